"""PyTorch's scaled_dot_product_attention on dense K and V: its cuDNN backend, and its FlashAttention-2."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from raddle.bench.gpu.cases import Case
from raddle.bench.gpu.engines import Contestant, Makers
from raddle.bench.gpu.problem import Problem

_BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}


def contestants(problem: Problem, case: Case, name: str) -> Makers:
    if case.variant == "causal":
        yield name, lambda: _prepared(problem, case, name)


def _prepared(problem: Problem, case: Case, name: str) -> Contestant:
    q, (k, v) = problem.dense_q, problem.dense
    options: dict[str, Any] = {"is_causal": not case.is_decode}
    if case.group_size > 1:
        options["enable_gqa"] = True

    def call() -> torch.Tensor:
        with sdpa_kernel(_BACKENDS[name]):
            return F.scaled_dot_product_attention(q, k, v, **options)

    return Contestant(name, call, rows=lambda out: out.transpose(1, 2).reshape(problem.q.shape))


def exact_enough(problem: Problem, case: Case) -> torch.Tensor:
    """O [rows, Hq, D] by SDPA as it chooses its backend, a request at a time: whose error others are held against."""
    hq, hkv, _ = case.heads
    found = []
    for request, (qo, kv) in enumerate(zip(case.qo_len, case.kv_len)):
        first = int(problem.qo_indptr[request])
        k, v = problem.tokens(request)
        if case.form == "blocks":
            kept = problem.on_device("kept_blocks").long()
            k, v = (x.view(-1, case.page_size, *x.shape[1:])[kept].flatten(0, 1) for x in (k, v))
        q, k, v = (x.transpose(0, 1)[None] for x in (problem.q[first : first + qo], k, v))
        k, v = (x.repeat_interleave(hq // hkv, 1) for x in (k, v))
        mask = None
        if 1 < qo < kv:
            mask = torch.ones(qo, kv, dtype=torch.bool, device=q.device).tril(kv - qo)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=1 < qo == kv)
        found.append(out[0].transpose(0, 1))
    return torch.cat(found)
