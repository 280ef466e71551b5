"""FlashAttention-4 (checked against 4.0.0b36), which the CuTe DSL compiles, on the tensors that Raddle reads: without
offsets of requests where all are equally long."""

from __future__ import annotations

import functools
from typing import Any

import torch
from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

from raddle.bench.engines import Engine, Makers
from raddle.bench.gpu.cases import Case
from raddle.bench.gpu.problem import Problem
from raddle.bench.gpu.variants import FLASH_ATTENTION


def contestants(problem: Problem, case: Case, name: str) -> Makers:
    if case.variant in FLASH_ATTENTION and case.form == "ragged" and not case.latent:
        yield name, functools.partial(_prepared, problem, case, name)


def _prepared(problem: Problem, case: Case, name: str) -> Engine:
    options = {"causal": case.variant != "window", **FLASH_ATTENTION[case.variant]}
    tensors = problem.q, problem.k, problem.v
    if len({*case.qo_len, *case.kv_len}) == 1:
        dense = [x.view(len(case.kv_len), -1, *x.shape[1:]) for x in tensors]
        attend = functools.partial(flash_attn_func, *dense, **options)
    else:
        options["cu_seqlens_q"] = problem.on_device("qo_indptr")
        options["cu_seqlens_k"] = problem.on_device("kv_indptr")
        options["max_seqlen_q"], options["max_seqlen_k"] = max(case.qo_len), max(case.kv_len)
        attend = functools.partial(flash_attn_varlen_func, *tensors, **options)

    def call(_: int) -> torch.Tensor:
        out = attend()
        return out[0] if isinstance(out, tuple) else out

    return Engine(name, call, rows=lambda out: out.reshape(-1, *out.shape[-2:]))
