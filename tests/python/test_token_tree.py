"""Trees of drafted tokens: against the reference, as masks of bits say them, in graphs, and what is no tree."""

from __future__ import annotations

import numpy as np
import pytest
import raddle
from checks import within
from draws import DTYPES, WORKERS, draw
from engine import twin
from reference import Alibi, Causal, PackedMask, Problem, Rope, SlidingWindow, SoftCap, attention
from small import refuses, reserved

HEADS = dict(dim=32, group=2, num_kv_heads=2)
LENGTHS = [(17, 400), (1, 90), (0, 40), (5, 5), (64, 300), (3, 4)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_against_the_reference(engine, rng, dtype, workers, kv_layout):
    problem = draw(rng, "token_tree", "plain", dtype, lengths=LENGTHS, kv_layout=kv_layout, **HEADS)
    engine.check(problem, num_workers=workers)


@pytest.mark.parametrize(
    "parts",
    [
        [Causal()],
        [SlidingWindow(9)],
        [SlidingWindow(3, 0), Causal()],
        [SoftCap(20.0), SlidingWindow(150), Causal()],
        [Alibi(np.float32([0.5, 0.25, 0.1, 0.01]))],
        [Rope(32, 10000.0), Causal()],
    ],
    ids=str,
)
def test_masks_and_positions_go_by_depth(engine, rng, parts):
    engine.check(draw(rng, "token_tree", parts, lengths=LENGTHS, **HEADS), num_workers=3)


def test_scales_of_tokens_lie_where_the_nodes_do(engine, rng):
    for kv_layout in ("NHD", "HND"):
        problem = draw(
            rng, "token_tree", "causal", "bfloat16", kv_dtype="float8_e4m3fn", scales=("token", "token"),
            lengths=LENGTHS, kv_layout=kv_layout, **HEADS,
        )  # fmt: skip
        engine.check(problem)


def test_masks_are_the_same_tree(rng):
    layout = draw(rng, "token_tree", "plain", lengths=LENGTHS, **HEADS).layout
    arguments = {k: v for k, v in vars(layout).items() if k not in ("parents", "qo_pos")}
    by_masks = raddle.TokenTree(**arguments, masks=layout.masks())
    packed = raddle.TokenTree(**arguments, masks=raddle.pack_masks(layout.masks()))
    for tree in (twin(layout), by_masks, packed):
        np.testing.assert_array_equal(tree.parents, layout.parents)
        assert tree.num_levels == 2 and tree.num_requests == len(LENGTHS)


def test_masks_that_are_no_trees(engine, rng):
    """Any bits: the reference is a mask over all keys, on the page table alone."""
    lengths = [(9, 80), (4, 4), (0, 3)]
    problem = draw(rng, "paged", "plain", lengths=lengths, page_size=16, **HEADS)
    masks = [rng.random((qo, qo)) < 0.6 for qo, _ in lengths]
    whole = [np.hstack([np.ones((qo, kv - qo), bool), mask]) for mask, (qo, kv) in zip(masks, lengths)]
    bits = PackedMask(*raddle.pack_masks(whole))
    names = "qo_indptr", "page_indptr", "page_indices", "kv_len", "page_size"
    table = {name: getattr(problem.layout, name) for name in names}
    tree = raddle.TokenTree(**table, masks=masks)
    attn = engine.attention(problem)
    found = attn.run(attn.plan(tree), problem.q, problem.kv[0], return_lse=True)
    within(attention(Problem(problem.q, problem.kv, problem.layout, [bits])), *found)
    assert tree.parents is None
    with refuses(ValueError, "masks are no trees"):
        tree.accept(problem.kv[0], [0, 0, -1])


def test_only_tiles_of_the_tree_are_masked(rng):
    """The text before the tree is full: a mask of bits over it would make every tile partial."""
    qo, context = 64, 8192
    pages = np.arange((context + qo) // 16, dtype=np.int32)[None]
    parents = [(n - 1) // 2 for n in range(qo)]
    attn = raddle.Attention(raddle.AttentionSpec(4, 1, 64, variant=[raddle.Causal()]))
    tree = attn.plan(raddle.TokenTree([0, qo], None, pages, [context + qo], parents=parents))
    for line in ("level 0: 1 group of requests, with 8192 keys", "level 1: 1 group of requests, with 64 keys"):
        assert line in tree.explain()


def test_positions_of_ones_own(engine, rng):
    problem = draw(rng, "token_tree", [SlidingWindow(30)], lengths=[(6, 90)], page_size=16, **HEADS)
    layout = problem.layout
    layout.qo_pos = layout.qo_pos + rng.integers(-20, 20, 6)
    arguments = {k: v for k, v in vars(layout).items()}
    attn = engine.attention(problem)
    found = attn.run(attn.plan(raddle.TokenTree(**arguments)), problem.q, problem.kv[0], return_lse=True)
    within(attention(problem), *found)


def test_batches_in_one_reservation(engine, rng):
    """Trees of any shape, up to max_nodes, one after another; as graphs need it, on GPUs."""
    lengths = [(12, 100), (3, 60)]
    first = draw(rng, "token_tree", "causal", "bfloat16", lengths=lengths, page_size=16, **HEADS)
    attn = engine.attention(first)
    owner = attn if engine.device == "cpu" else attn.attention
    maxima = dict(max_requests=4, max_qo_tokens=24, max_kv_tokens=400, max_levels=2, num_workers=5)
    reservation = reserved(owner, **maxima)
    for lengths in ([(12, 100), (3, 60)], [(1, 40), (2, 2), (20, 90)], [(0, 7), (24, 24)], [(16, 300)]):
        problem = draw(rng, "token_tree", "causal", "bfloat16", lengths=lengths, page_size=16, **HEADS)
        arguments = {k: v for k, v in vars(problem.layout).items() if k != "qo_pos"}
        reservation.update(raddle.TokenTree(**arguments, max_nodes=24))
        within(attention(problem), attn.run(reservation, problem.q, problem.kv[0]))
    if engine.device != "cpu":
        with refuses(ValueError, "max_nodes", "expected 24"):
            reservation.update(raddle.TokenTree(**arguments, max_nodes=32))


TABLE = dict(qo_indptr=[0, 3, 4], page_indices=[[0, 1], [2, 3]], kv_len=[20, 17])


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"parents": [-1, 2, 1, -1]}, ValueError, ["parents[1] is 2 for node 1", "form a cycle, 2 -> 1 -> 2"]),
        ({"parents": [-1, 0, 2, -1]}, ValueError, ["parents[2] is 2", "form a cycle, 2 -> 2"]),
        ({"parents": [-1, 5, 0, -1]}, ValueError, ["parents[1] is 5", "expected an earlier node, or -1"]),
        ({"parents": [-1, 0, 0, -2]}, ValueError, ["parents[3] is -2 for node 0 of request 1"]),
        ({"parents": [-1, 0, 0]}, ValueError, ["parents has 3 entries; expected 4"]),
        ({"parents": [-1.0, 0.0, 0.0, -1.0]}, TypeError, ["parents"]),
        ({}, ValueError, ["parents is missing, and so is masks"]),
        ({"parents": [-1, 0, 0, -1], "masks": [np.eye(3), np.eye(1)]}, ValueError, ["parents and masks are both"]),
        ({"masks": [np.eye(3)]}, ValueError, ["masks[1] has 2 entries; expected 3"]),
        ({"masks": [np.eye(4), np.eye(1)]}, ValueError, ["masks[0] has shape [4, 4]; expected [3, 3]"]),
        ({"masks": (np.zeros(5, np.uint8), [0, 4, 5])}, ValueError, ["masks give request 0 4 bytes; expected 2"]),
        ({"masks": (np.zeros(1, np.uint8), [0, 2, 3])}, ValueError, ["masks[0] has 1 bytes; expected at least 3"]),
        ({"parents": [-1, 0, 0, -1], "kv_len": [2, 17]}, ValueError, ["kv_len[0] is 2; expected at least 3"]),
        ({"parents": [-1, 0, 0, -1], "max_nodes": 2}, ValueError, ["request 0 3 nodes", "max_nodes = 2"]),
        ({"parents": [-1, 0, 0, -1], "max_nodes": -1}, ValueError, ["max_nodes is -1"]),
        ({"parents": [-1, 0, 0, -1], "qo_pos": [1, 2]}, ValueError, ["qo_pos has 2 entries; expected 4"]),
        ({"parents": [-1, 0, 0, -1], "page_indices": [[0], [2]]}, ValueError, ["page_indices has 1 columns"]),
    ],
)  # fmt: skip
def test_what_is_no_tree_is_named(changes, error, words):
    with refuses(error, *words):
        raddle.TokenTree(**{**TABLE, **changes})
    assert raddle.TokenTree(**TABLE, parents=[-1, 0, 0, -1]).num_rows == 4


def test_pools_are_checked_as_pages(rng):
    attn = raddle.Attention(raddle.AttentionSpec(1, 1, 8, dtype="float32"))
    plan = attn.plan(raddle.TokenTree(**TABLE, parents=[-1, 0, 0, -1]))
    q = np.zeros((4, 1, 8), np.float32)
    for shape, words in (((4, 8, 1, 8), ["kv: k", "16"]), ((3, 16, 1, 8), ["kv: k has 3 pages", "page 3"])):
        pool = np.zeros(shape, np.float32)
        with refuses(ValueError, *words):
            attn.run(plan, q, (pool, pool))
    with refuses(ValueError, "layout has 2 levels"):
        raddle.append_kv(raddle.TokenTree(**TABLE, parents=[-1, 0, 0, -1]), (pool, pool), q, q)
