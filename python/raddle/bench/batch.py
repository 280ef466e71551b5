"""What all engines of a CPU compute: random inputs of a workload, and the exact outputs.

K and V [tokens, Hkv, D] are copied, in the arrangement that suits each engine, as often as fill pools that no cache
holds. All tensors come from torch's allocator.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Optional

import numpy as np
import torch

import raddle
from raddle.bench.workloads import Workload

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
    "int8": torch.bfloat16,
    "fp32": torch.float32,
}
#: Of K and V, where they are quantised.
STORED = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
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
        w, dtype = workload, DTYPES[workload.dtype]
        kv_shape = (sum(w.kv_len), w.num_kv_heads, w.head_dim)
        q = torch.randn(sum(w.qo_len), w.num_qo_heads, w.head_dim, dtype=dtype)
        k = torch.randn(kv_shape, dtype=dtype)
        v = k[..., : w.latent] if w.latent else torch.randn(kv_shape, dtype=dtype)
        if w.dtype in STORED:
            k, v = (quantized(x, w.dtype).to(dtype) * SCALE for x in (k, v))
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
                slopes = torch.tensor(raddle.alibi_slopes(self.workload.num_qo_heads))
                logits += slopes[of_head, None, None] * distance
            weights = logits.masked_fill_(hidden, float("-inf")).softmax(-1)
            heads.append(torch.einsum("grk,kd->rgd", weights, v[:, head]))
        return torch.cat(heads, 1)


def causal_mask(qo_len: int, kv_len: int) -> torch.Tensor:
    """True where a row sees a key; the rows are the last of kv_len tokens."""
    return torch.ones(qo_len, kv_len, dtype=torch.bool).tril_(kv_len - qo_len)


def quantized(x: torch.Tensor, dtype: str) -> torch.Tensor:
    x = x.float() / SCALE
    return (x.round().clamp(-127, 127) if dtype == "int8" else x).to(STORED[dtype])


def indptr(counts: Iterable[int]) -> np.ndarray:
    """[n + 1] int32 offsets of n consecutive spans."""
    return np.array([0, *itertools.accumulate(counts)], np.int32)
