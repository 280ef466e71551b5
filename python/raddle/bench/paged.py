"""Raddle on a CPU: pages in one shuffled pool that no cache holds."""

from __future__ import annotations

from typing import Any, Optional

import numpy as np
import torch

import raddle
from raddle import flex
from raddle.bench.batch import SCALE, SOFT_CAP, STORED, Batch, indptr, quantized
from raddle.bench.engines import RADDLE, Engine
from raddle.bench.workloads import Workload

#: Shared last-level caches reach hundreds of MB: a pool is read again only after this many bytes.
POOL_BYTES = 2 * 10**9


def _variant(workload: Workload) -> list[Any]:
    """Causal, and the score as users write it: a function of Python, which takes a compiler."""
    mods = {
        None: lambda: [],
        "softcap": lambda: [flex.mods.softcap(SOFT_CAP)],
        "alibi": lambda: [flex.mods.alibi(raddle.alibi_slopes(workload.num_qo_heads))],
    }
    return [*mods[workload.score](), raddle.Causal()]


def copies(kv_bytes: int, pool_bytes: Optional[int] = None) -> int:
    """How many copies of K and V fill ``pool_bytes`` (default `POOL_BYTES`); at least two."""
    return max(2, -(-(pool_bytes or POOL_BYTES) // kv_bytes))


class PagedBatch:
    """Raddle on pages in one shuffled pool, with a page table and a plan for each copy of the batch.

    The form is ``workload``'s, by default the batch's own: its page size, its K and V of 8 bits or not, its score.
    """

    def __init__(
        self, batch: Batch, pool_bytes: Optional[int] = None, workload: Optional[Workload] = None
    ) -> None:
        w = workload or batch.workload
        self.batch, self.workload, self.copies = batch, w, copies(w.kv_bytes, pool_bytes)
        self._is_quantized = w.dtype in STORED
        spec = raddle.AttentionSpec(
            num_qo_heads=w.num_qo_heads,
            num_kv_heads=w.num_kv_heads,
            head_dim=w.head_dim,
            head_dim_vo=w.head_dim_vo,
            dtype=str(batch.q.dtype).split(".")[-1],
            kv_dtype=STORED.get(w.dtype),
            variant=_variant(w),
        )
        self.attention = raddle.Attention(spec)
        self.out = batch.q.new_empty(*batch.q.shape[:2], w.head_dim_vo)
        self._page_indptr = indptr(-(-n // w.page_size) for n in w.kv_len)
        total = int(self._page_indptr[-1])
        self._tables = torch.randperm(total * self.copies, dtype=torch.int32).view(self.copies, total)
        shape = (total * self.copies, w.page_size, w.num_kv_heads, w.head_dim)
        stored = torch.uint8 if self._is_quantized else batch.q.dtype
        written = tuple(torch.empty(shape, dtype=stored) for _ in ("k" if w.latent else "kv"))
        rows = [self._stored(x).split(w.kv_len) for x in (batch.k, batch.v)]
        for copy in range(self.copies):
            self._fill(copy, written, rows)
        self.pools = (written[0], written[0][..., : w.latent]) if w.latent else written
        self.plans = [self.plan(copy) for copy in range(self.copies)]
        self._scales = {"k_scale": SCALE, "v_scale": SCALE} if self._is_quantized else {}

    def layout(self, copy: int) -> raddle.PagedKV:
        w = self.workload
        kv_len = np.array(w.kv_len, np.int32)
        return raddle.PagedKV(indptr(w.qo_len), self._page_indptr, self._tables[copy], kv_len, page_size=w.page_size)

    def plan(self, copy: int, num_workers: int | None = None) -> raddle.Plan:
        return self.attention.plan(self.layout(copy), num_workers=num_workers)

    def run(self, step: int) -> torch.Tensor:
        plan = self.plans[step % self.copies]
        return self.attention.run(plan, self.batch.q, self.pools, out=self.out, **self._scales)

    def _stored(self, x: torch.Tensor) -> torch.Tensor:
        return quantized(x, self.workload.dtype).view(torch.uint8) if self._is_quantized else x

    def _fill(self, copy: int, pools: tuple[torch.Tensor, ...], rows: list[tuple[torch.Tensor, ...]]) -> None:
        """Writes the batch's K and V into the pages of one copy."""
        size, table, first = self.workload.page_size, self._tables[copy].long(), self._page_indptr.tolist()
        for pool, requests in zip(pools, rows):
            for request, tokens in enumerate(requests):
                position = torch.arange(len(tokens))
                slot = table[first[request] + position // size] * size + position % size
                pool.view(-1, *tokens.shape[1:]).index_copy_(0, slot, tokens)


def raddle_engines(batch: Batch, pool_bytes: Optional[int] = None) -> list[Engine]:
    """Raddle; of a form of another workload also that one, on the same batch."""
    w = batch.workload
    batches = {RADDLE: PagedBatch(batch, pool_bytes)}
    if not w.is_plain:
        batches[f"{RADDLE} {w.plain.dtype}, page {w.plain.page_size}"] = PagedBatch(batch, pool_bytes, w.plain)
    return [Engine(name, each.run, each.out, score=each.workload.score) for name, each in batches.items()]
