"""raddle.compat.flashinfer: FlashInfer's names and signatures, against the fp64 reference."""

import inspect
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import raddle
import reference
import torch
from checks import within
from raddle.compat import flashinfer
from signatures import spelled

RECORD = json.loads((Path(__file__).parent / "flashinfer_signatures.json").read_text(encoding="utf-8"))
WORKSPACE = torch.empty(0, dtype=torch.uint8)
HQ, HKV, D = 4, 2, 32


class TestSignatures:
    @pytest.mark.parametrize("name", [name for name in RECORD["signatures"] if name])
    def test_class(self, name):
        kind = getattr(flashinfer, name)
        for method, expected in RECORD["signatures"][name].items():
            found = inspect.getattr_static(kind, method)
            assert spelled(found.fget if isinstance(found, property) else found) == expected, method

    @pytest.mark.parametrize("name", list(RECORD["signatures"][""]))
    def test_function(self, name):
        assert spelled(getattr(flashinfer, name)) == RECORD["signatures"][""][name]

    def test_aliases(self):
        for kind in (flashinfer.BatchDecodeWithPagedKVCacheWrapper, flashinfer.BatchPrefillWithRaggedKVCacheWrapper):
            assert kind.begin_forward is kind.plan and hasattr(kind, "run_return_lse")


class Batch:
    """Requests over pages, some of which no request has; slots that no key has hold NaN."""

    def __init__(self, rng, decode=False, dtype="float32", page_size=None, kv_layout="NHD"):
        self.page_size = int(rng.integers(1, 9)) if page_size is None else page_size
        self.kv_len = rng.integers(1, 40, 4)
        self.qo_len = np.ones(4, int) if decode else np.minimum(rng.integers(1, 12, 4), self.kv_len)
        pages = -(-self.kv_len // self.page_size)
        self.indptr, self.qo_indptr = (np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (pages, self.qo_len))
        num_pages = int(pages.sum()) + 3
        self.indices = rng.permutation(num_pages)[: pages.sum()].astype(np.int32)
        self.last_page_len = ((self.kv_len - 1) % self.page_size + 1).astype(np.int32)
        shape = (self.page_size, HKV, D) if kv_layout == "NHD" else (HKV, self.page_size, D)
        self.kv_layout, torch_dtype = kv_layout, getattr(torch, dtype)
        self.cache = torch.from_numpy(rng.standard_normal((num_pages, 2, *shape)).astype(np.float32)).to(torch_dtype)
        self.q = torch.from_numpy(rng.standard_normal((self.qo_indptr[-1], HQ, D)).astype(np.float32)).to(torch_dtype)
        for request, page in enumerate(self.indices[self.indptr[1:] - 1]):
            rest = self.cache[page].narrow(1 if kv_layout == "NHD" else 2, n := int(self.last_page_len[request]), self.page_size - n)
            rest.fill_(float("nan"))

    @property
    def table(self):
        return tuple(torch.from_numpy(x) for x in (self.indptr, self.indices, self.last_page_len))

    def layout(self, qo_pos=None):
        table = self.qo_indptr, self.indptr, self.indices, self.kv_len
        return reference.PagedKV(*table, self.page_size, self.kv_layout, qo_pos=qo_pos)

    def exact(self, variant=(), scale=None, qo_pos=None):
        kv = tuple(array(self.cache[:, n]) for n in (0, 1))
        return reference.attention(reference.Problem(array(self.q), [kv], self.layout(qo_pos), list(variant), scale))


def array(x):
    """numpy's, with bfloat16 of ml_dtypes."""
    import ml_dtypes

    return x.float().numpy().astype(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def check(exact, out, lse=None):
    """LSE is to base 2 outside of Raddle."""
    within(exact, array(out), None if lse is None else lse.numpy() * np.log(2.0))


TERMS = {
    "plain": ({}, []),
    "causal": (dict(causal=True), [reference.Causal()]),
    "window": (dict(causal=True, window_left=5), [reference.Causal(), reference.SlidingWindow(5)]),
    "soft cap": (dict(logits_soft_cap=3.0), [reference.SoftCap(3.0)]),
    "all": (
        dict(causal=True, window_left=9, logits_soft_cap=5.0),
        [reference.SoftCap(5.0), reference.Causal(), reference.SlidingWindow(9)],
    ),
}


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("terms", list(TERMS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_paged_prefill(terms, kv_layout, dtype, rng):
    given, variant = TERMS[terms]
    batch = Batch(rng, dtype=dtype, kv_layout=kv_layout)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, kv_layout)
    rows = torch.from_numpy(batch.qo_indptr)
    wrapper.plan(rows, *batch.table, HQ, HKV, D, batch.page_size, sm_scale=0.3, q_data_type=dtype, **given)
    exact = batch.exact(variant, scale=0.3)
    check(exact, *wrapper.run(batch.q, batch.cache, return_lse=True))
    check(exact, *wrapper.run_return_lse(batch.q, (batch.cache[:, 0], batch.cache[:, 1])))
    out, lse = torch.full_like(batch.q, torch.nan), torch.full(batch.q.shape[:2], torch.nan)
    assert wrapper.run(batch.q, batch.cache, out=out, lse=lse, return_lse=True)[0] is out
    check(exact, out, lse)


@pytest.mark.parametrize("terms", ["plain", "window", "soft cap"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_decode(terms, page_size, rng):
    given, variant = TERMS[terms]
    given = {name: value for name, value in given.items() if name != "causal"}
    batch = Batch(rng, decode=True, page_size=page_size)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    flashinfer.fast_decode_plan(wrapper, *batch.table, HQ, HKV, D, page_size, q_data_type=torch.float32, **given)
    exact = batch.exact(variant)
    check(exact, *wrapper.run(batch.q, batch.cache, return_lse=True))
    if page_size == 1:  # pools without a dimension for the page
        slots = batch.cache[:, 0, 0], batch.cache[:, 1, 0]
        check(exact, *wrapper.run(batch.q, slots, return_lse=True))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_ragged_prefill(kv_layout, rng):
    kv_len, qo_len = np.array([17, 3, 30]), np.array([5, 3, 1])
    rows, keys = (np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (qo_len, kv_len))
    q, k = (torch.from_numpy(rng.standard_normal((n, h, D)).astype(np.float32)) for n, h in ((9, HQ), (50, HKV)))
    v = torch.from_numpy(rng.standard_normal((50, HKV, 16)).astype(np.float32))
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, kv_layout)
    offsets = torch.from_numpy(rows), torch.from_numpy(keys)
    wrapper.plan(*offsets, HQ, HKV, D, 16, causal=True, q_data_type=torch.float32)
    kv = (k, v) if kv_layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))
    layout = reference.RaggedKV(rows, keys)
    exact = reference.attention(reference.Problem(array(q), [(array(k), array(v))], layout, [reference.Causal()]))
    check(exact, *wrapper.run(q, *kv, return_lse=True))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [-1, 6])
def test_custom_masks(packed, window, rng):
    batch = Batch(rng)
    masks = [rng.random((q, kv)) < 0.5 for q, kv in zip(batch.qo_len, batch.kv_len)]
    flat = torch.from_numpy(np.concatenate([mask.ravel() for mask in masks]))
    sizes = np.concatenate([[0], np.cumsum(batch.qo_len * batch.kv_len)])
    bits, where = flashinfer.segment_packbits(flat, torch.from_numpy(sizes), bitorder="little")
    given = dict(packed_custom_mask=bits) if packed else dict(custom_mask=flat)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    rows = torch.from_numpy(batch.qo_indptr)
    # causal has no effect beside a mask
    wrapper.plan(
        rows, *batch.table, HQ, HKV, D, batch.page_size, causal=True, window_left=window, q_data_type="float32", **given
    )
    variant = [reference.PackedMask(bits.numpy(), where.numpy()), reference.SlidingWindow(window)]
    check(batch.exact(variant), *wrapper.run(batch.q, batch.cache, return_lse=True))


@pytest.mark.parametrize("decode", [False, True])
def test_alibi_counts_rows_from_0(decode, rng):
    batch = Batch(rng, decode)
    kind = "Decode" if decode else "Prefill"
    wrapper = getattr(flashinfer, f"Batch{kind}WithPagedKVCacheWrapper")(WORKSPACE)
    rows = () if decode else (torch.from_numpy(batch.qo_indptr),)
    wrapper.plan(*rows, *batch.table, HQ, HKV, D, batch.page_size, pos_encoding_mode="ALIBI", q_data_type="float32")
    slopes = 2.0 ** (-8.0 / HQ * np.arange(1, HQ + 1))
    exact = batch.exact([reference.Alibi(slopes)], qo_pos=np.concatenate([np.arange(n) for n in batch.qo_len]))
    check(exact, *wrapper.run(batch.q, batch.cache, return_lse=True))


@pytest.mark.parametrize("rope_scale", [None, 4.0])
def test_rope(rope_scale, rng):
    batch = Batch(rng)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    rope = dict(pos_encoding_mode="ROPE_LLAMA", rope_theta=5e3, rope_scale=rope_scale)
    rows = torch.from_numpy(batch.qo_indptr)
    wrapper.plan(rows, *batch.table, HQ, HKV, D, batch.page_size, causal=True, q_data_type="float32", **rope)
    angle = np.arange(64)[:, None] / (rope_scale or 1.0) * 5e3 ** (-np.arange(D // 2) / (D // 2))
    exact = batch.exact([reference.RopeTables(np.cos(angle), np.sin(angle)), reference.Causal()])
    check(exact, *wrapper.run(batch.q, batch.cache, return_lse=True))


def test_overrides_of_forward(rng):
    batch = Batch(rng)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.begin_forward(
        torch.from_numpy(batch.qo_indptr), *batch.table, HQ, HKV, D, batch.page_size, q_data_type="float32"
    )
    check(batch.exact(), wrapper.run(batch.q, batch.cache))
    terms = dict(causal=True, window_left=4, logits_soft_cap=7.0, sm_scale=0.5)
    variant = [reference.SoftCap(7.0), reference.Causal(), reference.SlidingWindow(4)]
    check(batch.exact(variant, 0.5), *wrapper.forward_return_lse(batch.q, batch.cache, **terms))
    assert (wrapper._window_left, wrapper._logits_soft_cap, wrapper._causal) == (4, 7.0, True)
    check(batch.exact(), wrapper.forward(batch.q, batch.cache))
    check(batch.exact([reference.SlidingWindow(2)]), wrapper.run(batch.q, batch.cache, window_left=2))
    check(batch.exact(), wrapper.run(batch.q, batch.cache))
    wrapper.end_forward()


def test_sinks(rng):
    batch, logits = Batch(rng), rng.standard_normal(HQ).astype(np.float32)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(torch.from_numpy(batch.qo_indptr), *batch.table, HQ, HKV, D, batch.page_size, q_data_type="float32")
    found = wrapper.run(batch.q, batch.cache, return_lse=True, sinks=torch.from_numpy(logits))
    check(batch.exact([reference.Sinks(logits)]), *found)


def test_scales_of_16_bit_caches(rng):
    """q_scale and k_scale belong to the softmax scale, v_scale to the output."""
    batch = Batch(rng)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(torch.from_numpy(batch.qo_indptr), *batch.table, HQ, HKV, D, batch.page_size, q_data_type="float32")
    out = wrapper.run(batch.q, batch.cache, q_scale=0.5, k_scale=3.0, v_scale=4.0)
    check(batch.exact(scale=1.5 / np.sqrt(D)), out / 4.0)
    again = wrapper.run(batch.q, batch.cache, q_scale=0.5, k_scale=torch.tensor(3.0), v_scale=torch.tensor([4.0]))
    assert torch.equal(again, out)


def test_scales_with_outputs_of_another_dtype(rng):
    """The output is rounded once."""
    batch = Batch(rng, dtype="bfloat16")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    dtypes = dict(q_data_type=torch.bfloat16, o_data_type=torch.float32)
    wrapper.plan(torch.from_numpy(batch.qo_indptr), *batch.table, HQ, HKV, D, batch.page_size, **dtypes)
    out, plain = wrapper.run(batch.q, batch.cache, v_scale=4.0), wrapper.run(batch.q, batch.cache)
    assert out.dtype == torch.float32 and torch.equal(out, 4.0 * plain)


@pytest.mark.parametrize("tensors", [False, True])
def test_quantised_caches(tensors, rng):
    batch = Batch(rng, kv_layout="NHD")
    stored = batch.cache.nan_to_num().to(torch.float8_e4m3fn)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    dtypes = dict(q_data_type="float32", kv_data_type=torch.float8_e4m3fn)
    wrapper.plan(torch.from_numpy(batch.qo_indptr), *batch.table, HQ, HKV, D, batch.page_size, **dtypes)
    k_scale, v_scale = (torch.tensor(0.5), torch.tensor([2.0])) if tensors else (0.5, 2.0)
    found = wrapper.run(batch.q, stored, return_lse=True, k_scale=k_scale, v_scale=v_scale)
    batch.cache = torch.stack([stored[:, 0].float() * 0.5, stored[:, 1].float() * 2.0], 1)
    check(batch.exact(), *found)


def test_o_data_type(rng):
    batch = Batch(rng, dtype="bfloat16")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    dtypes = dict(q_data_type=torch.bfloat16, o_data_type=torch.float32)
    wrapper.plan(torch.from_numpy(batch.qo_indptr), *batch.table, HQ, HKV, D, batch.page_size, causal=True, **dtypes)
    out, lse = wrapper.run(batch.q, batch.cache, return_lse=True)
    assert out.dtype == torch.float32
    check(batch.exact([reference.Causal()]), out, lse)
    with pytest.raises(ValueError, match="out has dtype torch.bfloat16; expected torch.float32, the o_data_type"):
        wrapper.run(batch.q, batch.cache, out=torch.empty_like(batch.q))


class TestGraphMode:
    def buffers(self, size=4, pages=200):
        return [torch.zeros(n, dtype=torch.int32) for n in (size + 1, pages, size)]

    def test_decode(self, rng):
        """Plans of several batches, in the caller's buffers and in memory that stays."""
        buffers = self.buffers()
        wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers)
        reservations = set()
        for _ in range(3):
            batch = Batch(rng, decode=True, page_size=3)
            wrapper.plan(*batch.table, HQ, HKV, D, 3, q_data_type="float32")
            reservations.add(id(wrapper._reservation))
            check(batch.exact(), *wrapper.run(batch.q, batch.cache, return_lse=True))
            assert torch.equal(buffers[0], batch.table[0]) and torch.equal(buffers[2], batch.table[2])
        assert len(reservations) == 1 and wrapper._paged_kv_indptr_buf is buffers[0]

    def test_prefill(self, rng):
        rows = torch.zeros(5, dtype=torch.int32)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD", True, rows, *self.buffers())
        batches = sorted((Batch(rng, page_size=3) for _ in range(3)), key=lambda batch: -batch.qo_indptr[-1])
        for batch in batches:
            given = torch.from_numpy(batch.qo_indptr)
            wrapper.plan(given, *batch.table, HQ, HKV, D, 3, causal=True, q_data_type="float32")
            found = wrapper.run(batch.q, batch.cache, return_lse=True)
            check(batch.exact([reference.Causal()]), *found)
            assert torch.equal(rows, given)

    def masked(self, batch, rng):
        """A mask of every request, flat and packed, and the parts that compute it."""
        masks = [rng.random(shape) < 0.6 for shape in zip(batch.qo_len, batch.kv_len)]
        bits, indptr = raddle.pack_masks(masks)
        flat = torch.from_numpy(np.concatenate([mask.ravel() for mask in masks]))
        return flat, torch.from_numpy(bits), torch.from_numpy(indptr), [reference.PackedMask(bits, indptr)]

    def test_custom_masks(self, rng):
        """Each plan brings its mask; buffers hold it as FlashInfer's do."""
        rows, indptr = (torch.zeros(5, dtype=torch.int32) for _ in range(2))
        bits = torch.zeros(900, dtype=torch.uint8)
        given = WORKSPACE, "NHD", True, rows, *self.buffers()
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(*given, custom_mask_buf=bits, mask_indptr_buf=indptr)
        batches = sorted((Batch(rng, page_size=3) for _ in range(4)), key=lambda batch: -batch.qo_indptr[-1])
        for number, batch in enumerate(batches):
            flat, packed, offsets, exact = self.masked(batch, rng)
            mask = {"custom_mask": flat} if number % 2 else {"packed_custom_mask": packed}
            table = torch.from_numpy(batch.qo_indptr), *batch.table
            wrapper.plan(*table, HQ, HKV, D, 3, causal=True, q_data_type="float32", **mask)
            check(batch.exact(exact), *wrapper.run(batch.q, batch.cache, return_lse=True))
            assert torch.equal(bits[: len(packed)], packed) and torch.equal(indptr, offsets.int())
        with pytest.raises(ValueError, match="planned for other terms; expected those of the first plan"):
            wrapper.plan(*table, HQ, HKV, D, 3, q_data_type="float32")
        for buffers, message in (
            ({"custom_mask_buf": bits}, "mask_indptr_buf is None; expected a tensor"),
            ({"mask_indptr_buf": indptr}, "custom_mask_buf is None; expected a tensor"),
            ({"custom_mask_buf": bits[:2], "mask_indptr_buf": indptr}, "custom_mask_buf has 2 entries; expected at"),
        ):
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(*given, **buffers)
            with pytest.raises(ValueError, match=message):
                wrapper.plan(*table, HQ, HKV, D, 3, q_data_type="float32", **mask)

    def test_what_does_not_fit(self, rng):
        batch = Batch(rng, decode=True, page_size=3)
        with pytest.raises(ValueError, match="paged_kv_indptr_buffer is None; expected a tensor"):
            flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, use_cuda_graph=True)
        plan = dict(num_qo_heads=HQ, num_kv_heads=HKV, head_dim=D, page_size=3, q_data_type="float32")
        for buffers, message in ((self.buffers(size=3), "4 requests; expected 3"), (self.buffers(pages=1), "indices has")):
            wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers)
            with pytest.raises(ValueError, match=message):
                wrapper.plan(*batch.table, **plan)
        wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *self.buffers())
        wrapper.plan(*batch.table, **plan)
        with pytest.raises(ValueError, match="planned for other terms; expected those of the first plan"):
            wrapper.plan(*batch.table, **plan, window_left=3)


def test_batch_attention(rng):
    batch = Batch(rng)
    attention = flashinfer.BatchAttention(device="cpu")
    dtypes = dict(q_data_type=torch.float32, kv_data_type=torch.float32)
    table = torch.from_numpy(batch.indptr), torch.from_numpy(batch.indices), torch.from_numpy(batch.kv_len)
    rows = torch.from_numpy(batch.qo_indptr)
    attention.plan(rows, *table, HQ, HKV, D, D, batch.page_size, causal=True, logits_soft_cap=9.0, **dtypes)
    check(batch.exact([reference.SoftCap(9.0), reference.Causal()]), *attention.run(batch.q, batch.cache))
    found = attention.run(batch.q, batch.cache, logits_soft_cap=2.0)
    check(batch.exact([reference.SoftCap(2.0), reference.Causal()]), *found)


@pytest.mark.parametrize("mask", [None, "blocks", "packed"])
def test_block_sparse(mask, rng):
    M, N, R, C = 10, 12, 3, 4
    keep = rng.random((4, 3)) < 0.6
    indptr, indices = np.concatenate([[0], np.cumsum(keep.sum(1))]).astype(np.int32), np.nonzero(keep)[1].astype(np.int32)
    blocks = rng.random((len(indices), R, C)) < 0.6
    packed = [np.packbits(blocks[a:b].transpose(1, 0, 2).ravel(), bitorder="little") for a, b in zip(indptr, indptr[1:])]
    given = {
        None: {},
        "blocks": dict(mask=torch.from_numpy(blocks)),
        "packed": dict(packed_mask=torch.from_numpy(np.concatenate(packed))),
    }[mask]
    q, k, v = (torch.from_numpy(rng.standard_normal((n, h, D)).astype(np.float32)) for n, h in ((M, HQ), (N, HKV), (N, HKV)))
    wrapper = flashinfer.BlockSparseAttentionWrapper(WORKSPACE)
    dtypes = dict(q_data_type="float32", o_data_type="float32")
    wrapper.plan(torch.from_numpy(indptr), torch.from_numpy(indices), M, N, R, C, HQ, HKV, D, **dtypes, **given)
    bits = None if mask is None else np.packbits(blocks.ravel(), bitorder="little")
    layout = reference.BlockSparse(R, C, indptr, indices, num_rows=M, num_cols=N, mask_bits=bits)
    exact = reference.attention(reference.Problem(array(q), [(array(k), array(v))], layout, []))
    check(exact, *wrapper.run(q, k, v, return_lse=True))


def test_cascade(rng):
    """Two levels of shared prefixes, then each request's own keys."""
    page_size, pool = 4, torch.from_numpy(rng.standard_normal((30, 2, 4, HKV, D)).astype(np.float32))
    rows = [np.array([0, 9]), np.array([0, 5, 9]), np.array([0, 2, 5, 9])]
    pages, last = [np.array([3]), np.array([1, 2]), np.array([2, 1, 3])], [np.array([4]), np.array([4, 4]), np.array([3, 1, 4])]
    indptr = [np.concatenate([[0], np.cumsum(n)]) for n in pages]
    free = iter(np.split(rng.permutation(30), np.cumsum([n.sum() for n in pages])))
    indices = [next(free) for _ in pages]
    own = [rows[-1], indptr[-1], indices[-1]]
    assert np.diff(own[0]).min() >= 1
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(3, WORKSPACE)
    given = [[torch.from_numpy(np.asarray(x, np.int32)) for x in arrays] for arrays in (rows, indptr, indices, last)]
    wrapper.plan(*given, HQ, HKV, D, page_size, q_data_type="float32")
    levels = [
        reference.PagedKV(r, p, i, (np.diff(p) - 1) * page_size + n, page_size) for r, p, i, n in zip(rows, indptr, indices, last)
    ]
    q = torch.from_numpy(rng.standard_normal((9, HQ, D)).astype(np.float32))
    kv = tuple(array(pool[:, n]) for n in (0, 1))
    exact = reference.attention(reference.Problem(array(q), [kv], reference.Cascade(levels), []))
    check(exact, wrapper.run(q, pool))


def test_mla(rng):
    batch = Batch(rng, page_size=4)
    latent, rope = 64, 16
    cache = torch.from_numpy(rng.standard_normal((len(batch.cache), 4, latent + rope)).astype(np.float32))
    q = torch.from_numpy(rng.standard_normal((batch.qo_indptr[-1], HQ, latent + rope)).astype(np.float32))
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE)
    table = torch.from_numpy(batch.indptr), torch.from_numpy(batch.indices), torch.from_numpy(batch.kv_len)
    dtypes = torch.float32, torch.float32
    wrapper.plan(torch.from_numpy(batch.qo_indptr), *table, HQ, latent, rope, 4, True, 0.1, *dtypes)
    parts = q[..., :latent], q[..., latent:], cache[..., :latent], cache[..., latent:]
    keys = array(cache)[:, :, None]
    problem = reference.Problem(array(q), [(keys, keys[..., :latent])], batch.layout(), [reference.Causal()], 0.1)
    exact = reference.attention(problem)
    check(exact, *wrapper.run(*parts, return_lse=True))
    out, lse = wrapper.run(*parts, return_lse=True, return_lse_base_on_e=True)
    within(exact, out.numpy(), lse.numpy())
    apart = wrapper.run(*parts[:2], parts[2].clone(), parts[3].clone(), return_lse=True)
    assert all(map(torch.equal, apart, wrapper.run(*parts, return_lse=True)))
    with pytest.raises(ValueError, match=r"kv: k is \[.*, 8\] float32; expected .*, 16\] float32"):
        wrapper.run(*parts[:3], parts[3][..., :8])


def test_states(rng):
    """merge_state, merge_state_in_place and merge_states compose what whole attention gives."""
    batch = Batch(rng)
    whole = batch.exact()
    parts = []
    for keep in (0, 1, 2):
        masks = [(np.arange(kv) % 3 == keep)[None].repeat(q, 0) for q, kv in zip(batch.qo_len, batch.kv_len)]
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
        flat = torch.from_numpy(np.concatenate([mask.ravel() for mask in masks]))
        rows = torch.from_numpy(batch.qo_indptr)
        wrapper.plan(rows, *batch.table, HQ, HKV, D, batch.page_size, custom_mask=flat, q_data_type="float32")
        parts.append(wrapper.run(batch.q, batch.cache, return_lse=True))
    slack = 1e-5
    v, s = flashinfer.merge_states(torch.stack([v for v, _ in parts], 1), torch.stack([s for _, s in parts], 1))
    pairwise = flashinfer.merge_state(*flashinfer.merge_state(*parts[0], *parts[1]), *parts[2])
    in_place = tuple(x.clone() for x in parts[0])
    for part in parts[1:]:
        flashinfer.merge_state_in_place(*in_place, *part)
    for found_v, found_s in ((v, s), pairwise, in_place):
        np.testing.assert_allclose(found_v.numpy(), whole.out, rtol=0, atol=slack)
        np.testing.assert_allclose(found_s.numpy() * np.log(2.0), whole.lse, rtol=0, atol=slack)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_append(kv_layout, rng):
    batch = Batch(rng, kv_layout=kv_layout)
    before, rows = batch.cache.clone(), torch.from_numpy(rng.standard_normal((2, batch.qo_indptr[-1], HKV, D))).float()
    lengths = flashinfer.get_seq_lens(batch.table[0], batch.table[2], batch.page_size)
    assert lengths.tolist() == batch.kv_len.tolist()
    where = flashinfer.get_batch_indices_positions(torch.from_numpy(batch.qo_indptr), lengths, rows.shape[1])
    table = batch.table[1], batch.table[0], batch.table[2]
    flashinfer.append_paged_kv_cache(*rows, *where, batch.cache, *table, kv_layout)
    for cache, new, old in ((batch.cache[:, 0], rows[0], before[:, 0]), (batch.cache[:, 1], rows[1], before[:, 1])):
        expected = (old if kv_layout == "NHD" else old.transpose(1, 2)).clone()
        row = 0
        for request, count in enumerate(batch.qo_len):
            for position in range(batch.kv_len[request] - count, batch.kv_len[request]):
                page = batch.indices[batch.indptr[request] + position // batch.page_size]
                expected[int(page), position % batch.page_size] = new[row]
                row += 1
        found = cache if kv_layout == "NHD" else cache.transpose(1, 2)
        assert torch.equal(found.nan_to_num(99.0), expected.nan_to_num(99.0))


@pytest.mark.parametrize("bitorder", ["little", "big"])
def test_packbits(bitorder, rng):
    x = rng.random(103) < 0.5
    ends = np.array([0, 0, 7, 15, 15, 103])
    bits, where = flashinfer.segment_packbits(torch.from_numpy(x), torch.from_numpy(ends), bitorder)
    expected = [np.packbits(x[a:b], bitorder=bitorder) for a, b in zip(ends, ends[1:])]
    assert bits.tolist() == np.concatenate(expected).tolist()
    assert where.tolist() == np.concatenate([[0], np.cumsum([len(each) for each in expected])]).tolist()
    assert flashinfer.packbits(torch.from_numpy(x), bitorder).tolist() == np.packbits(x, bitorder=bitorder).tolist()


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_single_requests(kv_layout, rng):
    q, k, v = (torch.from_numpy(rng.standard_normal((n, h, D)).astype(np.float32)) for n, h in ((7, HQ), (21, HKV), (21, HKV)))
    kv = (k, v) if kv_layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))

    def exact(rows, variant):
        layout = reference.RaggedKV(np.array([0, len(rows)]), np.array([0, 21]))
        return reference.attention(reference.Problem(array(rows), [(array(k), array(v))], layout, variant))

    how = dict(kv_layout=kv_layout, return_lse=True)
    check(exact(q, [reference.Causal()]), *flashinfer.single_prefill_with_kv_cache(q, *kv, causal=True, **how))
    keep = torch.from_numpy(rng.random((7, 21)) < 0.5)
    bits = flashinfer.packbits(keep.flatten(), "little")
    expected = exact(q, [reference.PackedMask(bits.numpy(), np.array([0, len(bits)]))])
    check(expected, *flashinfer.single_prefill_with_kv_cache(q, *kv, custom_mask=keep, **how))
    check(expected, *flashinfer.single_prefill_with_kv_cache_return_lse(q, *kv, packed_custom_mask=bits, kv_layout=kv_layout))
    out, lse = flashinfer.single_decode_with_kv_cache(q[0], *kv, window_left=4, **how)
    check(exact(q[:1], [reference.SlidingWindow(4)]), out[None], lse[None])


class TestRefusals:
    def wrapper(self):
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)

    @pytest.mark.parametrize(
        "given, message",
        [
            (dict(backend="trtllm-gen"), "backend is 'trtllm-gen'; expected one of"),
            (dict(jit_args=["name"]), "jit_args is given"),
        ],
    )
    def test_constructors(self, given, message):
        with pytest.raises(NotImplementedError, match=message):
            flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, **given)

    @pytest.mark.parametrize(
        "given, message",
        [
            (dict(prefix_len_ptr=torch.zeros(4)), "prefix_len_ptr is given"),
            (dict(token_pos_in_items_len=3), "token_pos_in_items_len is given"),
            (dict(pos_encoding_mode="ALIBI", window_left=3), "window_left is given beside pos_encoding_mode='ALIBI'"),
            (dict(q_data_type="float8_e4m3fn"), "q_data_type is given"),
        ],
    )
    def test_plans(self, given, message, rng):
        batch = Batch(rng)
        with pytest.raises(NotImplementedError, match=message):
            self.wrapper().plan(
                torch.from_numpy(batch.qo_indptr), *batch.table, HQ, HKV, D, batch.page_size, **{"q_data_type": "float32", **given}
            )

    @pytest.mark.parametrize("name", ["kv_cache_sf", "skip_softmax_threshold_scale_factor"])
    def test_runs(self, name, rng):
        batch, wrapper = Batch(rng), self.wrapper()
        wrapper.plan(torch.from_numpy(batch.qo_indptr), *batch.table, HQ, HKV, D, batch.page_size, q_data_type="float32")
        with pytest.raises(NotImplementedError, match=f"{name} is given"):
            wrapper.run(batch.q, batch.cache, **{name: 1.0})

    def test_unknown_words(self):
        with pytest.raises(KeyError, match="kv_layout is 'NDH'"):
            flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "NDH")


def test_overlay(monkeypatch):
    """Classes of the installed package are replaced where it has them; what Raddle does not have stays."""
    package = types.ModuleType("flashinfer")
    package.BatchAttention = package.sampling_from_probs = object
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    for suffix in flashinfer.overlay.MODULES[1:]:
        module = types.ModuleType(f"flashinfer{suffix}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
    sys.modules["flashinfer.decode"].fast_decode_plan = object
    assert sorted(flashinfer.install()) == ["flashinfer.BatchAttention", "flashinfer.decode.fast_decode_plan"]
    assert package.BatchAttention is flashinfer.BatchAttention and package.sampling_from_probs is object
    assert sys.modules["flashinfer.decode"].fast_decode_plan is flashinfer.fast_decode_plan
