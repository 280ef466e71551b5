"""Quest: summaries of pages, the choice of pages by them, attention over the chosen ones."""

from __future__ import annotations

import numpy as np
import pytest
import raddle
from draws import DTYPES, numpy_dtype
from engine import twin
from layout_draws import paged, paged_pools
from reference.exact import fetch

DIM, KV_HEADS, GROUP = 40, 2, 3
LENGTHS = [(1, 100), (1, 1), (0, 30), (2, 64), (1, 333)]


def drawn(rng, dtype="float32", kv_layout="NHD", lengths=LENGTHS, page_size=None, dim=DIM, **more):
    layout = paged(rng, lengths, page_size=page_size, kv_layout=kv_layout)
    pools = paged_pools(rng, layout, KV_HEADS, dim, 24, numpy_dtype(dtype), **more)[0]
    rows = sum(qo for qo, _ in lengths)
    q = rng.standard_normal((rows, KV_HEADS * GROUP, dim)).astype(numpy_dtype(dtype))
    return layout, pools, q


def by_hand(layout, k, kv_layout="NHD"):
    """Page -> (minimum, maximum) [Hkv, D]."""
    summary = {}
    for i, group in enumerate(layout.groups()):
        keys = fetch(k, group.slot, kv_layout)
        for nth in range(-(-len(keys) // layout.page_size)):
            part = keys[nth * layout.page_size : (nth + 1) * layout.page_size]
            summary[int(layout.pages(i)[nth])] = part.min(0), part.max(0)
    return summary


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_summaries_are_the_extremes_of_a_pages_keys(rng, dtype, kv_layout):
    layout, (k, v), _ = drawn(rng, dtype, kv_layout)
    summary = raddle.summarize_pages(twin(layout), (k, v))
    assert summary.shape == (len(k), 2, KV_HEADS, DIM) and summary.dtype == k.dtype
    for page, extremes in by_hand(layout, k, kv_layout).items():
        for got, want in zip(summary[page], extremes):
            np.testing.assert_array_equal(got.astype(np.float64), want)


def test_only_pages_of_new_rows(rng):
    lengths = [(1, 100), (5, 64), (0, 30), (33, 64)]
    layout, (k, v), _ = drawn(rng, lengths=lengths, page_size=16)
    summary = np.full((len(k), 2, KV_HEADS, DIM), np.nan, np.float32)
    assert raddle.summarize_pages(twin(layout), (k, v), summary, new_only=True) is summary
    new = {
        int(layout.pages(i)[nth])
        for i, (qo, kv) in enumerate(lengths)
        for nth in range((kv - qo) // 16, -(-kv // 16))
        if qo
    }
    assert len(new) == 5
    for page, extremes in by_hand(layout, k).items():
        if page in new:
            np.testing.assert_array_equal(summary[page], np.stack(extremes))
    assert np.isnan(summary[[page for page in range(len(k)) if page not in new]]).all()


def test_interleaved_pools_of_torch(rng):
    torch = pytest.importorskip("torch")
    both = torch.randn(4, 2, 8, KV_HEADS, 16, dtype=torch.bfloat16)
    layout = raddle.PagedKV([0, 1], [0, 3], [2, 0, 3], [20], 8)
    summary = raddle.summarize_pages(layout, both)
    assert summary.dtype == torch.bfloat16
    assert torch.equal(summary[2, 0], both[2, 0].amin(0)) and torch.equal(summary[3, 1], both[3, 0, :4].amax(0))
    selected = raddle.select_pages(layout, torch.randn(1, 4, 16).bfloat16(), summary, 2)
    assert selected.pages.dtype == torch.int32 and selected.pages.shape == (1, 2)


def scores(layout, q, summary, i, per_head):
    """fp64 scores [Hkv or 1, pages] of request i."""
    pages = layout.pages(i)[: -(-int(layout.kv_len[i]) // layout.page_size)]
    rows = q[layout.qo_indptr[i] : layout.qo_indptr[i + 1]].astype(np.float64)
    rows = rows.reshape(len(rows), KV_HEADS, GROUP, 1, q.shape[-1])
    low, high = (summary[pages, w].astype(np.float64).transpose(1, 0, 2)[:, None] for w in (0, 1))  # [Hkv, 1, n, D]
    bound = np.maximum(rows * low, rows * high).sum(-1).max((0, 2), initial=-np.inf)  # [Hkv, n]
    return bound if per_head else bound.max(0, keepdims=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("keep_last", [False, True])
@pytest.mark.parametrize("dim", [DIM, 96])  # whole tiles of bf16, too
def test_the_pages_of_the_largest_scores(rng, dtype, per_head, keep_last, dim):
    layout, (k, v), q = drawn(rng, dtype, page_size=int(rng.choice([1, 3, 16])), dim=dim)
    summary = raddle.summarize_pages(twin(layout), (k, v))
    num_pages = int(rng.integers(1, 12))
    selected = raddle.select_pages(
        twin(layout), q, summary, num_pages, per_head=per_head, keep_last=keep_last
    )
    for i, (_, kv) in enumerate(LENGTHS):
        listed = list(layout.pages(i)[: -(-kv // layout.page_size)])
        for h, expected in enumerate(scores(layout, q, summary, i, per_head)):
            pages, pos, count = ((x[i, h] if per_head else x[i]) for x in selected)
            kept = min(num_pages, len(listed))
            assert (pages[kept:] == -1).all() and (pos[kept:] == 0).all() and (count[kept:] == 0).all()
            nth = pos[:kept] // layout.page_size
            assert (np.diff(nth) > 0).all() and [listed[n] for n in nth] == pages[:kept].tolist()
            assert (count[:kept] == np.minimum(layout.page_size, kv - pos[:kept])).all()
            if keep_last:
                assert nth[-1] == len(listed) - 1
                expected = np.where(np.arange(len(listed)) == len(listed) - 1, np.inf, expected)
            # No page left out may score more than one taken, but for fp32's rounding.
            left = np.setdiff1d(np.arange(len(listed)), nth)
            if len(left) and np.isfinite(expected).any():
                assert expected[nth].min() >= expected[left].max() - 1e-4


def test_of_equal_scores_earlier_pages_win():
    layout = raddle.PagedKV([0, 1], [0, 6], [5, 4, 3, 2, 1, 0], [12], 2)
    summary = np.zeros((6, 2, 1, 8), np.float32)
    summary[1] = 1.0  # the fifth page of the list
    q = np.ones((1, 1, 8), np.float32)
    assert raddle.select_pages(layout, q, summary, 3, keep_last=False).pages.tolist() == [[5, 4, 1]]
    assert raddle.select_pages(layout, q, summary, 3).pages.tolist() == [[5, 1, 0]]
    assert raddle.select_pages(layout, q, summary, 1).pages.tolist() == [[0]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinite_keys_are_bounded_as_defined(dtype):
    layout = raddle.PagedKV([0, 1], [0, 3], [0, 1, 2], [6], 2)
    summary = np.zeros((3, 2, 1, 32), numpy_dtype(dtype))
    summary[0, 0], summary[0, 1] = -2.0, np.inf  # q < 0 meets the minimum: 64
    summary[1, 0], summary[1, 1] = -1.0, 1.0  # 32
    summary[2, 0] = -np.inf
    q = -np.ones((1, 4, 32), summary.dtype)
    assert raddle.select_pages(layout, q, summary, 1, keep_last=False).pages.tolist() == [[2]]
    assert raddle.select_pages(layout, q, summary, 2, keep_last=False).pages.tolist() == [[0, 2]]


def attention(q, kv_heads=KV_HEADS, variant=()):
    return raddle.Attention(raddle.AttentionSpec(q.shape[1], kv_heads, DIM, 24, str(q.dtype), list(variant)))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("variant", [[raddle.Causal()], [raddle.Alibi([0.1 * h for h in range(6)]), raddle.Causal()]])
def test_all_pages_selected_is_full_attention(rng, kv_layout, variant):
    layout, (k, v), q = drawn(rng, kv_layout=kv_layout)
    table = twin(layout)
    attn = attention(q, variant=variant)
    summary = raddle.summarize_pages(table, (k, v))
    selected = raddle.select_pages(table, q, summary, 400).layout(table)
    for got, want in zip(*(attn.run(attn.plan(x), q, (k, v), return_lse=True) for x in (selected, table))):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_attention_over_some_pages_is_attention_over_their_keys(rng):
    layout, (k, v), q = drawn(rng, lengths=[(1, 150), (1, 333), (1, 20)], page_size=16)
    table = twin(layout)
    alibi = [raddle.Alibi([0.1 * h for h in range(6)]), raddle.Causal()]
    selected = raddle.select_pages(table, q, raddle.summarize_pages(table, (k, v)), 4)
    attn = attention(q, variant=alibi)
    out = attn.run(attn.plan(selected.layout(table)), q, (k, v))
    for i, (_, kv) in enumerate([(1, 150), (1, 333), (1, 20)]):
        pos = np.concatenate([np.arange(p, p + n) for p, n in zip(selected.pos[i], selected.count[i])])
        slot = layout.groups()[i].slot[pos]
        keys, values = (fetch(x, slot, "NHD") for x in (k, v))
        for head in range(6):
            s = keys[:, head // GROUP] @ q[i, head].astype(np.float64) / np.sqrt(DIM) + 0.1 * head * (pos - (kv - 1))
            p = np.exp(s - s.max())
            np.testing.assert_allclose(out[i, head], p @ values[:, head // GROUP] / p.sum(), rtol=1e-4, atol=1e-5)


def test_a_selection_per_head_over_heads_as_requests(rng):
    """KV heads become requests of one head over the pages of an HND pool."""
    layout, (k, v), q = drawn(rng, kv_layout="HND", lengths=[(1, 150), (1, 333)], page_size=16)
    table = twin(layout)
    summary = raddle.summarize_pages(table, (k, v))
    chosen = raddle.select_pages(table, q, summary, 400, per_head=True)
    pages = np.where(chosen.pages < 0, -1, chosen.pages * KV_HEADS + np.arange(KV_HEADS)[:, None])
    lists = [x.reshape(2 * KV_HEADS, -1) for x in (pages, chosen.pos, chosen.count)]
    rows = np.arange(5)
    heads = raddle.PagedKV(rows, None, lists[0], np.repeat(layout.kv_len, KV_HEADS), 16, "HND")
    split = raddle.SelectedPages(*lists).layout(heads)
    views = tuple(x.reshape(-1, 1, 16, x.shape[-1]) for x in (k, v))
    per_head = raddle.Attention(raddle.AttentionSpec(GROUP, 1, DIM, 24, "float32"))
    out = per_head.run(per_head.plan(split), q.reshape(4, GROUP, DIM), views)
    whole = attention(q)
    np.testing.assert_allclose(out.reshape(2, 6, 24), whole.run(whole.plan(table), q, (k, v)), rtol=1e-5, atol=1e-6)


def test_bad_arguments_are_named(rng):
    layout, (k, v), q = drawn(rng, page_size=16)
    table = twin(layout)
    summary = raddle.summarize_pages(table, (k, v))
    with pytest.raises(ValueError, match="num_pages is 0; expected at least 1"):
        raddle.select_pages(table, q, summary, 0)
    with pytest.raises(TypeError, match="q is float16; expected float32"):
        raddle.select_pages(table, q.astype(np.float16), summary, 2)
    with pytest.raises(ValueError, match="q has 5 heads; expected a multiple of 2"):
        raddle.select_pages(table, q[:, :5], summary, 2)
    with pytest.raises(ValueError, match=r"summary is \[.*\] float32; expected \[\*, 2, \*, \*\]"):
        raddle.select_pages(table, q, summary[:, :1], 2)
    with pytest.raises(ValueError, match="page_indices has .*, which may be selected; expected 0 to 0"):
        raddle.select_pages(table, q, summary[:1], 2)
    with pytest.raises(ValueError, match=r"summary is .*; expected \[\*, 2, 2, 40\] float32"):
        raddle.summarize_pages(table, (k, v), summary[..., :32])
    with pytest.raises(ValueError, match="pool.k has a head_dim of 12; expected a multiple of 8"):
        raddle.summarize_pages(table, (k[..., :12], v))
    with pytest.raises(ValueError, match="page 0 with 5 keys as page 0 of request 1; expected 3"):
        raddle.summarize_pages(raddle.PagedKV([0, 1, 2], [0, 1, 2], [0, 0], [3, 5], 16), (k, v))
    per_head = raddle.select_pages(table, q, summary, 2, per_head=True)
    with pytest.raises(ValueError, match=r"pages has 3 dimensions"):
        per_head.layout(table)
    few = raddle.select_pages(table, q, summary, 1, keep_last=False)
    with pytest.raises(ValueError, match=r"pos has shape \[5, 2\]; expected \[5, 1\], a list a request"):
        few._replace(pos=np.zeros((5, 2), np.int32)).layout(table)
    for page in (-2, -(2**31)):
        with pytest.raises(ValueError, match=rf"pages\[0, 0\] is {page}; expected 0 to 2147483647, or -1 for none"):
            few._replace(pages=np.full_like(few.pages, page)).layout(table)


def test_rows_of_a_request_without_keys(rng):
    layout, pools, q = drawn(rng, lengths=[(2, 0), (1, 5)], page_size=16)
    table = twin(layout)
    chosen = raddle.select_pages(table, q, raddle.summarize_pages(table, pools), 2).layout(table)
    attn = raddle.Attention(raddle.AttentionSpec(q.shape[1], 2, q.shape[2], pools[1].shape[-1], str(q.dtype)))
    out, lse = attn.run(attn.plan(chosen), q, pools, return_lse=True)
    assert (out[:2] == 0).all() and (lse[:2] == -np.inf).all() and np.isfinite(lse[2]).all()


def test_rows_need_their_own_pages(rng):
    """Causal goes by index: with several rows, the pages that hold their keys must be there."""
    layout, (k, v), q = drawn(rng, lengths=[(20, 100)], page_size=16)
    table = twin(layout)
    summary = raddle.summarize_pages(table, (k, v))
    summary[layout.pages(0)[5]] = 0.0
    chosen = raddle.select_pages(table, q, summary, 6)
    assert 80 not in chosen.pos[0]
    with pytest.raises(ValueError, match="pages lacks page 5 of request 0, which holds keys of its 20 rows"):
        chosen.layout(table)
