"""Accepting a path of a token tree: its rows become the next keys, and the text decodes on from there."""

from __future__ import annotations

import numpy as np
import pytest
import raddle
from draws import DTYPES, numpy_dtype
from engine import twin
from layout_draws import paged, paged_pools
from reference.exact import fetch


def random_tree(rng, nodes):
    return np.array([rng.integers(-1, n) if n else -1 for n in range(nodes)], np.int32)


def path_of(tree, node):
    path = []
    while node >= 0:
        path.append(int(node))
        node = tree[node]
    return path[::-1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_the_path_becomes_the_next_keys(rng, dtype, kv_layout):
    lengths = [(7, 40), (1, 1), (0, 9), (30, 30), (12, 80)]
    layout = paged(rng, lengths, kv_layout=kv_layout)
    pools = paged_pools(rng, layout, 3, 24, 8, numpy_dtype(dtype))[0]
    trees = [random_tree(rng, qo) for qo, _ in lengths]
    accepted = np.array([rng.integers(-1, qo) for qo, _ in lengths])
    before = [[fetch(pool, group.slot, kv_layout) for group in layout.groups()] for pool in pools]
    raw = [pool.copy() for pool in pools]
    kv_len = raddle.accept_tree(twin(layout), tuple(pools), np.concatenate(trees), accepted)
    assert kv_len.dtype == np.int32
    for i, (qo, kv) in enumerate(lengths):
        path = path_of(trees[i], accepted[i])
        assert kv_len[i] == kv - qo + len(path)
        slots = layout.groups()[i].slot
        for pool, old in zip(pools, before):
            expected = np.concatenate([old[i][: kv - qo], old[i][kv - qo :][path]])
            np.testing.assert_array_equal(fetch(pool, slots[: kv_len[i]], kv_layout), expected)
    # Every row of the pool that is not on a path's new place keeps its bits.
    moved = np.concatenate([g.slot[kv - qo : n] for g, (qo, kv), n in zip(layout.groups(), lengths, kv_len)])
    for pool, old in zip(pools, raw):
        now, was = (x.swapaxes(1, 2) if kv_layout == "HND" else x for x in (pool, old))
        size = now.shape[1]
        kept = np.ones(now.shape[:2], bool)
        kept[moved // size, moved % size] = False
        np.testing.assert_array_equal(now[kept].view(np.uint8), was[kept].view(np.uint8))


@pytest.mark.parametrize("token_tree", [False, True])
def test_verifying_a_tree_and_decoding_on_equals_the_text(rng, token_tree):
    """Drafts as a tree with keys turned at their depth; the accepted path decodes like the plain text."""
    dim, context = 16, 10
    tree = np.array([-1, 0, 0, 1, 2, 2, 4], np.int32)
    depth = np.array([len(path_of(tree, n)) - 1 for n in range(7)])
    path = path_of(tree, 6)
    k, v = (rng.standard_normal((context + 7, 2, dim)).astype(np.float32) for _ in range(2))
    rope = raddle.Rope(dim)
    pages = [[4, 2, 0, 1, 3, 5]]

    def pool_of(rows):
        pools = tuple(np.full((6, 3, 2, dim), np.nan, np.float32) for _ in range(2))
        table = raddle.PagedKV([0, len(rows)], None, pages, [len(rows)], 3)
        raddle.append_kv(table, pools, k[rows], v[rows], rope=rope)
        return pools

    drafted = pool_of(np.arange(context))
    table = [0, 7], None, pages, [context + 7], 3
    if token_tree:
        batch = raddle.TokenTree(*table, parents=tree)
        raddle.append_kv(batch.pages, drafted, k[context:], v[context:], rope=rope)
        kv_len = batch.accept(drafted, [6])
    else:
        batch = raddle.PagedKV(*table, qo_pos=(context + depth).astype(np.int32))
        raddle.append_kv(batch, drafted, k[context:], v[context:], rope=rope)
        kv_len = raddle.accept_tree(batch, drafted, tree, [6])
    assert kv_len.tolist() == [context + 4]

    text = pool_of(np.concatenate([np.arange(context), context + np.array(path)]))
    attn = raddle.Attention(raddle.AttentionSpec(2, 2, dim, dtype="float32"))
    plan = attn.plan(raddle.PagedKV([0, 1], None, pages, kv_len, 3))
    q = rng.standard_normal((1, 2, dim)).astype(np.float32)
    np.testing.assert_array_equal(attn.run(plan, q, drafted), attn.run(plan, q, text))


@pytest.mark.parametrize(
    ("parents", "accepted", "message"),
    [
        ([-1, 0, 2, -1, 0], [0, 0], r"parents\[2\] is 2 for node 2 of request 0; expected an earlier node"),
        ([-1, 0, 1, -2, 0], [0, 0], r"parents\[3\] is -2 for node 0 of request 1"),
        ([-1, 0, 1, -1, 0], [3, 0], r"accepted\[0\] is 3; expected a node of that request's 3"),
        ([-1, 0, 1, -1, 0], [0, -2], r"accepted\[1\] is -2"),
        ([-1, 0, 1, -1], [0, 0], "parents has 4 entries; expected 5"),
        ([-1, 0, 1, -1, 0], [0], "accepted has 1 entries; expected 2"),
    ],
)
def test_what_is_no_tree_is_named_and_nothing_moves(rng, parents, accepted, message):
    layout = raddle.PagedKV([0, 3, 5], [0, 1, 2], [1, 0], [4, 4], 4)
    pools = tuple(rng.standard_normal((2, 4, 1, 8)).astype(np.float32) for _ in range(2))
    before = [pool.copy() for pool in pools]
    with pytest.raises(ValueError, match=message):
        raddle.accept_tree(layout, pools, parents, accepted)
    for pool, old in zip(pools, before):
        np.testing.assert_array_equal(pool, old)
