"""What this machine can do at best, measured in the run: the denominators of everything that is measured beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Optional

import raddle
from raddle import _library

#: Bytes that are read for it: several times what a large shared cache holds.
READ_BYTES = 2 << 30
#: The same for `read_gbps`, which takes a second or two: still more than the caches of most machines hold.
QUICK_READ_BYTES, QUICK_LOOPS = 512 << 20, 2
#: Least bandwidth in GB/s that a machine with AMX has, a thread and in all: less was disturbed, and no limit.
PLAUSIBLE_A_THREAD, PLAUSIBLE = 15.0, 30.0
_TRIES = 3

_read_sequential = _library.function("raddle.read_bandwidth_gbps")
_read_pages = _library.function("raddle.read_pages_gbps")
_rate = _library.function("raddle.compute_rate")


@dataclass(frozen=True)
class Limits:
    """Rates of all threads together."""

    threads: int
    sequential_gbps: float  #: reading memory from begin to end
    pages_gbps: float  #: reading pages of 4 KiB in random order
    fma_gflops: float  #: fp32, in the chosen instruction set
    exp2_gelems: float
    bf16_gflops: float  #: in tile registers or by pairs; 0 where there is neither, or ``RADDLE_CPU_ISA`` leaves it out
    plausible_gbps: float = 0.0  #: a read bandwidth below this is no limit

    @property
    def read_gbps(self) -> Optional[float]:
        """The better of both ways to read; None where even that was disturbed."""
        best = max(self.sequential_gbps, self.pages_gbps)
        return best if best >= self.plausible_gbps else None

    def flops_rate(self, dtype: str) -> float:
        """GFLOP/s of products of that dtype: those of bf16, where there are any; else FMA's."""
        return self.bf16_gflops if dtype not in ("fp32", "fp16") and self.bf16_gflops else self.fma_gflops

    def least_us(self, dtype: str, read_bytes: float, flops: float) -> Optional[float]:
        """Microseconds that so much work takes at the limits; None where they are not known."""
        if read_bytes and self.read_gbps is None:
            return None
        reading = read_bytes / self.read_gbps / 1e3 if read_bytes and self.read_gbps else 0.0
        return reading + flops / self.flops_rate(dtype) / 1e3

    def best_of(self, other: Limits) -> Limits:
        """On a machine with other users the better of two measurements is nearer to the limit."""
        names = ("sequential_gbps", "pages_gbps", "fma_gflops", "exp2_gelems", "bf16_gflops")
        return replace(self, **{name: max(getattr(self, name), getattr(other, name)) for name in names})

    def rows(self) -> list[dict[str, Any]]:
        """Rows for programs; a disturbed bandwidth has the engine "disturbed"."""
        state = "limit" if self.read_gbps else "disturbed"
        found = [
            ("memory read", state, self.sequential_gbps, "GB/s"),
            ("memory read, random pages of 4 KiB", state, self.pages_gbps, "GB/s"),
            ("fp32 FMA", "limit", self.fma_gflops, "GFLOP/s"),
            ("exp2", "limit", self.exp2_gelems, "Gelem/s"),
        ]
        if self.bf16_gflops:
            found.append(("bf16 products", "limit", self.bf16_gflops, "GFLOP/s"))
        return [{"workload": w, "engine": e, "us": None, "value": v, "unit": u} for w, e, v, u in found]


def measure(
    threads: int,
    read_bytes: Optional[int] = None,
    say: Callable[[str], None] = lambda text: None,
) -> Limits:
    """All limits; reading is tried again where it is slower than this kind of machine can be."""
    size = READ_BYTES if read_bytes is None else read_bytes
    say("limits: arithmetic")
    rates = [float(_rate(limit=name, num_threads=threads)) for name in ("fma", "exp2", "bf16")]
    floor = _plausible(threads)
    found: Optional[Limits] = None
    for _ in range(_TRIES):
        say("limits: memory read")
        read = [float(loop(nbytes=size, num_threads=threads)) for loop in (_read_sequential, _read_pages)]
        one = Limits(threads, *read, *rates, floor)
        found = one if found is None else found.best_of(one)
        if found.read_gbps:
            break
    assert found is not None
    return found


def has_amx(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPU has AMX, used or not: it tells which kind of machine this is."""
    try:
        return " amx_bf16" in cpuinfo.read_text()
    except OSError:
        return False


def read_gbps(advance: Callable[[], None] = lambda: None) -> Optional[float]:
    """The read bandwidth alone, of all threads; None where it was disturbed.

    A quick measurement for commands that are not about it: it reads less memory, and once. ``advance`` is called after
    each of `QUICK_LOOPS` loops.
    """
    threads, best = raddle.cpu_threads(), 0.0
    for loop in (_read_sequential, _read_pages):
        best = max(best, float(loop(nbytes=QUICK_READ_BYTES, num_threads=threads)))
        advance()
    return best if best >= _plausible(threads) else None


def _plausible(threads: int) -> float:
    """A read bandwidth in GB/s below which the measurement was disturbed; 0 where nothing tells."""
    return min(PLAUSIBLE, PLAUSIBLE_A_THREAD * threads) if has_amx() else 0.0
