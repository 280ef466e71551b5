"""Later batches in the graphs of captured runs: the emulated driver keeps a launch's parameters, as graphs do."""

import itertools
import weakref

import numpy as np
import pytest
import tvm_ffi
from checks import within
from device_arrays import DeviceArray
from draws import draw
from engine import twin
from reference import Causal, Problem, Rope, attention
from small import refuses, reserved

HEADS = {"dim": 64, "group": 2, "num_kv_heads": 2, "dtype": "bfloat16"}
MAXIMA = {"max_requests": 6, "max_qo_tokens": 24, "max_kv_tokens": 1000}
PAGES = 200
streams = itertools.count(0x90000, 0x100)  # a graph each, which no other test replays


def padded(x: np.ndarray, rows: int) -> np.ndarray:
    """With rows of NaN after its own."""
    return np.concatenate([x, np.full((rows - len(x), *x.shape[1:]), np.nan, x.dtype)])


class Captured:
    """A run of a reservation in a graph: tensors of the largest batch, whose contents change."""

    def __init__(self, engine, emulator, first: Problem, zero_unused_rows: bool = False, given=None, **maxima):
        """``given``: arguments of the run beside its tensors."""
        self.emulator, self.stream, self.zeroes = emulator, next(streams), zero_unused_rows
        self.attn = engine.attention(first).attention
        self.reservation = reserved(self.attn, **{**MAXIMA, "num_workers": 5, **maxima})
        self.update(first)
        (heads, dim), dim_vo, dtype = first.q.shape[1:], first.kv[0][1].shape[-1], first.q.dtype
        self.q, self.out = (DeviceArray(np.zeros((24, heads, d), dtype)) for d in (dim, dim_vo))
        self.kv = [[DeviceArray(np.zeros((PAGES, *x.shape[1:]), dtype)) for x in pair] for pair in first.kv]
        pairs = [tuple(pair) for pair in self.kv]
        kv = pairs if len(pairs) > 1 else pairs[0]
        options = {"out": self.out, "zero_unused_rows": self.zeroes, **(given or {})}
        self._capture(lambda: self.attn.run(self.reservation, self.q, kv, **options))

    def _capture(self, run) -> None:
        self.emulator.raddle_emulator_capture(self.stream)
        with tvm_ffi.use_raw_stream(tvm_ffi.device(self.attn.device), self.stream):
            run()
        self.emulator.raddle_emulator_capture(None)

    def update(self, problem: Problem) -> None:
        self.reservation.update(twin(problem.layout))

    def check(self, problem: Problem) -> None:
        """Replays the graph on another batch."""
        self.update(problem)
        self.q.write(padded(problem.q, 24))
        for lent, pair in zip(self.kv, problem.kv):
            for pool, x in zip(lent, pair):
                pool.write(padded(x, PAGES))
        self.out.write(np.full(self.out.shape, np.nan, self.out.dtype))
        self.emulator.raddle_emulator_replay(self.stream)
        out, rows = self.out.numpy(), len(problem.q)
        within(attention(problem), out[:rows])
        assert (out[rows:] == 0.0 if self.zeroes else np.isnan(out[rows:])).all()


def batch(rng, layout="paged", most_rows=24):
    """A batch within MAXIMA."""
    while True:
        lengths = [(int(rng.integers(0, 6)), int(rng.integers(0, 160))) for _ in range(rng.integers(1, 7))]
        if sum(qo for qo, _ in lengths) <= most_rows:
            return draw(rng, layout, "causal", lengths=lengths, page_size=16, **HEADS)


def two_caches(rng) -> Problem:
    """MLA over latents and rotary keys, narrowed."""
    lengths = [(int(rng.integers(1, 4)), int(rng.integers(4, 160))) for _ in range(rng.integers(1, 7))]
    heads = {"dim": 96, "dim_vo": 64, "group": 8, "num_kv_heads": 1, "dtype": "bfloat16", "k_extends_v": True}
    return draw(rng, lengths=lengths, page_size=16, **heads)


def with_positions(rng) -> Problem:
    return draw(rng, "paged_positions", "causal", lengths=[(2, 9), (1, 40)], page_size=16, **HEADS)


@pytest.mark.parametrize("zero_unused_rows", [False, True])
def test_later_batches(engine, emulator, rng, zero_unused_rows):
    captured = Captured(engine, emulator, batch(rng), zero_unused_rows)
    for _ in range(5):
        captured.check(problem := batch(rng))
    far = Problem(problem.q, problem.kv, problem.layout, problem.variant)
    far.layout.page_indices = far.layout.page_indices + PAGES
    if far.layout.page_indices.size and (far.layout.kv_len > 0).any():
        with refuses(ValueError, "layout uses page", f"the pool of a captured run has {PAGES}"):
            captured.reservation.update(twin(far.layout))


def test_two_caches(engine, emulator, rng):
    captured = Captured(engine, emulator, two_caches(rng))
    for _ in range(3):
        captured.check(two_caches(rng))


def test_tensors_must_hold_the_largest_batch(engine, emulator, rng):
    captured = Captured(engine, emulator, first := batch(rng, most_rows=20))
    q = DeviceArray(first.q)
    with refuses(ValueError, "q has", "max_qo_tokens = 24"):
        captured._capture(lambda: captured.attn.run(captured.reservation, q, tuple(captured.kv[0]), out=q))


def test_layouts_that_lack_what_the_captured_one_has(engine, emulator, rng):
    """Its graph reads positions, prefixes and rows of theirs, which are written out."""
    both = draw(rng, "cascade", "causal", lengths=[(1, 30)] * 6, page_size=8, **HEADS)
    both.layout.levels[0].qo_rows, both.layout.levels[0].qo_indptr = np.int32([1, 4]), np.int32([0, 2])
    both.layout.levels[1].kv_begin = np.int32([0, 1, 0, 0, 1, 0]) * both.layout.levels[0].kv_len[0]
    captured = Captured(engine, emulator, both, max_levels=2)
    for lengths in [[(1, 20)], [(0, 0)], [(2, 9), (1, 40), (1, 3)], [(1, 5)] * 6]:
        captured.check(draw(rng, "cascade", "causal", lengths=lengths, page_size=8, **HEADS))
    captured = Captured(engine, emulator, with_positions(rng))
    for _ in range(2):
        captured.check(batch(rng))
        captured.check(batch(rng, "paged_positions"))


def test_layouts_with_what_the_captured_one_lacks(engine, emulator, rng):
    captured = Captured(engine, emulator, first := batch(rng))
    with refuses(ValueError, "layout has qo_pos", "expected an update with such a layout before the first capture"):
        captured.reservation.update(twin(with_positions(rng).layout))
    captured.check(first)


def test_values_that_the_graph_keeps(engine, emulator, rng):
    """One a request, of requests that a later batch does not have."""
    rope = [Rope(64, offset=np.int32([3, 5])), Causal()]
    captured = Captured(engine, emulator, draw(rng, "paged", rope, lengths=[(1, 9), (2, 30)], page_size=16, **HEADS))
    captured.check(draw(rng, "paged", rope, lengths=[(3, 40), (1, 8)], page_size=16, **HEADS))
    with refuses(ValueError, "rope.offset has 2 elements", "one a request, 3; a captured run's graph keeps it"):
        captured.reservation.update(twin(draw(rng, "paged", "causal", lengths=[(1, 9)] * 3, page_size=16, **HEADS).layout))


def test_members_on_the_gpu_in_later_replays(engine, emulator, rng):
    """A replay reads what the tensor holds then. The reservation keeps its memory."""
    problem = draw(rng, "paged", "sinks", lengths=[(1, 30), (2, 50)], page_size=16, **HEADS)
    sinks = DeviceArray(np.zeros(4, np.float32))
    uploads = emulator.raddle_emulator_uploads
    captured = Captured(engine, emulator, problem, given={"params": {"sinks.logit": sinks}})
    alive = weakref.ref(sinks)
    for _ in range(3):
        problem.variant[0].logits = rng.normal(0.0, 3.0, 4).astype(np.float32)
        sinks.write(problem.variant[0].logits)
        captured.check(problem)
    before = uploads()
    emulator.raddle_emulator_replay(captured.stream)
    assert uploads() == before
    del sinks
    assert alive() is not None
    captured.check(problem)
    del captured
    assert alive() is None


def test_a_plan_of_before_the_reservation_grew(engine, emulator, rng):
    """Its arrays are no longer those that updates fill."""
    first = batch(rng)
    attn = engine.attention(first).attention
    reservation = reserved(attn, **MAXIMA, num_workers=5)
    reservation.update(twin(first.layout))
    old = reservation.plan
    reservation.update(twin(with_positions(rng).layout))
    q, out = (DeviceArray(np.zeros((24, *first.q.shape[1:]), first.q.dtype)) for _ in range(2))
    pools = tuple(DeviceArray(np.zeros((PAGES, *x.shape[1:]), x.dtype)) for x in first.kv[0])
    stream = next(streams)
    emulator.raddle_emulator_capture(stream)
    with tvm_ffi.use_raw_stream(tvm_ffi.device(attn.device), stream):
        with refuses(ValueError, "plan is of an earlier update", "expected the reservation itself"):
            attn.run(old, q, pools, out=out)
        attn.run(reservation, q, pools, out=out)


def test_without_memory_to_grow_the_plan_before_stays(engine, emulator, rng):
    first = batch(rng)
    attn = engine.attention(first)
    reservation = reserved(attn.attention, **{**MAXIMA, "max_kv_tokens": 10**7, "num_workers": 5})
    reservation.update(twin(first.layout))
    emulator.raddle_emulator_memory_left(1000)
    with refuses(RuntimeError, "this reservation takes", "bytes free"):
        reservation.update(twin(with_positions(rng).layout))
    emulator.raddle_emulator_memory_left(2**40)
    within(attention(first), attn.run(reservation, first.q, first.kv[0]))
    reservation.update(twin((later := with_positions(rng)).layout))
    within(attention(later), attn.run(reservation, later.q, later.kv[0]))


def test_the_smallest_pool_of_each_level(engine, emulator, rng):
    problem = draw(rng, "cascade", "causal", lengths=[(1, 30)] * 6, page_size=8, **HEADS)
    problem.layout.levels[1].page_indices %= 2
    captured = Captured(engine, emulator, problem, max_levels=2)
    small = [tuple(DeviceArray(np.zeros((n, *x.shape[1:]), x.dtype)) for x in problem.kv[0]) for n in (PAGES, 2)]
    captured._capture(lambda: captured.attn.run(captured.reservation, captured.q, small, out=captured.out))
    far = problem.layout
    far.levels[1].page_indices = np.arange(2, 2 + len(far.levels[1].page_indices), dtype=np.int32)
    with refuses(ValueError, "layout uses page", "the pool of a captured run has 2"):
        captured.reservation.update(twin(far))
