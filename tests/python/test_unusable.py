"""Tensors that the host cannot read, and what is no flag and no number: refused by the argument's name."""

import numpy as np
import pytest
import raddle
import torch
from raddle import flex, mla, parallel
from small import attention, paged, refuses

UNUSABLE = {
    "of no memory": torch.zeros(3, device="meta"),
    "sparse": torch.eye(3).to_sparse(),
    "conjugated": torch.ones(3, dtype=torch.complex64).conj(),
    "structured": np.zeros(3, [("a", "f4"), ("b", "i4")]),
}
ATTENTION, LAYOUT = attention(), paged()
POOL, Q = (np.ones((6, 16, 2, 16), np.float32), np.ones((6, 16, 2, 16), np.float32)), np.ones((3, 4, 16), np.float32)
ROWS, X = np.ones((3, 2, 16), np.float32), np.ones((1, 2, 9, 16), np.float32)
W = np.ones((8, 2, 4), np.float32)
CACHE = raddle.RadixCache(raddle.PagePool(4))


@pytest.mark.parametrize("x", UNUSABLE.values(), ids=UNUSABLE)
@pytest.mark.parametrize("name, call", [
    ("bias", lambda x: raddle.Sigmoid(x)),
    ("left", lambda x: raddle.SlidingWindow(x)),
    ("num_heads", lambda x: raddle.alibi_slopes(x)),
    ("interleaved", lambda x: raddle.Rope(16, interleaved=x)),
    ("num_workers", lambda x: ATTENTION.plan(LAYOUT, num_workers=x)),
    ("schedule", lambda x: ATTENTION.plan(LAYOUT, schedule=x)),
    ("num_workers", lambda x: raddle.workspace_bytes(ATTENTION.spec, raddle.Maxima(1, 1, 1), x)),
    ("rope", lambda x: raddle.append_kv(LAYOUT, POOL, ROWS, ROWS, rope=x)),
    ("levels", lambda x: raddle.Cascade([x])),
    ("name", lambda x: raddle.Variant(x, "struct X {};")),
    ("lock", lambda x: CACHE.match([1], lock=x)),
    ("num_items", lambda x: raddle.Timeline(ATTENTION.plan(LAYOUT), "cpu", x)),
    ("cap", lambda x: flex.mods.softcap(x)),
    ("offset", lambda x: flex.with_offset(flex.masks.causal(), x)),
    ("masks", lambda x: raddle.pack_masks([x])),
    ("cache", lambda x: mla.append(LAYOUT, mla.kv(x)[0], W, W)),
    ("kv_lora_rank", lambda x: mla.spec(4, kv_lora_rank=x)),
    ("kv_len", lambda x: parallel.spans(x, 2)),
    ("num_ranks", lambda x: parallel.spans([4], x)),
    ("w_uk", lambda x: mla.absorb_q(W, x)),
    ("w_uv", lambda x: mla.value_heads(np.ones((3, 2, 8), np.float32), x)),
])  # fmt: skip
def test_tensors_that_hold_nothing(name, call, x):
    with pytest.raises((ValueError, TypeError), match=rf"^{name}\b"):
        call(x)


@pytest.mark.parametrize("x", [torch.zeros(3), np.zeros(3), torch.zeros(2, device="meta")])
@pytest.mark.parametrize("name, call", [
    ("return_lse", lambda x: ATTENTION.run(ATTENTION.plan(LAYOUT), Q, POOL, return_lse=x)),
    ("return_state", lambda x: ATTENTION.run(ATTENTION.plan(LAYOUT), Q, POOL, return_state=x)),
    ("return_lse", lambda x: flex.flex_attention(X, X, X, return_lse=x)),
    ("enable_gqa", lambda x: flex.flex_attention(np.ones((1, 4, 9, 16), np.float32), X, X, enable_gqa=x)),
    ("allow_gaps", lambda x: raddle.Cascade([LAYOUT], allow_gaps=x)),
    ("fast", lambda x: flex.mods.softcap(30.0, fast=x)),
    ("bidirectional", lambda x: flex.mods.t5_buckets(np.ones((32, 1)), bidirectional=x)),
    ("per_head", lambda x: raddle.select_pages(LAYOUT, Q, np.ones((6, 2, 2, 16), np.float32), 2, per_head=x)),
    ("flatten", lambda x: flex.create_block_mask(flex.masks.causal(), None, None, 9, 9).as_tuple(flatten=x)),
])  # fmt: skip
def test_what_is_neither_true_nor_false(name, call, x):
    with refuses(TypeError, f"{name} is a", "expected True or False"):
        call(x)


@pytest.mark.parametrize("call, words", [
    (lambda: flex.mods.softcap(10**400), "cap is inf"),
    (lambda: flex.mods.softcap(-(10**400)), "cap is -inf"),
    (lambda: flex.mods.t5_buckets(-(10**400)), "bias has"),
    (lambda: mla.spec(4, nope=-(10**400)), "nope is -1"),
    (lambda: mla.spec(4, rope=0), "rope is 0"),
    (lambda: parallel.spans([4], 2**31), "num_ranks is 2147483648; expected at least 1, at most"),
    (lambda: parallel.spans([4], 2, 2**63), "page_size is"),
    (lambda: parallel.spans([2**40], 2), "kv_len is"),
    (lambda: mla.value_heads(np.ones((3, 8), np.float32), W), "out has 2 dimensions; expected 3"),
])  # fmt: skip
def test_numbers_that_no_float_or_size_is(call, words):
    with refuses(ValueError, words):
        call()


def test_results_beyond_memory():
    """As numpy has it; torch's own is a RuntimeError."""
    summary = np.ones((6, 2, 2, 16), np.float32)
    for q in (Q, torch.from_numpy(Q)):
        with pytest.raises(MemoryError):
            raddle.select_pages(LAYOUT, q, summary, 2**44)


def test_mixed_kinds_of_weights():
    with refuses(TypeError, "w_uk is a Tensor and w_uq a ndarray", "same kind"):
        mla.absorb_q(W, torch.ones(8, 2, 4))
    with refuses(TypeError, "w_uk is a tensor of torch.float64", "torch.float32"):
        mla.absorb_q(torch.ones(8, 2, 4), torch.ones(8, 2, 4, dtype=torch.float64))
    with refuses(TypeError, "w_uk has dtype complex64"):
        mla.absorb_q(W, W.astype(np.complex64))
