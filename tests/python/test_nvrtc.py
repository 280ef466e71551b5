"""Every shipped variant compiles into a GPU kernel, without a GPU and without CUDA's headers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import raddle
from raddle import _cuda

HEADS = 8
TABLES = np.ones((4, 32), np.float32), np.zeros((4, 32), np.float32)
# struct of engine/variant -> compositions that use it
SHIPPED = {
    "Causal": [raddle.Causal()],
    "SlidingWindow": [(raddle.Causal() & raddle.SlidingWindow(9)) | raddle.SlidingWindow(3, 3)],
    "PackedMask": [raddle.PackedMask.from_masks([np.ones((2, 3), bool)])],
    "SoftCap": [raddle.SoftCap(30.0), raddle.SlidingWindow(9), raddle.Causal()],
    "Alibi": [raddle.Alibi(raddle.alibi_slopes(HEADS)), raddle.Causal()],
    "Sinks": [raddle.Sinks([0.5] * HEADS), raddle.Causal()],
    "Sigmoid": [raddle.Sigmoid(-1.0), raddle.Causal()],
    "Rope": [raddle.Rope(64), raddle.Causal()],
    "RopeInterleaved": [raddle.Rope(32, interleaved=True), raddle.Causal()],
    "RopeTables": [raddle.RopeTables(*TABLES), raddle.Causal()],
    "RopeTablesInterleaved": [raddle.RopeTables(*TABLES, interleaved=True), raddle.Causal()],
}

# Shared memory that a block may ask for, and the bytes of spilled registers that are known and borne: one kernel holds
# the loops of short and of long queries, and NVRTC keeps some values of both. Long queries lose time by it.
ARCHS = {"sm_80": 163 * 1024, "sm_89": 99 * 1024, "sm_90a": 227 * 1024}
MOST_SPILLED = 512

OWN = raddle.Variant(
    "ScaledValues",
    """struct ScaledValues {
  float factor;
  Tensor<const float, 1> by_head;
  template <class Vec> RADDLE_FN void value(Vec& v, const Key& c) const {
    const float s = factor * by_head.data[c.kv_head];
    v.map([&](float x, i32) { return x * s; });
  }
  template <class Vec> RADDLE_FN void output(Vec& o, const Row&, float lse) const {
    const float norm = o.sum([](float x) { return x * x; });
    o.map([&](float x, i32) { return lse > 0.0f ? x : x * norm; });
  }
};""",
    {"factor": float, "by_head": raddle.Tensor["Hkv"]},
)(factor=2.0, by_head=np.ones(2, np.float32))


def test_no_shipped_variant_is_missing_here():
    header = Path(__file__).parents[2] / "include/raddle/engine/variant/shipped.h"
    listed = re.search(r"ShippedVariants\s*=\s*VariantList<([^>]*)>", header.read_text())[1]
    assert {name.strip() for name in listed.split(",")} == set(SHIPPED)


def spec(variant, head_dim=64, dtype="bfloat16", **more):
    return raddle.AttentionSpec(HEADS, 2, head_dim, dtype=dtype, variant=variant, **more)


@pytest.mark.timeout(900)
def test_shipped_variants_compile(capsys):
    """Prints what they take: a register spilled is memory traffic in the innermost loop."""
    specs = {"plain": spec([]), **{name: spec(parts) for name, parts in SHIPPED.items()}}
    specs["own source"] = spec([OWN])
    specs["causal, 128 wide"] = spec([raddle.Causal()], head_dim=128)
    specs["plain, 256 wide"] = spec([], head_dim=256, dtype="float16")
    jobs = [(name, arch) for name in specs for arch in ARCHS if arch != "sm_89" or "wide" in name]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        reports = list(pool.map(lambda job: _cuda.compile_kernel(specs[job[0]], job[1]), jobs))
    with capsys.disabled():
        print(f"\nGPU kernels by NVRTC {_cuda.nvrtc_version()}")
        print(f"{'variant':24}{'target':8}{'registers':>10}{'spilled':>9}{'shared':>8}{'seconds':>9}")
        for (name, arch), got in zip(jobs, reports):
            numbers = f"{got['registers']:10}{got['spill_bytes']:9}{got['shared_bytes']:8}{got['seconds']:9.1f}"
            print(f"{name:24}{arch:8}{numbers}")
    for (name, arch), got in zip(jobs, reports):
        assert 32 <= got["registers"] <= 255, (name, arch, got["log"])
        assert got["shared_bytes"] <= ARCHS[arch], (name, arch)
        assert got["spill_bytes"] <= MOST_SPILLED, (name, arch)


NO_COMPILER = """
import sys
sys.modules["torch"] = None
import numpy as np, raddle
from raddle import _cuda
own = raddle.Variant("Own", '''struct Own {
  float by;
  i32 far;
  Tensor<const float, 1> slopes;
  RADDLE_FN bool mask(const Row& r, const Key& c) const { return r.q_pos - c.kv_pos <= far; }
  RADDLE_FN float logits(float s, const Row& r, const Key&) const { return by * slopes.data[r.q_head] * s; }
};''', {"far": int, "slopes": raddle.Tensor["Hq"], "by": float})
variant = [own(far=3, slopes=np.ones(4, np.float32), by=2.0), raddle.Causal()]
_cuda.compile_kernel(raddle.AttentionSpec(4, 2, 64, variant=variant), "sm_80")
try:
    raddle.Attention(raddle.AttentionSpec(4, 2, 64, variant=variant))
except raddle.CompileError as error:
    print("CPU:", error)
"""


def test_own_source_needs_no_cpp_compiler(tmp_path):
    """NVRTC tells what a C++ compiler would: which parts there are, and where the members lie."""
    env = {**os.environ, "RADDLE_CXX": "/nowhere/c++", "RADDLE_CACHE_DIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", NO_COMPILER], env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "CPU: RADDLE_CXX is '/nowhere/c++'" in ended.stdout


def test_dtypes_without_a_gpu_kernel_are_refused_by_name():
    with pytest.raises(ValueError, match="float32.*bfloat16"):
        _cuda.compile_kernel(spec([], dtype="float32"), "sm_80")


def test_an_unknown_target_is_an_error_with_the_compilers_text():
    with pytest.raises(raddle.CompileError, match="sm_99"):
        _cuda.compile_kernel(spec([]), "sm_99")


def test_a_gpu_is_needed_to_run():
    """Where there is one, it has a name; where there is none, the error says so."""
    try:
        assert _cuda.machine()["gpu"]
    except RuntimeError as error:
        assert re.search("CUDA driver|no GPU|CUDA: ", str(error))
