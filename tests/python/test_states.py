"""States (O, LSE): what `return_state` gives, how ⊕ composes them, and cascades against flat layouts."""

import numpy as np
import pytest
import raddle
from checks import compare, within
from draws import DTYPES, VARIANTS, WORKERS, draw
from engine import spec_of
from layout_draws import fill, indptr, paged_pools
from reference import Cascade, PagedKV, Problem, RaggedKV, Sinks, attention, merge_states


@pytest.mark.parametrize("variant", ["plain", "causal", "sinks", "gemma2", "gpt_oss", "rope"])
def test_a_state_is_fp32_and_without_sink(engine, rng, variant):
    problem = draw(rng, dtype="bfloat16", variant=variant)
    out, lse = engine.run(problem, state=True)
    assert out.dtype == np.float32 and lse.dtype == np.float32
    within(attention(problem, state=True), out, lse)


def random_states(rng, n, rows=5, heads=3, dim=24):
    o = rng.standard_normal((n, rows, heads, dim)).astype(np.float32)
    lse = rng.normal(0.0, 4.0, (n, rows, heads)).astype(np.float32)
    empty = rng.random(lse.shape) < 0.3
    o[empty], lse[empty] = 0.0, -np.inf
    return o, lse


@pytest.mark.parametrize("n, dim", [(1, 24), (2, 24), (3, 512), (17, 24)])
def test_merge_states(rng, n, dim):
    o, lse = random_states(rng, n, dim=dim)
    within(merge_states(o, lse), *raddle.merge_states(o, lse))


def by_rows(o, lse, indptr, finish=None):
    """Each row's states by themselves."""
    rows = [raddle.merge_states(o[a:b, None], lse[a:b, None], finish) for a, b in zip(indptr, indptr[1:])]
    return tuple(np.concatenate(each) for each in zip(*rows))


@pytest.mark.parametrize("kind", [np.int32, np.int64])
@pytest.mark.parametrize("dim", [24, 512])
def test_merge_uneven_states(rng, kind, dim):
    o, lse = random_states(rng, 1, rows=30, dim=dim)
    cuts = np.sort(rng.integers(0, 31, 7))
    indptr = np.array([0, *cuts, 30, 30], kind)
    sunk = raddle.AttentionSpec(3, 3, dim, dtype="float32", variant=raddle.Sinks([0.5, -1.0, 2.0]))
    for finish in (None, sunk):
        merged = raddle.merge_states(o[0], lse[0], finish, indptr=indptr)
        for got, want in zip(merged, by_rows(o[0], lse[0], indptr, finish)):
            np.testing.assert_array_equal(got, want)
    assert (merged[1][-1] == np.array([0.5, -1.0, 2.0], np.float32)).all(), "no state: the sink alone"
    assert raddle.merge_states(o[0], lse[0], indptr=[0])[0].shape == (0, 3, dim)


def test_bad_bounds_of_uneven_states(rng):
    o, lse = random_states(rng, 1, rows=6)
    out = np.full((2, 3, 24), 7.0, np.float32), np.full((2, 3), 7.0, np.float32)
    for indptr, message in (
        ([0, 4, 3], r"indptr\[2\] is 3; expected 4 to 6, the number of states"),
        ([-1, 2, 3], r"indptr\[0\] is -1; expected 0 to 6"),
        ([0, 2, 7], r"indptr\[2\] is 7; expected 2 to 6"),
        ([[0, 2, 4]], r"indptr is not \[rows \+ 1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            raddle.merge_states(o[0], lse[0], out=out, indptr=indptr)
    with pytest.raises(ValueError, match=r"out is \[2, 3, 24\] float32; expected \[1, 3, 24\] float32"):
        raddle.merge_states(o[0], lse[0], out=out, indptr=[0, 4])
    with pytest.raises(ValueError, match="out shares memory with o"):
        raddle.merge_states(o[0], lse[0], out=(o[0][:2], out[1]), indptr=[0, 2, 4])
    assert (out[0] == 7.0).all() and (out[1] == 7.0).all()


def test_merge_state_of_two(rng):
    o, lse = random_states(rng, 2)
    within(merge_states(o, lse), *raddle.merge_state(o[0], lse[0], o[1], lse[1]))


def test_merging_into_one_of_the_states(rng):
    o, lse = random_states(rng, 3)
    expected = raddle.merge_state(o[0], lse[0], o[1], lse[1]), raddle.merge_states(o, lse)
    out = np.full_like(o[0], np.nan), np.full_like(lse[0], np.nan)
    assert raddle.merge_states(o, lse, out=out) is out
    raddle.merge_state(o[0], lse[0], o[1], lse[1], out=(o[1], lse[1]))
    for got, want in zip((o[1], lse[1], *out), (*expected[0], *expected[1])):
        np.testing.assert_array_equal(got, want)


def test_two_empty_states_compose_to_the_empty_state():
    o, lse = np.zeros((2, 4, 3, 8), np.float32), np.full((2, 4, 3), -np.inf, np.float32)
    for merged in (raddle.merge_states(o, lse), raddle.merge_state(o[0], lse[0], o[1], lse[1])):
        np.testing.assert_array_equal(merged[0], 0.0)
        np.testing.assert_array_equal(merged[1], -np.inf)


def test_an_empty_state_changes_no_bit(rng):
    o, lse = random_states(rng, 2)
    o[1], lse[1] = 0.0, -np.inf
    for pair in ((0, 1), (1, 0)):
        merged = raddle.merge_state(o[pair[0]], lse[pair[0]], o[pair[1]], lse[pair[1]])
        np.testing.assert_array_equal(merged[0], o[0])
        np.testing.assert_array_equal(merged[1], lse[0])


def test_finish_applies_the_sinks(rng):
    o, lse = random_states(rng, 3, heads=4)
    sinks = Sinks(rng.normal(0.0, 2.0, 4).astype(np.float32))
    problem = draw(rng, variant=[sinks], dtype="float32", dim=24, group=2, num_kv_heads=2)
    merged = raddle.merge_states(o, lse, finish=spec_of(problem))
    within(merge_states(o, lse, sinks.logits), *merged)


@pytest.mark.every_isa
def test_states_of_disjoint_keys_merge_to_the_whole(engine, rng):
    """Keys cut at three places, run apart, merged and finished: the same as one run."""
    whole = draw(rng, "ragged", "sinks", "bfloat16", group=4, num_kv_heads=2, lengths=[(3, 400)])
    k, v = whole.kv[0]
    parts = [slice(0, 1), slice(1, 130), slice(130, 400)]
    states = []
    for part in parts:
        layout = type(whole.layout)(np.array([0, 3]), np.array([0, part.stop - part.start]))
        states.append(engine.run(Problem(whole.q, [(k[part], v[part])], layout, whole.variant), state=True))
    o, lse = (np.stack(x) for x in zip(*states))
    exact = attention(whole)
    merged_o, merged_lse = raddle.merge_states(o, lse, finish=spec_of(whole))
    # Roundings of the parts, and once more those of ⊕.
    compare("O", merged_o, exact.out, 2.0 * exact.out_budget)
    compare("LSE", merged_lse, exact.lse, 2.0 * exact.lse_budget)


def flat(cascade_problem) -> Problem:
    """The same attention as one page table of page_size 1."""
    from reference import keys_of_rows

    layout = cascade_problem.layout
    requests = {keys.request: keys for keys in keys_of_rows(layout)}
    heads, dim = cascade_problem.kv[0][0].shape[-2:]
    dim_vo = cascade_problem.kv[0][1].shape[-1]
    pools, pages, counts = [[], []], [], []
    for i in range(len(layout.qo_indptr) - 1):
        keys = requests.get(i)
        counts.append(0 if keys is None else len(keys.slot))
        if keys is None:
            continue
        order = np.argsort(keys.kv_index)
        for which in (0, 1):
            level_rows = [pair[which].reshape(-1, heads, dim if which == 0 else dim_vo) for pair in cascade_problem.kv]
            pools[which] += [level_rows[level][slot] for level, slot in zip(keys.level[order], keys.slot[order])]
    pages = np.arange(sum(counts), dtype=np.int32)
    kv_len = np.array(counts, np.int32)
    table = PagedKV(layout.qo_indptr, indptr(counts), pages, kv_len, 1, qo_pos=layout.qo_pos)
    kv = tuple(np.stack(rows)[:, None] for rows in pools)
    return Problem(cascade_problem.q, [kv], table, cascade_problem.variant)


SHAREABLE = [name for name in VARIANTS if name != "rope_llama31"]


@pytest.mark.parametrize("variant", SHAREABLE)
def test_a_cascade_equals_the_flat_layout(engine, rng, variant):
    lengths = [(int(rng.integers(1, 4)), int(rng.integers(5, 200))) for _ in range(5)]
    problem = draw(rng, "cascade", variant, "float32", dim=32, group=4, num_kv_heads=2, lengths=lengths)
    exact = attention(problem)
    other = attention(flat(problem))
    np.testing.assert_allclose(exact.out, other.out, atol=1e-10)
    for workers in WORKERS:
        within(exact, *engine.run(problem, num_workers=workers))
    within(exact, *engine.run(flat(problem)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_three_levels_of_non_adjacent_requests(engine, rng, dtype):
    """Requests 0…3 share 64 keys, 0 and 2 another 50, and all have keys of their own."""
    rows = np.arange(4, dtype=np.int32)
    one_each = indptr([1, 1, 1, 1])
    root = PagedKV(indptr([4]), indptr([4]), np.array([3, 1, 0, 2], np.int32), np.array([64], np.int32), 16)
    middle = PagedKV(indptr([2]), indptr([5]), np.arange(5, dtype=np.int32), np.array([50], np.int32), 10)
    root.qo_rows, middle.qo_rows = rows, np.array([2, 0], np.int32)
    middle.kv_begin = np.array([64], np.int32)
    begin = np.array([114, 64, 114, 64], np.int32)
    own = np.array([7, 0, 33, 1], np.int32)
    leaves = PagedKV(one_each, indptr(-(-own // 4)), np.arange(12, dtype=np.int32), own, 4, kv_begin=begin)
    layout = Cascade([root, middle, leaves])
    problem = draw(rng, "ragged", "gpt_oss", dtype, group=3, num_kv_heads=2, lengths=[(1, 1)] * 4)
    kv = [paged_pools(rng, level, 2, 64, 64, problem.q.dtype)[0] for level in layout.levels]
    for workers in WORKERS:
        engine.check(Problem(problem.q, kv, layout, problem.variant), num_workers=workers)


def test_a_tile_of_more_states_than_a_warp_has_lanes(engine, rng):
    """Forty pairs of rows, each with keys of its own, are one request on the next level."""
    layout = Cascade([RaggedKV(indptr([2] * 40), indptr([5] * 40)), RaggedKV(indptr([80]), indptr([45]))])
    problem = draw(rng, "ragged", "plain", "float16", dim=64, group=1, num_kv_heads=2, lengths=[(80, 45)])
    kv = [tuple(rng.standard_normal((n, 2, 64)).astype(np.float16) for _ in range(2)) for n in (200, 45)]
    for workers in WORKERS:
        engine.check(Problem(problem.q, kv, layout, problem.variant), num_workers=workers)


def test_levels_that_share_one_pool(engine, rng):
    problem = draw(rng, "cascade", "causal", "float32", lengths=[(1, 30), (2, 70)])
    prefix, suffix = problem.layout.levels
    prefix.page_size = suffix.page_size = 8
    for level, kv_len in ((prefix, [24]), (suffix, [30, 70])):
        level.kv_len = np.array(kv_len, np.int32)
    prefix.qo_indptr, prefix.qo_rows = indptr([3]), np.arange(3, dtype=np.int32)
    prefix.page_indptr, prefix.page_indices = indptr([3]), np.array([5, 9, 0], np.int32)
    suffix.page_indptr = indptr([4, 9])
    suffix.page_indices = np.array([1, 2, 3, 4, 6, 7, 8, 10, 11, 12, 13, 14, 15], np.int32)
    suffix.kv_begin = np.array([24, 24], np.int32)
    heads, dim = problem.kv[0][0].shape[-2:]
    k, v = (np.full((16, 8, heads, dim), np.nan, problem.q.dtype) for _ in range(2))
    for level in (prefix, suffix):
        fill(rng, level, k), fill(rng, level, v)
    engine.check(Problem(problem.q, [(k, v)], Cascade([prefix, suffix]), problem.variant))
