"""Kernels of sm_75 on a later GPU, by RADDLE_CUDA_ARCH; and what a bad one says. Run with --device cuda.

The first test runs the others of this file in a process of its own, for a process opens its GPU once.
"""

import dataclasses
import os
import subprocess
import sys

import pytest
import raddle
from draws import draw
from engine import spec_of
from raddle import _cuda, _toolchain
from reference import Causal, Rope, SoftCap
from small import refuses, reserved

SMALL = {"group": 4, "num_kv_heads": 1, "dtype": "float16"}
# Tiles of wide heads have few keys, and rows of O leave them in two turns.
HEADS = [(64, 64), (256, 256), (216, 24)]


def test_kernels_of_sm_75_run_on_a_later_gpu(gpu, request):
    if os.environ.get("RADDLE_CUDA_ARCH") == "75":
        pytest.skip("this is that process")
    seed = ["--seed", str(request.config.option.seed)]
    command = [sys.executable, "-m", "pytest", "-q", "--device", gpu, *seed, "-k", "not another_one", __file__]
    turing = {**os.environ, "RADDLE_CUDA_ARCH": "75", "RADDLE_BACKEND": "mma"}
    ended = subprocess.run(command, env=turing, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    assert f"{len(HEADS) + 4} passed" in ended.stdout


@pytest.fixture
def turing(gpu):
    if os.environ.get("RADDLE_CUDA_ARCH") != "75":
        pytest.skip("runs in the first test's process")
    return gpu


@pytest.mark.parametrize("dim, dim_vo", HEADS)
def test_short_and_long_queries(turing, engine, rng, dim, dim_vo):
    variant = [Rope(dim, 10000.0), SoftCap(30.0), Causal()]
    lengths = [(1, 90), (37, 80), (1, 0), (2, 40)]
    engine.check(draw(rng, "paged", variant, dim=dim, dim_vo=dim_vo, lengths=lengths, **SMALL), num_workers=3)


def test_quantised_keys(turing, engine, rng):
    stored = {"kv_dtype": "float8_e4m3fn", "scales": ("token", "head")}
    engine.check(draw(rng, "ragged", "causal", dim=64, lengths=[(40, 90), (1, 50)], **stored, **SMALL))


def test_bfloat16_is_refused_by_name(turing, rng):
    spec = dataclasses.replace(spec_of(draw(rng, **SMALL)), dtype="bfloat16")
    with refuses(ValueError, "dtype is 'bfloat16'", "expected 'float16' on sm_75"):
        raddle.Attention(spec, device=turing)


def test_the_planner(turing, rng):
    """Is compiled for that architecture, too."""
    attn = raddle.Attention(spec_of(draw(rng, variant="causal", **SMALL)), device=turing)
    reserved(attn, max_requests=4, max_qo_tokens=8, max_kv_tokens=256, device_lengths=True)


def test_doctor_says_so(turing):
    assert _cuda.machine()["arch"] == "compute_75"
    found = _toolchain.driver()
    assert found["problem"] is None and found["gpus"][0]["target"] == "compute_75" != found["gpus"][0]["arch"]


@pytest.mark.parametrize("arch", ["77", "121"])
def test_another_one_is_refused_by_name(gpu, arch):
    code = "from raddle import _cuda, _toolchain; print(_toolchain.driver()['problem']); _cuda.machine()"
    environment = {**os.environ, "RADDLE_CUDA_ARCH": arch}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    told = f'RADDLE_CUDA_ARCH is "{arch}"; expected one of 75, '
    assert ended.returncode != 0 and f"ValueError: {told}" in ended.stderr and ended.stdout.startswith(told)
