"""One row of the benchmark: a batch, how its keys lie, what is computed, and what it is held against."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from raddle.bench import workloads
from raddle.bench.workloads import document_offsets

ITEM_BYTES = 2  #: bfloat16, the dtype of every case; K and V may be stored in 8 bits
SOFT_CAP = 30.0
WINDOW = 1024


def lengths(kind: str, batch: int, mean: int) -> tuple[int, ...]:
    """KV lengths of a batch: those of `raddle.bench.workloads`; other batches are constant, or drawn from
    U(mean / 2, mean) with a fixed seed. Raises ValueError for a kind that has no such batch."""
    if kind == "constant":
        return (mean,) * batch
    if kind == "uniform" and batch > 16:
        draw = random.Random(0)
        return tuple(draw.randint(mean // 2, mean) for _ in range(batch))
    return workloads.lengths(kind, batch, mean)


@dataclass(frozen=True)
class Case:
    """A batch of requests, computed in bfloat16.

    ``name`` is unique in its section. Rates count bytes of K and V read once ("GB/s"), or two floating-point operations
    for each kept pair and element of the heads of K and of V ("TFLOP/s").
    """

    name: str
    qo_len: tuple[int, ...]
    kv_len: tuple[int, ...]  #: all keys of a request, those of a shared prefix included
    heads: tuple[int, int, int] = (32, 8, 128)  #: Hq, Hkv, D
    form: str = "paged"  #: or "ragged", "cascade" (a shared prefix as a level), "blocks" (block-sparse)
    page_size: int = 16
    variant: str = "causal"
    prefix: int = 0  #: leading keys that all requests share
    latent: int = 0  #: MLA with absorbed weights: V is so many first columns of K
    values: int = 0  #: columns of V, where they are not as many as those of K
    blocks: int = 0  #: form "blocks": blocks of page_size slots that the only row keeps
    unit: str = "GB/s"
    peers: tuple[str, ...] = ()  #: engines that join, by family: "flashinfer", "cudnn", "flex", "fa2", "fa3", "fa4"
    floor: bool = False  #: time a read of as many bytes, too
    is_call: bool = False  #: Raddle takes part by calls of `raddle.flex.flex_attention`, not by a plan made ahead
    kv_dtype: str = ""  #: "float8_e4m3fn" or "float8_e5m2": what K and V are stored in, with scales
    scales: str = "tensor"  #: or "token": one a token and head
    backends: tuple[str, ...] = ()  #: kernel families that take part, each asked for by RADDLE_BACKEND, too
    versus: str = ""  #: case of the same section whose rate this one's is divided by
    at_least: Mapping[str, float] = field(default_factory=dict)  #: targets: peer's family, "floor" or "versus"

    @property
    def is_decode(self) -> bool:
        return max(self.qo_len) == 1

    @property
    def num_rows(self) -> int:
        return sum(self.qo_len)

    @property
    def group_size(self) -> int:
        return self.heads[0] // self.heads[1]

    @property
    def dim_vo(self) -> int:
        return self.latent or self.values or self.heads[2]

    @property
    def bytes_read(self) -> int:
        """Bytes of K and V, a shared prefix counted once, and V not where it is a part of K."""
        if self.form == "blocks":
            tokens = self.blocks * self.page_size
        elif self.prefix:
            tokens = self.prefix + sum(n - self.prefix for n in self.kv_len)
        else:
            tokens = sum(self.kv_len)
        rows = (self.heads[2],) if self.latent else (self.heads[2], self.dim_vo)
        scale = 4 if self.kv_dtype and self.scales == "token" else 0
        item = 1 if self.kv_dtype else ITEM_BYTES
        return tokens * self.heads[1] * sum(columns * item + scale for columns in rows)

    @property
    def flops(self) -> float:
        kept = sum(self._kept(qo, kv) for qo, kv in zip(self.qo_len, self.kv_len))
        return 2.0 * self.heads[0] * (self.heads[2] + self.dim_vo) * kept

    def _kept(self, qo: int, kv: int) -> int:
        """Pairs of row and key that the mask keeps."""
        if self.variant == "window":
            sees = min(qo, max(0, WINDOW + 1 - (kv - qo)))  # rows that see all keys before them
            whole = sum(range(kv - qo + 1, kv - qo + sees + 1))
            return whole + (qo - sees) * (WINDOW + 1)
        if self.variant == "documents":
            return sum(n * (n + 1) // 2 for n in np.diff(document_offsets(kv)).tolist())
        return qo * kv - qo * (qo - 1) // 2

    def rate(self, us: float) -> float:
        """Work a second, in ``unit``, of a call that takes ``us`` microseconds."""
        return self.bytes_read / us / 1e3 if self.unit == "GB/s" else self.flops / us / 1e6

    def shrunk(self, most: int = 96) -> Case:
        """The same kernels on a batch of almost nothing: to compile them, or to see that all fits together."""
        shared = min(self.prefix, most // 2 // 16 * 16)
        cut = [(min(qo, most), min(kv, most)) for qo, kv in zip(self.qo_len[:4], self.kv_len[:4])]
        qo_len, kv_len = zip(*cut)
        changed = {"qo_len": qo_len, "kv_len": kv_len, "prefix": shared, "blocks": min(self.blocks, 4)}
        return type(self)(**{**self.__dict__, **changed})


@dataclass(frozen=True)
class Section:
    """Cases that are timed in the same rounds; ``small`` is held against fp64 beside PyTorch's own."""

    name: str
    title: str
    cases: tuple[Case, ...] = ()
    small: Case | None = None
    rows: tuple[str, ...] = ()  #: what a section without cases measures
