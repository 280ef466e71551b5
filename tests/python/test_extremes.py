"""Numbers near the ends of their types: refused by name, or right; nothing wraps, and nothing takes for ever."""

import dataclasses

import numpy as np
import pytest
import raddle
from forked import outcome
from raddle import flex
from small import SPEC, attention, refuses


def kept(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


INT_MAX, LONG_MAX = 2**31 - 1, 2**63 - 1


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("levels", [1, 8])
@pytest.mark.parametrize("sizes", [(INT_MAX, INT_MAX, LONG_MAX), (1, INT_MAX, 2**62), (INT_MAX, 1, LONG_MAX), (4, 4, 2**50)])
def test_workspaces_are_counted_or_refused(sizes, levels, batch_invariant):
    spec = raddle.AttentionSpec(128, 1, 64, batch_invariant=batch_invariant)
    maxima = raddle.Maxima(*sizes, max_levels=1 if batch_invariant else levels, max_runs=INT_MAX)
    for workers in (None, 1, 65536):
        try:
            assert raddle.workspace_bytes(spec, maxima, workers) > 0
        except ValueError as error:
            assert "max_kv_tokens" in str(error) and "2**60" in str(error)


def test_more_levels_than_there_are():
    with refuses(ValueError, "max_levels is 9", "at most 8"):
        raddle.workspace_bytes(raddle.AttentionSpec(**SPEC), raddle.Maxima(1, 1, 1, max_levels=9))


def test_workers():
    layout = raddle.RaggedKV([0, 3], [0, 3])
    for workers in (-(2**31), -1, INT_MAX, 2**31, 2**63, 2**64):
        for call in (
            lambda n: raddle.workspace_bytes(raddle.AttentionSpec(**SPEC), raddle.Maxima(1, 1, 1), n),
            lambda n: attention().plan(layout, num_workers=n),
            lambda n: attention().reserve(raddle.Maxima(1, 1, 1), num_workers=n),
        ):
            with pytest.raises((ValueError, TypeError), match="num_workers"):
                call(workers)


@pytest.mark.parametrize("call, words", [
    (lambda: raddle.alibi_slopes(2**30), "num_heads is 1073741824; expected at least 1, at most"),
    (lambda: raddle.alibi_slopes(INT_MAX), "num_heads is"),
    (lambda: raddle.Rope(2**30), "rotary_dim is 1073741824; expected an even number above 0, at most 576"),
    (lambda: raddle.PagePool(4).fork(0, INT_MAX), "count is"),
    (lambda: raddle.PagePool(2**27 + 1), "num_pages is 134217729; expected at least 1, at most 134217728"),
    (lambda: flex.create_block_mask(kept, None, None, 64, 64, BLOCK_SIZE=2**64), "BLOCK_SIZE is"),
    (lambda: flex.create_block_mask(kept, None, None, 2**64, 64), "Q_LEN is"),
])  # fmt: skip
def test_too_large(call, words):
    def message():
        try:
            return repr(call())
        except ValueError as error:
            return str(error)

    assert words in outcome(message, seconds=30)


def test_a_tree_of_300000_nodes():
    """In time that grows with the tree, not with its square: that would be minutes."""
    nodes = 300_000
    pool = np.arange(nodes * 8, dtype=np.float32).reshape(nodes // 100, 100, 1, 8)
    layout = raddle.PagedKV([0, nodes], None, [list(range(nodes // 100))], [nodes], page_size=100)
    parents = np.maximum(np.arange(nodes) - 2, -1).astype(np.int32)  # even nodes are a path

    def rows():
        kept = raddle.accept_tree(layout, (pool, pool.copy()), parents, [nodes - 2])
        return kept.tolist(), pool.reshape(nodes, 8)[: nodes // 2, 0].tolist()

    kept, moved = outcome(rows, seconds=60)
    assert kept == [nodes // 2] and moved == [16.0 * n for n in range(nodes // 2)]


def test_blocks_larger_than_the_mask():
    mask = flex.create_block_mask(kept, None, None, 64, 48, BLOCK_SIZE=(INT_MAX, INT_MAX))
    assert outcome(lambda: (repr(mask), np.asarray(mask.kv_num_blocks).tolist()), seconds=30)[1] == [[[1]]]


def test_a_spec_of_another_head_dim():
    """dataclasses.replace hands over the head_dim_vo that None became."""
    spec = raddle.AttentionSpec(**SPEC)
    with refuses(ValueError, "head_dim is 32 and head_dim_vo 16", "expected head_dim_vo, too"):
        dataclasses.replace(spec, head_dim=32)
    assert dataclasses.replace(spec, head_dim=32, head_dim_vo=None).head_dim_vo == 32
    assert dataclasses.replace(spec, head_dim=32, head_dim_vo=8).head_dim_vo == 8
    assert dataclasses.replace(spec, num_kv_heads=4) == raddle.AttentionSpec(**{**SPEC, "num_kv_heads": 4})
    apart = raddle.AttentionSpec(**SPEC, head_dim_vo=8)
    assert dataclasses.replace(apart, head_dim=32).head_dim_vo == 8


def test_v_longer_than_k():
    q, k, v = (np.ones((n, 2, 16), np.float32) for n in (3, 5, 6))
    with refuses(ValueError, "v has 6 keys; expected 5"):
        raddle.attention(q, k, v)


def test_functions_named_as_macros_are():
    def RADDLE_FN(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    def RADDLE_VARIANT(score, b, h, q_idx, kv_idx):
        return score * 2.0

    q, k, v = np.random.default_rng(0).standard_normal((3, 5, 4, 16), np.float32)
    out = raddle.attention(q, k, v, variant=[RADDLE_VARIANT, RADDLE_FN], scale=0.125)
    np.testing.assert_allclose(out, raddle.attention(q, k, v, causal=True, scale=0.25), rtol=1e-5)
    with refuses(ValueError, "name is 'RADDLE_FN'"):
        raddle.Variant("RADDLE_FN", "struct RADDLE_FN {};")
