"""FlashAttention-3 as vLLM ships it (checked against 0.24), on the tensors and page lists that Raddle reads. That build
takes offsets of requests, also where all are equally long."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from raddle.bench.engines import Engine, Makers
from raddle.bench.gpu.cases import Case
from raddle.bench.gpu.problem import Problem
from raddle.bench.gpu.variants import FLASH_ATTENTION
from vllm.vllm_flash_attn import flash_attn_interface as fa


def contestants(problem: Problem, case: Case, name: str) -> Makers:
    if case.variant in FLASH_ATTENTION and case.form in ("ragged", "paged"):
        yield name, functools.partial(_prepared, problem, case, name)


def _prepared(problem: Problem, case: Case, name: str) -> Engine:
    options = {"causal": True, "fa_version": 3, **FLASH_ATTENTION[case.variant]}
    rows = problem.on_device("qo_indptr")
    longest = max(case.qo_len), max(case.kv_len)
    keys: dict[str, Any] = {"cu_seqlens_k": problem.on_device("kv_indptr")}
    if case.form == "paged":
        lengths = problem.on_device("kv_len")
        keys = {"seqused_k": lengths, "block_table": _page_table(problem)}
        keys["scheduler_metadata"] = fa.get_scheduler_metadata(
            len(case.kv_len),
            *longest,
            *case.heads,
            lengths,
            cu_seqlens_q=rows,
            page_size=case.page_size,
            causal=True,
            window_size=options.get("window_size", (-1, -1)),
            has_softcap="softcap" in options,
        )
    out = problem.empty()

    def call(_: int) -> torch.Tensor:
        return fa.flash_attn_varlen_func(
            problem.q, problem.k, problem.v, longest[0], rows, longest[1], out=out, **keys, **options
        )

    return Engine(name, call, out)


def _page_table(problem: Problem) -> torch.Tensor:
    """Pages of each request [B, pages of the longest], int32; after a request's last one, 0."""
    ends, pages = problem.page_indptr, problem.on_device("page_indices")
    return pad_sequence([pages[begin:end] for begin, end in zip(ends, ends[1:])], batch_first=True)
