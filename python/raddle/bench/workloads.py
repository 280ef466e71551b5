"""What is measured: batches with literal lengths, so that every machine and every version runs the same ones.

The lengths follow Figure 8 of the FlashInfer paper (Ye et al., MLSys 2025): *constant* is the mean itself,
*uniform* was drawn from U(mean / 2, mean), *skewed* from a Zipf law scaled to that mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Optional

import numpy as np

HQ, HKV, D = 32, 8, 128
MEANS = (1024, 4096, 8192)
DOCUMENTS = 12
PAGE_SIZE = 16
#: More query heads to a KV head than these, and a decode takes the time of its arithmetic, not of reading.
MOST_READING = 16
#: Of an element of K and V; where these are quantised, Q and the output are in bf16.
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
#: Least bytes of K and V that a turn of a decode reads: tens of milliseconds of work, as a step of a model is.
TURN_BYTES = 512 * 10**6

#: On AVX2, bars of plain workloads: speed relative to the best of the others, and share of the machine's limit.
_AVX2_BARS = {
    **{("decode", dtype): {"bar": 1.15, "share_bar": 0.6} for dtype in ("bf16", "fp16", "fp32")},
    ("prefill", "bf16"): {"bar": 1.8},
    ("prefill", "fp32"): {"bar": 1.4},
}

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
    """One batch, causal: a query row a request (decode), as many as keys or the last ones (prefill), or both (mixed)."""

    phase: str  #: "decode", "prefill" or "mixed"
    dtype: str  #: "bf16", "fp16", "fp32", or of K and V with a scale alone: "fp8" (e4m3) and "int8", all else bf16
    kind: str  #: what the lengths are called in the name: "S1024", "skewed4096"
    kv_len: tuple[int, ...]
    bar: Optional[float] = None  #: least accepted speed relative to the best of the others
    usual: bool = True  #: measured unless ``--workloads`` says otherwise
    num_qo_heads: int = HQ
    num_kv_heads: int = HKV
    head_dim: int = D
    page_size: int = PAGE_SIZE
    score: Optional[str] = None  #: "softcap" or "alibi", written in Python
    chunks: tuple[int, ...] = ()  #: rows of each request; empty: one in decode, as many as keys in prefill
    share_bar: Optional[float] = None  #: least accepted share of the machine's limit
    latent: int = 0  #: MLA with absorbed weights: V is so many first columns of K

    @property
    def name(self) -> str:
        words = [self.phase, self.dtype, f"B{len(self.kv_len)}", self.kind]
        if self.latent:
            words.append(f"mla{self.num_qo_heads}")
        if self.group_size == 1:
            words.append("G1")
        if self.page_size != PAGE_SIZE:
            words.append(f"page{self.page_size}")
        return " ".join([*words, self.score] if self.score else words)

    @property
    def is_decode(self) -> bool:
        return self.phase == "decode"

    def judged_on(self, isa: str) -> Workload:
        """The workload with the bars of an instruction set, where it has some of its own."""
        if isa == "avx2" and self.is_plain and not self.latent:
            return replace(self, **_AVX2_BARS.get((self.phase, self.dtype), {}))
        if isa == "amx" and self.score and not self.is_decode:
            return replace(self, bar=0.8)  # scores run on vectors beside products that tiles make fast
        return self

    @property
    def group_size(self) -> int:
        return self.num_qo_heads // self.num_kv_heads

    @property
    def head_dim_vo(self) -> int:
        return self.latent or self.head_dim

    @property
    def qo_len(self) -> tuple[int, ...]:
        return self.chunks or ((1,) * len(self.kv_len) if self.is_decode else self.kv_len)

    @property
    def plain(self) -> Workload:
        """What the workload is compared with where it is a form of another: bf16, pages of 16, no score."""
        dtype = "bf16" if self.dtype in ("fp8", "int8") else self.dtype
        return replace(self, dtype=dtype, page_size=PAGE_SIZE, score=None)

    @property
    def is_plain(self) -> bool:
        return self == self.plain

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V together."""
        return sum(self.kv_len) * self.token_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of a token; a latent is both."""
        dims = self.head_dim if self.latent else 2 * self.head_dim
        return self.num_kv_heads * dims * BYTES[self.dtype]

    @property
    def layers(self) -> int:
        """Calls that are timed as one step: of a short decode as many as read `TURN_BYTES`, else one."""
        return max(1, -(-TURN_BYTES // self.kv_bytes)) if self.is_decode else 1

    @property
    def is_few(self) -> bool:
        """Whether a short comparison has it."""
        same_form = replace(self.plain, score=self.score) == self
        return self.bar is not None and same_form and self.group_size > 1 and len(set(self.kv_len)) == 1

    def _only_reads(self, qo_len: int) -> bool:
        """Whether nothing but reading K and V takes time for a request."""
        return qo_len == 1 and self.group_size <= MOST_READING

    @property
    def read_bytes(self) -> int:
        """Bytes of K and V of the requests that decode, which nothing but reading takes time for."""
        return self.token_bytes * sum(kv for qo, kv in zip(self.qo_len, self.kv_len) if self._only_reads(qo))

    @property
    def flops(self) -> float:
        """Floating-point operations of the other requests.

        Half the square of a whole prompt counts, as everybody counts it, though the diagonal adds a little.
        """
        requests = [(qo, kv) for qo, kv in zip(self.qo_len, self.kv_len) if not self._only_reads(qo)]
        pairs = sum(kv if qo == 1 else qo * (kv - qo / 2) for qo, kv in requests)
        return 2.0 * self.num_qo_heads * (self.head_dim + self.head_dim_vo) * pairs

    @property
    def unit(self) -> str:
        if self.phase == "mixed":
            return "rows/ms"
        return "GB/s" if self.read_bytes else "GFLOP/s"

    def rate(self, us: float) -> float:
        """Work a second, in ``unit``, when a call takes ``us`` microseconds."""
        if self.phase == "mixed":
            return 1e3 * sum(self.qo_len) / us
        return (self.read_bytes or self.flops) / us / 1e3


def _decode(dtype: str) -> list[Workload]:
    bf16 = dtype == "bf16"
    bars = {"bar": 1.15 if bf16 else None, "share_bar": 0.75}
    return [
        Workload("decode", dtype, "S1024", lengths("constant", 16, 1024), **bars),
        Workload("decode", dtype, "S4096", lengths("constant", 16, 4096), **bars),
        Workload("decode", dtype, "S8192", lengths("constant", 1, 8192), **bars),
        Workload("decode", dtype, "skewed4096", lengths("skewed", 16, 4096), **bars),
        Workload("decode", dtype, "skewed1024", lengths("skewed", 16, 1024), usual=False),
        Workload("decode", dtype, "skewed8192", lengths("skewed", 16, 8192), usual=False),
        Workload("decode", dtype, "uniform1024", lengths("uniform", 16, 1024), usual=False),
        Workload("decode", dtype, "uniform4096", lengths("uniform", 16, 4096), usual=False),
        Workload("decode", dtype, "uniform8192", lengths("uniform", 16, 8192), usual=False),
    ]


def _prefill(dtype: str) -> list[Workload]:
    bars = {"bar": 1.4, "share_bar": 0.35} if dtype == "bf16" else {"bar": 1.05, "share_bar": 0.75}
    return [
        Workload("prefill", dtype, "S1024", lengths("constant", 1, 1024), **bars),
        Workload("prefill", dtype, "S4096", lengths("constant", 1, 4096), **bars),
    ]


def _mixed() -> list[Workload]:
    """A prompt, whole or the last chunk of it, beside requests that decode."""
    decodes, rows = lengths("constant", 16, 1024), (1,) * 16
    return [
        Workload("mixed", "bf16", "1024+16x1024", (1024, *decodes), chunks=(1024, *rows)),
        Workload("mixed", "bf16", "512of4096+16x1024", (4096, *decodes), chunks=(512, *rows)),
    ]


def _forms() -> list[Workload]:
    """Other forms of decode and prefill in bf16; the bars say how they may compare with those."""
    decode, prefill = _decode("bf16")[0], _prefill("bf16")[0]
    group_of_one = replace(decode, num_kv_heads=HQ, share_bar=0.8)
    pages = [replace(decode, page_size=n, bar=0.9, share_bar=None) for n in (1, 32, 128)]
    quantized = [
        replace(d, dtype=dtype, bar=1.4, share_bar=None) for dtype in ("fp8", "int8") for d in _decode("bf16")[:2]
    ]
    scored = [
        replace(plain, score=score, bar=bar, share_bar=None)
        for plain, bar in ((decode, 0.95), (prefill, 1 / 1.15))
        for score in ("softcap", "alibi")
    ]
    return [group_of_one, *pages, *quantized, *scored]


def _mla() -> list[Workload]:
    """DeepSeek's heads with absorbed weights over one latent of 512 + 64: those of one of eight devices, and all."""

    def heads(count: int) -> dict[str, int]:
        return {"num_qo_heads": count, "num_kv_heads": 1, "head_dim": 576, "latent": 512}

    long, short = lengths("constant", 1, 8192), lengths("constant", 16, 4096)
    return [
        Workload("decode", "bf16", "S4096", short, share_bar=0.6, **heads(16)),
        Workload("decode", "bf16", "S8192", long, share_bar=0.6, **heads(16)),
        Workload("decode", "bf16", "S4096", short, **heads(128)),
        Workload("prefill", "bf16", "256of4096", (4096,), chunks=(256,), **heads(16)),
        Workload("prefill", "bf16", "256of4096", (4096,), chunks=(256,), usual=False, **heads(128)),
    ]


def _halves() -> list[Workload]:
    """fp16, measured where it is asked for: its bytes are bf16's, and its arithmetic is fp32's on every CPU."""
    return [replace(w, bar=None, share_bar=None, usual=False) for w in _decode("fp16") + _prefill("fp16")]


ALL = tuple(
    _decode("bf16") + _decode("fp32") + _prefill("bf16") + _prefill("fp32") + _mixed() + _forms() + _mla() + _halves()
)


def chosen(patterns: tuple[str, ...] = (), isa: str = "", few: bool = False) -> list[Workload]:
    """The usual workloads; with patterns, all those whose name holds every word of one of them, or is one of them.

    They have the bars of ``isa``. ``few``: of all workloads those with a bar on their speed, of constant lengths and on
    pages of 16, in a dtype that is no quantised one. Raises ``ValueError`` for a pattern that fits none.
    """
    of_isa = [w.judged_on(isa) for w in ALL]
    known = [w for w in of_isa if w.is_few] if few else of_isa
    if not patterns:
        return [w for w in known if few or w.usual]
    for pattern in patterns:
        if not any(_fits(w, pattern) for w in known):
            names = ", ".join(w.name for w in known)
            raise ValueError(f"no workload fits {pattern!r}; expected words of one of: {names}")
    return [w for w in known if any(_fits(w, pattern) for pattern in patterns)]


def _fits(workload: Workload, pattern: str) -> bool:
    if any(w.name == pattern for w in ALL):
        return workload.name == pattern
    return all(word in workload.name for word in pattern.split())


def document_offsets(length: int) -> np.ndarray:
    """Twelve documents of uneven lengths, the same for every run."""
    weights = np.array([5, 1, 9, 3, 2, 14, 4, 7, 1, 10, 6, 8])
    return np.concatenate([[0], np.cumsum(weights)]) * length // weights.sum()
