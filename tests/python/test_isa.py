"""Each instruction set of this machine: the tests marked `every_isa`, in a process of its own.

Raddle chooses its instruction set once a process, so a forced one needs a fresh process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FLAGS = {
    "generic": set(),
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx512_bf16": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"},
    "amx": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512vbmi", "amx_tile", "amx_bf16"},
}


def cpu_flags() -> set:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.split(":")[1].split())
    return set()


HERE = [isa for isa, flags in FLAGS.items() if flags <= cpu_flags()]


def run(isa, *arguments):
    env = {**os.environ, "RADDLE_CPU_ISA": isa}
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True)


@pytest.mark.parametrize("isa", HERE)
def test_every_isa(isa, request):
    root = Path(__file__).parent
    seed = str(request.config.option.seed)
    command = ["-m", "pytest", str(root), "-q", "-m", "every_isa", "--seed", seed, "-p", "no:cacheprovider"]
    done = run(isa, *command)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("isa", HERE)
def test_the_forced_isa_is_used(isa):
    done = run(isa, "-c", "import raddle; print(raddle.cpu_isa())")
    assert done.stdout.strip() == isa, done.stderr


@pytest.mark.parametrize("isa", [*(isa for isa in FLAGS if isa not in HERE), "sse9"])
def test_an_isa_that_is_not_there_is_refused_by_name(isa):
    code = "import raddle\ntry: raddle.Attention(raddle.AttentionSpec(1, 1, 8))\nexcept ValueError as e: print(e)"
    done = run(isa, "-c", code)
    assert "RADDLE_CPU_ISA" in done.stdout and isa in done.stdout, done.stdout + done.stderr
