"""Functions of Python give the bits of shipped variants, and a fused composition those of its list."""

from __future__ import annotations

import numpy as np
import pytest
import raddle
from draws import draw_lengths, numpy_dtype
from layout_draws import LAYOUTS
from raddle import flex
from small import refuses


def compute(variant, problem, fuse=False, workers=1):
    """(O, LSE) with one work item a tile: one worker, so that nothing is split."""
    q, pools, layout = problem
    heads = {"num_qo_heads": q.shape[1], "num_kv_heads": pools[0][0].shape[-2], "head_dim": q.shape[2]}
    spec = raddle.AttentionSpec(**heads, dtype=str(q.dtype), variant=variant, fuse=fuse)
    attention = raddle.Attention(spec)
    out = np.full(q.shape, np.nan, q.dtype)
    lse = np.full(q.shape[:2], np.nan, np.float32)
    attention.run(attention.plan(layout, num_workers=workers), q, pools, out=out, lse=lse)
    return out, lse


def draw_problem(rng, layout="paged", dtype="float32", group=2, dim=64):
    from engine import twin

    make, pools = LAYOUTS[layout]
    plan = make(rng, draw_lengths(rng))
    kind = numpy_dtype(dtype)
    q = rng.standard_normal((int(plan.qo_indptr[-1]), 2 * group, dim)).astype(kind)
    return q, pools(rng, plan, 2, dim, dim, kind), twin(plan)


def same_bits(a, b):
    for x, y in zip(a, b):
        np.testing.assert_array_equal(x.view(f"u{x.itemsize}"), y.view(f"u{y.itemsize}"))


SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
PAIRS = {
    "softcap": lambda: (flex.mods.softcap(30.0), raddle.SoftCap(30.0)),
    "alibi": lambda: (flex.mods.alibi(SLOPES), raddle.Alibi(SLOPES)),
    "window": lambda: (flex.masks.sliding_window(20), raddle.SlidingWindow(20)),
    "band": lambda: (flex.masks.sliding_window(13, 5), raddle.SlidingWindow(13, 5)),
    "causal": lambda: (flex.masks.causal(), raddle.Causal()),
}


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", PAIRS)
def test_traced_equals_shipped(rng, name, dtype):
    traced, shipped = PAIRS[name]()
    for layout in ("paged", "ragged"):
        problem = draw_problem(rng, layout, dtype)
        same_bits(compute([traced], problem), compute([shipped], problem))


COMPOSITIONS = {
    "gemma2": lambda: [raddle.SoftCap(50.0), raddle.SlidingWindow(30), raddle.Causal()],
    "gpt_oss": lambda: [raddle.Sinks([0.5, -1.0, 2.0, 0.0]), raddle.SlidingWindow(25), raddle.Causal()],
    "joined": lambda: [(raddle.Causal() & raddle.SlidingWindow(9)) | raddle.SlidingWindow(3, 3), raddle.SoftCap(9.0)],
    "rope": lambda: [raddle.Rope(64), raddle.SoftCap(20.0), raddle.SoftCap(5.0), raddle.Causal()],
    "mixed": lambda: [flex.mods.alibi(SLOPES), raddle.SoftCap(8.0), flex.masks.sliding_window(40), raddle.Causal()],
}


@pytest.mark.parametrize("workers", [1, 7])
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_fused_equals_list(rng, name, workers):
    variant = COMPOSITIONS[name]()
    for layout in ("paged", "ragged", "cascade"):
        problem = draw_problem(rng, layout)
        same_bits(compute(variant, problem, workers=workers), compute(variant, problem, fuse=True, workers=workers))


def test_a_thousand_shapes_compile_once(rng):
    from raddle import cache

    window, cap = int(rng.integers(5, 50)), float(rng.uniform(1, 9))

    def score(score, b, h, q_idx, kv_idx):
        return flex.ops.where(q_idx - kv_idx <= window, cap * flex.ops.tanh(score / cap), score)

    attention = raddle.Attention(raddle.AttentionSpec(2, 1, 8, dtype="float32", variant=[score]))
    before = cache.num_compiled()
    for _ in range(1000):
        qo, kv = (int(n) for n in rng.integers(1, 40, 2))
        plan = attention.plan(raddle.RaggedKV([0, qo], [0, kv]))
        q, k = (rng.standard_normal((n, heads, 8), dtype=np.float32) for n, heads in ((qo, 2), (kv, 1)))
        assert np.isfinite(attention.run(plan, q, (k, k))).all()
    for n in range(20):  # and so do other numbers, of another function object
        def score(score, b, h, q_idx, kv_idx, window=n, cap=cap + n):
            return flex.ops.where(q_idx - kv_idx <= window, cap * flex.ops.tanh(score / cap), score)

        raddle.Attention(raddle.AttentionSpec(2, 1, 8, dtype="float32", variant=[score]))
    assert cache.num_compiled() == before


def test_captured_tensors_change_between_calls(rng):
    """What a mask reads goes to plan, what a score reads to run; lengths may change; nothing compiles again."""
    from raddle import cache

    documents, bias = np.zeros(4, np.int32), np.zeros(4, np.float32)

    def same_document(b, h, q_idx, kv_idx):
        return documents[q_idx] == documents[kv_idx]

    def biased(score, b, h, q_idx, kv_idx):
        return score + bias[h]

    spec = raddle.AttentionSpec(4, 2, 16, dtype="float32", variant=[biased, same_document])
    attention = raddle.Attention(spec)
    before = cache.num_compiled()
    for n in (7, 64, 300):
        ids = np.sort(rng.integers(0, 5, n)).astype(np.int32)
        plan = attention.plan(raddle.RaggedKV([0, n], [0, n]), params={"same_document.documents": ids})
        q = rng.standard_normal((n, 4, 16), dtype=np.float32)
        k, v = (rng.standard_normal((n, 2, 16), dtype=np.float32) for _ in "kv")
        shift = rng.standard_normal(4).astype(np.float32)
        out, lse = attention.run(plan, q, (k, v), params={"biased.bias": shift}, return_lse=True)
        wide_k, wide_v = (np.repeat(x, 2, axis=1).astype(np.float64) for x in (k, v))
        s = np.einsum("qhd,khd->hqk", q, wide_k) / 4.0 + shift[:, None, None]
        s = np.where(ids[:, None] == ids[None], s, -np.inf)
        top = s.max(-1, keepdims=True)
        p = np.exp(s - top)
        np.testing.assert_allclose(out, np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), wide_v), atol=2e-5)
        np.testing.assert_allclose(lse, (top[..., 0] + np.log(p.sum(-1))).T, atol=2e-5)
        with refuses(ValueError, "same_document.documents", "plan member"):
            attention.run(plan, q, (k, v), params={"same_document.documents": ids})
        with refuses(ValueError, "same_document.documents", "is empty"):
            attention.plan(raddle.RaggedKV([0, n], [0, n]), params={"same_document.documents": ids[:0]})
        with refuses(ValueError, "biased.bias", "run member"):
            attention.plan(raddle.RaggedKV([0, n], [0, n]), params={"biased.bias": shift})
    assert cache.num_compiled() == before
