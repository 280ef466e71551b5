"""First use on a GPU, each in a process of its own: from `Attention(spec)` to the first results on the device.

A decode first, then a prompt, as an engine that warms up: each waits for the kernel that it needs.
"""

from __future__ import annotations

import tempfile

from raddle._progress import Progress
from raddle.bench import first_use, timing
from raddle.bench.gpu import results
from raddle.bench.gpu.engines import first_line

SECTION = "first-use"
#: Milliseconds.
BAR_COLD, BAR_WARM = 1500.0, 30.0

#: CUDA's own start is not counted: torch has used the device before. The soft cap's number makes the source new
#: for no cache but Raddle's, which is empty.
_FIRST_RESULT = """
import sys, time
import torch, raddle
from raddle import cache
device, name = sys.argv[1], sys.argv[2]
parts = {"causal": lambda: [raddle.Causal()], "softcap and window": lambda: [raddle.SoftCap(30.0),
         raddle.SlidingWindow(1023), raddle.Causal()], "rope": lambda: [raddle.Rope(128), raddle.Causal()]}[name]()
found = len(cache.entries())
q = torch.randn(64, 32, 128, dtype=torch.bfloat16, device=device)
k = torch.randn(64, 8, 128, dtype=torch.bfloat16, device=device)
torch.cuda.synchronize()
outs = []
start = time.perf_counter()
attention = raddle.Attention(raddle.AttentionSpec(32, 8, 128, variant=parts), device=device)
for queries in (1, 64):
    outs.append(attention.run(attention.plan(raddle.RaggedKV([0, queries], [0, 64])), q[:queries], (k, k)))
    torch.cuda.synchronize()
    print(1e3 * (time.perf_counter() - start), end=" ")
# A check is a kernel of torch's, which takes time to load.
if not all(torch.isfinite(out).all() for out in outs): raise RuntimeError("the first result is not finite")
print(len(cache.entries()) - found)
"""
RESULTS = ("first decode", "first prompt")
VARIANTS = ("causal", "softcap and window", "rope")


def measure(rounds: int, progress: Progress, device: str = "cuda") -> list[results.Row]:
    """The worst and the median of ``rounds`` processes with an empty cache, and of as many that find it full."""
    rows: list[results.Row] = []
    progress.say("first use", total=2 * rounds * len(VARIANTS))
    for name in VARIANTS:
        try:
            rows += _variant(name, rounds, progress, device)
        except Exception as error:  # noqa: BLE001
            lines = str(error).strip().splitlines()
            reason = lines[-1] if lines else first_line(error)  # of the process: its last line says what it was
            rows.append(results.failed(SECTION, name, "raddle", reason))
    return rows


def _variant(name: str, rounds: int, progress: Progress, device: str) -> list[results.Row]:
    times: dict[tuple[str, str], list[float]] = {(kind, what): [] for kind in ("cold", "warm") for what in RESULTS}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            for kind in ("cold", "warm"):
                *ms, compiled = first_use.run_script(_FIRST_RESULT, [device, name], cache).split()
                if kind == "warm" and compiled != "0":
                    raise RuntimeError(f"{compiled} kernels were compiled though the cache is warm")
                for what, took in zip(RESULTS, ms):
                    times[kind, what].append(float(took))
                progress.advance()
    rows = []
    for (kind, what), found in times.items():
        workload = f"{name}, {kind} cache, {what}"
        # A cold prompt waits for twice the code; it is shown, and has no bar.
        bar = BAR_WARM if kind == "warm" else BAR_COLD if what == RESULTS[0] else None
        rows.append(results.figure(SECTION, f"{workload}, median", timing.median(found), "ms"))
        rows.append(results.figure(SECTION, f"{workload}, worst", max(found), "ms", bar))
    return rows
