"""FlashInfer's wrappers (checked against 0.6.12), on the pools and page lists that Raddle reads."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

import flashinfer
import flashinfer.mla
from raddle.bench.engines import Engine, Makers
from raddle.bench.gpu.cases import Case
from raddle.bench.gpu.problem import DTYPE, Problem, indptr

_WORKSPACE_BYTES = 512 << 20


@functools.lru_cache(maxsize=None)
def _workspace(device: Any) -> torch.Tensor:
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def contestants(problem: Problem, case: Case, name: str) -> Makers:
    for form, make in _forms(case).items():
        yield f"{name} {form}".strip(), functools.partial(make, problem, case, f"{name} {form}".strip())


def _forms(case: Case) -> dict[str, Callable[..., Engine]]:
    """What FlashInfer offers for a case; a name is the family's and one of these words."""
    if case.form == "blocks":
        return {"blocks": _blocks}
    if case.latent:
        return {backend: functools.partial(_mla, backend=backend) for backend in ("fa2", "fa3")}
    if case.prefix:
        return {"single": functools.partial(_decode, tensor_cores=True), "cascade": _cascade}
    if case.variant == "rope":
        return {"cuda": functools.partial(_decode, tensor_cores=False)}
    if case.is_decode:
        forms = {"tensor": functools.partial(_decode, tensor_cores=True)}
        # Its CUDA cores win only over few keys.
        return {**forms, "cuda": functools.partial(_decode, tensor_cores=False)} if case.floor else forms
    if min(case.qo_len) == 1:
        return {"batch": _mixed, "fa2": functools.partial(_paged_prefill, backend="fa2")}
    prefill = _paged_prefill if case.form == "paged" else _ragged_prefill
    return {backend: functools.partial(prefill, backend=backend) for backend in ("fa2", "fa3")}


def _last_page_len(problem: Problem) -> torch.Tensor:
    lengths, page = problem.on_device("kv_len"), problem.case.page_size
    return ((lengths - 1) % page + 1).int()


def _tables(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return problem.on_device("page_indptr"), problem.on_device("page_indices"), _last_page_len(problem)


def _with_out(name: str, problem: Problem, run: Callable[..., Any], *tensors: Any) -> Engine:
    out = problem.empty()
    return Engine(name, lambda _: run(*tensors, out=out), out)


def _decode(problem: Problem, case: Case, name: str, tensor_cores: bool) -> Engine:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(problem.device), "NHD", use_tensor_cores=tensor_cores
    )
    position = "ROPE_LLAMA" if case.variant == "rope" else "NONE"
    types = {"q_data_type": DTYPE, "kv_data_type": DTYPE}
    wrapper.plan(*_tables(problem), *case.heads, case.page_size, pos_encoding_mode=position, **types)
    return _with_out(name, problem, wrapper.run, problem.q, (problem.k, problem.v))


def _ragged_prefill(problem: Problem, case: Case, name: str, backend: str) -> Engine:
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(_workspace(problem.device), "NHD", backend=backend)
    ends = problem.on_device("qo_indptr"), problem.on_device("kv_indptr")
    types = {"q_data_type": DTYPE, "kv_data_type": DTYPE}
    wrapper.plan(*ends, *case.heads, head_dim_vo=case.dim_vo, causal=True, **types)
    return _with_out(name, problem, wrapper.run, problem.q, problem.k, problem.v)


def _paged_prefill(problem: Problem, case: Case, name: str, backend: str) -> Engine:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(problem.device), "NHD", backend=backend)
    tables, types = _tables(problem), {"q_data_type": DTYPE, "kv_data_type": DTYPE}
    wrapper.plan(problem.on_device("qo_indptr"), *tables, *case.heads, case.page_size, causal=True, **types)
    return _with_out(name, problem, wrapper.run, problem.q, (problem.k, problem.v))


def _mixed(problem: Problem, case: Case, name: str) -> Engine:
    wrapper = flashinfer.BatchAttention("NHD", str(problem.device))
    hq, hkv, dim = case.heads
    ends, pages, _ = _tables(problem)
    heads = hq, hkv, dim, dim, case.page_size
    types = {"q_data_type": DTYPE, "kv_data_type": DTYPE}
    wrapper.plan(problem.on_device("qo_indptr"), ends, pages, problem.on_device("kv_len"), *heads, causal=True, **types)
    lse = torch.empty(case.num_rows, hq, dtype=torch.float32, device=problem.device)
    run = functools.partial(wrapper.run, lse=lse)
    return _with_out(name, problem, run, problem.q, (problem.k, problem.v))


def _mla(problem: Problem, case: Case, name: str, backend: str) -> Engine:
    """The latent part of Q and K and the one that RoPE turned are tensors of their own there: here, views."""
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(_workspace(problem.device), backend=backend)
    hq, _, dim = case.heads
    ends, pages, _ = _tables(problem)
    rope, scale = dim - case.latent, dim**-0.5
    heads = hq, case.latent, rope, case.page_size
    rows = problem.on_device("qo_indptr"), ends, pages, problem.on_device("kv_len")
    wrapper.plan(*rows, *heads, True, scale, DTYPE, DTYPE)
    parts = (x.split([case.latent, rope], -1) for x in (problem.q, problem.k.squeeze(2)))
    return _with_out(name, problem, wrapper.run, *itertools.chain(*parts))


def _cascade(problem: Problem, case: Case, name: str) -> Engine:
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, _workspace(problem.device), "NHD")
    page, requests = case.page_size, len(case.kv_len)

    def ints(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=problem.device)

    own = [n - case.prefix for n in case.kv_len]
    wrapper.plan(
        [ints([0, requests]), ints(list(range(requests + 1)))],
        [ints([0, len(problem.prefix_pages)]), problem.on_device("own_indptr")],
        [problem.on_device("prefix_pages"), problem.on_device("own_pages")],
        [ints([(case.prefix - 1) % page + 1]), ints([(n - 1) % page + 1 for n in own])],
        *case.heads,
        page,
        q_data_type=DTYPE,
        kv_data_type=DTYPE,
    )
    return Engine(name, lambda _: wrapper.run(problem.q, (problem.k, problem.v)))


def _blocks(problem: Problem, case: Case, name: str) -> Engine:
    wrapper = flashinfer.BlockSparseAttentionWrapper(_workspace(problem.device))
    ends = torch.from_numpy(indptr([len(problem.kept_blocks)])).to(problem.device)
    shape = 1, case.kv_len[0], 1, case.page_size
    types = {"q_data_type": DTYPE, "kv_data_type": DTYPE, "o_data_type": DTYPE}
    wrapper.plan(ends, problem.on_device("kept_blocks"), *shape, *case.heads, **types)
    return _with_out(name, problem, wrapper.run, problem.q, problem.k, problem.v)
