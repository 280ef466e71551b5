"""Levels that the planner's costs choose for requests that share pages: never dearer, and the same attention."""

from __future__ import annotations

import re

import numpy as np
import pytest
import raddle
from checks import within
from draws import VARIANTS, Place
from engine import twin
from layout_draws import indptr, paged_pools
from reference import Causal, PagedKV, Problem, SlidingWindow, SoftCap, attention
from small import refuses

HEADS = dict(num_qo_heads=4, num_kv_heads=2, head_dim=32, dtype="float32")


def nested(rng, requests, page_size, most_pages, qo_len=(0, 1, 1, 1, 5), depth=3):
    """Requests at the leaves of a random tree of texts; each has keys of its own, a partial last page, or none."""
    pages = iter(rng.permutation(40000).astype(np.int32))
    texts = [[]]
    for _ in range(depth):
        for _ in range(3):
            more = rng.integers(most_pages // 2, most_pages)
            texts.append(texts[rng.integers(len(texts))] + [next(pages) for _ in range(more)])
    lists, qo_lens, kv_lens = [], [], []
    for _ in range(requests):
        text = texts[rng.integers(len(texts))]
        qo = int(rng.choice(qo_len))
        own = int(rng.integers(qo, qo + 3 * page_size))
        lists.append(text + [next(pages) for _ in range(-(-own // page_size))])
        qo_lens.append(qo), kv_lens.append(len(text) * page_size + own)
    counts = indptr([len(each) for each in lists])
    used, indices = np.unique(np.concatenate([np.int32(each) for each in lists]), return_inverse=True)
    indices = rng.permutation(len(used)).astype(np.int32)[indices]
    return PagedKV(indptr(qo_lens), counts, indices, np.int32(kv_lens), page_size)


def chosen_for(attn, layout, **options):
    arrays = layout.qo_indptr, layout.page_indptr, layout.page_indices, layout.kv_len
    return raddle.Cascade.from_page_tables(attn, *arrays, layout.page_size, qo_pos=layout.qo_pos, **options)


def batch(prefix, own, requests, page_size=16):
    """Requests that share a prefix, as arguments of PagedKV."""
    shared, alone = prefix // page_size, -(-own // page_size)
    table = [[*range(shared), *range(shared + i * alone, shared + (i + 1) * alone)] for i in range(requests)]
    return np.arange(requests + 1), None, np.int32(table).reshape(requests, -1), [prefix + own] * requests, page_size


PARTS = [[], [Causal()], [SlidingWindow(150), Causal()], [SoftCap(20.0), SlidingWindow(2000)], "rope", "gpt_oss"]


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_the_same_attention_never_dearer(engine, rng, parts):
    cascades = 0
    for n in range(6):
        size = 16 if n == 0 else int(rng.choice([1, 7, 16]))
        layout = nested(rng, 24, size, 90 if n == 0 else 40, depth=1 if n == 0 else int(rng.integers(1, 5)))
        place = Place(rng, HEADS["num_qo_heads"], HEADS["head_dim"], None, layout)
        variant = VARIANTS[parts](place) if isinstance(parts, str) else parts
        kind = np.float32 if engine.device == "cpu" else np.float16
        q = rng.standard_normal((int(layout.qo_indptr[-1]), 4, 32)).astype(kind)
        kv = paged_pools(rng, layout, 2, 32, 32, q.dtype)
        problem = Problem(q, kv, layout, variant)
        attn = engine.attention(problem)
        inner = getattr(attn, "attention", attn)
        options = {"num_workers": int(rng.choice([1, 2, 7]))}
        found = chosen_for(inner, layout, **options)
        plan = attn.plan(found, **options)
        assert plan.estimated_us <= attn.plan(twin(layout), **options).estimated_us, found.explain()
        within(attention(problem), *engine.run_plan(attn, plan, problem))
        cascades += found.num_levels > 1
        assert str(found.num_levels) in found.explain() or "single" in found.explain()
    # Windows may see none of it, and on a GPU a state costs more than keys of 32 elements.
    assert cascades > 0 or parts == PARTS[2] or isinstance(parts, str) or engine.device != "cpu"


def test_three_levels_as_by_hand(rng):
    """A system prompt for all, examples for quarters, a conversation a pair; the plan is that of hand-made levels."""
    page, system, shots, talk = 16, 2048, 1024, 768
    page_of = iter(rng.permutation(1000).astype(np.int32))

    def take(tokens):
        return [next(page_of) for _ in range(tokens // page)]

    text = take(system)
    quarters = [take(shots) for _ in range(4)]
    pairs = [take(talk) for _ in range(8)]
    own = [take(page) for _ in range(16)]
    lists = [text + quarters[i // 4] + pairs[i // 2] + own[i] for i in range(16)]
    layout = PagedKV(np.arange(17), indptr([len(x) for x in lists]), np.int32(sum(lists, [])), [3856] * 16, page)
    attn = raddle.Attention(raddle.AttentionSpec(32, 8, 128, dtype="float32", variant=[raddle.Causal()]))
    found = chosen_for(attn, layout, num_workers=3)
    assert found.num_levels == 4, found.explain()
    assert "level 2 reads 6144 keys of 8 groups once for 16 requests" in found.explain()

    def level(groups, rows, begin):
        return raddle.PagedKV(
            np.arange(0, 17, rows), indptr([len(x) for x in groups]), sum(groups, []), [len(x) * page for x in groups],
            page, kv_begin=[begin] * len(groups), qo_rows=np.arange(16),
        )  # fmt: skip

    by_hand = [level([text], 16, 0), level(quarters, 4, 2048), level(pairs, 2, 3072)]
    last = raddle.PagedKV(np.arange(17), np.arange(17), sum(own, []), [page] * 16, page, kv_begin=[3840] * 16)
    q = rng.standard_normal((16, 32, 128)).astype(np.float32)
    pools = tuple(rng.standard_normal((1000, page, 8, 128)).astype(np.float32) for _ in range(2))
    plans = [attn.plan(each, num_workers=3) for each in (found, raddle.Cascade([*by_hand, last]))]
    assert plans[0].explain() == plans[1].explain()
    bits = [attn.run(plan, q, pools) for plan in plans]
    np.testing.assert_array_equal(bits[0], bits[1])


def attention_of(**changes):
    return raddle.Attention(raddle.AttentionSpec(**{**HEADS, "variant": [raddle.Causal()], **changes}))


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (batch(0, 200, 8), "no requests share"),
        (batch(1024, 16, 1), "no requests share"),
        (batch(16, 500, 3), "worth"),
        (([0], None, np.zeros((0, 4), np.int32), np.zeros(0, np.int32)), "no requests share"),
        (([0, 0, 0], None, np.int32([[1, 2], [1, 2]]), [32, 32]), "no requests share"),
        (([0, 1, 2], None, np.int32([[-1, 2], [-1, 2]]), [32, 32]), "no requests share"),  # -1 is no page
        (([0, 9, 18], None, np.int32([[1], [1]]), [16, 9]), "no requests share"),  # the shared page is not full
    ],
)  # fmt: skip
def test_nothing_worth_sharing(arguments, reason):
    found = raddle.Cascade.from_page_tables(attention_of(), *arguments)
    assert type(found) is raddle.PagedKV and found.num_levels == 1
    assert "single level" in found.explain() and reason in found.explain()


def test_identical_requests_share_all_full_pages_before_their_rows(rng):
    attn = attention_of()
    table = np.tile(rng.permutation(128).astype(np.int32), (16, 1))
    found = raddle.Cascade.from_page_tables(attn, np.arange(17), None, table, [2048] * 16, 16)
    assert type(found) is raddle.Cascade and found.num_levels == 2
    assert "reads 2032 keys of 1 group once for 16 requests" in found.explain()


def test_a_window_that_sees_none_of_the_prefix_shares_nothing():
    attn = attention_of(variant=[raddle.SlidingWindow(100), raddle.Causal()])
    found = raddle.Cascade.from_page_tables(attn, *batch(4096, 128, 16))
    assert type(found) is raddle.PagedKV
    found = raddle.Cascade.from_page_tables(attn, *batch(4096, 128, 16), params={"window.left": 4000})
    assert type(found) is raddle.Cascade


def test_specs_that_refuse_shared_keys():
    found = raddle.Cascade.from_page_tables(attention_of(batch_invariant=True), *batch(4096, 128, 16))
    assert type(found) is raddle.PagedKV and "batch_invariant" in found.explain()
    offsets = [raddle.Rope(32, offset=np.arange(16)), raddle.Causal()]
    found = raddle.Cascade.from_page_tables(attention_of(variant=offsets), *batch(4096, 128, 16))
    assert type(found) is raddle.PagedKV and "rope.offset differs by request" in found.explain()


def test_more_nested_texts_than_levels(engine, rng):
    """Request i shares everything with all before it, and a text of its own depth with all behind it."""
    page, texts = 16, 12
    lists = [list(range(40 * (min(i, texts - 1) + 1))) + [1000 + i] for i in range(2 * texts)]
    kv_len = np.int32([len(x) * page for x in lists])
    rows = indptr([1] * len(lists))
    layout = PagedKV(rows, indptr([len(x) for x in lists]), np.int32(sum(lists, [])), kv_len, page)
    q = rng.standard_normal((len(lists), 4, 32)).astype(np.float32)
    problem = Problem(q, paged_pools(rng, layout, 2, 32, 32, np.float32), layout, [Causal()])
    attn = raddle.Attention(raddle.AttentionSpec(**HEADS, variant=[raddle.Causal()]))
    found = chosen_for(attn, layout)
    assert 2 < found.num_levels <= 8
    out, lse = attn.run(attn.plan(found), q, problem.kv[0], return_lse=True)
    within(attention(problem), out, lse)


def test_arguments_are_those_of_a_page_table():
    attn = attention_of()
    rows, _, table, kv_len, page = batch(64, 16, 2)
    with refuses(ValueError, "kv_len"):
        raddle.Cascade.from_page_tables(attn, rows, None, table, [80], page)
    with refuses(ValueError, "page_indices", "unequal length"):
        raddle.Cascade.from_page_tables(attn, rows, None, [[1, 2], [1]], kv_len, page)
    with refuses(ValueError, "schedule is 'best'"):
        raddle.Cascade.from_page_tables(attn, rows, None, table, kv_len, page, schedule="best")
    with refuses(ValueError, "num_workers is -1"):
        raddle.Cascade.from_page_tables(attn, rows, None, table, kv_len, page, num_workers=-1)
    with refuses(TypeError, "attention is"):
        raddle.Cascade.from_page_tables(None, rows, None, table, kv_len, page)
