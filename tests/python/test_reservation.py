"""Reservations: later batches in the same memory, on the CPU and, as graphs need it, on GPUs."""

import ctypes

import numpy as np
import pytest
import raddle
from checks import within
from device_arrays import DeviceArray
from draws import draw
from engine import twin
from reference import Problem, attention
from small import refuses, reserved

HEADS = {"dim": 64, "group": 2, "num_kv_heads": 2, "dtype": "bfloat16"}
MAXIMA = {"max_requests": 6, "max_qo_tokens": 24, "max_kv_tokens": 1000}


def batch(rng, most_rows=24, pages=200):
    """A batch within MAXIMA, on pages of 16."""
    while True:
        lengths = [(int(rng.integers(0, 6)), int(rng.integers(0, 160))) for _ in range(rng.integers(1, 7))]
        if sum(qo for qo, _ in lengths) <= most_rows:
            return draw(rng, "paged", "causal", lengths=lengths, page_size=16, **HEADS)


def padded(x: np.ndarray, rows: int) -> np.ndarray:
    """With rows of NaN after its own."""
    return np.concatenate([x, np.full((rows - len(x), *x.shape[1:]), np.nan, x.dtype)])


def reserve(engine, problem, **changes):
    attn = engine.attention(problem)
    owner = attn if engine.device == "cpu" else attn.attention
    return attn, reserved(owner, **{**MAXIMA, "num_workers": 5, **changes})


def test_batches_one_after_another(engine, rng, monkeypatch):
    # A reservation's kernel is chosen by its maxima, a plan's by its batch: with one family they are the same.
    monkeypatch.setenv("RADDLE_BACKEND", "mma")
    attn, reservation = reserve(engine, batch(rng))
    for _ in range(6):
        problem = batch(rng)
        reservation.update(twin(problem.layout))
        out = attn.run(reservation, problem.q, problem.kv[0])
        within(attention(problem), out)
        plan = attn.plan(twin(problem.layout), num_workers=5)
        assert repr(reservation.plan) == repr(plan)


def test_rows_beyond_the_batch_are_not_touched(engine, rng):
    problem = batch(rng, most_rows=20)
    attn, reservation = reserve(engine, problem)
    reservation.update(twin(problem.layout))
    q, rows = padded(problem.q, 24), len(problem.q)
    out = np.full(q.shape, 7.0, q.dtype)
    attn.run(reservation, q, problem.kv[0], out=out)
    within(attention(problem), out[:rows])
    assert (out[rows:] == 7.0).all()
    with refuses(ValueError, "q is", "expected"):
        attn.run(attn.plan(twin(problem.layout)), q, problem.kv[0])


@pytest.mark.parametrize("options", [{}, {"lse_base_2": True}, {"return_state": True}], ids=str)
def test_rows_beyond_the_batch_are_zero_where_asked(engine, rng, options):
    problem = batch(rng, most_rows=20)
    attn, reservation = reserve(engine, problem)
    q, rows = padded(problem.q, 24), len(problem.q)
    out = np.full(q.shape, np.nan, np.float32 if "return_state" in options else q.dtype)
    lse = np.full(q.shape[:2], np.nan, np.float32)
    for _ in range(2):  # into what the run before has left
        reservation.update(twin(problem.layout))
        attn.run(reservation, q, problem.kv[0], out=out, lse=lse, zero_unused_rows=True, **options)
        within(attention(problem, state="return_state" in options), out[:rows])
        assert (out[rows:] == 0.0).all() and (lse[rows:] == -np.inf).all()
        assert not np.isnan(lse[:rows]).any()
        problem = batch(rng, most_rows=20)
        rows = len(problem.q)
        q[:rows] = problem.q
    plan = attn.plan(twin(problem.layout))
    same = attn.run(plan, problem.q, problem.kv[0], zero_unused_rows=True)
    within(attention(problem), same)


def test_what_does_not_fit_leaves_the_plan_in_force(engine, rng):
    problem = draw(rng, "paged", "causal", lengths=[(2, 30), (1, 50)], page_size=16, **HEADS)
    attn, reservation = reserve(engine, problem)
    with refuses(ValueError, "reservation has no plan"):
        attn.run(reservation, problem.q, problem.kv[0])
    reservation.update(twin(problem.layout))
    wrong = {
        "25 query rows; expected at most max_qo_tokens = 24": [(25, 30)],
        "7 requests; expected at most max_requests = 6": [(1, 1)] * 7,
        "keys; expected at most max_kv_tokens = 1000": [(1, 1001)],
    }
    for words, lengths in wrong.items():
        with refuses(ValueError, words):
            reservation.update(twin(draw(rng, "paged", "causal", lengths=lengths, page_size=16, **HEADS).layout))
    with refuses(ValueError, "2 levels", "max_levels"):
        reservation.update(twin(draw(rng, "cascade", "causal", lengths=[(1, 9), (1, 9)], **HEADS).layout))
    within(attention(problem), attn.run(reservation, problem.q, problem.kv[0]))
    if engine.device != "cpu":
        with refuses(ValueError, "another kind", "page or block size is 8; expected 16"):
            reservation.update(twin(draw(rng, "paged", "causal", lengths=[(1, 9)], page_size=8, **HEADS).layout))
        within(attention(problem), attn.run(reservation, problem.q, problem.kv[0]))


def test_requests_of_few_rows(engine, rng, monkeypatch):
    """Less memory, and on a GPU the kernel of short queries; longer requests are refused, or go elsewhere."""
    monkeypatch.setenv("RADDLE_BACKEND", "mma")  # wgmma has its kernel of short queries for both
    decode = draw(rng, "paged", "causal", lengths=[(1, 30), (2, 70), (0, 9), (1, 5)], page_size=16, **HEADS)
    longer = draw(rng, "paged", "causal", lengths=[(1, 30), (3, 50)], page_size=16, **HEADS)
    attn = engine.attention(decode)
    owner = attn if engine.device == "cpu" else attn.attention
    any_rows, few = (reserved(owner, **MAXIMA, num_workers=5, max_qo_len=n) for n in (0, 2))
    assert few.num_bytes < any_rows.num_bytes
    few.update(twin(decode.layout))
    within(attention(decode), attn.run(few, decode.q, decode.kv[0]))
    if engine.device != "cpu":
        any_rows.update(twin(decode.layout))
        name = "Causal (short queries) for"  # of the kernel
        assert name in few.plan.explain() and name not in any_rows.plan.explain()
    with refuses(ValueError, "3 query rows in request 1", "max_qo_len = 2"):
        few.update(twin(longer.layout))
    within(attention(decode), attn.run(few, decode.q, decode.kv[0]))
    assert raddle.select([few, any_rows], twin(longer.layout)) is any_rows


def test_pages_of_one_size(engine, rng):
    """A page size that the reservation names is that of all its layouts."""
    problem = batch(rng)
    attn, reservation = reserve(engine, problem, page_size=16)
    reservation.update(twin(problem.layout))
    within(attention(problem), attn.run(reservation, problem.q, problem.kv[0]))
    lengths = [(1, 30), (2, 50)]
    for layout, words in (
        (draw(rng, "paged", "causal", lengths=lengths, page_size=32, **HEADS).layout, "layout has pages of 32 keys"),
        (draw(rng, "ragged", "causal", lengths=lengths, **HEADS).layout, "layout has keys that are not in pages"),
    ):
        with refuses(ValueError, words, "expected page_size = 16 of the reservation"):
            reservation.update(twin(layout))
    within(attention(problem), attn.run(reservation, problem.q, problem.kv[0]))


def test_cascades(engine, rng):
    first = draw(rng, "cascade", "causal", lengths=[(1, 30), (2, 70), (1, 5)], **HEADS)
    attn, reservation = reserve(engine, first, max_levels=4)
    reservation.update(twin(first.layout))
    within(attention(first), attn.run(reservation, first.q, first.kv))


def test_select(engine, rng):
    problem = draw(rng, "paged", "causal", lengths=[(2, 30), (1, 50)], page_size=16, **HEADS)
    attn = engine.attention(problem)
    owner = attn if engine.device == "cpu" else attn.attention
    sizes = [(1, 8), (4, 64), (16, 256), (4, 64)]
    all_of = [reserved(owner, max_requests=n, max_qo_tokens=t, max_kv_tokens=500) for n, t in sizes]
    chosen = raddle.select(all_of[::-1], twin(problem.layout))
    assert chosen is all_of[3] and all_of[0].num_bytes < chosen.num_bytes < all_of[2].num_bytes
    many = draw(rng, "paged", "causal", lengths=[(1, 3)] * 17, page_size=16, **HEADS)
    with refuses(ValueError, "none of 4", "17 requests", "max_requests = 16"):
        raddle.select(all_of, twin(many.layout))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"max_requests": 0}, "max_requests is 0"),
        ({"max_qo_tokens": 0}, "max_qo_tokens is 0"),
        ({"max_levels": 9}, "max_levels is 9"),
        ({"max_qo_len": -1}, "max_qo_len is -1"),
        ({"page_size": -1}, "page_size is -1"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"params": {"softcap.cap": 1.0}}, "softcap.cap"),
    ],
)
def test_bad_maxima(engine, rng, changes, words):
    with refuses(ValueError, words):
        reserve(engine, batch(rng), **changes)


@pytest.mark.parametrize(
    ("layouts", "options"),
    [
        (["paged", "paged_positions"], {"page_size": 16}),
        (["cascade"], {"page_size": 8}),
        (["bsr", "bsr_bits"], {"Br": 4, "Bc": 8}),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_arrays_that_come_and_go(engine, rng, layouts, options):
    """Idle steps, prefixes that no requests share, masks that keep everything: no batch decides for those after it."""
    some = [[(0, 0)], [(1, 40)], [(1, 9), (3, 50)], [(2, 70), (1, 5), (4, 30)], [(0, 7)], [(1, 20), (1, 20)]]
    problems = [
        draw(rng, layouts[n % len(layouts)], "causal", lengths=lengths, **options, **HEADS)
        for n, lengths in enumerate(some + some[::-1])
    ]
    attn, reservation = reserve(engine, problems[1], max_levels=2)
    for problem in problems:
        reservation.update(twin(problem.layout))
        kv = problem.kv[0] if len(problem.kv) == 1 else problem.kv
        within(attention(problem), attn.run(reservation, problem.q, kv))
