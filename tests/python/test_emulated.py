"""The GPU path where there is no GPU: what is its own, on the emulated driver, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.timeout(900)
def test_cuda_on_emulated_threads(request):
    command = [TESTS / "gpu/emulate.sh", sys.executable, "-m", "pytest", "-q", "--device", "cuda"]
    seed = ["--seed", str(request.config.option.seed)]
    environment = {**os.environ, "PYTHON": sys.executable}
    names = "cuda", "device_lengths", "device_lengths_errors", "kv_cuda", "replay_cuda", "reservation", "timeline"
    files = [TESTS / "python" / f"test_{name}.py" for name in names]
    ended = subprocess.run([*command, *seed, *files], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
