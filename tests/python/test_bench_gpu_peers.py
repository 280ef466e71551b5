"""How `raddle bench gpu` calls packages that tests do not have: FlashInfer, vLLM and CuPy are stand-ins here.

The stand-ins of FlashInfer (0.6.12) and of vLLM's FlashAttention-3 (0.24) have these packages' signatures and compute,
with plain loops, what the tables say that they are given: a wrong offset, page or last length gives a wrong output.
"""

import dataclasses
import importlib
import sys
import types

import pytest
import torch
from bench_gpu_cases import CASES, DECODE, PREFILL, Quiet
from raddle.bench import engines
from raddle.bench.gpu import check, floor
from raddle.bench.gpu.cases import Case
from raddle.bench.gpu.problem import Problem
from raddle.bench.gpu.variants import exact_row


def attend(q, k, v, causal, variant="causal"):
    """Rows q [n, Hq, D] at the end of keys k, v [S, Hkv, D]."""
    variant = variant if causal else "plain"
    rows = [
        exact_row(variant, q[row].double(), k.double(), v.double(), len(k) - len(q) + row) for row in range(len(q))
    ]
    return torch.stack(rows).to(q.dtype)


def listed(pool, pages, length):
    return pool[pages.long()].flatten(0, 1)[:length]


class Wrapper:
    def __init__(self, workspace, kv_layout="NHD", use_tensor_cores=False, backend="auto"):
        assert workspace.dtype == torch.uint8 and not workspace.any() and kv_layout == "NHD"
        assert backend in ("auto", "fa2", "fa3")

    def _paged(self, q, kv, out):
        """Each request's rows over its pages."""
        ends, first, pages, last = self.tables
        for n in range(len(first) - 1):
            own = pages[first[n] : first[n + 1]]
            length = (len(own) - 1) * self.page_size + int(last[n])
            rows = slice(int(ends[n]), int(ends[n + 1]))
            k, v = (listed(pool, own, length) for pool in kv)
            assert k.shape[1:] == (self.heads[1], self.heads[2]) and k.shape[0] == length
            out[rows] = attend(q[rows], k, v, self.causal, self.variant)
        return out


class Decode(Wrapper):
    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
             pos_encoding_mode="NONE", q_data_type="float16", kv_data_type=None):  # fmt: skip
        assert q_data_type is kv_data_type is torch.bfloat16 and indptr.dtype == indices.dtype == torch.int32
        self.tables = range(len(indptr)), indptr, indices, last_page_len
        self.heads, self.page_size, self.causal = (num_qo_heads, num_kv_heads, head_dim), page_size, True
        self.variant = {"NONE": "causal", "ROPE_LLAMA": "rope"}[pos_encoding_mode]

    def run(self, q, paged_kv_cache, out=None):
        return self._paged(q, paged_kv_cache, out)


class PagedPrefill(Wrapper):
    variant = "causal"

    def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
             head_dim_qk, page_size, causal=False, q_data_type="float16", kv_data_type=None):  # fmt: skip
        assert q_data_type is kv_data_type is torch.bfloat16
        self.tables = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        self.heads, self.page_size, self.causal = (num_qo_heads, num_kv_heads, head_dim_qk), page_size, causal

    def run(self, q, paged_kv_cache, out=None):
        return self._paged(q, paged_kv_cache, out)


class RaggedPrefill(Wrapper):
    def plan(self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, causal=False,
             q_data_type="float16", kv_data_type=None):  # fmt: skip
        self.ends, self.causal = (qo_indptr, kv_indptr), causal

    def run(self, q, k, v, out=None):
        qo, kv = self.ends
        for n in range(len(qo) - 1):
            rows, keys = slice(int(qo[n]), int(qo[n + 1])), slice(int(kv[n]), int(kv[n + 1]))
            out[rows] = attend(q[rows], k[keys], v[keys], self.causal)
        return out


class Holistic(PagedPrefill):
    def __init__(self, kv_layout="NHD", device="cuda"):
        assert kv_layout == "NHD" and device == "cpu"

    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo,
             page_size, causal=False, q_data_type=None, kv_data_type=None):  # fmt: skip
        last = (kv_len_arr - 1) % page_size + 1
        heads = num_qo_heads, num_kv_heads, head_dim_qk
        super().plan(qo_indptr, kv_indptr, kv_indices, last, *heads, page_size, causal, q_data_type, kv_data_type)

    def run(self, q, kv_cache, out=None, lse=None):
        assert lse.shape == q.shape[:2] and lse.dtype == torch.float32
        return self._paged(q, kv_cache, out), lse


class Cascade(Wrapper):
    def __init__(self, num_levels, float_workspace_buffer, kv_layout="NHD"):
        assert num_levels == 2
        super().__init__(float_workspace_buffer, kv_layout)

    def plan(self, qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len, num_qo_heads,
             num_kv_heads, head_dim, page_size, q_data_type="float16", kv_data_type=None):  # fmt: skip
        self.levels = list(zip(qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len))
        self.page_size = page_size

    def run(self, q, paged_kv_cache):
        (shared_rows, _, shared, full), (ends, first, pages, last) = self.levels
        assert shared_rows.tolist() == [0, len(q)] and ends.tolist() == list(range(len(q) + 1))
        out = torch.empty_like(q)
        for n in range(len(q)):
            own = pages[first[n] : first[n + 1]]
            lengths = [(len(each) - 1) * self.page_size + int(cut) for each, cut in ((shared, full), (own, last[n]))]
            levels = list(zip((shared, own), lengths))
            k, v = (torch.cat([listed(pool, each, length) for each, length in levels]) for pool in paged_kv_cache)
            out[n] = attend(q[n : n + 1], k, v, True)[0]
        return out


class Mla(Wrapper):
    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size,
             causal, sm_scale, q_data_type, kv_data_type):  # fmt: skip
        assert q_data_type is kv_data_type is torch.bfloat16 and causal
        self.tables = qo_indptr, kv_indptr, kv_indices, (kv_len_arr - 1) % page_size + 1
        self.heads, self.latent = (num_heads, 1, head_dim_ckv + head_dim_kpe), head_dim_ckv
        assert sm_scale == self.heads[2] ** -0.5
        self.page_size, self.causal, self.variant = page_size, True, "causal"

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out=None):
        assert ckv_cache.shape[1:] == (self.page_size, self.latent)
        q, k = torch.cat((q_nope, q_pe), -1), torch.cat((ckv_cache, kpe_cache), -1)[:, :, None]
        return self._paged(q, (k, k[..., : self.latent]), out)


class BlockSparse(Wrapper):
    def plan(self, indptr, indices, M, N, R, C, num_qo_heads, num_kv_heads, head_dim, q_data_type="float16",
             kv_data_type=None, o_data_type="float16"):  # fmt: skip
        assert (M, R) == (1, 1) and indptr.tolist() == [0, len(indices)] and int(indices.max()) * C < N
        self.kept, self.size = indices, C

    def run(self, q, k, v, out=None):
        k, v = (listed(x.view(-1, self.size, *x.shape[1:]), self.kept, 1 << 30) for x in (k, v))
        return out.copy_(attend(q, k, v, False))


@pytest.fixture
def flashinfer(monkeypatch):
    fake = types.ModuleType("flashinfer")
    fake.__version__ = "0.6.12"
    fake.BatchDecodeWithPagedKVCacheWrapper, fake.BatchAttention = Decode, Holistic
    fake.BatchPrefillWithPagedKVCacheWrapper, fake.BatchPrefillWithRaggedKVCacheWrapper = PagedPrefill, RaggedPrefill
    fake.MultiLevelCascadeAttentionWrapper, fake.BlockSparseAttentionWrapper = Cascade, BlockSparse
    fake.mla = types.ModuleType("flashinfer.mla")
    fake.mla.BatchMLAPagedAttentionWrapper = Mla
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", fake.mla)
    monkeypatch.delitem(sys.modules, "raddle.bench.peers.flashinfer", raising=False)
    module = importlib.import_module("raddle.bench.peers.flashinfer")
    monkeypatch.setattr(module, "_WORKSPACE_BYTES", 1 << 10)
    yield module
    sys.modules.pop("raddle.bench.peers.flashinfer")


BY_NAME = {case.name: case for case in CASES}
FORMS = [
    (dataclasses.replace(DECODE, floor=True), {"tensor", "cuda"}),
    (DECODE, {"tensor"}),
    (PREFILL, {"fa2", "fa3"}),
    (BY_NAME["values"], {"fa2", "fa3"}),
    (dataclasses.replace(PREFILL, form="paged"), {"fa2", "fa3"}),
    (BY_NAME["mixed"], {"batch", "fa2"}),
    (BY_NAME["prefix"], {"single", "cascade"}),
    (dataclasses.replace(BY_NAME["prefix"], form="paged"), {"single", "cascade"}),
    (BY_NAME["blocks"], {"blocks"}),
    (BY_NAME["mla"], {"fa2", "fa3"}),
    (BY_NAME["rope"], {"cuda"}),
]


@pytest.mark.parametrize("case, forms", FORMS, ids=lambda x: f"{x.name}-{x.form}" if isinstance(x, Case) else "")
def test_flashinfer_is_told_the_same_problem(flashinfer, case, forms):
    assert engines.versions(("flashinfer",)) == {"flashinfer": "0.6.12"}
    problem = Problem(case, "cpu")
    reference = check.exact(problem, case, check.all_rows(case))
    made = dict(flashinfer.contestants(problem, case, "flashinfer"))
    assert set(made) == {f"flashinfer {form}" for form in forms}
    for name, make in made.items():
        contestant = make()
        assert contestant.name == name and engines.family(name) == "flashinfer"
        for _ in range(2):
            assert check.error(contestant.outcome(), reference) < check.TOLERANCE, name


# --- FlashAttention-3 -----------------------------------------------------------------------


def variant_told(window_size, softcap):
    return "window" if window_size == (1024, 0) else "softcap" if softcap == 30.0 else "causal"


def is_told_the_same(peer, case, name):
    """The only contestant of a module computes the case."""
    problem = Problem(case, "cpu")
    reference = check.exact(problem, case, check.all_rows(case))
    ((found, make),) = peer.contestants(problem, case, name)
    assert found == name and check.error(make().outcome(), reference) < check.TOLERANCE


def varlen(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, causal=False,
           window_size=(-1, -1), softcap=0.0, block_table=None, out=None, scheduler_metadata=None, fa_version=2):  # fmt: skip
    assert fa_version == 3 and causal and (cu_seqlens_k is None) == (seqused_k is not None)
    variant = variant_told(window_size, softcap)
    assert (scheduler_metadata is None) == (block_table is None)
    for n, (begin, end) in enumerate(zip(cu_seqlens_q, cu_seqlens_q[1:])):
        if block_table is None:
            keys = slice(int(cu_seqlens_k[n]), int(cu_seqlens_k[n + 1]))
            own = k[keys], v[keys]
        else:
            own = tuple(listed(pool, block_table[n], int(seqused_k[n])) for pool in (k, v))
        assert end - begin <= max_seqlen_q and len(own[0]) <= max_seqlen_k
        out[begin:end] = attend(q[begin:end], *own, True, variant)
    return out


def metadata(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens,
             cu_seqlens_q, page_size, causal, window_size, has_softcap):  # fmt: skip
    assert len(cache_seqlens) == batch_size == len(cu_seqlens_q) - 1 and max(cache_seqlens) == max_seqlen_k
    return torch.zeros(1, dtype=torch.int32)


@pytest.fixture
def fa3(monkeypatch):
    vllm, package = types.ModuleType("vllm"), types.ModuleType("vllm.vllm_flash_attn")
    vllm.__version__ = "0.24.0"
    package.flash_attn_interface = types.SimpleNamespace(flash_attn_varlen_func=varlen, get_scheduler_metadata=metadata)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", package)
    monkeypatch.delitem(sys.modules, "raddle.bench.peers.fa3", raising=False)
    yield importlib.import_module("raddle.bench.peers.fa3")
    sys.modules.pop("raddle.bench.peers.fa3")


@pytest.mark.parametrize("case", [DECODE, PREFILL, *(BY_NAME[name] for name in ("values", "mixed", "window", "softcap"))], ids=lambda x: x.name)
def test_flash_attention_3_is_told_the_same_problem(fa3, case):
    assert engines.versions(("fa3",)) == {"fa3": "of vLLM 0.24.0"}
    is_told_the_same(fa3, case, "fa3")


@pytest.mark.parametrize("name", ["prefix", "alibi", "blocks"])
def test_flash_attention_3_has_no_form_for_others(fa3, name):
    assert not list(fa3.contestants(Problem(BY_NAME[name], "cpu"), BY_NAME[name], "fa3"))


# --- FlashAttention-4 -----------------------------------------------------------------------


def fa4_dense(q, k, v, causal=False, window_size=(None, None), softcap=0.0):
    assert causal == (window_size == (None, None))
    variant = variant_told(window_size, softcap)
    return torch.stack([attend(*each, True, variant) for each in zip(q, k, v)]), None


def fa4_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
    rows, keys = ([slice(*pair) for pair in zip(ends, ends[1:])] for ends in (cu_seqlens_q.tolist(), cu_seqlens_k.tolist()))
    assert max(x.stop - x.start for x in rows) == max_seqlen_q and max(x.stop - x.start for x in keys) == max_seqlen_k
    return torch.cat([fa4_dense(q[a][None], k[b][None], v[b][None], **options)[0][0] for a, b in zip(rows, keys)]), None


@pytest.fixture
def fa4(monkeypatch):
    package = types.ModuleType("flash_attn.cute")
    package.flash_attn_func, package.flash_attn_varlen_func = fa4_dense, fa4_varlen
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", package)
    monkeypatch.setattr(engines.importlib.metadata, "version", {"flash-attn-4": "4.0.0b36"}.__getitem__)
    monkeypatch.delitem(sys.modules, "raddle.bench.peers.fa4", raising=False)
    yield importlib.import_module("raddle.bench.peers.fa4")
    sys.modules.pop("raddle.bench.peers.fa4")


UNEQUAL = dataclasses.replace(PREFILL, name="unequal", qo_len=(7, 40), kv_len=(9, 40))
RAGGED = [dataclasses.replace(BY_NAME[name], form="ragged") for name in ("window", "softcap")]


@pytest.mark.parametrize("case", [PREFILL, UNEQUAL, BY_NAME["values"], *RAGGED], ids=lambda x: x.name)
def test_flash_attention_4_is_told_the_same_problem(fa4, case):
    assert engines.versions(("fa4",)) == {"fa4": "4.0.0b36"}
    is_told_the_same(fa4, case, "fa4")


@pytest.mark.parametrize("case", [DECODE, *(BY_NAME[name] for name in ("prefix", "alibi", "blocks"))], ids=lambda x: x.name)
def test_flash_attention_4_has_no_form_for_others(fa4, case):
    assert not list(fa4.contestants(Problem(case, "cpu"), case, "fa4"))


# --- the floor ------------------------------------------------------------------------------


class Kernel:
    max_dynamic_shared_size_bytes = None

    def __init__(self, name, launches):
        self.name, self.launches = name, launches

    def __call__(self, grid, block, arguments, shared_mem=0):
        self.launches.append((self.name, grid, block, arguments, shared_mem))


@pytest.fixture
def launches(monkeypatch):
    """Launches of the floor's kernels, through a CuPy and a GPU that are not there."""
    found = []

    class Module:
        def __init__(self, code, backend, options):
            assert backend == "nvrtc" and "--gpu-architecture=sm_90a" in options
            self.code = code

        def get_function(self, name):
            assert f"__global__ void {name}(" in self.code
            return Kernel(name, found)

    class Stream:
        def __init__(self, number):
            assert number == 7

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    fake = types.ModuleType("cupy")
    fake.RawModule, fake.uint64 = Module, int
    fake.cuda = types.SimpleNamespace(ExternalStream=Stream)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    properties = types.SimpleNamespace(major=9, minor=0, multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=7))
    return found


def test_the_floor_reads_every_byte_that_it_was_asked_for(launches):
    made = floor.Floor("cpu", 1_000_000)
    made.nothing(0)
    reads = made.reads(999_999)
    for read in reads.values():
        read(0)
    first, *rest = launches
    assert first[0] == "nothing" and len(rest) == len(reads) == 16
    chunk = 8192
    whole = -(-999_999 // chunk) * chunk
    for name, grid, block, arguments, shared in rest:
        assert arguments[1] == (whole // chunk if name == "read_bulk" else whole // 16)
        assert grid[0] % 4 == 0 and shared == (24 * chunk if name == "read_bulk" else 0)
        assert block == (32,) or name == "read_loads"
    with pytest.raises(ValueError, match="expected at most"):
        made.reads(2_000_000)


def test_the_floor_of_a_section_is_the_fastest_read(launches, monkeypatch):
    from raddle.bench import results
    from raddle.bench.gpu import measure
    from raddle.bench.gpu.cases import Section

    class Clock:
        """The bulk read is fast, every other call slow."""

        def turn(self, call):
            kernel = getattr(call, "args", [None])[0]  # of the floor's launches, which are partial functions
            us = 5.0 if kernel is None else 2.0 if kernel.name == "read_bulk" else 3.0
            return lambda number: us

    case = dataclasses.replace(DECODE, floor=True, at_least={"floor": 0.3})
    rows = measure.SectionRun(Section("s", "S", (case,)), (), 2, Quiet(), "cpu", Clock()).run()
    by_engine = {row["engine"]: row for row in rows if "rounds" in row}
    assert by_engine[results.FLOOR]["us"] == 2.0
    assert by_engine["raddle"]["ratios"] == {"floor": 0.4} and by_engine["raddle"]["met"] == {"floor": True}
