"""PyTorch's scaled_dot_product_attention on dense K and V: on a CPU in every form that may be its fastest for a batch,
on a GPU its cuDNN backend and its FlashAttention-2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from raddle.bench.batch import Batch, causal_mask
from raddle.bench.engines import Engine, Makers
from raddle.bench.paged import copies
from raddle.bench.gpu.cases import Case
from raddle.bench.gpu.problem import Problem

_BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}


def torch_engines(batch: Batch, pool_bytes: Optional[int] = None) -> list[Engine]:
    """All forms for this batch, on a CPU."""
    w, n = batch.workload, len(batch.workload.kv_len)
    if w.phase != "prefill" and len(set(zip(w.qo_len, w.kv_len))) > 1:
        return [_torch_loop(batch, pool_bytes)]
    q, k, v = (x.view(n, -1, *x.shape[1:]).transpose(1, 2).contiguous() for x in (batch.q, batch.k, batch.v))
    pools = _dense_pools(k, v, copies(w.kv_bytes, pool_bytes))

    def form(name: str, q: torch.Tensor, pools: list[Any], **options: Any) -> Engine:
        def call(step: int) -> torch.Tensor:
            pool = pools[step % len(pools)]
            return F.scaled_dot_product_attention(q, *pool, is_causal=not w.is_decode, **options)

        return Engine(f"torch sdpa {name}", call, rows=lambda out: out.transpose(1, 2).reshape(batch.q.shape))

    if w.is_decode:
        # Query heads as rows of their KV head, half the pools away from the other form, which has just read its own.
        half, rows = len(pools) // 2, batch.q.view(n, w.num_kv_heads, w.group_size, w.head_dim)
        other = form("grouped", rows, pools[half:] + pools[:half])
        other.rows = lambda out: out.reshape(batch.q.shape)
    else:
        repeated = (x.repeat_interleave(w.group_size, 1) for x in (k, v))
        other = form("repeated", q, _dense_pools(*repeated, copies(w.kv_bytes * w.group_size, pool_bytes)))
    return [form("gqa", q, pools, enable_gqa=True), other]


def _torch_loop(batch: Batch, pool_bytes: Optional[int]) -> Engine:
    """A loop over requests: SDPA has no ragged form on a CPU, and padding would multiply what is read."""
    calls, count = [], copies(batch.workload.kv_bytes, pool_bytes)
    for q, k, v in batch.requests():
        pool = _dense_pools(k.transpose(0, 1)[None], v.transpose(0, 1)[None], count)
        calls.append((_one_row(q, batch) if len(q) == 1 else _several_rows(q, len(k)), pool))

    def loop(step: int) -> torch.Tensor:
        return torch.cat([call(*pool[step % count]) for call, pool in calls])

    return Engine("torch sdpa grouped loop", loop)


_Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _one_row(q: torch.Tensor, batch: Batch) -> _Call:
    """Query heads as rows of their KV head."""
    w = batch.workload
    grouped = q.view(1, w.num_kv_heads, w.group_size, w.head_dim)
    return lambda k, v: F.scaled_dot_product_attention(grouped, k, v).view(q.shape)


def _several_rows(q: torch.Tensor, kv_len: int) -> _Call:
    """The last rows of a request. SDPA's own causal mask fits a whole prompt only."""
    x = q.transpose(0, 1)[None].contiguous()
    whole = len(q) == kv_len
    mask = None if whole else causal_mask(len(q), kv_len)

    def call(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = F.scaled_dot_product_attention(x, k, v, attn_mask=mask, is_causal=whole, enable_gqa=True)
        return out[0].transpose(0, 1)

    return call


def _dense_pools(k: torch.Tensor, v: torch.Tensor, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """``count`` contiguous copies of K and V [B, H, S, D]."""
    dense = torch.contiguous_format
    return [(k.clone(memory_format=dense), v.clone(memory_format=dense)) for _ in range(count)]



def contestants(problem: Problem, case: Case, name: str) -> Makers:
    if case.variant == "causal":
        yield name, lambda: _prepared(problem, case, name)


def _prepared(problem: Problem, case: Case, name: str) -> Engine:
    q, (k, v) = problem.dense_q, problem.dense
    options: dict[str, Any] = {"is_causal": not case.is_decode}
    if case.group_size > 1:
        options["enable_gqa"] = True

    def call(_: int) -> torch.Tensor:
        with sdpa_kernel(_BACKENDS[name]):
            return F.scaled_dot_product_attention(q, k, v, **options)

    return Engine(name, call, rows=lambda out: out.transpose(1, 2).flatten(0, 1))


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
        mask = causal_mask(qo, kv).to(q.device) if 1 < qo < kv else None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=1 < qo == kv)
        found.append(out[0].transpose(0, 1))
    return torch.cat(found)
