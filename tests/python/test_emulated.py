"""The GPU path where there is no GPU: what is its own, on the emulated driver, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


FILES = (
    "captured_runs",
    "cuda",
    "cuda_arch",
    "device_invariance",
    "device_lengths",
    "device_lengths_errors",
    "gpu_members",
    "kv_cuda",
    "masks_in_graphs",
    "replay_cuda",
    "reservation",
    "sample_cuda",
    "streams",
    "timeline",
    "vllm_cuda",
)


@pytest.mark.parametrize("name", FILES)
def test_cuda_on_emulated_threads(name, request):
    command = [TESTS / "gpu/emulate.sh", sys.executable, "-m", "pytest", "-q", "--device", "cuda"]
    seed = ["--seed", str(request.config.option.seed)]
    environment = {**os.environ, "PYTHON": sys.executable}
    file = TESTS / "python" / f"test_{name}.py"
    ended = subprocess.run([*command, *seed, file], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]


HOPPERS = {
    "kernel_families": [],
    "short_wgmma": [],
    "gpu_members": ["-k", "wgmma"],
    "unquantized_scales": ["-k", "wgmma"],
    "vllm_cuda": ["-k", "PIECEWISE"],
}


@pytest.mark.parametrize("name, few", HOPPERS.items(), ids=HOPPERS)
def test_hoppers_kernels_on_emulated_threads(name, few, request):
    """Where the device says that it is an sm_90."""
    command = [TESTS / "gpu/emulate.sh", sys.executable, "-m", "pytest", "-q", "--device", "cuda"]
    seed = ["--seed", str(request.config.option.seed)]
    environment = {**os.environ, "PYTHON": sys.executable, "RADDLE_EMULATOR_COMPUTE": "90"}
    file = TESTS / "python" / f"test_{name}.py"
    ended = subprocess.run([*command, *seed, *few, file], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]


def test_wide_heads_on_emulated_threads(request):
    """A few of them, for each is a kernel of its own: both tile shapes, V in K and apart, parts of one's own, 8 bits."""
    command = [TESTS / "gpu/emulate.sh", sys.executable, "-m", "pytest", "-q", "--device", "cuda"]
    whole, one = "test_states or test_values or test_parts", "(test_head_dims and 264-264-float16)"
    few = ["-k", f"{whole} or {one} or (test_8_bits_in_layouts and cascade)"]
    seed = ["--seed", str(request.config.option.seed)]
    environment = {**os.environ, "PYTHON": sys.executable}
    file = TESTS / "python" / "test_wide_heads.py"
    ended = subprocess.run([*command, *seed, *few, file], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]


OF_BOTH = {
    # Split and whole; the sums' kernels are their own.
    "empty_rows": "(test_rows_that_keep_nothing and float16-5) or test_sums_and_sinks",
    "same_bits": "order_of_blocks",
}


@pytest.mark.parametrize("name, few", OF_BOTH.items(), ids=OF_BOTH)
@pytest.mark.parametrize("family, compute", [("mma", "80"), ("wgmma", "90")])
def test_both_families_on_emulated_threads(family, compute, name, few, request):
    command = [TESTS / "gpu/emulate.sh", sys.executable, "-m", "pytest", "-q", "--device", "cuda"]
    seed = ["--seed", str(request.config.option.seed)]
    variables = {"RADDLE_EMULATOR_COMPUTE": compute, "RADDLE_BACKEND": family}
    environment = {**os.environ, "PYTHON": sys.executable, **variables}
    file = TESTS / "python" / f"test_{name}.py"
    ended = subprocess.run([*command, *seed, "-k", few, file], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]


def test_unquantized_scales_on_emulated_threads(request):
    """Not of every variant: each is another kernel, with and without scales."""
    command = [TESTS / "gpu/emulate.sh", sys.executable, "-m", "pytest", "-q", "--device", "cuda", "-k", "not every_pair"]
    seed = ["--seed", str(request.config.option.seed)]
    environment = {**os.environ, "PYTHON": sys.executable}
    file = TESTS / "python" / "test_unquantized_scales.py"
    ended = subprocess.run([*command, *seed, file], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]


def test_the_support_matrix_of_gpus():
    """What is refused is refused by the host: kernels that do nothing say as much as those that compute."""
    command = [TESTS / "gpu/emulate.sh", sys.executable, "-c", "from raddle.cli import main; main()", "support"]
    environment = {**os.environ, "RADDLE_EMULATOR_HOLLOW": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-4000:]
    page = TESTS.parent / "docs/support.md"
    refresh = "refresh it: RADDLE_EMULATOR_HOLLOW=1 tests/gpu/emulate.sh raddle support > docs/support.md"
    assert ended.stdout == page.read_text(), refresh


def test_the_contract_is_checked_on_emulated_threads():
    """The command that draws its problems: one of one kind."""
    few = ["--only", "sum", "--cases", "1", "--longest", "60", "--seed", "1", "--processes", "1"]
    command = [TESTS / "gpu/emulate.sh", sys.executable, TESTS / "gpu/contract.py", *few]
    ended = subprocess.run(command, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    assert "2 cases, 0 failed" in ended.stdout
