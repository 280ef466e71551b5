"""Lengths and page tables that only the GPU knows: the host's plan, made there; and what is wrong with them.

Everything but the last tests needs --device cuda; test_emulated.py runs this file on the emulated driver.
"""

import ctypes
import dataclasses
import gc

import numpy as np
import pytest
import raddle
from checks import within
from device_arrays import DeviceArray
from draws import draw
from engine import Engine, spec_of, twin
from reference import Causal, Problem, SlidingWindow, SoftCap, attention
from reference.variants import Flex
from small import refuses

HEADS = {"dim": 64, "group": 2, "num_kv_heads": 2, "dtype": "bfloat16"}
MAXIMA = {"max_requests": 6, "max_qo_tokens": 24, "max_kv_tokens": 1000, "num_workers": 5}
PAGES, WIDTH = 200, 80
FORMS = ("lists", "table")
WIDTHS = np.array([3, 60, 200, 20], np.int32)


def window_by_head(b, h, q_idx, kv_idx):
    """A mask of a user's own: its array is read by the planner, which derives coverage from the expression."""
    return (q_idx - kv_idx < WIDTHS[h]) & (q_idx >= kv_idx)


class Table:
    """A page table of up to 6 requests at fixed addresses of a GPU, written anew for every batch."""

    def __init__(self, form, page_size=16, counted=True, **options):
        requests = MAXIMA["max_requests"]
        self.qo_indptr, self.kv_len = ints(np.zeros(requests + 1)), ints(np.zeros(requests))
        self.page_indptr = ints(np.zeros(requests + 1)) if form == "lists" else None
        self.pages = ints(np.zeros(requests * WIDTH if form == "lists" else (requests, WIDTH)))
        self.count = ints([0]) if counted else None
        arrays = self.qo_indptr, self.page_indptr, self.pages, self.kv_len, page_size
        self.layout = raddle.PagedKV(*arrays, num_requests=self.count, **options)

    def write(self, layout):
        """The arrays of a reference layout; what lies behind them is bad."""
        arrays = {"qo_indptr": layout.qo_indptr, "kv_len": layout.kv_len}
        arrays.update(page_indptr=layout.page_indptr, pages=layout.page_indices)
        if self.page_indptr is None:
            table = np.full(self.pages.shape, -7, np.int32)
            for i in range(len(layout.kv_len)):
                pages = layout.pages(i)
                table[i, : len(pages)] = pages
            arrays["pages"] = table
        for name, array in arrays.items():
            if getattr(self, name) is not None:
                self._fill(getattr(self, name), array)
        if self.count is not None:
            self._fill(self.count, np.array([len(layout.kv_len)]))

    def _fill(self, there, array):
        all_of = np.full(there.shape, -9, np.int32)
        all_of[tuple(slice(n) for n in array.shape)] = array
        there.write(all_of)


class Tensors:
    """Q, pools and the output of any batch at fixed addresses."""

    def __init__(self, heads=4, kv_heads=2, dim=64, page_size=16):
        kind = draw(np.random.default_rng(0), lengths=[(1, 1)], **HEADS).q.dtype
        self.q, self.out = (DeviceArray(np.zeros((MAXIMA["max_qo_tokens"], heads, dim), kind)) for _ in range(2))
        self.kv = tuple(DeviceArray(np.zeros((PAGES, page_size, kv_heads, dim), kind)) for _ in range(2))

    def write(self, problem):
        self.out.write(np.full(self.out.shape, 7.0, self.out.dtype))
        for there, array in zip((self.q, *self.kv), (problem.q, *problem.kv[0])):
            rest = np.full((there.shape[0] - len(array), *array.shape[1:]), np.nan, array.dtype)
            there.write(np.concatenate([array, rest]))


def ints(values):
    return DeviceArray(np.asarray(values, np.int32))


def batch(rng, kind="paged", variant=None, page_size=16):
    """A batch within MAXIMA."""
    while True:
        lengths = [(int(rng.integers(0, 6)), int(rng.integers(0, 160))) for _ in range(rng.integers(1, 7))]
        if sum(qo for qo, _ in lengths) <= MAXIMA["max_qo_tokens"]:
            return draw(rng, kind, variant or [Causal()], lengths=lengths, page_size=page_size, **HEADS)


def reserve(gpu, variant=None, **changes):
    spec = spec_of(draw(np.random.default_rng(0), "paged", variant or [Causal()], lengths=[(1, 1)], **HEADS))
    attn = raddle.Attention(spec, device=gpu)
    return attn, attn.reserve(**{**MAXIMA, "device_lengths": True, **changes})


def host_plans(attn, problem, tensors, **changes):
    """Output bits of the reservation that the host plans."""
    host = attn.reserve(**{**MAXIMA, "schedule": "linear", **changes})
    host.update(twin(problem.layout))
    attn.run(host, tensors.q, tensors.kv, out=tensors.out)
    return tensors.out.numpy()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("prefixes", [False, True])
@pytest.mark.parametrize("variant", [[], [SoftCap(30.0), SlidingWindow(40), Causal()], [Flex(window_by_head)]])
def test_bits_are_those_of_the_hosts_plan(gpu, rng, form, prefixes, variant):
    levels = {"max_levels": 2 if prefixes else 1}
    attn, reservation = reserve(gpu, variant, **levels)
    table, tensors = Table(form, num_pages=PAGES, discover_prefixes=16 if prefixes else False), Tensors()
    for _ in range(5):
        problem = batch(rng, "paged_prefixes" if prefixes else "paged", variant)
        problem.layout.discover_prefixes = 16 if prefixes else 0
        table.write(problem.layout), tensors.write(problem)
        reservation.update(table.layout)
        attn.run(reservation, tensors.q, tensors.kv, out=tensors.out)
        out, rows = tensors.out.numpy(), len(problem.q)
        reservation.check()
        within(attention(problem), out[:rows])
        assert (out[rows:] == 7.0).all()
        tensors.write(problem)
        np.testing.assert_array_equal(out.view(np.uint16), host_plans(attn, problem, tensors, **levels).view(np.uint16))


def test_plan_members_of_a_reservation(gpu, rng):
    attn, reservation = reserve(gpu, [SlidingWindow(3)], params={"window.left": 50})
    table, tensors = Table("lists"), Tensors()
    problem = batch(rng, variant=[SlidingWindow(50)])
    table.write(problem.layout), tensors.write(problem)
    reservation.update(table.layout)
    attn.run(reservation, tensors.q, tensors.kv, out=tensors.out)
    reservation.check()
    within(attention(problem), tensors.out.numpy()[: len(problem.q)])
    with refuses(ValueError, "window.left"):
        attn.run(reservation, tensors.q, tensors.kv, out=tensors.out, params={"window.left": 5})


def test_decode_without_a_count(gpu, rng):
    """As serving engines call it: one row a request, requests that are none have no keys."""
    attn, reservation = reserve(gpu)
    table, tensors = Table("table", counted=False), Tensors()
    problem = draw(rng, "paged", "causal", lengths=[(1, n) for n in (70, 0, 1, 160, 33, 0)], page_size=16, **HEADS)
    table.write(problem.layout), tensors.write(problem)
    reservation.update(table.layout)
    attn.run(reservation, tensors.q, tensors.kv, out=tensors.out)
    reservation.check()
    within(attention(problem), tensors.out.numpy()[:6])
    assert "Plan(made on the device, 5 workers)" == repr(reservation.plan)
    assert "planner Causal (1 launch an update)" in reservation.plan.explain()
    assert reservation.plan.num_workers == 5 and reservation.plan.num_items is None
    assert repr(table.layout) == f"PagedKV(6 requests, on {attn.device})" and table.layout.num_rows is None


def test_nothing_is_copied_or_allocated(gpu, rng, emulator):
    attn, reservation = reserve(gpu, max_levels=2)
    table, tensors = Table("table", discover_prefixes=True), Tensors()
    problem = batch(rng)
    table.write(problem.layout), tensors.write(problem)
    counts = emulator.raddle_emulator_allocations, emulator.raddle_emulator_uploads
    reservation.update(table.layout)
    attn.run(reservation, tensors.q, tensors.kv, out=tensors.out)
    before, launches = [count() for count in counts], emulator.raddle_emulator_launches()
    for _ in range(3):
        reservation.update(table.layout)
        attn.run(reservation, tensors.q, tensors.kv, out=tensors.out)
    assert [count() for count in counts] == before
    assert emulator.raddle_emulator_launches() == launches + 6, "a launch an update, a launch a run"


@pytest.fixture
def emulator(gpu):
    cuda = ctypes.CDLL("libcuda.so.1")
    if not hasattr(cuda, "raddle_emulator_replay"):
        pytest.skip("asks the emulated driver; on a GPU test_cuda_torch.py captures with torch")
    for name in ("capture", "replay"):
        getattr(cuda, f"raddle_emulator_{name}").argtypes = [ctypes.c_void_p]
    yield cuda
    cuda.raddle_emulator_capture(None)


@pytest.mark.parametrize("prefixes", [False, True])
def test_a_captured_update_plans_at_every_replay(gpu, rng, emulator, prefixes):
    import tvm_ffi

    attn, reservation = reserve(gpu, max_levels=2 if prefixes else 1)
    table, tensors, stream = Table("table", discover_prefixes=16 if prefixes else False), Tensors(), 0x700 + prefixes
    emulator.raddle_emulator_capture(stream)
    with tvm_ffi.use_raw_stream(tvm_ffi.device(attn.device), stream):
        reservation.update(table.layout)
        attn.run(reservation, tensors.q, tensors.kv, out=tensors.out)
        with refuses(ValueError, "capturing", "check after"):
            reservation.check()
        with refuses(ValueError, "capturing", "reserve before"):
            reserve(gpu)
    emulator.raddle_emulator_capture(None)
    table.layout = None
    for _ in range(4):
        problem = batch(rng, "paged_prefixes" if prefixes else "paged")
        table.write(problem.layout), tensors.write(problem)
        emulator.raddle_emulator_replay(stream)
        within(attention(problem), tensors.out.numpy()[: len(problem.q)])
    reservation.check()
    # Another table is another graph's: this one brings its own along.
    reservation.update(Table("table", discover_prefixes=16 if prefixes else False).layout)


def test_a_graph_keeps_its_arrays(gpu, rng, emulator):
    import tvm_ffi

    class Watched(DeviceArray):
        freed = 0

        def __del__(self):
            Watched.freed += 1
            super().__del__()

    attn, reservation = reserve(gpu)
    zeros = np.zeros((3, 4), np.int32)

    def layout():
        lists = (zeros[0, :3], None, zeros[:2], zeros[0, :2])
        return raddle.PagedKV(*(None if x is None else Watched(x) for x in lists), page_size=16)

    emulator.raddle_emulator_capture(0x710)
    with tvm_ffi.use_raw_stream(tvm_ffi.device(attn.device), 0x710):
        reservation.update(layout())
    emulator.raddle_emulator_capture(None)
    reservation.update(layout())
    gc.collect()
    assert Watched.freed == 0
    reservation.update(layout())
    gc.collect()
    assert Watched.freed == 3, "an update's arrays are borrowed until the next one"
    del reservation
    gc.collect()
    assert Watched.freed == 9


def test_a_run_captured_alone_keeps_its_table(gpu, rng, emulator):
    import tvm_ffi

    attn, reservation = reserve(gpu)
    table, tensors, stream = Table("table"), Tensors(), 0x720
    problem = batch(rng)
    table.write(problem.layout), tensors.write(problem)
    reservation.update(table.layout)
    emulator.raddle_emulator_capture(stream)
    with tvm_ffi.use_raw_stream(tvm_ffi.device(attn.device), stream):
        attn.run(reservation, tensors.q, tensors.kv, out=tensors.out)
    emulator.raddle_emulator_capture(None)
    with refuses(ValueError, "page_indices is another array", "captured run"):
        reservation.update(Table("table").layout)
    for _ in range(3):
        problem = batch(rng)
        table.write(problem.layout), tensors.write(problem)
        reservation.update(table.layout)
        emulator.raddle_emulator_replay(stream)
        within(attention(problem), tensors.out.numpy()[: len(problem.q)])


# --- what is wrong shows in check ------------------------------------------------------------------


def with_(array, at, value):
    array = array.copy()
    array[at] = value
    return array


# what check says -> the arrays that are wrong, and the request that is then taken for one without keys (None: rows)
SPOILED = {
    "request 1: kv_len is below 0": (lambda x: {"kv_len": with_(x.kv_len, 1, -5)}, 1),
    "request 1: page_indices has fewer pages than kv_len needs": (
        lambda x: {"kv_len": with_(x.kv_len, 1, 16 * WIDTH + 1)},
        1,
    ),
    "request 1: page_indices names a page that is not in the pool": (
        lambda x: {"page_indices": with_(x.page_indices, x.page_indptr[1], PAGES)},
        1,
    ),
    "request 2: page_indices names a page that is not in the pool of num_pages, or is -1": (
        lambda x: {"page_indices": with_(x.page_indices, x.page_indptr[2], -1)},
        2,
    ),
    "request 1: qo_indptr decreases, or leaves 0 to max_qo_tokens = 24: rows there are left alone": (
        lambda x: {"qo_indptr": with_(x.qo_indptr, 2, 30)},
        None,
    ),
}


@pytest.mark.parametrize("words", SPOILED)
def test_a_bad_request_is_taken_for_one_without_keys(gpu, rng, words):
    attn, reservation = reserve(gpu)
    table, tensors = Table("table", num_pages=PAGES), Tensors()
    problem = draw(rng, "paged", "causal", lengths=[(2, 40), (1, 70), (1, 20)], page_size=16, **HEADS)
    spoiled, without_keys = SPOILED[words]
    tensors.write(problem)
    table.write(dataclasses.replace(problem.layout, **spoiled(problem.layout)))
    reservation.update(table.layout)
    attn.run(reservation, tensors.q, tensors.kv, out=tensors.out)
    with refuses(ValueError, words):
        reservation.check()
    reservation.check()  # it has been said
    out, planned, rows = tensors.out.numpy()[:4], problem.layout, 4
    if without_keys is None:
        assert (out[2:] == 7.0).all()
        rows, planned = 2, dataclasses.replace(planned, qo_indptr=np.array([0, 2, 2, 2], np.int32))
    else:
        planned = dataclasses.replace(planned, kv_len=with_(planned.kv_len, without_keys, 0))
    within(attention(Problem(problem.q[:rows], problem.kv, planned, problem.variant)), out[:rows])
    table.write(problem.layout)
    reservation.update(table.layout)
    attn.run(reservation, tensors.q, tensors.kv, out=tensors.out)
    reservation.check()
    within(attention(problem), tensors.out.numpy()[:4])


@pytest.mark.parametrize(
    "words, lengths",
    [
        ("qo_indptr has more rows than max_qo_tokens = 24", [(20, 30), (5, 9)]),
        ("kv_len has more keys than max_kv_tokens = 1000", [(1, 400), (2, 601)]),
    ],
)
def test_a_batch_beyond_the_maxima_is_not_computed(gpu, rng, words, lengths):
    attn, reservation = reserve(gpu)
    table, tensors = Table("lists"), Tensors()
    problem = draw(rng, "paged", "causal", lengths=lengths, page_size=16, **HEADS)
    table.write(problem.layout), tensors.write(draw(rng, lengths=[(1, 1)], page_size=16, **HEADS))
    reservation.update(table.layout)
    attn.run(reservation, tensors.q, tensors.kv, out=tensors.out)
    assert (tensors.out.numpy() == 7.0).all()
    with refuses(ValueError, words, "of the reservation: the plan is empty"):
        reservation.check()


def test_more_requests_than_the_arrays_have(gpu, rng):
    attn, reservation = reserve(gpu)
    table = Table("lists")
    table.write(batch(rng).layout)
    table.count.write(np.array([7], np.int32))
    reservation.update(table.layout)
    with refuses(ValueError, "num_requests", "max_requests = 6", "plan is empty"):
        reservation.check()


# --- what the host sees is refused by name -----------------------------------------------------------


ZEROS = {"qo_indptr": 3, "page_indptr": 3, "page_indices": 4, "kv_len": 2}


def page_table(**changes):
    arrays = {name: ints(np.zeros(n)) for name, n in ZEROS.items()}
    return raddle.PagedKV(**{**arrays, "page_size": 16, **changes})


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"qo_indptr": np.zeros(3, np.int32)}, ValueError, ["qo_indptr lies on 'cpu'", "'cuda:0'", "kv_len"]),
        ({"kv_len": np.zeros(2, np.int32)}, ValueError, ["qo_indptr lies on 'cuda:0'", "host"]),
        ({"page_indices": lambda: DeviceArray(np.zeros(4, np.int64))}, TypeError, ["page_indices has dtype int64"]),
        ({"kv_len": lambda: DeviceArray(np.zeros(2, np.float32))}, TypeError, ["kv_len has dtype float32"]),
        ({"page_indices": lambda: ints(np.zeros((2, 4)))}, ValueError, ["page_indices has 2 dimensions; expected 1"]),
        ({"page_indptr": None}, ValueError, ["page_indices has 1 dimensions; expected 2"]),
        ({"qo_indptr": lambda: ints(np.zeros(2))}, ValueError, ["qo_indptr has 2 entries; expected 3"]),
        ({"page_indptr": lambda: ints(np.zeros(4))}, ValueError, ["page_indptr has 4 entries; expected 3"]),
        ({"page_indptr": None, "page_indices": lambda: ints(np.zeros((3, 4)))}, ValueError, ["page_indices", "3", "2"]),
        ({"kv_len": lambda: DeviceArray(np.zeros(4, np.int32)[::2])}, ValueError, ["kv_len has stride 2"]),
        ({"page_size": 0}, ValueError, ["page_size is 0"]),
        ({"num_pages": -1}, ValueError, ["num_pages is -1"]),
        ({"discover_prefixes": -2}, ValueError, ["discover_prefixes is"]),
        ({"qo_pos": np.zeros(1, np.int32)}, ValueError, ["qo_pos is given"]),
        ({"num_requests": lambda: ints([1, 2])}, ValueError, ["num_requests has 2 entries; expected 1"]),
    ],
)
def test_bad_page_tables(gpu, changes, error, words):
    with refuses(error, *words):
        page_table(**{name: value() if callable(value) else value for name, value in changes.items()})


def test_arrays_of_two_gpus(emulator):
    with refuses(ValueError, "qo_indptr lies on 'cuda:0'", "'cuda:1', where kv_len lies"):
        page_table(kv_len=DeviceArray(np.zeros(2, np.int32), 1))


def test_reservations_and_layouts_of_other_kinds(gpu, rng):
    attn, reservation = reserve(gpu)
    problem = batch(rng)
    with refuses(ValueError, "layout has its lengths on a GPU", "device_lengths=True"):
        attn.plan(page_table())
    with refuses(ValueError, "layout lies on 'cuda:0'", "device_lengths=True"):
        attn.reserve(**MAXIMA).update(page_table())
    with refuses(ValueError, "layout lies on the host", "'cuda:0'", "device_lengths=True"):
        reservation.update(twin(problem.layout))
    with refuses(ValueError, "layout has 7 requests", "max_requests = 6"):
        arrays = {"qo_indptr": ints(np.zeros(8)), "page_indptr": ints(np.zeros(8)), "kv_len": ints(np.zeros(7))}
        reservation.update(page_table(**arrays))
    with refuses(ValueError, "discover_prefixes is 512; expected False", "max_levels", "1"):
        reservation.update(page_table(discover_prefixes=True))
    with refuses(ValueError, "discover_prefixes is 0; expected more", "max_levels", "2"):
        reserve(gpu, max_levels=2)[1].update(page_table())
    on_cpu = raddle.Attention(raddle.AttentionSpec(4, 2, 64))
    with refuses(ValueError, "layout lies on 'cuda:0'; expected 'cpu'"):
        on_cpu.reserve(**MAXIMA, device_lengths=True).update(page_table())
    for changes, words in (
        ({"schedule": "algorithm1"}, ["schedule is 'algorithm1'", "'linear'"]),
        ({"max_levels": 3}, ["max_levels is 3", "2"]),
    ):
        with refuses(ValueError, *words):
            attn.reserve(**{**MAXIMA, "device_lengths": True, **changes})
    invariant = raddle.Attention(raddle.AttentionSpec(4, 2, 64, batch_invariant=True), device=gpu)
    with refuses(ValueError, "batch_invariant is True", "host"):
        invariant.reserve(**MAXIMA, device_lengths=True)


def test_runs_have_room_for_any_batch(gpu, rng):
    attn, reservation = reserve(gpu)
    tensors, problem = Tensors(), batch(rng)
    reservation.update(page_table(num_pages=PAGES + 1))
    with refuses(ValueError, "q is [23, 4, 64]", "expected [24, 4, 64]"):
        attn.run(reservation, DeviceArray(np.zeros((23, 4, 64), problem.q.dtype)), tensors.kv, out=tensors.out)
    with refuses(ValueError, "kv: k has 200 pages", "page 200"):
        attn.run(reservation, tensors.q, tensors.kv, out=tensors.out)


def test_bits_of_a_batch_are_refused(gpu):
    mask = raddle.PackedMask(np.zeros(1, np.uint8), np.zeros(3, np.int32))
    attn = raddle.Attention(raddle.AttentionSpec(4, 2, 64, variant=[mask]), device=gpu)
    with refuses(ValueError, "packed_mask has bits for every pair", "host"):
        attn.reserve(**MAXIMA, device_lengths=True).update(page_table())


# --- where the device is the host ------------------------------------------------------------------


def test_on_a_cpu_the_host_plans(rng):
    problem = batch(rng)
    attn = Engine("cpu").attention(problem)
    reservation = attn.reserve(**{**MAXIMA, "device_lengths": True})
    for _ in range(3):
        reservation.update(twin(problem.layout))
        reservation.check()
        within(attention(problem), attn.run(reservation, problem.q, problem.kv[0]))
        problem = batch(rng)


def test_discovered_prefixes_in_a_reservation_of_the_host(engine, rng):
    """With and without anything shared: one kind of layout."""
    first = batch(rng, "paged_prefixes")
    attn = engine.attention(first)
    owner = attn if engine.device == "cpu" else attn.attention
    reservation = owner.reserve(**MAXIMA, max_levels=2)
    for number in range(8):
        problem = batch(rng, "paged_prefixes" if number % 2 else "paged")
        problem.layout.discover_prefixes = problem.layout.discover_prefixes or 1
        reservation.update(twin(problem.layout))
        within(attention(problem), attn.run(reservation, problem.q, problem.kv[0]))


def test_what_prefix_discovery_refuses():
    arrays = {"qo_indptr": [0, 1], "page_indptr": [0, 1], "page_indices": [0], "kv_len": [3]}
    assert raddle.PagedKV(**arrays, discover_prefixes=True).num_levels == 2
    for name in ("kv_begin", "qo_rows"):
        with refuses(ValueError, f"{name} is given with discover_prefixes"):
            raddle.PagedKV(**arrays, discover_prefixes=True, **{name: [0]})
    with refuses(TypeError, "discover_prefixes is a string"):
        raddle.PagedKV(**arrays, discover_prefixes="yes")
    with refuses(ValueError, "num_requests is given", "host"):
        raddle.PagedKV(**arrays, num_requests=np.array([1], np.int32))
    attn = raddle.Attention(raddle.AttentionSpec(4, 2, 64, batch_invariant=True))
    with refuses(ValueError, "cascade", "batch_invariant"):
        attn.plan(raddle.PagedKV(**arrays, discover_prefixes=True))
