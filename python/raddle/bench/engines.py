"""The engines that are compared, each with pools so large that no call finds its keys in a cache.

All engines compute the same batch: random K and V [tokens, Hkv, D], copied as often as fill
``POOL_BYTES``, in the arrangement that suits each. All tensors come from torch's allocator.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn.functional as F

import raddle
from raddle.bench.workloads import Workload

#: Shared last-level caches reach hundreds of MB: a pool is read again only after this many bytes.
POOL_BYTES = 2 * 10**9
PAGE_SIZE = 16
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
#: Largest accepted RMS error relative to the RMS of the outputs, against SDPA in fp32.
TOLERANCE = {"bf16": 1e-2, "fp32": 2e-5}


@dataclass
class Batch:
    """Inputs of one workload: q [rows, Hq, D], k and v [tokens, Hkv, D], requests one after another."""

    workload: Workload
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def random(cls, workload: Workload, seed: int = 0) -> Batch:
        torch.manual_seed(seed)
        w, dtype = workload, _DTYPES[workload.dtype]
        kv_shape = (sum(w.kv_len), w.num_kv_heads, w.head_dim)
        q = torch.randn(sum(w.qo_len), w.num_qo_heads, w.head_dim, dtype=dtype)
        return cls(w, q, torch.randn(kv_shape, dtype=dtype), torch.randn(kv_shape, dtype=dtype))

    def requests(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(q, k, v) of each request."""
        w = self.workload
        parts = self.q.split(w.qo_len), self.k.split(w.kv_len), self.v.split(w.kv_len)
        return list(zip(*parts))

    def reference(self) -> torch.Tensor:
        """O [rows, Hq, D] by SDPA in fp32, one request at a time."""
        repeats = self.workload.group_size
        outputs = []
        for q, k, v in self.requests():
            q, k, v = (x.float().transpose(0, 1)[None] for x in (q, k, v))
            k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
            causal = not self.workload.is_decode
            outputs.append(F.scaled_dot_product_attention(q, k, v, is_causal=causal)[0].transpose(0, 1))
        return torch.cat(outputs)


@dataclass
class Engine:
    """Something that computes the batch."""

    name: str
    call: Callable[[int], torch.Tensor]  #: what is timed; its argument chooses the pool
    rows: Callable[[torch.Tensor], torch.Tensor]  #: what ``call`` returned as O [rows, Hq, D]

    def error(self, reference: torch.Tensor, step: int = 0) -> float:
        """RMS error of one call relative to the RMS of ``reference``; NaN where the output holds one."""
        difference = self.rows(self.call(step)).float() - reference
        return float(difference.square().mean().sqrt() / reference.square().mean().sqrt())


def copies(kv_bytes: int, pool_bytes: Optional[int] = None) -> int:
    """How many copies of K and V fill ``pool_bytes`` (default `POOL_BYTES`); at least two."""
    return max(2, -(-(pool_bytes or POOL_BYTES) // kv_bytes))


class PagedBatch:
    """Raddle on pages of 16 in one shuffled pool, with a page table and a plan for each copy of the batch."""

    def __init__(self, batch: Batch, pool_bytes: Optional[int] = None) -> None:
        w = batch.workload
        self.batch, self.copies = batch, copies(w.kv_bytes, pool_bytes)
        spec = raddle.AttentionSpec(
            num_qo_heads=w.num_qo_heads,
            num_kv_heads=w.num_kv_heads,
            head_dim=w.head_dim,
            dtype=str(batch.q.dtype).split(".")[-1],
            variant=[raddle.Causal()],
        )
        self.attention = raddle.Attention(spec)
        self.out = torch.empty_like(batch.q)
        self._kv_len = torch.tensor(w.kv_len, dtype=torch.int32)
        self._qo_indptr = _indptr(torch.tensor(w.qo_len))
        pages = -(-self._kv_len // PAGE_SIZE)
        self._page_indptr = _indptr(pages)
        total = int(pages.sum())
        self._tables = torch.randperm(total * self.copies, dtype=torch.int32).view(self.copies, total)
        shape = (total * self.copies, PAGE_SIZE, w.num_kv_heads, w.head_dim)
        self.pools = tuple(torch.empty(shape, dtype=batch.q.dtype) for _ in "kv")
        for copy in range(self.copies):
            self._fill(copy)
        self.plans = [self.plan(copy) for copy in range(self.copies)]

    def layout(self, copy: int) -> raddle.PagedKV:
        tables = (self._qo_indptr, self._page_indptr, self._tables[copy], self._kv_len)
        return raddle.PagedKV(*tables, page_size=PAGE_SIZE)

    def plan(self, copy: int, num_workers: int | None = None) -> raddle.Plan:
        return self.attention.plan(self.layout(copy), num_workers=num_workers)

    def run(self, step: int) -> torch.Tensor:
        plan = self.plans[step % self.copies]
        return self.attention.run(plan, self.batch.q, self.pools, out=self.out)

    def _fill(self, copy: int) -> None:
        """Writes the batch's K and V into the pages of one copy."""
        table, first = self._tables[copy].long(), self._page_indptr.tolist()
        for request, (_, k, v) in enumerate(self.batch.requests()):
            position = torch.arange(len(k))
            slot = table[first[request] + position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
            for pool, rows in zip(self.pools, (k, v)):
                pool.view(-1, *rows.shape[1:]).index_copy_(0, slot, rows)


def raddle_engine(batch: Batch, pool_bytes: Optional[int] = None) -> Engine:
    return Engine("raddle", PagedBatch(batch, pool_bytes).run, lambda out: out)


def torch_engines(batch: Batch, pool_bytes: Optional[int] = None) -> list[Engine]:
    """PyTorch's SDPA on dense K and V, in every form that may be its fastest for this batch."""
    if not batch.workload.is_decode:
        return _torch_prefill(batch, pool_bytes)
    if len(set(batch.workload.kv_len)) > 1:
        return [_torch_ragged_decode(batch, pool_bytes)]
    return _torch_decode(batch, pool_bytes)


def _torch_decode(batch: Batch, pool_bytes: Optional[int]) -> list[Engine]:
    w, shape = batch.workload, batch.q.shape
    n = len(w.kv_len)
    k, v = (x.view(n, -1, *x.shape[1:]).transpose(1, 2) for x in (batch.k, batch.v))
    pools = _dense_pools(k, v, copies(w.kv_bytes, pool_bytes))
    q_gqa = batch.q.view(n, w.num_qo_heads, 1, w.head_dim)
    q_grouped = batch.q.view(n, w.num_kv_heads, w.group_size, w.head_dim)

    def gqa(step: int) -> torch.Tensor:
        return F.scaled_dot_product_attention(q_gqa, *pools[step % len(pools)], enable_gqa=True)

    def grouped(step: int) -> torch.Tensor:
        # Half the pools away from the other form, which has just read its own.
        return F.scaled_dot_product_attention(q_grouped, *pools[(step + len(pools) // 2) % len(pools)])

    forms = (("torch sdpa gqa", gqa), ("torch sdpa grouped", grouped))
    return [Engine(name, call, lambda out: out.reshape(shape)) for name, call in forms]


def _torch_ragged_decode(batch: Batch, pool_bytes: Optional[int]) -> Engine:
    """A loop over requests: SDPA has no ragged form on a CPU, and padding would multiply what is read."""
    w = batch.workload
    q = [each.view(1, w.num_kv_heads, w.group_size, w.head_dim) for each, _, _ in batch.requests()]
    one = [(k.transpose(0, 1)[None], v.transpose(0, 1)[None]) for _, k, v in batch.requests()]
    pools = [_dense_pools(k, v, copies(w.kv_bytes, pool_bytes)) for k, v in one]

    def loop(step: int) -> torch.Tensor:
        outputs = [F.scaled_dot_product_attention(x, *pool[step % len(pool)]) for x, pool in zip(q, pools)]
        return torch.cat(outputs)

    return Engine("torch sdpa grouped loop", loop, lambda out: out.reshape(batch.q.shape))


def _torch_prefill(batch: Batch, pool_bytes: Optional[int]) -> list[Engine]:
    w, n = batch.workload, len(batch.workload.kv_len)
    q, k, v = (x.view(n, -1, *x.shape[1:]).transpose(1, 2).contiguous() for x in (batch.q, batch.k, batch.v))
    pools = _dense_pools(k, v, copies(w.kv_bytes, pool_bytes))
    repeated = [x.repeat_interleave(w.group_size, 1) for x in (k, v)]
    repeated_pools = _dense_pools(*repeated, copies(w.kv_bytes * w.group_size, pool_bytes))

    def gqa(step: int) -> torch.Tensor:
        pool = pools[step % len(pools)]
        return F.scaled_dot_product_attention(q, *pool, is_causal=True, enable_gqa=True)

    def repeat(step: int) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, *repeated_pools[step % len(repeated_pools)], is_causal=True)

    forms = (("torch sdpa gqa", gqa), ("torch sdpa repeated", repeat))

    def rows(out: torch.Tensor) -> torch.Tensor:
        return out.transpose(1, 2).reshape(batch.q.shape)

    return [Engine(name, call, rows) for name, call in forms]


def _dense_pools(k: torch.Tensor, v: torch.Tensor, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """``count`` contiguous copies of K and V [B, H, S, D]."""
    dense = torch.contiguous_format
    return [(k.clone(memory_format=dense), v.clone(memory_format=dense)) for _ in range(count)]


def _indptr(counts: torch.Tensor) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(counts.tolist())], dtype=torch.int32)
