"""Edges of the input space: empty rows and requests, extreme sizes, infinities, sinks on nothing."""

import mmap

import numpy as np
import pytest
import raddle
from checks import within
from draws import DTYPES, SCHEDULES, WORKERS, draw, numpy_dtype
from engine import spec_of, twin
from layout_draws import LAYOUTS, fill, paged_pools
from reference import Causal, PagedKV, Problem, RaggedKV, Sinks, SlidingWindow, attention

MAP_NORESERVE = 0x4000  # Linux: pages that are never touched cost nothing


@pytest.mark.parametrize("layout", LAYOUTS)
def test_requests_without_rows_or_keys(engine, rng, layout):
    lengths = [(0, 0), (3, 0), (0, 5), (2, 9), (1, 0), (0, 0)]
    engine.check(draw(rng, layout, "causal", lengths=lengths), num_workers=3)


@pytest.mark.parametrize("variant", ["plain", "sinks", "sigmoid"])
@pytest.mark.parametrize("lengths", [[(0, 0)], [(0, 7)], [(4, 0)], [(0, 0)] * 3])
def test_batches_of_nothing(engine, rng, variant, lengths):
    engine.check(draw(rng, "paged", variant, lengths=lengths))


@pytest.mark.parametrize("layout", ["ragged", "paged"])
def test_a_batch_of_no_requests(engine, rng, layout):
    problem = draw(rng, layout, "causal", lengths=[(1, 4)])
    none = np.zeros(1, np.int32)
    problem.layout.qo_indptr = none
    problem.q = problem.q[:0]
    if layout == "ragged":
        problem.layout.kv_indptr = none
    else:
        problem.layout.page_indptr, problem.layout.kv_len = none, none[:0]
    out, lse = engine.run(problem)
    assert out.shape[0] == 0 and lse.shape[0] == 0


@pytest.mark.every_isa
@pytest.mark.parametrize("workers", WORKERS)
def test_more_rows_than_keys(engine, rng, workers):
    """Cross-attention: causal rows of negative index see nothing, exactly."""
    problem = draw(rng, "paged", "causal", lengths=[(70, 9), (5, 1), (40, 39)])
    out, lse = engine.run(problem, num_workers=workers)
    empty = np.r_[0:61, 70:74, 75:76]
    np.testing.assert_array_equal(out[empty], 0.0)
    np.testing.assert_array_equal(lse[empty], -np.inf)
    assert np.isfinite(lse[np.setdiff1d(np.arange(len(lse)), empty)]).all()
    engine.check(problem, num_workers=workers)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fully_masked_rows(engine, rng, dtype, schedule):
    """A band that lies behind all keys for the last rows, before them for the first."""
    problem = draw(rng, "paged_positions", [SlidingWindow(3, 0)], dtype, lengths=[(20, 64), (3, 300)])
    problem.layout.qo_pos = np.r_[-30:-20, 60:70, 500, 2, 299].astype(np.int32)
    out, lse = engine.run(problem, num_workers=9, schedule=schedule)
    for row in (*range(10), *range(17, 20), 20):
        assert (out[row] == 0.0).all() and np.isneginf(lse[row]).all(), row
    engine.check(problem, num_workers=9, schedule=schedule)


@pytest.mark.every_isa
@pytest.mark.parametrize("layout", ["paged", "cascade"])
def test_a_sink_on_an_empty_row(engine, rng, layout):
    lengths = [(2, 0), (40, 3), (1, 300)]
    problem = draw(rng, "paged", "gpt_oss", "float32", lengths=lengths)
    out, lse = engine.run(problem, num_workers=5)
    sinks = next(part for part in problem.variant if isinstance(part, Sinks)).logits
    for row in (*range(2), *range(2, 39)):
        np.testing.assert_array_equal(out[row], 0.0)
        np.testing.assert_array_equal(lse[row], sinks)
    engine.check(draw(rng, layout, "gpt_oss", lengths=lengths), num_workers=5)


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_key_returns_its_value(engine, rng, dtype):
    """The only weight is exactly 1, so O is V bit for bit."""
    problem = draw(rng, "ragged", "plain", dtype, group=3, num_kv_heads=2, lengths=[(4, 1)])
    out, _ = engine.run(problem)
    np.testing.assert_array_equal(out, np.broadcast_to(np.repeat(problem.kv[0][1], 3, axis=1), out.shape))


@pytest.mark.every_isa
@pytest.mark.parametrize("variant", ["plain", "softcap"])
@pytest.mark.parametrize("size", [1e3, 1e18])
def test_huge_logits_do_not_overflow(engine, rng, size, variant):
    """Logits of ±10³ and ±10¹⁸: one key has all the weight."""
    dtype = "float32" if engine.device == "cpu" else "bfloat16"  # float16 has no 10¹⁸
    problem = draw(rng, "ragged", variant, dtype, dim=8, group=1, num_kv_heads=1, lengths=[(3, 200)], peak=1.0)
    problem.q = (problem.q.astype(np.float32) * np.float32(size)).astype(problem.q.dtype)
    out, lse = engine.run(problem, num_workers=4)
    assert np.isfinite(out.astype(np.float32)).all() and np.isfinite(lse).all()
    engine.check(problem, num_workers=4)


def test_infinite_keys_that_a_mask_hides(engine, rng):
    """K = inf and NaN past kv_len, in pages that are used in part: no bit of them reaches the output."""
    problem = draw(rng, "paged", "causal", lengths=[(3, 21), (1, 7)], page_size=16)
    before = engine.run(problem)
    for pool in problem.kv[0]:
        pool[np.isnan(pool)] = np.inf
    for a, b in zip(before, engine.run(problem)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_request_of_one_row(engine, rng, layout):
    engine.check(draw(rng, layout, "gemma2", lengths=[(1, 1)]), num_workers=132)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_4096_requests(engine, rng, schedule):
    lengths = [(int(qo), int(kv)) for qo, kv in zip(rng.integers(0, 3, 4096), rng.integers(0, 30, 4096))]
    problem = draw(rng, "paged", "causal", dim=8, group=1, num_kv_heads=1, lengths=lengths, page_size=4)
    out, lse = engine.run(problem, num_workers=132, schedule=schedule)
    same, same_lse = engine.run(problem, num_workers=1, schedule="one-per-request")
    np.testing.assert_allclose(out, same, atol=2e-6)
    np.testing.assert_allclose(lse, same_lse, atol=2e-6)
    if schedule == "auto":
        engine.check(problem, num_workers=132)


def sparse_pool(shape, kind):
    """An array of zeros of which untouched pages need no memory."""
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    return np.frombuffer(memory, kind).reshape(shape)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_pool_beyond_2_to_the_31_elements(engine, rng, dtype, kv_layout):
    pages, page_size, heads, dim = 2**20 + 7, 16, 2, 80
    kind = numpy_dtype(dtype)
    shape = (pages, page_size, heads, dim) if kv_layout == "NHD" else (pages, heads, page_size, dim)
    assert np.prod(shape) > 2**31
    k, v = sparse_pool(shape, kind), sparse_pool(shape, kind)
    used = np.array([pages - 1, 3, pages // 2, pages - 2, 838861], np.int32)
    layout = PagedKV(np.array([0, 2]), np.array([0, 5]), used, np.array([75]), page_size, kv_layout)
    fill(rng, layout, k), fill(rng, layout, v)
    q = rng.standard_normal((2, 4, dim)).astype(kind)
    engine.check(Problem(q, [(k, v)], layout, [Causal()]), num_workers=3)


def test_ragged_rows_beyond_2_to_the_31_elements(engine, rng):
    tokens, dim = 2**24 + 100, 128
    k, v = (sparse_pool((tokens, 1, dim), np.float16) for _ in range(2))
    assert k.size > 2**31
    k[-40:], v[-40:] = rng.standard_normal((2, 40, 1, dim))
    layout = RaggedKV(np.array([0, 0, 2]), np.array([0, tokens - 40, tokens]))
    q = rng.standard_normal((2, 2, dim)).astype(np.float16)
    problem = Problem(q, [(k, v)], layout, [])
    # The first request has no rows, so its sixteen million keys belong to no row.
    short = Problem(q, [(k[-40:], v[-40:])], RaggedKV(np.array([0, 2]), np.array([0, 40])), [])
    for a, b in zip(engine.run(problem), engine.run(short)):
        np.testing.assert_array_equal(a, b)
    engine.check(short)


def windowed(rng, **options):
    return draw(rng, "paged", [SlidingWindow(20), Causal()], lengths=[(1, 100), (2, 100)], page_size=8, **options)


def test_pages_outside_the_window_may_be_missing(engine, rng):
    """Row 99 keeps 79…99, rows 98 and 99 keep 78…99: pages 0…8 of both are never read."""
    problem = windowed(rng)
    before = engine.run(problem)
    problem.layout.page_indices = problem.layout.page_indices.copy()
    problem.layout.page_indices[np.r_[0:9, 13:22]] = -1
    for a, b in zip(before, engine.run(problem)):
        np.testing.assert_array_equal(a, b)
    engine.check(problem)


@pytest.mark.parametrize("page", [9, 12, 22])
def test_a_missing_page_that_a_row_keeps_is_an_error(rng, page):
    problem = windowed(rng)
    problem.layout.page_indices = problem.layout.page_indices.copy()
    problem.layout.page_indices[page] = -1
    with pytest.raises(ValueError, match="page_indices"):
        raddle.Attention(spec_of(problem)).plan(twin(problem.layout))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_plan_serves_all_layers(engine, rng, dtype):
    first = draw(rng, "paged", "gemma2", dtype, dim=64, group=2, num_kv_heads=2, lengths=[(3, 90), (1, 500)])
    attn = engine.attention(first)
    plan = attn.plan(twin(first.layout), num_workers=7)
    for _ in range(3):
        q = rng.standard_normal(first.q.shape).astype(first.q.dtype)
        kv = paged_pools(rng, first.layout, 2, 64, 64, first.q.dtype)
        layer = Problem(q, kv, first.layout, first.variant)
        within(attention(layer), *engine.run_plan(attn, plan, layer))


@pytest.mark.parametrize("left", [-1, 2**31 - 1])
def test_a_window_without_end_hides_nothing(engine, rng, left):
    """Rows before the first key have negative positions, from which no bound may wrap."""
    engine.check(draw(rng, "paged", [SlidingWindow(left), Causal()], lengths=[(20, 9), (3, 70)]))


def test_windows_below_none_are_refused():
    for arguments, words in (((-2,), "left is -2"), ((3, -5), "right is -5")):
        with pytest.raises(ValueError, match=words):
            raddle.SlidingWindow(*arguments)


def test_more_keys_than_the_planner_counts_are_refused():
    longest = 2**31 - 1 - 2**16
    with pytest.raises(ValueError, match=f"kv_indptr gives request 1 {longest + 1} keys; expected at most {longest}"):
        raddle.RaggedKV([0, 1, 2], [0, 1, longest + 2])
