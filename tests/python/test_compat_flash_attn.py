"""raddle.compat.flash_attn_interface: FlashAttention-3's functions, against the fp64 reference."""

import json
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from checks import within
from raddle.compat import flash_attn_interface as flash_attn
from signatures import spelled

RECORD = json.loads((Path(__file__).parent / "flash_attn_signatures.json").read_text(encoding="utf-8"))["signatures"][""]
HQ, HKV, D = 4, 2, 32
TERMS = {
    "plain": ({}, []),
    "causal": (dict(causal=True), [reference.SlidingWindow(-1, 0)]),
    "window": (dict(window_size=(5, 2)), [reference.SlidingWindow(5, 2)]),
    "causal window": (dict(causal=True, window_size=(6, -1)), [reference.SlidingWindow(6, 0)]),
    "soft cap": (dict(softcap=3.0, softmax_scale=0.4), [reference.SoftCap(3.0)]),
}
EACH = pytest.mark.parametrize("terms", list(TERMS))


def randn(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))


def check(rows, kv, layout, terms, out, lse):
    given, variant = TERMS[terms]
    pools = tuple(x.numpy() for x in kv)
    exact = reference.attention(reference.Problem(rows.numpy(), [pools], layout, variant, given.get("softmax_scale")))
    within(exact, out.reshape(exact.out.shape).numpy(), lse.numpy())


def by_rows(lse):
    """[B, H, S] as [rows, H]."""
    return lse.transpose(1, 2).flatten(0, 1)


@pytest.mark.parametrize("name", list(RECORD))
def test_signature(name):
    assert spelled(getattr(flash_attn, name)) == RECORD[name]


@EACH
@pytest.mark.parametrize("lengths", [(9, 23), (12, 5)], ids=["more keys", "more rows"])
def test_even(terms, lengths, rng):
    rows, keys = lengths
    q, k, v = randn(rng, 3, rows, HQ, D), randn(rng, 3, keys, HKV, D), randn(rng, 3, keys, HKV, 16)
    out, lse = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **TERMS[terms][0])
    assert out.shape == (3, rows, HQ, 16) and lse.shape == (3, HQ, rows)
    table = np.arange(4) * rows, None, np.arange(3)[:, None], np.full(3, keys)
    check(q.flatten(0, 1), (k, v), reference.PagedKV(*table, keys), terms, out, by_rows(lse))
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, **TERMS[terms][0]), out)


@EACH
@pytest.mark.parametrize("used", [False, True])
def test_varlen(terms, used, rng):
    rows, keys = np.array([0, 4, 4, 9], np.int32), np.array([0, 10, 14, 30], np.int32)
    q, k, v = randn(rng, 9, HQ, D), randn(rng, 30, HKV, D), randn(rng, 30, HKV, D)
    lengths = np.array([7, 4, 16], np.int32) if used else np.diff(keys)
    seqused = dict(seqused_k=torch.from_numpy(lengths)) if used else {}
    offsets = torch.from_numpy(rows), torch.from_numpy(keys), 5, 16
    out, lse = flash_attn.flash_attn_varlen_func(q, k, v, *offsets, return_attn_probs=True, **seqused, **TERMS[terms][0])
    layout = reference.PagedKV(rows, keys, np.arange(30), lengths, 1)
    check(q, (k[:, None], v[:, None]), layout, terms, out, lse.transpose(0, 1))


@EACH
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("new", [0, 3])
def test_cache(terms, paged, new, rng):
    """Caches in rows or in pages, and new keys that are written into them; slots that have no key hold NaN."""
    before, rows = np.array([5, 0, 17], np.int32), 3
    after = before + new
    size, table = (4, rng.permutation(20)[:18].reshape(3, 6)) if paged else (24, rng.permutation(5)[:3, None])
    caches = [randn(rng, 20 if paged else 5, size, HKV, D) for _ in range(2)]
    for cache in caches:
        for request, pages in enumerate(table):
            flat = torch.arange(before[request], table.shape[1] * size)
            cache[torch.from_numpy(pages)[flat // size], flat % size] = float("nan")
    fresh = [randn(rng, 3, new, HKV, D) for _ in range(2)] if new else []
    kept = [cache.clone() for cache in caches]
    q = randn(rng, 3, rows, HQ, D)
    where = dict(page_table=torch.from_numpy(table)) if paged else dict(cache_batch_idx=torch.from_numpy(table[:, 0]))
    given = dict(cache_seqlens=torch.from_numpy(before), return_softmax_lse=True, **where, **TERMS[terms][0])
    out, lse = flash_attn.flash_attn_with_kvcache(q, *caches, *fresh, **given)
    for cache, old, rows_of in zip(caches, kept, fresh or [None, None]):
        for request, pages in enumerate(table if new else []):
            for n in range(new):
                place = before[request] + n
                old[int(pages[place // size]), place % size] = rows_of[request, n]
        assert torch.equal(cache.nan_to_num(9.0), old.nan_to_num(9.0))
    layout = reference.PagedKV(np.arange(4) * rows, None, table, after, size)
    check(q.flatten(0, 1), caches, layout, terms, out, by_rows(lse))


def test_cache_with_rows_of_any_number(rng):
    rows, before = np.array([0, 2, 3, 7], np.int32), np.array([5, 9, 2], np.int32)
    caches, q = [randn(rng, 3, 16, HKV, D) for _ in range(2)], randn(rng, 7, HQ, D)
    fresh = [randn(rng, 7, HKV, D) for _ in range(2)]
    offsets = dict(cu_seqlens_q=torch.from_numpy(rows), cu_seqlens_k_new=torch.from_numpy(rows), max_seqlen_q=4)
    how = dict(cache_seqlens=torch.from_numpy(before), causal=True, return_softmax_lse=True)
    out, lse = flash_attn.flash_attn_with_kvcache(q, *caches, *fresh, **offsets, **how)
    layout = reference.PagedKV(rows, None, np.arange(3)[:, None], before + np.diff(rows), 16)
    check(q, caches, layout, "causal", out, lse.transpose(0, 1))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_rotary(interleaved, causal, rng):
    """New keys turn at their places; rows at theirs where causal, else at cache_seqlens."""
    before, new = np.array([5, 0], np.int32), 3
    angle = np.arange(32)[:, None] * 100.0 ** (-np.arange(D // 4) / (D // 4))
    cos, sin = (torch.from_numpy(f(angle).astype(np.float32)) for f in (np.cos, np.sin))
    old = [randn(rng, 2, 16, HKV, D) for _ in range(2)]
    q, k, v = randn(rng, 2, new, HQ, D), randn(rng, 2, new, HKV, D), randn(rng, 2, new, HKV, D)
    caches = [cache.clone() for cache in old]
    rotary = dict(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved)
    out = flash_attn.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=torch.from_numpy(before), causal=causal, **rotary)
    rotation = reference.RopeTables(np.cos(angle), np.sin(angle), interleaved)
    for request, first in enumerate(before):
        places = first + np.arange(new)
        at = places if causal else np.full(new, first)
        rows = rotation.rotate(q[request].numpy().astype(np.float64), at, 0).astype(np.float32)
        keys = rotation.rotate(k[request].numpy().astype(np.float64), places, 0).astype(np.float32)
        np.testing.assert_allclose(caches[0][request, first : first + new].numpy(), keys, rtol=0, atol=1e-5)
        pools = old[0][request, : first + new].clone(), old[1][request, : first + new].clone()
        pools[0][first:], pools[1][first:] = torch.from_numpy(keys), v[request]
        layout = reference.RaggedKV(np.array([0, new]), np.array([0, first + new]))
        variant = [reference.Causal()] if causal else []
        exact = reference.attention(reference.Problem(rows, [tuple(x.numpy() for x in pools)], layout, variant))
        np.testing.assert_allclose(out[request].numpy(), exact.out, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tensors", [False, True])
def test_descales(tensors, rng):
    """One number of K and one of V, or tensors that hold nothing else."""
    q, k, v = randn(rng, 2, 5, HQ, D), randn(rng, 2, 9, HKV, D), randn(rng, 2, 9, HKV, D)
    made = (lambda x: torch.full((2, HKV), x)) if tensors else float
    scales = dict(k_descale=made(0.5), v_descale=made(4.0))
    expected = 4.0 * flash_attn.flash_attn_func(q, 0.5 * k, v, causal=True)
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, causal=True, **scales), expected)
    offsets = torch.arange(3, dtype=torch.int32) * 5, torch.arange(3, dtype=torch.int32) * 9, 5, 9
    flat = (x.flatten(0, 1) for x in (q, k, v))
    found = flash_attn.flash_attn_varlen_func(*flat, *offsets, causal=True, **scales)
    assert torch.equal(found.view_as(expected), expected)
    found = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=9, causal=True, **scales)
    assert torch.equal(found, expected)


@EACH
@pytest.mark.parametrize("new", [0, 3])
def test_queries_of_values(terms, new, rng):
    """qv: MLA over a cache of rotary keys and one of latents."""
    latent, rope, rows, before = 48, 16, 3, np.array([5, 0, 17], np.int32)
    table, given = rng.permutation(20)[:18].reshape(3, 6), TERMS[terms][0]
    caches = randn(rng, 20, 4, 1, rope), randn(rng, 20, 4, 1, latent)
    fresh = [randn(rng, 3, new, 1, n) for n in (rope, latent)] if new else []
    q, qv = randn(rng, 3, rows, HQ, rope), randn(rng, 3, rows, HQ, latent)
    where = dict(page_table=torch.from_numpy(table), cache_seqlens=torch.from_numpy(before))
    out, lse = flash_attn.flash_attn_with_kvcache(q, *caches, *fresh, qv=qv, return_softmax_lse=True, **where, **given)
    whole = torch.cat([qv, q], -1).flatten(0, 1).numpy()
    layout = reference.PagedKV(np.arange(4) * rows, None, table, before + new, 4)
    pools = [tuple(x.numpy() for x in caches)]
    problem = reference.Problem(whole, pools, layout, TERMS[terms][1], given.get("softmax_scale"), k_extends_v=True)
    exact = reference.attention(problem)
    within(exact, out.reshape(exact.out.shape).numpy(), by_rows(lse).numpy())


def test_queries_of_values_without_a_cache(rng):
    """The three functions alike."""
    q, qv, k, v = (randn(rng, 2, n, h, d) for n, h, d in ((3, HQ, 16), (3, HQ, 48), (9, HKV, 16), (9, HKV, 48)))
    out = flash_attn.flash_attn_func(q, k, v, causal=True, qv=qv)
    assert torch.equal(flash_attn.flash_attn_with_kvcache(q, k, v, qv=qv, causal=True), out)
    offsets = torch.arange(3, dtype=torch.int32) * 3, torch.arange(3, dtype=torch.int32) * 9, 3, 9
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    assert torch.equal(flash_attn.flash_attn_varlen_func(*rows, *offsets, causal=True, qv=qv.flatten(0, 1)), out.flatten(0, 1))
    with pytest.raises(ValueError, match=r"qv has shape \[6, 4, 40\] in rows; expected \[6, 4, 48\]"):
        flash_attn.flash_attn_func(q, k, v, qv=qv[..., :40])
    with pytest.raises(NotImplementedError, match="v_descale with qv is given"):
        flash_attn.flash_attn_func(q, k, v, qv=qv, v_descale=2.0)


class TestRefusals:
    @pytest.mark.parametrize("name", ["k_descale", "v_descale"])
    def test_descales(self, name, rng):
        q, cache, new = randn(rng, 1, 1, HQ, D), torch.zeros(1, 8, HKV, D), randn(rng, 1, 1, HKV, D)
        for value, error, words in (
            (torch.arange(HKV * 1.0)[None], NotImplementedError, f"{name} has several numbers"),
            (float("nan"), ValueError, f"{name} is nan; expected a finite number"),
        ):
            with pytest.raises(error, match=words):
                flash_attn.flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=2, **{name: value})
        assert (cache == 0).all()

    @pytest.mark.parametrize("name", ["q_descale"])
    def test_tensors(self, name, rng):
        q = randn(rng, 1, 2, HQ, D)
        with pytest.raises(NotImplementedError, match=f"{name} is given"):
            flash_attn.flash_attn_func(q, q, q, **{name: torch.ones(1)})

    @pytest.mark.parametrize("name", ["attention_chunk", "cache_leftpad", "rotary_seqlens"])
    def test_of_caches(self, name, rng):
        q, cache = randn(rng, 1, 2, HQ, D), randn(rng, 1, 8, HKV, D)
        with pytest.raises(NotImplementedError, match=f"{name} is given"):
            flash_attn.flash_attn_with_kvcache(q, cache, cache, **{name: 1 if name == "attention_chunk" else torch.ones(1)})

    def test_before_anything_is_written(self, rng):
        q, cache, new = randn(rng, 1, 1, HQ, 64), torch.zeros(1, 8, HKV, D), randn(rng, 1, 1, HKV, D)
        with pytest.raises(ValueError, match="q has head dimension 64; expected 32"):
            flash_attn.flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=2)
        with pytest.raises(ValueError, match="kv_len"):
            flash_attn.flash_attn_with_kvcache(q[..., :D], cache, cache, new, new, cache_seqlens=8)
        assert (cache == 0).all()

    def test_gradients(self, rng):
        q = randn(rng, 1, 2, HQ, D).requires_grad_()
        with pytest.raises(ValueError, match="requires a gradient; Raddle is forward-only"):
            flash_attn.flash_attn_func(q, q, q)
