"""What the first use of something new costs: a variant's first compile, a warm start, a mask over a million tokens; on a
GPU the first results on the device.

Every figure is taken in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from raddle._progress import Progress
from raddle.bench import results, timing
from raddle.bench.engines import RADDLE, first_line
from raddle.bench.results import Measured

#: Milliseconds from Attention(spec) to the first result.
BAR_COLD_MS, BAR_WARM_MS = 3000.0, 30.0
TOKENS = 1 << 20
BAR_MASK_S, BAR_MASK_MB = 1.0, 100.0

#: A random expression: its structure, not only its numbers, comes from the seed.
_FIRST_RESULT = """
import random, sys, time
import numpy as np
import raddle
from raddle.flex import ops

draw = random.Random(int(sys.argv[1]))
plan = [(draw.choice("tanh sin where bias abs mul".split()), draw.uniform(0.1, 2.0)) for _ in range(12)]
table = np.linspace(-1, 1, 64).astype(np.float32)

def score(s, b, h, q, kv):
    for kind, x in plan:
        if kind == "tanh": s = s + x * ops.tanh(s)
        if kind == "sin": s = s * ops.sin(s * x)
        if kind == "where": s = ops.where((q - kv) % int(7 * x + 2) == 0, s, s - x)
        if kind == "bias": s = s + table[(q + kv) % 64] * x
        if kind == "abs": s = ops.abs(s) - x
        if kind == "mul": s = s * x + (kv - q) * 0.001
    return s

q = np.random.default_rng(0).standard_normal((64, 8, 64), dtype=np.float32)
k = q[:, :2].copy()
start = time.perf_counter()
spec = raddle.AttentionSpec(8, 2, 64, dtype="float32", variant=[score, raddle.Causal()])
attention = raddle.Attention(spec)
out = attention.run(attention.plan(raddle.RaggedKV([0, 64], [0, 64])), q, (k, k))
print(1e3 * (time.perf_counter() - start), int(np.isfinite(out).all()), raddle.cache.num_compiled())
"""

_MASK = """
import json, resource, sys, time
import numpy as np
import raddle
from raddle import flex

tokens = int(sys.argv[2])
make = {
    "causal": lambda: flex.masks.causal(),
    "window": lambda: flex.masks.sliding_window(4095, 0),
    "documents": lambda: flex.masks.document(np.linspace(0, tokens, 1001).astype(np.int64)),
}[sys.argv[1]]

def ready(n):
    block_mask = flex.create_block_mask(make() if n == tokens else flex.masks.causal(), None, None, n, n)
    attention = raddle.Attention(raddle.AttentionSpec(32, 8, 128, variant=[block_mask]))
    return attention.plan(raddle.RaggedKV([0, n], [0, n]))

attention = raddle.Attention(raddle.AttentionSpec(32, 8, 128, variant=[make()]))  # compiled, as ever after
ready(128)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
plan = ready(tokens)
seconds = time.perf_counter() - start
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": seconds, "mb": (after - before) / 1024, "tiles": plan.num_query_tiles}))
"""


def run_script(script: str, arguments: Sequence[str], cache: str) -> str:
    """The last line that a script prints in a new process whose cache is that folder. Raises RuntimeError."""
    # NVRTC keeps a cache of its own (from CUDA 13 on), where the driver's is: a cold start has neither.
    env = {**os.environ, "RADDLE_CACHE_DIR": cache, "CUDA_CACHE_PATH": os.path.join(cache, "cuda")}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"a measured process failed:\n{done.stderr}")
    return done.stdout.splitlines()[-1]


def compiles(rounds: int, seed: int, progress: Progress) -> list[Measured]:
    """A structurally new expression with an empty cache; the same again in a new process."""
    cold, warm = [], []
    progress.say("first use", total=2 * rounds)
    for n in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            for times, compiled in ((cold, "1"), (warm, "0")):
                ms, finite, count = run_script(_FIRST_RESULT, [str(seed + n)], cache).split()
                if count != compiled:
                    raise RuntimeError(f"{count} variants were compiled; expected {compiled}")
                times.append(float(ms))
                progress.advance()
    name = f"of a new expression, worst of {rounds}"
    return [
        Measured("cold, median", 1e3 * timing.median(cold), timing.median(cold), "ms"),
        Measured(f"cold, first use {name}", 1e3 * max(cold), max(cold), "ms", BAR_COLD_MS),
        Measured("warm, median", 1e3 * timing.median(warm), timing.median(warm), "ms"),
        Measured(f"warm, a new process, {name}", 1e3 * max(warm), max(warm), "ms", BAR_WARM_MS),
    ]


def masks(progress: Progress, tokens: int = TOKENS) -> list[Measured]:
    """Seconds and memory until a mask over a million tokens is planned."""
    found: list[Measured] = []
    progress.say(f"masks over {tokens} tokens", total=3)
    with tempfile.TemporaryDirectory() as cache:
        for name in ("causal", "window", "documents"):
            got: dict[str, Any] = json.loads(run_script(_MASK, [name, str(tokens)], cache))
            where = f"{name} over {tokens:,} tokens"
            found.append(Measured(f"{where}: ready", 1e6 * got["seconds"], got["seconds"], "s", BAR_MASK_S))
            found.append(Measured(f"{where}: memory", None, got["mb"], "MB", BAR_MASK_MB))
            progress.advance()
    return found


# --- on a GPU -------------------------------------------------------------------------------

#: The section of `raddle bench gpu`, and its bars in milliseconds.
GPU_SECTION = "first-use"
BAR_GPU_COLD, BAR_GPU_WARM = 1500.0, 30.0

#: A decode first, then a prompt, as an engine that warms up: each waits for the kernel that it needs.
#: CUDA's own start is not counted: torch has used the device before. The soft cap's number makes the source new
#: for no cache but Raddle's, which is empty.
_FIRST_ON_GPU = """
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


def on_gpu(rounds: int, progress: Progress, device: str = "cuda") -> list[results.Row]:
    """From `Attention(spec)` to the first results on the device, the worst and the median of ``rounds`` processes with an
    empty cache, and of as many that find it full."""
    rows: list[results.Row] = []
    progress.say("first use", total=2 * rounds * len(VARIANTS))
    for name in VARIANTS:
        try:
            rows += _variant(name, rounds, progress, device)
        except Exception as error:  # noqa: BLE001
            lines = str(error).strip().splitlines()
            reason = lines[-1] if lines else first_line(error)  # of the process: its last line says what it was
            rows.append(results.failed(GPU_SECTION, name, RADDLE, reason))
    return rows


def _variant(name: str, rounds: int, progress: Progress, device: str) -> list[results.Row]:
    times: dict[tuple[str, str], list[float]] = {(kind, what): [] for kind in ("cold", "warm") for what in RESULTS}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            for kind in ("cold", "warm"):
                *ms, compiled = run_script(_FIRST_ON_GPU, [device, name], cache).split()
                if kind == "warm" and compiled != "0":
                    raise RuntimeError(f"{compiled} kernels were compiled though the cache is warm")
                for what, took in zip(RESULTS, ms):
                    times[kind, what].append(float(took))
                progress.advance()
    rows = []
    for (kind, what), found in times.items():
        workload = f"{name}, {kind} cache, {what}"
        # A cold prompt waits for twice the code; it is shown, and has no bar.
        bar = BAR_GPU_WARM if kind == "warm" else BAR_GPU_COLD if what == RESULTS[0] else None
        rows.append(results.figure(GPU_SECTION, f"{workload}, median", timing.median(found), "ms"))
        rows.append(results.figure(GPU_SECTION, f"{workload}, worst", max(found), "ms", bar))
    return rows
