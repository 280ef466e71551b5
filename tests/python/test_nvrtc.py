"""Every shipped variant compiles into a GPU kernel, without a GPU and without CUDA's headers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import raddle
from raddle import _cuda, _library

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


class Kernel(NamedTuple):
    name: str
    spec: raddle.AttentionSpec
    arch: str
    short_only: bool = False
    spilled: int = 0  # bytes that are known of
    family: str = "mma"
    short_rows: int = 0
    levels: bool = False
    rows: bool = False
    scales_output: bool = False
    clusters: bool = False

    def compile(self):
        _, spec, arch, short_only, _, *which = self
        return _cuda.compile_kernel(spec, arch, short_only, *which)


def mla(**more):
    return raddle.AttentionSpec(16, 1, 576, 512, variant=raddle.Causal(), **more)


MLA = mla()
ROPE = [raddle.Rope(128), raddle.Causal()]
KIB_OF_A_BLOCK = {"sm_75": 64, "sm_80": 163, "sm_89": 99, "sm_90a": 227}
# Spills that are known and borne, in bytes rounded up to 64. Of a thread's 255 registers, O and S of long queries take
# 128 where heads are 64 wide, 192 where they are 128 wide (128 rows of 64 keys), 160 where they are 256 wide (64 rows),
# and a row of RoPE in registers some dozens. Of MLA's 32 rows by 32 keys on sm_80 they take 160, too. Most of what is
# spilled is used once an item, not once a tile. More than listed fails.
KERNELS = [
    Kernel("plain", spec([]), "sm_80"),
    *(Kernel(name, spec(parts), "sm_90a") for name, parts in SHIPPED.items()),
    *(Kernel(name, spec(SHIPPED[name]), "sm_80") for name in ("PackedMask", "SoftCap")),
    Kernel("own source", spec([OWN]), "sm_90a"),
    Kernel("128 wide", spec([], 128), "sm_80", spilled=128),
    Kernel("128 wide", spec([], 128), "sm_89"),
    Kernel("128 wide", spec([], 128), "sm_90a", spilled=256),
    Kernel("Rope, 128 wide", spec(ROPE, 128), "sm_80"),
    Kernel("Rope, 128 wide", spec(ROPE, 128), "sm_90a"),
    *(Kernel("128 wide", spec([], 128), arch, short_only=True) for arch in ("sm_80", "sm_89")),
    Kernel("128 wide, scaled", spec([], 128), "sm_90a", short_only=True, scales_output=True),
    Kernel("Rope, 128 wide", spec(ROPE, 128), "sm_90a", short_only=True, spilled=64),
    Kernel("e4m3, 128 wide", spec([], 128, kv_dtype="float8_e4m3fn"), "sm_80"),
    *(
        Kernel("e4m3, 128 wide", spec([], 128, kv_dtype="float8_e4m3fn"), arch, short_only=True)
        for arch in ("sm_80", "sm_90a")
    ),
    Kernel("int8, 128 wide", spec([], 128, kv_dtype="int8"), "sm_89", short_only=True),
    Kernel("e5m2, Rope", spec(ROPE, 128, kv_dtype="float8_e5m2"), "sm_90a", short_only=True),
    Kernel("e5m2, own source", spec([OWN], kv_dtype="float8_e5m2"), "sm_90a"),
    Kernel("256 wide", spec([], 256, "float16"), "sm_80", spilled=640),
    Kernel("256 wide", spec([], 256, "float16"), "sm_90a", spilled=704),
    Kernel("256 wide", spec([], 256, "float16"), "sm_90a", short_only=True),
    *(Kernel("plain, fp16", spec([], 64, "float16"), "sm_75", short_only) for short_only in (False, True)),
    *(Kernel("128 wide, fp16", spec([], 128, "float16"), "sm_75", short_only) for short_only in (False, True)),
    Kernel("Rope, 128 wide, fp16", spec(ROPE, 128, "float16"), "sm_75"),
    Kernel("MLA", MLA, "sm_80", spilled=128),
    Kernel("MLA", MLA, "sm_90a"),
    Kernel("MLA, e4m3", mla(kv_dtype="float8_e4m3fn"), "sm_80"),
    Kernel("MLA, e4m3", mla(kv_dtype="float8_e4m3fn"), "sm_90a"),
    Kernel("MLA, two of e4m3", mla(k_extends_v=True, kv_dtype="float8_e4m3fn"), "sm_80", spilled=128),
    Kernel("MLA, two of e4m3", mla(k_extends_v=True, kv_dtype="float8_e4m3fn"), "sm_90a"),
    # Between products only, not in their loop (tests/gpu/sass.py): 168 registers are for the loading warpgroup, too.
    Kernel("Causal, wgmma", spec(SHIPPED["Causal"], 128), "sm_90a", spilled=256, family="wgmma"),
    Kernel("SoftCap, wgmma clusters", spec(SHIPPED["SoftCap"]), "sm_90a", spilled=256, family="wgmma", clusters=True),
    Kernel("Causal, wgmma", spec(SHIPPED["Causal"], 128), "sm_90a", family="wgmma", short_rows=8),
    # With all the code that there is; multiplied by a scale of V, an instruction a row more.
    Kernel("SoftCap, wgmma, scaled", spec(SHIPPED["SoftCap"], 128), "sm_90a", False, 0, "wgmma", 64, True, True, True),
]


def test_kernels_compile(capsys):
    """Prints what they take: a register spilled is memory traffic in the innermost loop."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        reports = list(pool.map(Kernel.compile, KERNELS))
    with capsys.disabled():
        print(f"\nGPU kernels by NVRTC {_cuda.nvrtc_version()}")
        print(f"{'variant':24}{'target':8}{'queries':>8}{'registers':>10}{'spilled':>9}{'shared':>8}{'seconds':>9}")
        for kernel, got in zip(KERNELS, reports):
            queries = kernel.short_rows or ("short" if kernel.short_only else "all")
            numbers = f"{got['registers']:10}{got['spill_bytes']:9}{got['shared_bytes']:8}{got['seconds']:9.1f}"
            print(f"{kernel.name:24}{kernel.arch:8}{queries:>8}{numbers}")
    assert len(KERNELS) <= 48, "compiled where there is no GPU: few enough to wait for"
    for kernel, got in zip(KERNELS, reports):
        which = kernel.name, kernel.arch, kernel.short_only, kernel.short_rows
        # "wgmma serialized": products that the compiler waits for, each by itself.
        assert "C75" not in got["log"] and "serializ" not in got["log"], (which, got["log"])
        assert 32 <= got["registers"] <= 255, (which, got["log"])
        assert got["spill_bytes"] <= kernel.spilled, (which, got["spill_bytes"])
        assert got["shared_bytes"] <= 1024 * KIB_OF_A_BLOCK[kernel.arch], (which, got["shared_bytes"])


def test_hoppers_kernel_of_wide_heads_compiles():
    got = _cuda.compile_kernel(spec(SHIPPED["SoftCap"], 256), "sm_90a", family="wgmma")
    assert "C75" not in got["log"] and "serializ" not in got["log"], got["log"]
    assert got["spill_bytes"] <= 256 and got["shared_bytes"] <= 1024 * KIB_OF_A_BLOCK["sm_90a"], got


PLANNERS = [
    *(([], arch, prefixes) for arch in ("sm_80", "sm_90a") for prefixes in (False, True)),
    ([], "sm_75", True),
    *((SHIPPED[name], "sm_90a", True) for name in ("SlidingWindow", "PackedMask", "Alibi")),
    ([OWN], "sm_90a", False),
    *(([], arch, False, True) for arch in ("sm_75", "sm_90a")),
    (SHIPPED["SlidingWindow"], "sm_90a", False, True),
    *(([], "sm_90a", prefixes, False, False) for prefixes in (False, True)),
    ([], "sm_80", False, True, False),
]


def compile_planner(variant, arch, prefixes, batch_invariant=False, in_shared=True):
    return _cuda.compile_planner(spec(variant, batch_invariant=batch_invariant), arch, prefixes, in_shared)


def test_planners_compile():
    """The kernel of `reserve(device_lengths=True)`: whole blocks of 512 threads, so at most 128 registers."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        reports = list(pool.map(lambda each: compile_planner(*each), PLANNERS))
    for (_, *which), got in zip(PLANNERS, reports):
        assert 32 <= got["registers"] <= 128, (which, got["log"])
        assert got["spill_bytes"] == 0, (which, got["log"])


SAMPLERS = [("float16", "sm_75"), ("float32", "sm_80"), ("bfloat16", "sm_90a")]


@pytest.mark.parametrize(("kind", "arch"), SAMPLERS)
def test_sampling_compiles(kind, arch):
    """Blocks of 512 threads: at most 128 registers."""
    log = _library.function("raddle.cuda.compile_sample")(dtype=kind, arch=arch)["log"]
    assert 16 <= int(re.search(r"Used (\d+) registers", log)[1]) <= 128, log
    assert re.findall(r"(\d+) bytes spill", log) == ["0", "0"], log


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


@pytest.mark.parametrize(
    ("why", "arch", "more"),
    [
        ("of sm_90 alone", "sm_80", {}),
        ("long queries of such head dims", "sm_90a", {"head_dim": 72}),
        ("such head dims", "sm_90a", {"head_dim": 264}),
        ("kv_dtype", "sm_90a", {"kv_dtype": "int8"}),
        ("parts for queries", "sm_90a", {"variant": SHIPPED["Rope"]}),
    ],
)
def test_what_wgmma_does_not_serve_is_refused_by_name(why, arch, more):
    with pytest.raises(ValueError, match=f"family is 'wgmma', and wgmma .*{why}"):
        _cuda.compile_kernel(spec(**{"variant": [], **more}), arch, family="wgmma")


@pytest.mark.parametrize(("family", "rows", "dim"), [("wgmma", 12, 64), ("wgmma", 64, 256), ("mma", 8, 64)])
def test_tiles_of_short_queries_that_no_kernel_has_are_refused_by_name(family, rows, dim):
    with pytest.raises(ValueError, match=f"short_rows is {rows}; expected 0, or of the wgmma family 8, 16"):
        _cuda.compile_kernel(spec([], dim), "sm_90a", family=family, short_rows=rows)


def test_what_kernels_serve_anyway_is_refused_by_name():
    with pytest.raises(ValueError, match="levels is given, and short_rows is 0: other kernels run plans of any levels"):
        _cuda.compile_kernel(spec([]), "sm_90a", family="wgmma", levels=True)
    with pytest.raises(ValueError, match="rows is given, and family is 'mma', whose kernels read any keys"):
        _cuda.compile_kernel(spec([]), "sm_90a", rows=True)
    for which in ({}, {"family": "wgmma", "short_rows": 8}):
        with pytest.raises(ValueError, match="clusters is given; expected the wgmma family and short_rows 0"):
            _cuda.compile_kernel(spec([]), "sm_90a", clusters=True, **which)


def test_bfloat16_is_refused_by_name_on_sm_75():
    with pytest.raises(ValueError, match="dtype is 'bfloat16'; expected 'float16' on sm_75"):
        _cuda.compile_kernel(spec([]), "sm_75")


@pytest.mark.parametrize("dim", [64, 256])
def test_ptx_is_for_later_gpus(dim):
    """What RADDLE_CUDA_ARCH asks for: no assembler has seen it."""
    assert _cuda.compile_kernel(spec([], dim, "float16"), "compute_75", True)["registers"] == 0


def test_an_unknown_target_is_an_error_with_the_compilers_text():
    with pytest.raises(raddle.CompileError, match="sm_99"):
        _cuda.compile_kernel(spec([]), "sm_99")


def test_a_gpu_is_needed_to_run():
    """Where there is one, it has a name; where there is none, the error says so."""
    try:
        assert _cuda.machine()["gpu"]
    except RuntimeError as error:
        assert re.search("CUDA driver|no GPU|CUDA: ", str(error))
