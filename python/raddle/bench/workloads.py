"""What is measured: batches with literal lengths, so that every machine and every version runs the same ones.

The lengths follow Figure 8 of the FlashInfer paper (Ye et al., MLSys 2025): *constant* is the mean itself,
*uniform* was drawn from U(mean / 2, mean), *skewed* from a Zipf law scaled to that mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

HQ, HKV, D = 32, 8, 128
MEANS = (1024, 4096, 8192)
BYTES = {"fp32": 4, "bf16": 2}

_UNIFORM = {
    1024: (948, 838, 774, 650, 669, 533, 550, 520, 601, 929, 845, 980, 770, 823, 1009, 886),
    4096: (3790, 3353, 3095, 2600, 2678, 2131, 2202, 2081, 2407, 3714, 3378, 3918, 3079, 3290, 4037, 3542),
    8192: (7581, 6705, 6190, 5201, 5357, 4263, 4404, 4163, 4814, 7427, 6756, 7835, 6159, 6581, 8073, 7084),
}
_SKEWED = {
    1024: (455, 65, 1885, 3185, 845, 3445, 130, 65, 390, 650, 65, 260, 4161, 325, 390, 65),
    4096: (1820, 260, 7541, 12743, 3380, 13783, 520, 260, 1560, 2600, 260, 1040, 16644, 1300, 1560, 260),
    8192: (3640, 520, 15083, 25486, 6761, 27566, 1040, 520, 3120, 5201, 520, 2080, 33288, 2600, 3120, 520),
}


def lengths(kind: str, batch: int, mean: int) -> tuple[int, ...]:
    """KV lengths of ``batch`` requests (1 or 16), ``kind`` one of constant, uniform, skewed.

    One request of a skewed batch alone has the mean's length, one of a uniform batch the first one's.
    Raises ``ValueError`` for a batch that is not in the table.
    """
    if batch not in (1, 16) or mean not in MEANS:
        raise ValueError(f"batch {batch}, mean {mean}: expected batch 1 or 16, mean one of {MEANS}")
    if kind == "constant" or (kind == "skewed" and batch == 1):
        return (mean,) * batch
    table = {"uniform": _UNIFORM, "skewed": _SKEWED}.get(kind)
    if table is None:
        raise ValueError(f"kind is {kind!r}; expected constant, uniform or skewed")
    return table[mean][:batch]


@dataclass(frozen=True)
class Workload:
    """One batch: a query row a request (decode), or as many rows as keys under a causal mask (prefill)."""

    phase: str  #: "decode" or "prefill"
    dtype: str  #: "bf16" or "fp32"
    kind: str  #: what the lengths are called in the name: "S1024", "skewed4096"
    kv_len: tuple[int, ...]
    bar: Optional[float] = None  #: least accepted speed relative to PyTorch's SDPA at its best
    usual: bool = True  #: measured unless ``--workloads`` says otherwise
    num_qo_heads: int = HQ
    num_kv_heads: int = HKV
    head_dim: int = D

    @property
    def name(self) -> str:
        return f"{self.phase} {self.dtype} B{len(self.kv_len)} {self.kind}"

    @property
    def is_decode(self) -> bool:
        return self.phase == "decode"

    @property
    def group_size(self) -> int:
        return self.num_qo_heads // self.num_kv_heads

    @property
    def qo_len(self) -> tuple[int, ...]:
        return (1,) * len(self.kv_len) if self.is_decode else self.kv_len

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V together."""
        return 2 * sum(self.kv_len) * self.num_kv_heads * self.head_dim * BYTES[self.dtype]

    @property
    def work(self) -> float:
        """Bytes of K and V that a decode reads; floating-point operations of a causal prefill.

        Half the square counts, as everybody counts it, though the diagonal adds a little.
        """
        if self.is_decode:
            return float(self.kv_bytes)
        return sum(4.0 * self.num_qo_heads * self.head_dim * n * n / 2 for n in self.kv_len)

    @property
    def unit(self) -> str:
        return "GB/s" if self.is_decode else "GFLOP/s"

    def rate(self, us: float) -> float:
        """Work a second, in ``unit``, when a call takes ``us`` microseconds."""
        return self.work / us / 1e3


def _decode(dtype: str) -> list[Workload]:
    bar = 1.5 if dtype == "bf16" else None
    return [
        Workload("decode", dtype, "S1024", lengths("constant", 16, 1024), bar),
        Workload("decode", dtype, "S4096", lengths("constant", 16, 4096), bar),
        Workload("decode", dtype, "S8192", lengths("constant", 1, 8192), bar),
        Workload("decode", dtype, "skewed4096", lengths("skewed", 16, 4096), bar),
        Workload("decode", dtype, "skewed1024", lengths("skewed", 16, 1024), usual=False),
        Workload("decode", dtype, "skewed8192", lengths("skewed", 16, 8192), usual=False),
        Workload("decode", dtype, "uniform1024", lengths("uniform", 16, 1024), usual=False),
        Workload("decode", dtype, "uniform4096", lengths("uniform", 16, 4096), usual=False),
        Workload("decode", dtype, "uniform8192", lengths("uniform", 16, 8192), usual=False),
    ]


def _prefill(dtype: str) -> list[Workload]:
    bar = 0.5 if dtype == "fp32" else None
    return [
        Workload("prefill", dtype, "S1024", lengths("constant", 1, 1024)),
        Workload("prefill", dtype, "S4096", lengths("constant", 1, 4096), bar),
    ]


ALL = tuple(_decode("bf16") + _decode("fp32") + _prefill("bf16") + _prefill("fp32"))


def chosen(patterns: tuple[str, ...] = ()) -> list[Workload]:
    """The usual workloads; with patterns, all those whose name holds every word of one of them.

    Raises ``ValueError`` for a pattern that fits none.
    """
    if not patterns:
        return [w for w in ALL if w.usual]
    for pattern in patterns:
        if not any(_fits(w, pattern) for w in ALL):
            names = ", ".join(w.name for w in ALL)
            raise ValueError(f"no workload fits {pattern!r}; expected words of one of: {names}")
    return [w for w in ALL if any(_fits(w, pattern) for pattern in patterns)]


def _fits(workload: Workload, pattern: str) -> bool:
    return all(word in workload.name for word in pattern.split())
