"""What the first use of something new costs: a variant's first compile, a warm start, a mask over a million tokens.

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

from raddle.bench import timing
from raddle.bench.bars import Measured
from raddle._progress import Progress

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
