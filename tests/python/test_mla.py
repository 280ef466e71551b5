"""Multi-head latent attention: absorbed weights give what unabsorbed ones give, through the engine, too."""

import ml_dtypes
import numpy as np
import pytest
import raddle
import torch
from checks import compare, within
from raddle import mla
from reference import UNIT, Causal, PagedKV, Problem, attention

HEADS, Q_LORA, HIDDEN = 16, 96, 80
RANK, NOPE, ROPE, V_DIM = 512, 128, 64, 128
LAMBDA = 6.0  # as in reference.budgets: roundings are taken as independent


def weights(rng, dtype=np.float64):
    """W_UQ, W_UK, W_UV, W_O, of a size that keeps every product near 1."""
    shapes = (Q_LORA, HEADS, NOPE), (RANK, HEADS, NOPE), (RANK, HEADS, V_DIM), (HEADS, V_DIM, HIDDEN)
    depths = Q_LORA, NOPE**0.5 * RANK**0.5, RANK, HEADS * V_DIM
    return [(rng.standard_normal(s) / n**0.5).astype(dtype) for s, n in zip(shapes, depths)]


def test_absorbed_weights_are_the_products(rng):
    w_uq, w_uk, w_uv, w_o = weights(rng)
    c_q, c_kv, out = rng.standard_normal((3, Q_LORA)), rng.standard_normal((7, RANK)), rng.standard_normal((3, HEADS, RANK))
    q, k = np.einsum("rl,lhn->rhn", c_q, w_uq), np.einsum("kl,lhn->khn", c_kv, w_uk)
    logits = np.einsum("rhn,khn->rhk", q, k)
    absorbed = mla.absorb_q(w_uq, w_uk)
    assert absorbed.shape == (Q_LORA, HEADS, RANK) and absorbed.flags.c_contiguous
    latent = np.einsum("rl,lhc->rhc", c_q, absorbed)
    np.testing.assert_allclose(np.einsum("rhc,kc->rhk", latent, c_kv), logits, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(mla.latent_q(q, q[..., :ROPE], w_uk)[..., :RANK], latent, rtol=1e-10, atol=1e-12)

    layer = np.einsum("rhv,hvd->rd", np.einsum("rhc,chv->rhv", out, w_uv), w_o)
    absorbed = mla.absorb_out(w_uv, w_o)
    assert absorbed.shape == (HEADS, RANK, HIDDEN)
    np.testing.assert_allclose(np.einsum("rhc,hcd->rd", out, absorbed), layer, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(np.einsum("rhv,hvd->rd", mla.value_heads(out, w_uv), w_o), layer, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_products_are_rounded_once(rng, dtype):
    """numpy's and torch's alike."""
    _, w_uk, w_uv, _ = weights(rng)
    kind = getattr(ml_dtypes, dtype, None) or getattr(np, dtype)
    q, pe, w_uk, w_uv = (x.astype(kind) for x in (rng.standard_normal((5, HEADS, NOPE)), rng.standard_normal((5, HEADS, ROPE)), w_uk, w_uv))
    as_torch = [torch.from_numpy(x.astype(np.float32)).to(getattr(torch, dtype)) for x in (q, pe, w_uk, w_uv)]
    wide = [x.astype(np.float64) for x in (q, pe, w_uk, w_uv)]
    latent, exact = mla.latent_q(q, pe, w_uk), mla.latent_q(*wide[:3])
    size = np.concatenate([np.einsum("rhn,chn->rhc", abs(wide[0]), abs(wide[2])), 0 * wide[1]], -1)
    budget = UNIT[dtype] * abs(exact) + (NOPE + 4) * UNIT["float32"] * size
    assert latent.dtype == kind and latent.flags.c_contiguous
    assert (abs(latent.astype(np.float64) - exact) <= budget).all()
    other = mla.latent_q(*as_torch[:3])
    assert other.dtype == as_torch[0].dtype and (abs(other.double().numpy() - exact) <= budget).all()
    np.testing.assert_array_equal(other[..., RANK:].float().numpy(), pe.astype(np.float32))
    heads = mla.value_heads(other[..., :RANK], as_torch[3])
    assert heads.shape == (5, HEADS, V_DIM) and heads.dtype == other.dtype


def unabsorbed(c_kv, q_nope, q_pe, k_pe, w_uk, w_uv, first):
    """Attention of equation 18 in fp64: K and V of every head, from position `first` on. All but w are lists."""
    k = np.concatenate([np.einsum("kl,lhn->khn", c_kv, w_uk), np.repeat(k_pe[:, None], HEADS, 1)], -1)
    v = np.einsum("kl,lhv->khv", c_kv, w_uv)
    s = np.einsum("rhn,khn->hrk", np.concatenate([q_nope, q_pe], -1), k) * (NOPE + ROPE) ** -0.5
    s = np.where(np.arange(len(k)) <= first + np.arange(len(q_pe))[:, None], s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("hrk,khv->rhv", p / p.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_through_the_engine(rng, dtype):
    """Decode and chunks of a prefill over pages: what the absorbed form adds to the engine's own budget is one rounding
    of the latent part of each query, and one of what W_UV makes."""
    kind = getattr(ml_dtypes, dtype, None) or getattr(np, dtype)
    qo_len, kv_len = [1, 1, 40, 9], [700, 5, 40, 130]
    rows = sum(qo_len)
    _, w_uk, w_uv, _ = (w.astype(kind) for w in weights(rng))
    q_nope, q_pe = (rng.standard_normal((rows, HEADS, n)).astype(kind) for n in (NOPE, ROPE))
    qo_indptr = np.cumsum([0, *qo_len], dtype=np.int32)
    pages = [-(-n // 16) for n in kv_len]
    page_indptr = np.cumsum([0, *pages], dtype=np.int32)
    order = rng.permutation(page_indptr[-1]).astype(np.int32)
    cache = np.full((len(order), 16, 1, RANK + ROPE), np.nan, kind)
    filling = raddle.PagedKV(np.cumsum([0, *kv_len], dtype=np.int32), page_indptr, order, kv_len, page_size=16)
    c_kv, k_pe = (rng.standard_normal((sum(kv_len), n)).astype(kind) for n in (RANK, ROPE))
    mla.append(filling, cache, c_kv, k_pe)

    layout = PagedKV(qo_indptr, page_indptr, order, np.array(kv_len, np.int32), page_size=16)
    spec = mla.spec(HEADS, dtype=dtype, variant=raddle.Causal())
    assert spec.scale == pytest.approx((NOPE + ROPE) ** -0.5) and (spec.head_dim, spec.head_dim_vo) == (576, 512)
    q = mla.latent_q(q_nope, q_pe, w_uk)
    exact = attention(Problem(q, [mla.kv(cache)], layout, [Causal()], scale=spec.scale))
    attn = raddle.Attention(spec)
    plan = attn.plan(raddle.PagedKV(qo_indptr, page_indptr, order, kv_len, page_size=16), num_workers=3)
    out = attn.run(plan, q, mla.kv(cache))
    within(exact, out)

    wide = [x.astype(np.float64) for x in (c_kv, k_pe, q_nope, q_pe, w_uk, w_uv)]
    c_kv, k_pe, q_nope, q_pe, w_uk, w_uv = wide
    values = mla.value_heads(out, w_uv.astype(kind)).astype(np.float64)
    u = UNIT[dtype] + (NOPE + 4) * UNIT["float32"]  # of an element of the latent, relative to its summands' sizes
    start = 0
    for first, end, kv in zip(qo_indptr[:-1], qo_indptr[1:], kv_len):
        keys, here = slice(start, start + kv), slice(first, end)
        start += kv
        expected = unabsorbed(c_kv[keys], q_nope[here], q_pe[here], k_pe[keys], w_uk, w_uv, kv - (end - first))
        size = np.einsum("rhn,chn->rhc", abs(q_nope[here]), abs(w_uk)) if dtype == "float32" else abs(exact_latent(q_nope[here], w_uk))
        delta = LAMBDA * spec.scale * u * np.sqrt(np.einsum("rhc,kc->rhk", size**2, c_kv[keys] ** 2)).max(-1)
        # |p' - p| ≤ p (e^2δ - 1), so that O moves by no more than that times Σ p |v - o| ≤ √(Σ p v² - o²).
        o = exact.out[here]
        moved = np.expm1(2 * delta)[..., None] * spread(o, q[here].astype(np.float64), cache_rows(c_kv[keys], k_pe[keys]), spec.scale, kv)
        budget = np.einsum("rhc,chv->rhv", exact.out_budget[here] + moved, abs(w_uv))
        budget += UNIT[dtype] * abs(expected) + (RANK + 4) * UNIT["float32"] * np.einsum("rhc,chv->rhv", abs(o), abs(w_uv))
        compare("values", values[here], expected, budget)


def exact_latent(q_nope, w_uk):
    return np.einsum("rhn,chn->rhc", q_nope, w_uk)


def cache_rows(c_kv, k_pe):
    return np.concatenate([c_kv, k_pe], -1)


def spread(o, q, rows, scale, kv_len):
    """√(Σ p v² - o²) [rows, heads, RANK]."""
    s = np.einsum("rhc,kc->rhk", q, rows) * scale
    seen = np.arange(kv_len) <= kv_len - len(q) + np.arange(len(q))[:, None]
    p = np.exp(np.where(seen[:, None], s, -np.inf) - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return np.sqrt(np.maximum(np.einsum("rhk,kc->rhc", p, rows[:, :RANK] ** 2) - o**2, 0.0))


def test_the_cache_is_written_once_and_turned_on_the_way(rng):
    """k_pe goes behind the latent, turned at its position, and the latent stays as it is."""
    cache = np.zeros((4, 16, 1, RANK + ROPE), np.float32)
    layout = raddle.PagedKV([0, 20], [0, 2], [2, 1], [20], page_size=16)
    c_kv, k_pe = rng.standard_normal((20, RANK), np.float32), rng.standard_normal((20, ROPE), np.float32)
    mla.append(layout, cache, c_kv, k_pe, rope=raddle.Rope(ROPE, interleaved=True))
    rows = np.concatenate([cache[2], cache[1, :4]])[:, 0]
    np.testing.assert_array_equal(rows[:, :RANK], c_kv)
    pairs = k_pe.astype(np.float64).reshape(20, -1, 2) @ [1, 1j]
    turned = pairs * np.exp(1j * np.arange(20)[:, None] * 10000.0 ** (-2.0 * np.arange(ROPE // 2) / ROPE))
    expected = np.stack([turned.real, turned.imag], -1).reshape(20, ROPE)
    np.testing.assert_allclose(rows[:, RANK:], expected, rtol=0, atol=2e-5)
    assert not cache[[0, 3]].any() and not cache[1, 4:].any()


def test_two_caches(rng):
    """Written in one call, and read where they lie, with what one cache gives."""
    layout = raddle.PagedKV([0, 20], [0, 2], [2, 1], [20], page_size=16)
    c_kv, k_pe = rng.standard_normal((20, RANK), np.float32), rng.standard_normal((20, ROPE), np.float32)
    whole, *parts = (np.zeros((4, 16, 1, n), np.float32) for n in (RANK + ROPE, RANK, ROPE))
    for cache in (whole, tuple(parts)):
        mla.append(layout, cache, c_kv, k_pe, rope=raddle.Rope(ROPE, interleaved=True))
    np.testing.assert_array_equal(np.concatenate(parts, -1), whole)
    q = rng.standard_normal((20, HEADS, RANK + ROPE), np.float32)
    specs = [mla.spec(HEADS, dtype="float32", variant=raddle.Causal(), k_extends_v=apart) for apart in (False, True)]
    one, two = (raddle.Attention(spec) for spec in specs)
    k, v = mla.kv(tuple(parts))
    assert k is parts[1] and v is parts[0]
    expected = one.run(one.plan(layout), q, mla.kv(whole))
    np.testing.assert_array_equal(two.run(two.plan(layout), q, (k, v)), expected)  # long queries: the same products


WHOLE, LATENTS, KEYS = (np.zeros((4, 16, 1, n), np.float32) for n in (RANK + ROPE, RANK, ROPE))


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (ValueError, (np.zeros((), np.float32),), "cache has 0 dimensions; expected a pool of K, of 2 to 4"),
        (ValueError, (WHOLE, 0), "kv_lora_rank is 0; expected 1 to 576, the columns of cache"),
        (ValueError, (WHOLE, -64), "kv_lora_rank is -64; expected 1 to 576"),
        (ValueError, (WHOLE, 577), "kv_lora_rank is 577; expected 1 to 576"),
        (ValueError, (KEYS,), "kv_lora_rank is 512; expected 1 to 64, the columns of cache"),
        (ValueError, ((LATENTS, KEYS), 64), r"kv_lora_rank is 64; expected 512, the columns of cache\[0\]"),
        (ValueError, ((LATENTS, np.zeros((), np.float32)),), r"cache\[1\] has 0 dimensions; expected a pool of K"),
        (TypeError, ((LATENTS, KEYS, KEYS),), r"cache is a tuple of 3; expected a tensor, or two: \(c_kv, k_pe\)"),
        (TypeError, ((LATENTS, "keys"),), r"cache\[1\] is"),
    ],
)
def test_caches_that_cannot_be(error, arguments, message):
    with pytest.raises(error, match=message):
        mla.kv(*arguments)


def test_appending_to_caches_that_cannot_be(rng):
    layout = raddle.PagedKV([0, 3], [0, 1], [2], [3], page_size=16)
    rows = [np.ones((3, n), np.float32) for n in (RANK, ROPE)]
    parts = [np.zeros_like(x) for x in (LATENTS, KEYS)]
    for cache, message in (
        ((parts[0], parts[1][0]), r"cache\[1\] has 3 dimensions; expected 4"),
        ((parts[1], parts[0]), "pool.k has 1 heads of 512; expected 1 heads of 64"),
    ):
        with pytest.raises(ValueError, match=message):
            mla.append(layout, cache, *rows)
    assert not any(x.any() for x in parts)


def test_wrong_shapes_are_named(rng):
    w_uq, w_uk, w_uv, w_o = weights(rng)
    q = np.zeros((3, HEADS, NOPE))
    with pytest.raises(ValueError, match=r"w_uk has shape \[512, 16, 100\]; expected .*kv_lora_rank, heads, nope\], here \[512, 16, 128\]"):
        mla.absorb_q(w_uq, w_uk[..., :100])
    with pytest.raises(ValueError, match="w_o has shape"):
        mla.absorb_out(w_uv, w_o[:7])
    with pytest.raises(ValueError, match="q_pe has shape"):
        mla.latent_q(q, np.zeros((2, HEADS, ROPE)), w_uk)
    with pytest.raises(ValueError, match="w_uv has shape"):
        mla.value_heads(np.zeros((3, HEADS, RANK)), w_uv[:100])
