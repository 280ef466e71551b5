"""The KV cache of 8 bits: rows quantised while they are appended, scales that move with pages and accepted drafts."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import raddle
import torch
from draws import DTYPES, KV_DTYPES, numpy_dtype
from engine import Engine, twin
from layout_draws import paged, paged_pools
from reference import Problem
from reference.exact import fetch, scales
from test_kv_pages import bits, random_bits, turned

DIM, HEADS = 64, 3
LENGTHS = [(1, 1), (5, 70), (0, 30), (33, 33), (2, 17)]
ROWS = sum(qo for qo, _ in LENGTHS)
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
SMALLEST = np.float32(2.0**-126)


def drawn(rng, kv_dtype, kv_layout="NHD"):
    layout = paged(rng, LENGTHS, kv_layout=kv_layout)
    return layout, paged_pools(rng, layout, HEADS, DIM, 32, numpy_dtype(kv_dtype))[0]


def new_rows(rng, dtype, spread=1.0):
    return [(spread * rng.standard_normal((ROWS, HEADS, d))).astype(numpy_dtype(dtype)) for d in (DIM, 32)]


def slots_of_rows(layout):
    return np.concatenate([group.slot[len(group.slot) - qo :] for group, (qo, _) in zip(layout.groups(), LENGTHS)])


def token_scales(pool):
    return np.full(pool.shape[:-1], np.nan, np.float32)


def in_pages(pool, kv_layout):
    return pool.swapaxes(1, 2) if kv_layout == "HND" else pool


def stored(pool, layout, kv_layout):
    """Bits of the rows of a batch, [rows, Hkv, D]."""
    pages, slots = in_pages(pool.view(np.uint8), kv_layout), slots_of_rows(layout)
    return pages[slots // pages.shape[1], slots % pages.shape[1]]


def saturated(x, kv_dtype):
    """By ml_dtypes, whose conversion overflows; numpy's to integers rounds to zero."""
    x = np.clip(x, -LARGEST[kv_dtype], LARGEST[kv_dtype])
    return (np.rint(x) if kv_dtype == "int8" else x).astype(numpy_dtype(kv_dtype))


# --- appending --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kind", ["none", "number", "head"])
@pytest.mark.parametrize("spread", [1.0, 1000.0])
def test_quantised_as_others_do(rng, dtype, kv_dtype, kv_layout, kind, spread):
    layout, pools = drawn(rng, kv_dtype, kv_layout)
    new = new_rows(rng, dtype, spread)
    make = {"none": lambda: None, "number": lambda: 0.37, "head": lambda: np.exp(rng.standard_normal(HEADS))}[kind]
    given = [make() if kind != "head" else make().astype(np.float32) for _ in range(2)]
    before = [pool.copy() for pool in pools]
    raddle.append_kv(twin(layout), pools, *new, k_scale=given[0], v_scale=given[1])
    for pool, old, rows, scale in zip(pools, before, new, given):
        by = np.float32(1.0 if scale is None else scale)
        quotient = rows.astype(np.float32) / (by[:, None] if by.ndim else by)
        found = stored(pool, layout, kv_layout)
        np.testing.assert_array_equal(found, saturated(quotient, kv_dtype).view(np.uint8))
        held = torch.from_numpy(np.clip(quotient, -LARGEST[kv_dtype], LARGEST[kv_dtype]))
        held = held.round() if kv_dtype == "int8" else held
        np.testing.assert_array_equal(found, held.to(getattr(torch, kv_dtype)).view(torch.uint8).numpy())
        # No other slot has changed.
        pages, slots = in_pages(pool.view(np.uint8), kv_layout), slots_of_rows(layout)
        there = np.zeros(pages.shape[:2], bool)
        there[slots // pages.shape[1], slots % pages.shape[1]] = True
        np.testing.assert_array_equal(pages[~there], in_pages(old.view(np.uint8), kv_layout)[~there])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_scales_of_tokens_are_written(rng, dtype, kv_dtype, kv_layout):
    layout, pools = drawn(rng, kv_dtype, kv_layout)
    new = new_rows(rng, dtype, 1000.0)
    new[0][3] = 0.0
    new[1][4, 1] = 2.0**-126  # too small for a scale of their own
    written = [token_scales(pool) for pool in pools]
    raddle.append_kv(twin(layout), pools, *new, k_scale=written[0], v_scale=written[1])
    slots = slots_of_rows(layout)
    for pool, rows, scale in zip(pools, new, written):
        rows = rows.astype(np.float32)
        largest = np.abs(rows).max(-1)
        expected = np.maximum(largest / np.float32(LARGEST[kv_dtype]), SMALLEST)
        pages = in_pages(scale, kv_layout)
        np.testing.assert_array_equal(pages[slots // pages.shape[1], slots % pages.shape[1]], expected)
        assert np.isfinite(scale).sum() == slots.size * HEADS
        found = stored(pool, layout, kv_layout)
        np.testing.assert_array_equal(found, saturated(rows / expected[..., None], kv_dtype).view(np.uint8))
        # The largest element of a row is as large as the dtype has it.
        size = np.abs(found.view(numpy_dtype(kv_dtype)).astype(np.float32)).max(-1)
        assert (size[largest > 1.0] == LARGEST[kv_dtype]).all()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("computed", [False, True])
def test_turned_keys_are_rounded_once(rng, kv_dtype, computed):
    layout, (k, v) = drawn(rng, kv_dtype)
    k_new, v_new = new_rows(rng, "bfloat16")
    scale = token_scales(k) if computed else 0.05
    raddle.append_kv(twin(layout), (k, v), k_new, v_new, rope=raddle.Rope(DIM), k_scale=scale)
    pos = np.concatenate([np.arange(kv - qo, kv) for qo, kv in LENGTHS])
    expected = turned(k_new, pos, 10000.0, False)
    slots = slots_of_rows(layout)
    factor = scales(scale, slots, "NHD")
    found = fetch(k, slots, "NHD") * factor
    # Half of a unit in the last place, or of the smallest number; and angles in fp32. Of integers units are all alike.
    mantissa, smallest = {"float8_e4m3fn": (3, 2.0**-9), "float8_e5m2": (2, 2.0**-16), "int8": (99, 1.0)}[kv_dtype]
    budget = np.maximum(np.abs(expected) * 2.0 ** -(mantissa + 1), smallest / 2 * factor) * (1 + 1e-5) + 1e-5
    assert (np.abs(found - expected) <= budget).all()


def test_nan_stays_and_the_infinite_is_the_largest(rng):
    layout = raddle.PagedKV([0, 2], [0, 1], [0], [2], 4)
    for kv_dtype in KV_DTYPES:
        k, v = (np.zeros((1, 4, 1, 8), numpy_dtype(kv_dtype)) for _ in range(2))
        new = np.zeros((2, 1, 8), np.float32)
        new[0, 0, :4] = np.nan, np.inf, -np.inf, 1.0
        raddle.append_kv(layout, (k, v), new, new)
        found = k[0, 0, 0].astype(np.float32)
        assert found[0] == 0 if kv_dtype == "int8" else np.isnan(found[0])  # there is no such integer
        assert found[1] == LARGEST[kv_dtype] and found[2] == -LARGEST[kv_dtype] and found[3] == 1


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_rows_that_are_quantised_already_are_moved(rng, kv_dtype):
    layout, pools = drawn(rng, kv_dtype)
    new = [random_bits(rng, (ROWS, HEADS, d), numpy_dtype(kv_dtype)) for d in (DIM, 32)]
    raddle.append_kv(twin(layout), pools, *new)
    for pool, rows in zip(pools, new):
        np.testing.assert_array_equal(stored(pool, layout, "NHD"), rows.view(np.uint8))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_bytes_and_tensors_of_torch(rng, kv_dtype):
    layout, pools = drawn(rng, kv_dtype)
    new = new_rows(rng, "float32")
    others = [pool.copy() for pool in pools]
    raddle.append_kv(twin(layout), pools, *new, k_scale=0.5)
    in_bytes = tuple(pool.view(np.uint8) for pool in others)
    raddle.append_kv(twin(layout), in_bytes, *new, k_scale=0.5, kv_dtype=kv_dtype)
    for pool, other in zip(pools, others):
        np.testing.assert_array_equal(bits(pool), bits(other))
    lent = tuple(torch.from_numpy(x).view(getattr(torch, kv_dtype)) for x in in_bytes)
    raddle.append_kv(twin(layout), lent, *map(torch.from_numpy, new), k_scale=torch.tensor([0.25] * HEADS))
    raddle.append_kv(twin(layout), pools, *new, k_scale=0.25)
    for pool, other in zip(pools, others):
        np.testing.assert_array_equal(bits(pool), bits(other))


def test_what_is_appended_is_what_attention_reads(rng):
    """A cache that was quantised a token and head at a time, within its own rounding of the exact one."""
    layout = paged(rng, [(20, 20), (5, 40)], page_size=16)
    whole = paged(rng, [(20, 20), (40, 40)], page_size=16)
    whole.page_indptr, whole.page_indices = layout.page_indptr, layout.page_indices
    rows = [rng.standard_normal((60, 2, DIM)).astype(np.float32) for _ in range(2)]
    q = rng.standard_normal((25, 4, DIM)).astype(np.float32)
    pages = int(layout.page_indices.max()) + 1
    exact = tuple(np.zeros((pages, 16, 2, DIM), np.float32) for _ in range(2))
    pools = tuple(np.zeros((pages, 16, 2, DIM), ml_dtypes.float8_e4m3fn) for _ in range(2))
    written = [token_scales(pool) for pool in pools]
    raddle.append_kv(twin(whole), exact, *rows)
    raddle.append_kv(twin(whole), pools, *rows, k_scale=written[0], v_scale=written[1])
    engine = Engine("cpu")
    engine.check(Problem(q, [pools], layout, [], k_scale=written[0], v_scale=written[1]))
    found, _ = engine.run(Problem(q, [pools], layout, [], k_scale=written[0], v_scale=written[1]))
    expected, _ = engine.run(Problem(q, [exact], layout, []))
    assert np.sqrt(np.mean((found - expected) ** 2)) < 0.05 * np.sqrt(np.mean(expected**2))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k_scale": 0.0}, ValueError, "k_scale is 0; expected another number"),
        ({"v_scale": np.ones(2, np.float32)}, ValueError, r"v_scale is \[2\] float32; expected a number, \[3\] float32"),
        ({"k_scale": np.ones((4, 16, 2), np.float32)}, ValueError, r"k_scale is \[4, 16, 2\] float32; expected"),
        ({"k_scale": np.broadcast_to(np.float32(1), (4, 16, 3))}, ValueError, "k_scale is a read-only array"),
        ({"v_new": np.zeros((3, 3, 32), np.float16)}, TypeError, "v_new is float16; expected float32, as k_new is"),
        ({"k_new": np.zeros((3, 3, 20), np.float32)}, ValueError, "heads of 20|head_dim of 20"),
        ({"k_new": np.zeros((3, 3, 64), ml_dtypes.float8_e5m2)}, TypeError, "k_new is float8_e5m2; expected float8_e4m3fn"),
        ({"kv_dtype": "float9"}, ValueError, "kv_dtype is 'float9'"),
    ],
)
def test_what_cannot_be_is_named_and_nothing_is_written(change, error, message):
    layout = raddle.PagedKV([0, 1, 3], [0, 1, 3], [0, 1, 2], [5, 22], 16)
    pools = tuple(np.ones((4, 16, 3, d), ml_dtypes.float8_e4m3fn) for d in (64, 32))
    new = {"k_new": np.zeros((3, 3, 64), np.float32), "v_new": np.zeros((3, 3, 32), np.float32)}
    with pytest.raises(error, match=message):
        raddle.append_kv(layout, pools, **{**new, **change})
    assert all((pool == 1).all() for pool in pools)


def test_scales_belong_to_quantised_pools(rng):
    layout = raddle.PagedKV([0, 1], [0, 1], [0], [5], 16)
    pools = tuple(np.ones((1, 16, 2, 16), np.float16) for _ in range(2))
    new = np.zeros((1, 2, 16), np.float16)
    with pytest.raises(ValueError, match=r"v_scale is given, and pool\.v is float16; expected no scale"):
        raddle.append_kv(layout, pools, new, new, v_scale=2.0)
    fp8 = tuple(pool.astype(ml_dtypes.float8_e5m2) for pool in pools)
    with pytest.raises(ValueError, match="k_scale is given, and k_new is float8_e5m2 already"):
        raddle.append_kv(layout, fp8, *[new.astype(ml_dtypes.float8_e5m2)] * 2, k_scale=2.0)
    with pytest.raises(TypeError, match=r"pool\.v is float8_e4m3fn; expected float8_e5m2, as pool\.k is"):
        raddle.append_kv(layout, (fp8[0], fp8[1].astype(ml_dtypes.float8_e4m3fn)), new, new)


@pytest.mark.parametrize("bad", [0.0, np.nan])
def test_rows_are_divided_by_no_zero(bad):
    pool = np.zeros((1, 16, 2, 8), np.int8)
    rows = np.ones((1, 2, 8), np.float32)
    layout = raddle.PagedKV([0, 1], [0, 1], [0], [1], 16)
    with pytest.raises(ValueError, match=r"v_scale\[1\] is (0|nan); expected another number than 0"):
        raddle.append_kv(layout, (pool, pool.copy()), rows, rows, k_scale=1.0, v_scale=np.float32([1, bad]))
    assert not pool.any()


# --- copies, summaries, trees -----------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", [*KV_DTYPES, "uint8"])
@pytest.mark.parametrize("shape", [(5, 3, 8), (3, 16)])
def test_scales_are_copied_with_their_pages(rng, kv_dtype, shape):
    kind = numpy_dtype(kv_dtype)
    pools = [random_bits(rng, (20, *shape), kind) for _ in range(2)]
    both = [rng.standard_normal((20, *shape[:-1])).astype(np.float32) for _ in range(2)]
    order = rng.permutation(20)
    expected = [x.copy() for x in (*pools, *both)]
    for x in expected:
        x[order[:7]] = x[order[7:14]]
    raddle.copy_pages(tuple(pools), order[7:14], order[:7], scales=tuple(both))
    for x, want in zip((*pools, *both), expected):
        np.testing.assert_array_equal(bits(x), bits(want))


def test_scales_of_another_pool(rng):
    kind = numpy_dtype("float8_e4m3fn")
    source, target = ([random_bits(rng, (n, 4, 3, 8), kind) for _ in range(2)] for n in (6, 9))
    scale, to_scale = ([rng.standard_normal((n, 4, 3)).astype(np.float32) for _ in range(2)] for n in (6, 9))
    raddle.copy_pages(tuple(source), [1, 5], [8, 0], to=tuple(target), scales=(scale[0], None), to_scales=(to_scale[0], None))
    np.testing.assert_array_equal(to_scale[0][[8, 0]], scale[0][[1, 5]])
    np.testing.assert_array_equal(bits(target[1][[8, 0]]), bits(source[1][[1, 5]]))
    for bad, message in (
        ({"scales": tuple(scale)}, r"to\.k_scale is missing; expected one, as from\.k_scale is given"),
        ({"scales": (0.5, None), "to_scales": (0.5, None)}, r"from\.k_scale is a number; expected None, or a scale for"),
        ({"scales": scale[0]}, "scales is a ndarray; expected a pair"),
        ({"scales": tuple(scale), "to_scales": tuple(scale)}, r"to\.k_scale is \[6, 4, 3\] float32; expected"),
    ):
        with pytest.raises(ValueError, match=message):
            raddle.copy_pages(tuple(source), [1, 5], [8, 0], to=tuple(target), **bad)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kind", ["number", "head", "token"])
def test_summaries_are_of_values(rng, kv_dtype, kv_layout, kind):
    layout, (k, v) = drawn(rng, kv_dtype, kv_layout)
    scale = {
        "number": lambda: np.float32(0.37),
        "head": lambda: rng.standard_normal(HEADS).astype(np.float32),  # of any sign
        "token": lambda: rng.standard_normal(k.shape[:-1]).astype(np.float32),
    }[kind]()
    summary = np.full((len(k), 2, HEADS, DIM), np.nan, np.float32)
    assert raddle.summarize_pages(twin(layout), (k, v), summary, k_scale=scale) is summary
    for group in layout.groups():
        for first in range(0, len(group.slot), layout.page_size):
            slots = group.slot[first : first + layout.page_size]
            values = (fetch(k, slots, kv_layout) * scales(scale, slots, kv_layout)).astype(np.float32)
            page = slots[0] // layout.page_size
            np.testing.assert_array_equal(summary[page], [values.min(0), values.max(0)])
    again = np.full_like(summary, np.nan)
    raddle.summarize_pages(twin(layout), (k.view(np.uint8), v.view(np.uint8)), again, k_scale=scale, kv_dtype=kv_dtype)
    np.testing.assert_array_equal(again, summary)
    q = rng.standard_normal((ROWS, 2 * HEADS, DIM)).astype(np.float32)
    raddle.select_pages(twin(layout), q, summary, 2)


def test_a_summary_of_quantised_keys_has_the_dtype_of_queries(rng):
    layout, (k, v) = drawn(rng, "float8_e4m3fn")
    with pytest.raises(ValueError, match="summary is None; expected a tensor in the dtype of queries"):
        raddle.summarize_pages(twin(layout), (k, v))
    with pytest.raises(TypeError, match="summary is float8_e4m3fn; expected float32, float16 or bfloat16"):
        raddle.summarize_pages(twin(layout), (k, v), np.zeros((len(k), 2, HEADS, DIM), k.dtype))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_accepted_drafts_keep_their_scales(rng, kv_layout):
    layout, pools = drawn(rng, "float8_e5m2", kv_layout)
    both = [rng.standard_normal(pool.shape[:-1]).astype(np.float32) for pool in pools]
    # Bytes of a scale as a row of four, moved by the same function.
    rows = [np.ascontiguousarray(x[..., None]).view(np.uint8) for x in both]
    parents = np.concatenate([[rng.integers(-1, n) if n else -1 for n in range(qo)] for qo, _ in LENGTHS])
    accepted = np.array([qo - 1 for qo, _ in LENGTHS])
    raddle.accept_tree(twin(layout), tuple(pools), parents.astype(np.int32), accepted, scales=tuple(both))
    raddle.accept_tree(twin(layout), tuple(rows), parents.astype(np.int32), accepted)
    for scale, row in zip(both, rows):
        np.testing.assert_array_equal(scale.view(np.uint32), row.view(np.uint32)[..., 0])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_one_infinite_element_does_not_spread_by_its_scale(kv_dtype):
    """The scale is the finite elements'; the infinite one is the largest number."""
    layout = raddle.PagedKV([0, 1], [0, 1], [0], [1], 4)
    k, v = (np.zeros((1, 4, 1, 8), numpy_dtype(kv_dtype)) for _ in range(2))
    scales = tuple(np.zeros((1, 4, 1), np.float32) for _ in range(2))
    new = np.ones((1, 1, 8), np.float32)
    new[0, 0, 2:4] = np.inf, -np.inf
    raddle.append_kv(layout, (k, v), new, new, k_scale=scales[0], v_scale=scales[1])
    for pool, scale in zip((k, v), scales):
        assert scale[0, 0, 0] == np.float32(1 / LARGEST[kv_dtype])
        found = pool[0, 0, 0].astype(np.float32) * scale[0, 0, 0]
        np.testing.assert_allclose(found, [1, 1, 1, -1, 1, 1, 1, 1], rtol=1e-6)
