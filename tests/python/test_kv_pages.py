"""Pages of a KV pool: copies, and keys turned while they are appended."""

from __future__ import annotations

import numpy as np
import pytest
import raddle
from draws import DTYPES, numpy_dtype
from engine import twin
from layout_draws import paged, paged_pools
from reference.exact import fetch

DIM = 32


def random_bits(rng, shape, kind):
    """Any bit pattern, NaN included: copies move bits."""
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * np.dtype(kind).itemsize), kind).reshape(shape).copy()


def bits(x):
    return np.ascontiguousarray(x).view(np.uint8)


# --- copies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 3, 8), (3, 16, 24), (2, 8), (40,)])
def test_pages_are_copied_and_nothing_else_changes(rng, dtype, shape):
    kind = numpy_dtype(dtype)
    pools = [random_bits(rng, (20, *shape), kind) for _ in range(2)]
    order = rng.permutation(20)
    expected = [pool.copy() for pool in pools]
    for pool in expected:
        pool[order[:7]] = pool[order[7:14]]
    raddle.copy_pages(tuple(pools), order[7:14], order[:7])
    for pool, want in zip(pools, expected):
        np.testing.assert_array_equal(bits(pool), bits(want))


def test_copies_between_pools_of_other_strides(rng):
    source = random_bits(rng, (6, 2, 4, 3, 8), np.float16)  # K and V interleaved
    target = [random_bits(rng, (9, 4, 5, 8), np.float16)[:, :, 1:4] for _ in range(2)]
    expected = [pool.copy() for pool in target]
    for which, pool in enumerate(expected):
        pool[[8, 0]] = source[[1, 5], which]
    raddle.copy_pages(source, [1, 5], [8, 0], to=tuple(target))
    for pool, want in zip(target, expected):
        np.testing.assert_array_equal(bits(pool), bits(want))


def test_a_summary_is_copied_like_a_pool(rng):
    summary = random_bits(rng, (5, 2, 3, 8), np.float32)
    expected = summary.copy()
    expected[4] = summary[1]
    raddle.copy_pages(summary, [1], [4])
    np.testing.assert_array_equal(bits(summary), bits(expected))


def test_large_copies_go_to_the_pool(rng):
    pools = [random_bits(rng, (64, 16, 4, 128), np.float16) for _ in range(2)]
    expected = [np.concatenate([pool[32:], pool[32:]]) for pool in pools]
    raddle.copy_pages(tuple(pools), np.arange(32, 64), np.arange(32))
    for pool, want in zip(pools, expected):
        np.testing.assert_array_equal(bits(pool), bits(want))


@pytest.mark.parametrize(
    ("from_pages", "to_pages", "message"),
    [
        ([0, 1], [2, 2], r"to_pages\[1\] is 2, and so is to_pages\[0\]"),
        ([0, 3], [3, 2], r"from_pages\[1\] is 3, which to_pages\[0\] overwrites"),
        ([4], [4], r"from_pages\[0\] is 4, which to_pages\[0\] overwrites"),
        ([0, 6], [1, 2], r"from_pages\[1\] is 6; expected a page, 0 to 5"),
        ([0, 1], [-1, 2], r"to_pages\[0\] is -1"),
        ([0, 1], [2], r"to_pages has 1 entries; expected 2"),
    ],
)
def test_bad_pages_are_named_and_nothing_is_written(rng, from_pages, to_pages, message):
    pools = tuple(random_bits(rng, (6, 2, 2, 8), np.float32) for _ in range(2))
    before = [pool.copy() for pool in pools]
    with pytest.raises(ValueError, match=message):
        raddle.copy_pages(pools, from_pages, to_pages)
    for pool, old in zip(pools, before):
        np.testing.assert_array_equal(bits(pool), bits(old))


def test_overlapping_views_of_one_pool_are_one_pool(rng):
    k, v = (random_bits(rng, (8, 2, 1, 8), np.float32) for _ in range(2))
    with pytest.raises(ValueError, match=r"from_pages\[0\] is 5, which to_pages\[0\] overwrites"):
        raddle.copy_pages((k[:6], v[:6]), [5, 0], [3, 0], to=(k[2:], v[2:]))
    expected = k.copy()
    expected[2:][5] = k[5]
    raddle.copy_pages((k[:6], v[:6]), [5], [5], to=(k[2:], v[2:]))
    np.testing.assert_array_equal(bits(k), bits(expected))


def test_views_that_walk_otherwise_are_one_pool(rng):
    k, v = (random_bits(rng, (4, 2, 1, 8), np.float32) for _ in range(2))
    backwards = k[::-1], v[::-1]
    with pytest.raises(ValueError, match=r"from_pages\[1\] is 3, which to_pages\[0\] overwrites"):
        raddle.copy_pages(backwards, [1, 3], [0, 1], to=(k, v))
    expected = k.copy()
    expected[0] = k[2]
    raddle.copy_pages(backwards, [1], [0], to=(k, v))
    np.testing.assert_array_equal(bits(k), bits(expected))
    with pytest.raises(ValueError, match=r"from_pages\[0\] is 1, which to_pages\[0\] overwrites"):
        raddle.copy_pages((k, v), [1], [1], to=(v, k))


def test_a_call_takes_one_level():
    pool = np.zeros((2, 16, 1, 8), np.float32)
    layout, new = raddle.PagedKV([0, 1], [0, 1], [0], [1], 16), np.zeros((1, 1, 8), np.float32)
    calls = [
        lambda kv: raddle.append_kv(layout, kv, new, new),
        lambda kv: raddle.copy_pages(kv, [0], [1]),
        lambda kv: raddle.summarize_pages(layout, kv),
    ]
    for call in calls:
        for kv in ([(pool, pool)] * 2, [pool, pool.copy()]):
            with pytest.raises(ValueError, match="kv_pool is a list of 2 levels; expected one pair"):
                call(kv)
    assert raddle.summarize_pages(layout, [(pool, pool)]).shape == (2, 2, 1, 8)


def test_unlike_pools_are_named(rng):
    a = tuple(np.zeros((6, 2, 2, 8), np.float32) for _ in range(2))
    with pytest.raises(ValueError, match=r"to\.v has shape \[6, 2, 3, 8\]; expected pages as in from\.v"):
        raddle.copy_pages(a, [0], [1], to=(a[0], np.zeros((6, 2, 3, 8), np.float32)))
    with pytest.raises(TypeError, match=r"to\.k is float16; expected float32"):
        raddle.copy_pages(a, [0], [1], to=(a[0].astype(np.float16), a[1]))


# --- appending --------------------------------------------------------------------------------


def turned(x, pos, theta, interleaved):
    """RoPE in fp64: [rows, heads, D] at positions [rows]."""
    half = x.shape[-1] // 2
    angle = pos[:, None, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angle), np.sin(angle)
    x = x.astype(np.float64)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    first, second = a * cos - b * sin, b * cos + a * sin
    if interleaved:
        return np.stack([first, second], -1).reshape(x.shape)
    return np.concatenate([first, second], -1)


ULP = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_keys_are_turned_at_their_position(rng, dtype, kv_layout, positions, interleaved):
    kind = numpy_dtype(dtype)
    lengths = [(1, 1), (5, 70), (0, 30), (33, 3000), (2, 17)]
    layout = paged(rng, lengths, kv_layout=kv_layout)
    pos = np.concatenate([np.arange(kv - qo, kv) for qo, kv in lengths])
    if positions:
        pos = rng.integers(0, 10_000, len(pos))
        layout.qo_pos = pos.astype(np.int32)
    k, v = paged_pools(rng, layout, 3, DIM, 24, kind)[0]
    k_new, v_new = (rng.standard_normal((41, 3, d)).astype(kind) for d in (DIM, 24))
    raddle.append_kv(twin(layout), (k, v), k_new, v_new, rope=raddle.Rope(DIM, interleaved=interleaved))
    expected = turned(k_new, pos, 10000.0, interleaved)
    row = 0
    for group, (qo_len, _) in zip(layout.groups(), lengths):
        slots = group.slot[len(group.slot) - qo_len :]
        rows = slice(row, row + qo_len)
        got, want = fetch(k, slots, kv_layout), expected[rows]
        # One rounding to the dtype, and fp32 arithmetic on elements as large as the pair is.
        scale = np.abs(want) * ULP[dtype] / 2 + 8 * 2.0**-24 * np.abs(k_new[rows].astype(np.float64)).max(initial=0.0)
        assert (np.abs(got - want) <= scale + 2.0**-24).all()
        np.testing.assert_array_equal(fetch(v, slots, kv_layout), v_new[rows].astype(np.float64))
        row += qo_len


def test_turned_keys_are_those_of_fused_rope(rng):
    """Attention whose variant turns only queries, over keys turned once, against RoPE fused into both."""
    layout = raddle.PagedKV([0, 1, 4], [0, 2, 5], [3, 1, 0, 2, 4], [20, 45], 16)
    rows = [rng.standard_normal((65, 2, DIM)).astype(np.float32) for _ in range(2)]
    whole = raddle.PagedKV([0, 20, 65], [0, 2, 5], [3, 1, 0, 2, 4], [20, 45], 16)
    pools = [[np.full((5, 16, 2, DIM), np.nan, np.float32) for _ in range(2)] for _ in range(2)]
    raddle.append_kv(whole, tuple(pools[0]), *rows)
    raddle.append_kv(whole, tuple(pools[1]), *rows, rope=raddle.Rope(DIM))
    q = rng.standard_normal((4, 4, DIM)).astype(np.float32)
    pos = np.array([19, 42, 43, 44])
    variants = [raddle.Rope(DIM), raddle.Causal()], [raddle.Causal()]
    fused, plain = (raddle.Attention(raddle.AttentionSpec(4, 2, DIM, dtype="float32", variant=x)) for x in variants)
    out = fused.run(fused.plan(layout), q, tuple(pools[0]))
    q_turned = turned(q, pos, 10000.0, False).astype(np.float32)
    np.testing.assert_allclose(plain.run(plain.plan(layout), q_turned, tuple(pools[1])), out, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("rope", "error", "message"),
    [
        (raddle.Causal(), ValueError, "rope is 'causal'; expected a variant with a key part"),
        (raddle.SoftCap(3.0), ValueError, "rope is 'softcap'"),
        (raddle.Rope(64), ValueError, "rotary_dim is 64"),
        (raddle.Rope(32, offset=[1, 2, 3]), ValueError, "rope.offset has 3 elements; expected 1, or one a request, 2"),
        (raddle.RopeTables(*2 * [np.zeros((20, 16), np.float32)]), ValueError, "request 1 has positions 20 to 21"),
        (3.0, TypeError, "rope is a float; expected a raddle.Variant"),
    ],
)
def test_bad_ropes_are_named_and_nothing_is_written(rng, rope, error, message):
    layout = raddle.PagedKV([0, 1, 3], [0, 1, 3], [0, 1, 2], [5, 22], 16)
    pools = tuple(random_bits(rng, (3, 16, 2, DIM), np.float32) for _ in range(2))
    before = [pool.copy() for pool in pools]
    new = np.zeros((3, 2, DIM), np.float32)
    with pytest.raises(error, match=message):
        raddle.append_kv(layout, pools, new, new, rope=rope)
    for pool, old in zip(pools, before):
        np.testing.assert_array_equal(bits(pool), bits(old))


@pytest.mark.parametrize(
    ("kv_len", "pages", "message"),
    [
        ([5, 5], [2, 2], "page 2 where new rows of requests 0 and 1 go to slot 3"),
        ([4, 6], [1, 1], "page 1 where new rows of requests 0 and 1 go to slot 3"),
        ([4, 6], [1, 0], None),
        ([3, 8], [1, 1], None),  # slots 0 to 2 and 5 to 7: a page shared by two requests
    ],
)
def test_two_rows_for_one_slot_are_refused(kv_len, pages, message):
    qo_indptr = [0, 2 if kv_len[0] > 3 else 3, 5 if kv_len[0] > 3 else 6]
    layout = raddle.PagedKV(qo_indptr, [0, 1, 2], pages, kv_len, 8)
    pools = tuple(np.full((3, 8, 1, 8), np.nan, np.float32) for _ in range(2))
    new = np.zeros((qo_indptr[-1], 1, 8), np.float32)
    if message is None:
        raddle.append_kv(layout, pools, new, new)
        assert np.isfinite(pools[0]).all(-1).sum() == qo_indptr[-1]
        return
    with pytest.raises(ValueError, match=message):
        raddle.append_kv(layout, pools, new, new)
    assert np.isnan(pools[0]).all() and np.isnan(pools[1]).all()
