"""What may change no bit: strides, page sizes, head order, stale memory; and, when asked for, the batch around."""

import draws
import layout_draws
import numpy as np
import pytest
from draws import DTYPES, VARIANTS, draw
from engine import twin
from layout_draws import indptr, paged
from reference import PagedKV, Problem, RaggedKV


def same(a, b):
    for x, y in zip(a, b):
        if x is None:
            assert y is None
            continue
        bits = {2: np.uint16, 4: np.uint32}[x.dtype.itemsize]
        np.testing.assert_array_equal(x.view(bits), y.view(bits))


def strided(engine, rng, x: np.ndarray) -> np.ndarray:
    """The same values in a larger array, NaN between them; the last dimension stays contiguous."""
    pads = [(int(rng.integers(0, 3)), int(rng.integers(1, 4))) for _ in x.shape]
    before, after = pads[-1]
    pads[-1] = (before, after + -(x.shape[-1] + before + after) % engine.row_unit)
    big = np.full([n + a + b for n, (a, b) in zip(x.shape, pads)], np.nan, x.dtype)
    view = big[tuple(slice(a, a + n) for n, (a, _) in zip(x.shape, pads))]
    view[...] = x
    return view


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["ragged", "paged", "paged_hnd", "bsr_blocks"])
def test_strided_equals_contiguous(engine, rng, dtype, layout):
    problem = draw(rng, layout, "everything", dtype, dim=72)
    q, (k, v) = problem.q, problem.kv[0]
    kv = strided(engine, rng, k), strided(engine, rng, v)
    loose = Problem(strided(engine, rng, q), [kv], problem.layout, problem.variant)
    same(engine.run(problem, num_workers=3), engine.run(loose, num_workers=3))


def test_strided_outputs_hold_the_same_bits(engine, rng):
    problem = draw(rng, "paged", "causal", "bfloat16")
    attn = engine.attention(problem)
    plan = attn.plan(twin(problem.layout), num_workers=5)
    out, lse = engine.run_plan(attn, plan, problem)
    loose, loose_lse = strided(engine, rng, np.full_like(out, np.nan)), strided(engine, rng, np.full_like(lse, np.nan))
    around = loose.base.copy()
    attn.run(plan, problem.q, problem.kv[0], out=loose, lse=loose_lse, return_lse=True)
    same((out, lse), (np.ascontiguousarray(loose), np.ascontiguousarray(loose_lse)))
    # Nothing outside the view was written.
    loose[...] = np.nan
    np.testing.assert_array_equal(np.isnan(loose.base.astype(np.float32)), np.isnan(around.astype(np.float32)))


def one_prefix(rng, lengths, **more):
    """All requests share a prefix."""
    return layout_draws.cascade_of(rng, lengths, np.arange(len(lengths)), 700, **more)


@pytest.fixture
def draws_one_prefix(monkeypatch):
    """For these tests alone: others go through all layouts."""
    monkeypatch.setitem(layout_draws.LAYOUTS, "one_prefix", (one_prefix, layout_draws.cascade_pools))
    monkeypatch.setattr(draws, "SHARED_ROWS", {*draws.SHARED_ROWS, "one_prefix"})


def many_states(engine, rng, layout, workers):
    """A run of a plan whose rows are composed of states: which worker does, by which code, depends on who is first."""
    lengths = [(1, int(n)) for n in rng.integers(1, 700, 12)]
    problem = draw(rng, layout, "causal", "bfloat16", lengths=lengths, page_size=16, group=4, num_kv_heads=2)
    attn = engine.attention(problem)
    plan = attn.plan(twin(problem.layout), num_workers=workers)
    return lambda: engine.run_plan(attn, plan, problem)


@pytest.mark.parametrize("workers", [3, 13])
@pytest.mark.parametrize("layout", ["paged", "one_prefix"])
def test_a_plan_repeats_its_bits(engine, rng, draws_one_prefix, layout, workers):
    run = many_states(engine, rng, layout, workers)
    first = run()
    for _ in range(10):
        same(first, run())


@pytest.mark.parametrize("layout", ["paged", "one_prefix"])
def test_bits_do_not_depend_on_the_order_of_blocks(engine, emulator, rng, draws_one_prefix, layout):
    """Blocks that wait for one another compose by other code than those that gave up."""
    run = many_states(engine, rng, layout, workers=7)
    first = run()
    for order in (0, 3):
        emulator.raddle_emulator_order(order)
        same(first, run())
    emulator.raddle_emulator_together(1)
    same(first, run())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["ragged", "paged", "paged_hnd"])
def test_one_tensor_of_k_and_v_equals_two(engine, rng, dtype, layout):
    problem = draw(rng, layout, "causal", dtype)
    both = np.stack(problem.kv[0], axis=1)
    expected = engine.run(problem)
    attn = engine.attention(problem)
    plan = attn.plan(twin(problem.layout))
    same(expected, attn.run(plan, problem.q, both, return_lse=True))
    same(expected, engine.run(Problem(problem.q, [(both[:, 0], both[:, 1])], problem.layout, problem.variant)))


def reshaped(rng, problem: Problem, page_size: int, kv_layout="NHD", interleaved=False) -> Problem:
    """The same keys in pages of another size and order."""
    from reference.exact import fetch

    old = problem.layout
    lengths = list(zip(np.diff(old.qo_indptr).tolist(), old.kv_len.tolist()))
    new = paged(rng, lengths, page_size, kv_layout)
    pages = int(new.page_indices.max(initial=0)) + 2
    pools = []
    for pool in problem.kv[0]:
        heads, dim = pool.shape[2:]
        rows = (page_size, heads, dim) if kv_layout == "NHD" else (heads, page_size, dim)
        pools.append(np.full((pages, *rows), np.nan, pool.dtype))
    if interleaved:
        both = np.stack(pools, axis=1)
        pools = [both[:, 0], both[:, 1]]
    for target, source in zip(pools, problem.kv[0]):
        view = target.swapaxes(1, 2) if kv_layout == "HND" else target
        for there, here in zip(new.groups(), old.groups()):
            view[there.slot // page_size, there.slot % page_size] = fetch(source, here.slot, old.kv_layout)
    return Problem(problem.q, [tuple(pools)], new, problem.variant)


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_of_any_size_and_order(engine, rng, dtype, monkeypatch):
    monkeypatch.setenv("RADDLE_BACKEND", "mma")  # on Hopper, a page's size also chooses the family of kernels
    problem = draw(rng, "paged", "gpt_oss", dtype, dim=40, page_size=16)
    expected = engine.run(problem, num_workers=7)
    for page_size in (1, 5, 16, 64):
        for kv_layout in ("NHD", "HND"):
            for interleaved in (False, True):
                other = reshaped(rng, problem, page_size, kv_layout, interleaved)
                same(expected, engine.run(other, num_workers=7))


def test_padded_tables_equal_lists(engine, rng):
    problem = draw(rng, "paged", "causal", "bfloat16", lengths=[(1, 33), (4, 0), (2, 100)])
    csr = problem.layout
    table = np.full((3, 200), -9, np.int64)
    for i in range(3):
        table[i, : len(csr.pages(i))] = csr.pages(i)
    padded = PagedKV(csr.qo_indptr, None, table, csr.kv_len, csr.page_size)
    same(engine.run(problem), engine.run(Problem(problem.q, problem.kv, padded, problem.variant)))


@pytest.mark.every_isa
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_lies_past_the_last_key_changes_no_bit(engine, rng, variant):
    problem = draw(rng, "paged", variant, "bfloat16", page_size=16)
    poisoned = engine.run(problem, num_workers=7)
    clean = [tuple(np.where(np.isnan(pool), np.zeros_like(pool), pool) for pool in problem.kv[0])]
    same(poisoned, engine.run(Problem(problem.q, clean, problem.layout, problem.variant), num_workers=7))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_plan_gives_the_same_bits_again(engine, rng, variant):
    problem = draw(rng, "paged", variant, "float32", lengths=[(1, 2000), (30, 300), (1, 700)], group=4, num_kv_heads=1)
    attn = engine.attention(problem)
    plan = attn.plan(twin(problem.layout), num_workers=7)
    first = engine.run_plan(attn, plan, problem)
    for _ in range(3):
        same(first, engine.run_plan(attn, plan, problem))
    same(first, engine.run(problem, num_workers=7))


LENGTHS = [(1, 2311), (5, 77), (1, 9), (64, 200), (3, 3), (1, 1024)]


def alone(problem: Problem, i: int) -> Problem:
    """Request i in a batch of its own, from the same pool."""
    layout = problem.layout
    rows = slice(layout.qo_indptr[i], layout.qo_indptr[i + 1])
    pages = layout.pages(i)
    indptrs = np.array([0, rows.stop - rows.start]), np.array([0, len(pages)])
    own = PagedKV(*indptrs, pages, layout.kv_len[i : i + 1], layout.page_size)
    return Problem(problem.q[rows], problem.kv, own, problem.variant)


def reordered(problem: Problem, order) -> Problem:
    layout = problem.layout
    rows = [np.arange(layout.qo_indptr[i], layout.qo_indptr[i + 1]) for i in order]
    pages = [layout.pages(i) for i in order]
    table = PagedKV(
        indptr([len(r) for r in rows]),
        indptr([len(p) for p in pages]),
        np.concatenate(pages),
        layout.kv_len[list(order)],
        layout.page_size,
    )
    return Problem(problem.q[np.concatenate(rows)], problem.kv, table, problem.variant)


@pytest.mark.every_isa
@pytest.mark.parametrize("variant", ["causal", "gpt_oss", "sigmoid", "rope", "band"])
def test_batch_invariance(engine, rng, variant):
    """A request's bits depend on nothing but itself: not on neighbours, order, page size, workers or schedule."""
    problem = draw(rng, "paged", variant, "bfloat16", lengths=LENGTHS, group=4, num_kv_heads=2, dim=64)

    def run(p, **how):
        return engine.run(p, batch_invariant=True, **how)

    def cut(state, where):
        return tuple(None if x is None else x[where] for x in state)

    whole = run(problem, num_workers=2)
    engine.check(problem, num_workers=2, batch_invariant=True)
    for workers in (1, 7, 132):
        same(whole, run(problem, num_workers=workers))
    for schedule in ("linear", "algorithm1", "one-per-request"):
        same(whole, run(problem, num_workers=7, schedule=schedule))
    for page_size in (1, 10, 64):
        same(whole, run(reshaped(rng, problem, page_size), num_workers=7))
    rows = [slice(*problem.layout.qo_indptr[i : i + 2]) for i in range(len(LENGTHS))]
    for i, where in enumerate(rows):
        same(cut(whole, where), run(alone(problem, i), num_workers=132))
    order = rng.permutation(len(LENGTHS))
    mixed = run(reordered(problem, order), num_workers=5)
    same(cut(whole, np.concatenate([np.arange(rows[i].start, rows[i].stop) for i in order])), mixed)


def test_batch_invariance_across_ragged_and_pages(engine, rng):
    """Where keys lie is no part of the problem."""
    from reference.exact import fetch

    problem = draw(rng, "paged", "causal", "float32", lengths=LENGTHS, group=2, num_kv_heads=1)
    kv = [
        np.concatenate([fetch(pool, group.slot, "NHD") for group in problem.layout.groups()]).astype(pool.dtype)
        for pool in problem.kv[0]
    ]
    ragged = RaggedKV(problem.layout.qo_indptr, indptr(problem.layout.kv_len))
    other = Problem(problem.q, [tuple(kv)], ragged, problem.variant)
    same(*(engine.run(p, batch_invariant=True, num_workers=n) for p, n in ((problem, 2), (other, 9))))


def test_batch_invariance_still_splits(engine, rng):
    """One decode over 8,192 keys is cut. `raddle bench formats` times it beside the default."""
    problem = draw(
        rng, "paged", "causal", "bfloat16", dim=128, group=4, num_kv_heads=8, lengths=[(1, 8192)], page_size=16
    )
    plan = engine.attention(problem, batch_invariant=True).plan(twin(problem.layout))
    assert plan.num_items > 8 and plan.num_contractions > 0
