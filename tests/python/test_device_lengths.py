"""Lengths and page tables that only the GPU knows: the host's plan, made there, in graphs too.

All but the last tests need --device cuda; test_emulated.py runs this file on the emulated driver.
"""

import gc

import numpy as np
import pytest
import raddle
from checks import within
from device_arrays import DeviceArray
from device_table import HEADS, MAXIMA, PAGES, Table, Tensors, batch, reserve
from draws import draw
from engine import Engine, twin
from reference import Causal, SlidingWindow, SoftCap, attention
from reference.variants import Flex
from small import paged, refuses, reserved

FORMS = ("lists", "table")
WIDTHS = np.array([3, 60, 200, 20], np.int32)


def window_by_head(b, h, q_idx, kv_idx):
    """A mask of a user's own: its array is read by the planner, which derives coverage from the expression."""
    return (q_idx - kv_idx < WIDTHS[h]) & (q_idx >= kv_idx)


def host_plans(attn, problem, tensors, **changes):
    """Output bits of the reservation that the host plans."""
    host = reserved(attn, **{**MAXIMA, "schedule": "linear", **changes})
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


@pytest.mark.parametrize("prefixes", [False, True])
@pytest.mark.parametrize("max_requests", [6, 9])
def test_rows_beyond_the_batch_are_zero_where_asked(gpu, rng, prefixes, max_requests):
    """The table has room for six requests; the reservation may have more."""
    attn, reservation = reserve(gpu, max_levels=2 if prefixes else 1, max_requests=max_requests)
    table, tensors = Table("table", discover_prefixes=16 if prefixes else False), Tensors()
    for _ in range(4):
        problem = batch(rng)
        table.write(problem.layout), tensors.write(problem)
        reservation.update(table.layout)
        attn.run(reservation, tensors.q, tensors.kv, out=tensors.out, zero_unused_rows=True)
        reservation.check()
        out, rows = tensors.out.numpy(), len(problem.q)
        within(attention(problem), out[:rows])
        assert (out[rows:] == 0.0).all()
    table.count.write(np.array([7], np.int32))  # more requests than fit: there is no plan, and no row of a batch
    tensors.out.write(np.full(tensors.out.shape, 7.0, tensors.out.dtype))
    reservation.update(table.layout)
    attn.run(reservation, tensors.q, tensors.kv, out=tensors.out, zero_unused_rows=True)
    with refuses(ValueError, "requests"):
        reservation.check()
    assert (tensors.out.numpy() == 0.0).all()


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


@pytest.mark.parametrize("prefixes", [False, True])
def test_graphs_of_several_sizes_share_a_reservation(gpu, rng, emulator, prefixes):
    """As serving engines capture them: a graph a batch size, each with tensors of that size, one plan for all."""
    import tvm_ffi

    options = {"discover_prefixes": 16 if prefixes else False}
    attn, reservation = reserve(gpu, max_levels=2 if prefixes else 1)
    table, tensors = Table("table", counted=False), Tensors()
    zeros = {size: np.zeros((size, *tensors.q.shape[1:]), tensors.q.dtype) for size in (2, 5, 6)}
    q, out = ({size: DeviceArray(array) for size, array in zeros.items()} for _ in range(2))

    def layout(size):
        whole = table.qo_indptr.first_columns(size + 1), None, table.pages.first_rows(size)
        return raddle.PagedKV(*whole, table.kv_len.first_columns(size), page_size=16, num_rows=size, **options)

    for size in zeros:
        reservation.update(layout(size))
        with tvm_ffi.use_raw_stream(tvm_ffi.device(attn.device), stream := 0x730 + size + 16 * prefixes):
            emulator.raddle_emulator_capture(stream)
            attn.run(reservation, q[size], tensors.kv, out=out[size])
            emulator.raddle_emulator_capture(None)
    for size, lengths in [(5, [40, 0, 97, 3, 60]), (2, [160, 31]), (6, [20, 70]), (6, [33, 150, 5, 0, 90, 1])]:
        kind = "paged_prefixes" if prefixes else "paged"
        problem = draw(rng, kind, "causal", lengths=[(1, n) for n in lengths], page_size=16, **HEADS)
        table.write(problem.layout), tensors.write(problem)
        rest = size - len(lengths)  # requests that are none: no rows, no keys
        counts = np.concatenate([problem.layout.kv_len, np.zeros(6 - len(lengths))])
        starts = np.minimum(np.arange(7), len(lengths))
        table.kv_len.write(counts.astype(np.int32)), table.qo_indptr.write(starts.astype(np.int32))
        q[size].write(np.concatenate([problem.q, np.full((rest, *problem.q.shape[1:]), np.nan, problem.q.dtype)]))
        out[size].write(np.full(out[size].shape, 7.0, out[size].dtype))
        reservation.update(layout(size))
        emulator.raddle_emulator_replay(0x730 + size + 16 * prefixes)
        reservation.check()
        within(attention(problem), out[size].numpy()[: len(lengths)])
        assert (out[size].numpy()[len(lengths) :] == 7.0).all()


@pytest.mark.parametrize("prefixes", [False, True])
def test_reservations_for_decodes(gpu, rng, prefixes, monkeypatch):
    """mma's kernel of short queries: it computes longer requests and prefixes as well."""
    monkeypatch.setenv("RADDLE_BACKEND", "mma")
    levels = {"max_levels": 2 if prefixes else 1}
    attn, reservation = reserve(gpu, max_qo_len=1, **levels)
    _, any_rows = reserve(gpu, **levels)
    assert reservation.num_bytes < any_rows.num_bytes
    table, tensors = Table("table", discover_prefixes=16 if prefixes else False), Tensors()
    kind = "paged_prefixes" if prefixes else "paged"
    for lengths in ([(1, n) for n in (70, 0, 1, 160, 33, 0)], [(1, 90), (20, 60), (1, 44)], [(1, 90)] * 6):
        problem = draw(rng, kind, "causal", lengths=lengths, page_size=16, **HEADS)
        table.write(problem.layout), tensors.write(problem)
        if len(lengths) == 6 and not prefixes:
            expected = host_plans(attn, problem, tensors, max_qo_len=1)
            tensors.write(problem)
        reservation.update(table.layout)
        attn.run(reservation, tensors.q, tensors.kv, out=tensors.out)
        reservation.check()
        assert "(short queries)" in reservation.plan.explain()
        within(attention(problem), tensors.out.numpy()[: len(problem.q)])
        if len(lengths) == 6 and not prefixes:
            np.testing.assert_array_equal(tensors.out.numpy().view(np.uint16), expected.view(np.uint16))


def test_fewer_rows_than_the_reservation_has(gpu, rng):
    attn, reservation = reserve(gpu)
    table, tensors = Table("table"), Tensors()
    arrays = table.qo_indptr, None, table.pages, table.kv_len
    layout = raddle.PagedKV(*arrays, page_size=16, num_requests=table.count, num_rows=5)
    assert layout.num_rows == 5
    problem = draw(rng, "paged", "causal", lengths=[(3, 40), (3, 70)], page_size=16, **HEADS)
    table.write(problem.layout), tensors.write(problem)
    reservation.update(layout)
    few = DeviceArray(np.zeros((4, *tensors.q.shape[1:]), tensors.q.dtype))
    with refuses(ValueError, "q is [4, 4, 64] bfloat16; expected [5, 4, 64]"):
        attn.run(reservation, few, tensors.kv, out=few)
    attn.run(reservation, tensors.q, tensors.kv, out=tensors.out)
    with refuses(ValueError, "qo_indptr has more rows than", "num_rows of the layout"):
        reservation.check()
    assert (tensors.out.numpy() == 7.0).all()
    with refuses(ValueError, "num_rows is 25; expected at most max_qo_tokens = 24 of the reservation"):
        reservation.update(raddle.PagedKV(*arrays, page_size=16, num_rows=25))
    with refuses(ValueError, "num_rows is -2; expected at least 0"):
        raddle.PagedKV(*arrays, page_size=16, num_rows=-2)


# --- where the device is the host ------------------------------------------------------------------


def test_on_a_cpu_the_host_plans(rng):
    problem = batch(rng)
    attn = Engine("cpu").attention(problem)
    reservation = reserved(attn, **{**MAXIMA, "device_lengths": True})
    for _ in range(3):
        reservation.update(twin(problem.layout))
        reservation.check()
        within(attention(problem), attn.run(reservation, problem.q, problem.kv[0]))
        problem = batch(rng)


@pytest.mark.parametrize("most", [0, 2])
def test_discovered_prefixes_in_a_reservation_of_the_host(engine, rng, most):
    """With and without anything shared: one kind of layout. Where requests have few rows, prefixes have those of many."""
    rows = {"most_rows": most or 5}
    first = batch(rng, "paged_prefixes", **rows)
    attn = engine.attention(first)
    owner = attn if engine.device == "cpu" else attn.attention
    reservation = reserved(owner, **MAXIMA, max_levels=2, max_qo_len=most)
    for number in range(8):
        problem = batch(rng, "paged_prefixes" if number % 2 else "paged", **rows)
        problem.layout.discover_prefixes = problem.layout.discover_prefixes or 1
        reservation.update(twin(problem.layout))
        within(attention(problem), attn.run(reservation, problem.q, problem.kv[0]))
    if most:
        longer = draw(rng, "paged_prefixes", [Causal()], lengths=[(3, 60), (1, 90)], page_size=16, **HEADS)
        with refuses(ValueError, "3 query rows in request 0", "max_qo_len = 2"):
            reservation.update(twin(longer.layout))
        invariant = raddle.Attention(raddle.AttentionSpec(4, 2, 64, batch_invariant=True), device=engine.device)
        with refuses(ValueError, "max_qo_len is 2; expected 0 with max_levels = 2 and batch_invariant"):
            reserved(invariant, **MAXIMA, max_levels=2, max_qo_len=most)


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


def test_a_host_table_within_num_rows(rng):
    assert paged(num_rows=3).num_rows == paged(num_rows=9).num_rows == 3
    with refuses(ValueError, "qo_indptr has 3 rows; expected at most num_rows = 2"):
        paged(num_rows=2)
