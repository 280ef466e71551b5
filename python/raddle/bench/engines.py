"""Raddle on a batch, and what all engines share: inputs, reference, pools that no cache holds.

All engines compute the same batch: random K and V [tokens, Hkv, D], copied as often as fill
``POOL_BYTES``, in the arrangement that suits each. All tensors come from torch's allocator.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

import torch

import raddle
from raddle import flex
from raddle.bench.workloads import Workload

#: Shared last-level caches reach hundreds of MB: a pool is read again only after this many bytes.
POOL_BYTES = 2 * 10**9
_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
    "int8": torch.bfloat16,
    "fp32": torch.float32,
}
#: Of K and V, where they are quantised.
_STORED = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
#: Largest accepted RMS error relative to the RMS of the outputs, against attention in fp32.
TOLERANCE = {"bf16": 1e-2, "fp16": 2e-3, "fp8": 1e-2, "int8": 1e-2, "fp32": 2e-5}
#: What K and V of 8 bits are multiplied by: standard normal numbers then lie within int8's ±127 and e4m3's ±448.
SCALE = 1 / 16
SOFT_CAP = 30.0


@dataclass
class Batch:
    """Inputs of one workload: q [rows, Hq, D], k and v [tokens, Hkv, D], requests one after another.

    Of a workload with latents v is a view of k. Of one with K and V of 8 bits they hold exactly what these hold.
    """

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
        k = torch.randn(kv_shape, dtype=dtype)
        v = k[..., : w.latent] if w.latent else torch.randn(kv_shape, dtype=dtype)
        if w.dtype in _STORED:
            k, v = (_quantized(x, w.dtype).to(dtype) * SCALE for x in (k, v))
        return cls(w, q, k, v)

    def requests(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(q, k, v) of each request."""
        w = self.workload
        parts = self.q.split(w.qo_len), self.k.split(w.kv_len), self.v.split(w.kv_len)
        return list(zip(*parts))

    def reference(self, score: Optional[str] = None) -> torch.Tensor:
        """O [rows, Hq, D] in fp32 with that score, one request at a time."""
        return torch.cat([self._reference(score, *(x.float() for x in each)) for each in self.requests()])

    def _reference(self, score: Optional[str], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """One KV head at a time: the logits of all of them would take gigabytes."""
        group = self.workload.group_size
        hidden = causal_mask(len(q), len(k)).logical_not()
        distance = torch.arange(len(k)) - torch.arange(len(k) - len(q), len(k))[:, None]
        heads = []
        for head in range(k.shape[1]):
            of_head = slice(head * group, (head + 1) * group)
            logits = torch.einsum("rgd,kd->grk", q[:, of_head], k[:, head]) * self.workload.head_dim**-0.5
            if score == "softcap":
                logits = SOFT_CAP * torch.tanh(logits / SOFT_CAP)
            elif score == "alibi":
                logits += slopes(self.workload.num_qo_heads)[of_head, None, None] * distance
            weights = logits.masked_fill_(hidden, float("-inf")).softmax(-1)
            heads.append(torch.einsum("grk,kd->rgd", weights, v[:, head]))
        return torch.cat(heads, 1)


def causal_mask(qo_len: int, kv_len: int) -> torch.Tensor:
    """True where a row sees a key; the rows are the last of kv_len tokens."""
    return torch.ones(qo_len, kv_len, dtype=torch.bool).tril_(kv_len - qo_len)


def slopes(num_qo_heads: int) -> torch.Tensor:
    """ALiBi's, one a head."""
    return 2.0 ** (-8.0 * torch.arange(1, num_qo_heads + 1) / num_qo_heads)


def _quantized(x: torch.Tensor, dtype: str) -> torch.Tensor:
    x = x.float() / SCALE
    return (x.round().clamp(-127, 127) if dtype == "int8" else x).to(_STORED[dtype])


def _variant(workload: Workload) -> list[Any]:
    """Causal, and the score as users write it: a function of Python, which takes a compiler."""
    mods = {
        None: lambda: [],
        "softcap": lambda: [flex.mods.softcap(SOFT_CAP)],
        "alibi": lambda: [flex.mods.alibi(slopes(workload.num_qo_heads).numpy())],
    }
    return [*mods[workload.score](), raddle.Causal()]


@dataclass
class Engine:
    """Something that computes the batch."""

    name: str
    call: Callable[[int], Any]  #: what is timed; its argument chooses the pool
    rows: Callable[[Any], torch.Tensor]  #: what ``call`` returned as O [rows, Hq, D]
    score: Optional[str] = None  #: what it does to logits

    def error(self, reference: torch.Tensor, step: int = 0) -> float:
        """RMS error of one call relative to the RMS of ``reference``; NaN where the output holds one."""
        difference = self.rows(self.call(step)).float() - reference
        return float(difference.square().mean().sqrt() / reference.square().mean().sqrt())


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
        self._is_quantized = w.dtype in _STORED
        spec = raddle.AttentionSpec(
            num_qo_heads=w.num_qo_heads,
            num_kv_heads=w.num_kv_heads,
            head_dim=w.head_dim,
            head_dim_vo=w.head_dim_vo,
            dtype=str(batch.q.dtype).split(".")[-1],
            kv_dtype=_STORED.get(w.dtype),
            variant=_variant(w),
        )
        self.attention = raddle.Attention(spec)
        self.out = batch.q.new_empty(*batch.q.shape[:2], w.head_dim_vo)
        self._kv_len = torch.tensor(w.kv_len, dtype=torch.int32)
        self._qo_indptr = _indptr(torch.tensor(w.qo_len))
        pages = -(-self._kv_len // w.page_size)
        self._page_indptr = _indptr(pages)
        total = int(pages.sum())
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
        tables = (self._qo_indptr, self._page_indptr, self._tables[copy], self._kv_len)
        return raddle.PagedKV(*tables, page_size=self.workload.page_size)

    def plan(self, copy: int, num_workers: int | None = None) -> raddle.Plan:
        return self.attention.plan(self.layout(copy), num_workers=num_workers)

    def run(self, step: int) -> torch.Tensor:
        plan = self.plans[step % self.copies]
        return self.attention.run(plan, self.batch.q, self.pools, out=self.out, **self._scales)

    def _stored(self, x: torch.Tensor) -> torch.Tensor:
        return _quantized(x, self.workload.dtype).view(torch.uint8) if self._is_quantized else x

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
    engines = [Engine("raddle", PagedBatch(batch, pool_bytes).run, lambda out: out, w.score)]
    if not w.is_plain:
        name = f"raddle {w.plain.dtype}, page {w.plain.page_size}"
        engines.append(Engine(name, PagedBatch(batch, pool_bytes, w.plain).run, lambda out: out))
    return engines


def _indptr(counts: torch.Tensor) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(counts.tolist())], dtype=torch.int32)
