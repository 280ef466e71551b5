"""Shapes as serving engines have them: heads folded into rows, pools of slots, LSE by heads, scales of one entry."""

from __future__ import annotations

import numpy as np
import pytest
import raddle
from checks import within
from draws import draw
from engine import twin
from reference import attention as exact
from small import refuses

ROWS, HQ, HKV, D, DVO = 5, 4, 2, 32, 16


def drawn(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def attention(head_dim_vo=D, **more):
    spec = raddle.AttentionSpec(HQ, HKV, D, head_dim_vo, dtype="float32", variant=raddle.Causal(), **more)
    return raddle.Attention(spec)


def of_slots(order="NHD"):
    """Two requests with pages of one token: 9 and 12 keys, the last 2 and 3 of them new."""
    slots = [np.arange(20)[::2].tolist() + [21, 23], np.arange(1, 20)[::2].tolist() + [22, 24]]
    return raddle.PagedKV([0, 2, 5], None, [slots[0], slots[1]], [9, 12], page_size=1, kv_layout=order)


@pytest.mark.parametrize("head_dim_vo", [D, DVO])
@pytest.mark.parametrize("state", [False, True])
def test_heads_folded_into_rows(rng, head_dim_vo, state):
    attn = attention(head_dim_vo)
    plan = attn.plan(raddle.RaggedKV([0, 2, ROWS], [0, 7, 20]))
    q, k, v = drawn(rng, ROWS, HQ, D), drawn(rng, 20, HKV, D), drawn(rng, 20, HKV, head_dim_vo)
    how = {"return_state": True} if state else {"return_lse": True}
    out, lse = attn.run(plan, q, (k, v), **how)
    folded, folded_lse = attn.run(plan, q.reshape(ROWS, -1), (k.reshape(20, -1), v.reshape(20, -1)), **how)
    assert folded.shape == (ROWS, HQ * head_dim_vo) and folded_lse.shape == (ROWS, HQ)
    np.testing.assert_array_equal(folded.reshape(out.shape), out)
    np.testing.assert_array_equal(folded_lse, lse)
    wide = np.full((ROWS, HQ * head_dim_vo + 8), np.nan, np.float32)
    if not state:
        attn.run(plan, q, (k, v), out=wide[:, : HQ * head_dim_vo])
        np.testing.assert_array_equal(wide[:, : HQ * head_dim_vo], folded)
        assert np.isnan(wide[:, HQ * head_dim_vo :]).all()


def heads_first(x):
    """[B, H, L, …] in memory, seen as [B, L, H, …]: rows of a request lie side by side, those of heads apart."""
    return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)


@pytest.mark.parametrize("rows", [1, 5, 40, 150])
@pytest.mark.parametrize("layout", ["ragged", "paged"])
@pytest.mark.parametrize("group", [1, 2])
def test_requests_in_a_dimension_of_their_own(engine, rng, layout, rows, group):
    """Rows of decoding, of short queries and of long ones; split over workers, and uncut. Of groups of one head, whole
    tiles of queries and outputs are boxes on Hopper."""
    heads = {"dim": 64, "group": group, "num_kv_heads": 2, "dtype": "bfloat16"}
    problem = draw(rng, layout, "gpt_oss", lengths=[(rows, 200), (rows, rows + 3), (rows, 0)], **heads)
    attn = engine.attention(problem)
    q = heads_first(problem.q.reshape(3, rows, *problem.q.shape[1:]))
    for workers in (None, 7):
        plan = attn.plan(twin(problem.layout), num_workers=workers)
        flat = attn.run(plan, problem.q, problem.kv[0], return_lse=True)
        out, lse = heads_first(np.full_like(q, np.nan)), heads_first(np.full(q.shape[:3], np.nan, np.float32))
        found = attn.run(plan, q, problem.kv[0], out=out, lse=lse, return_lse=True)
        within(exact(problem), out.reshape(problem.q.shape), lse.reshape(-1, q.shape[2]))
        for a, b in zip(flat, found):
            np.testing.assert_array_equal(a.view(np.uint8), np.ascontiguousarray(b).reshape(a.shape).view(np.uint8))


def test_requests_in_a_dimension_of_their_own_are_made_and_refused(rng):
    attn = attention()
    plan = attn.plan(raddle.RaggedKV([0, 2, 4], [0, 7, 20]))
    q, k = drawn(rng, 2, 2, HQ, D), drawn(rng, 20, HKV, D)
    out, lse = attn.run(plan, q, (k, k), return_lse=True)
    assert out.shape == (2, 2, HQ, D) and lse.shape == (2, 2, HQ)
    base_2 = np.empty_like(lse)
    attn.run(plan, q, (k, k), lse=base_2, lse_base_2=True)
    np.testing.assert_allclose(base_2 * np.log(2), lse, rtol=1e-5)
    uneven = attn.plan(raddle.RaggedKV([0, 1, 4], [0, 7, 20]))
    reservation = attn.reserve(raddle.Maxima(max_requests=2, max_qo_tokens=4, max_kv_tokens=20))
    reservation.update(raddle.RaggedKV([0, 2, 4], [0, 7, 20]))
    for plan_of, options, why in [
        (uneven, {}, "and request 0 has 1 rows; expected [rows, Hq, D]"),
        (reservation, {}, "the run is a reservation's"),
        (plan, {"zero_unused_rows": True}, "zero_unused_rows is given"),
    ]:
        with refuses(ValueError, "q is [2, 2, 4, 32] float32", why):
            attn.run(plan_of, q, (k, k), **options)
    with refuses(ValueError, "out is [4, 4, 32] float32; expected [2, 2, 4, 32] float32"):
        attn.run(plan, q, (k, k), out=np.zeros((4, HQ, D), np.float32))


def test_a_row_of_another_width_is_refused(rng):
    attn = attention()
    plan = attn.plan(raddle.RaggedKV([0, 2], [0, 7]))
    q, k = drawn(rng, 2, HQ * D), drawn(rng, 7, HKV, D)
    with refuses(ValueError, "q is [2, 120] float32; expected [2, 4, 32] float32"):
        attn.run(plan, q[:, :120], (k, k))
    with refuses(ValueError, "out is [2, 64] float32; expected [2, 4, 32] float32"):
        attn.run(plan, q, (k, k), out=np.zeros((2, 64), np.float32))
    with refuses(ValueError, "kv: k is [7, 32] float32; expected [*, 2, 32] float32"):
        attn.run(plan, q, (k[:, 0], k))


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("scale", ["number", "one", "head", "token"])
def test_pools_of_slots(rng, order, scale):
    """[slots, Hkv, D] is a pool whose pages have one slot; its scales are [slots, Hkv]."""
    attn, layout = attention(kv_dtype="int8"), of_slots(order)
    plan, q = attn.plan(layout), drawn(rng, ROWS, HQ, D)
    pools = rng.integers(-100, 100, (2, 25, HKV, D)).astype(np.int8)
    scales = {
        "number": [0.25, 0.5],
        "one": [np.array([0.25], np.float32), np.array([0.5], np.float32)],
        "head": list(np.exp(drawn(rng, 2, HKV))),
        "token": list(np.exp(drawn(rng, 2, 25, HKV))),
    }[scale]
    slot = 1 if order == "NHD" else 2
    paged = [np.expand_dims(x, slot) for x in pools]
    of_pages = [np.expand_dims(x, slot) if scale == "token" else x for x in scales]
    expected = attn.run(plan, q, tuple(paged), k_scale=of_pages[0], v_scale=of_pages[1])
    got = attn.run(plan, q, tuple(pools), k_scale=scales[0], v_scale=scales[1])
    np.testing.assert_array_equal(got, expected)
    both = np.ascontiguousarray(pools.transpose(1, 0, 2, 3))  # [slots, 2, Hkv, D]
    np.testing.assert_array_equal(attn.run(plan, q, both, k_scale=scales[0], v_scale=scales[1]), expected)


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("how", ["layout", "slots"])
def test_append_to_slots(rng, order, how):
    pools, new = np.zeros((2, 25, HKV, D), np.float32), drawn(rng, 2, ROWS, HKV, D)
    slots = np.array([14, 16, 19, 22, 24])
    where = of_slots(order) if how == "layout" else slots
    raddle.append_kv(where, tuple(pools), *new.reshape(2, ROWS, -1))
    expected = np.zeros_like(pools)
    expected[:, slots] = new
    np.testing.assert_array_equal(pools, expected)


def test_append_quantises_into_slots(rng):
    pools, new = np.zeros((2, 25, HKV, D), np.int8), drawn(rng, 2, ROWS, HKV, D)
    scales, slots = np.zeros((2, 25, HKV), np.float32), np.array([3, 9, -1, 24, 0])
    raddle.append_kv(slots, tuple(pools), *new, k_scale=scales[0], v_scale=scales[1])
    paged, of_pages = np.zeros((2, 25, 1, HKV, D), np.int8), np.zeros((2, 25, 1, HKV), np.float32)
    raddle.append_kv(slots, tuple(paged), *new, k_scale=of_pages[0], v_scale=of_pages[1])
    np.testing.assert_array_equal(pools, paged[:, :, 0])
    np.testing.assert_array_equal(scales, of_pages[:, :, 0])
    assert scales[:, 24].all() and not scales[:, 2].any()


def test_pools_of_slots_have_pages_of_one(rng):
    attn = attention()
    plan = attn.plan(raddle.PagedKV([0, 1], None, [[2, 0]], [20], page_size=16))
    pool = drawn(rng, 48, HKV, D)
    with refuses(ValueError, "kv: k is [48, 2, 32] float32; expected [*, 16, 2, 32] float32"):
        attn.run(plan, drawn(rng, 1, HQ, D), (pool, pool))
    with refuses(ValueError, "k_scale is [3] float32; expected a number, [2] float32"):
        attn, pool = attention(kv_dtype="int8"), np.zeros((3, 16, HKV, D), np.int8)
        plan = attn.plan(raddle.PagedKV([0, 1], None, [[2, 0]], [20], page_size=16))
        attn.run(plan, drawn(rng, 1, HQ, D), (pool, pool), k_scale=np.ones(3, np.float32))


def test_lse_by_heads(rng):
    """A transposed view of [Hq, rows], which several libraries keep."""
    attn = attention()
    plan = attn.plan(raddle.RaggedKV([0, 2, ROWS], [0, 7, 20]))
    q, k, v = drawn(rng, ROWS, HQ, D), drawn(rng, 20, HKV, D), drawn(rng, 20, HKV, D)
    out, lse = attn.run(plan, q, (k, v), return_state=True)
    by_heads = np.full((HQ, ROWS + 3), np.nan, np.float32)
    attn.run(plan, q, (k, v), lse=by_heads[:, :ROWS].T)
    np.testing.assert_array_equal(by_heads[:, :ROWS], lse.T)
    assert np.isnan(by_heads[:, ROWS:]).all()
    merged = np.zeros_like(out), np.zeros((HQ, ROWS), np.float32)
    raddle.merge_state(out, by_heads[:, :ROWS].T, out, lse, out=(merged[0], merged[1].T))
    expected = raddle.merge_state(out, lse, out, lse)
    np.testing.assert_array_equal(merged[0], expected[0])
    np.testing.assert_array_equal(merged[1].T, expected[1])
    several = np.stack([out, out, out]), np.stack([lse.T] * 3).transpose(0, 2, 1)
    expected = raddle.merge_states(several[0], np.stack([lse] * 3))
    np.testing.assert_array_equal(raddle.merge_states(*several)[1], expected[1])
    with refuses(ValueError, "lse has stride 0 in a dimension of 4; expected rows that do not overlap"):
        attn.run(plan, q, (k, v), lse=np.lib.stride_tricks.as_strided(by_heads, (ROWS, HQ), (4, 0)))


@pytest.mark.parametrize("state", [False, True])
def test_lse_to_base_2(rng, state):
    """Written by the same kernel: one rounding of its product with log2(e)."""
    attn = raddle.Attention(raddle.AttentionSpec(HQ, HKV, D, dtype="float32", variant=raddle.Sinks([0.5] * HQ)))
    plan = attn.plan(raddle.RaggedKV([0, 2, ROWS], [0, 0, 20]))  # the first request has no keys
    q, k, v = drawn(rng, ROWS, HQ, D), drawn(rng, 20, HKV, D), drawn(rng, 20, HKV, D)
    how = {"return_state": True} if state else {"return_lse": True}
    out, lse = attn.run(plan, q, (k, v), **how)
    same, base_2 = attn.run(plan, q, (k, v), lse_base_2=True, **how)
    np.testing.assert_array_equal(same, out)
    np.testing.assert_array_equal(base_2, lse * np.float32(np.log2(np.e)))
    assert np.isneginf(base_2[:2]).all() == state
