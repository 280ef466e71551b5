"""The KV cache's GPU kernels compile for every architecture without a GPU, and spill nothing."""

from __future__ import annotations

import re

import pytest
import raddle
from raddle import _library

_compile = _library.function("raddle.cuda.compile_kv")
KERNELS = {"append", "copy", "accept", "summarize", "score", "select", "merge"}
CASES = [
    ("float16", None, [raddle.Rope(64, interleaved=True)], "sm_75"),
    ("float32", None, [raddle.Sinks([0.5] * 8)], "sm_80"),
    ("bfloat16", None, [], "sm_89"),
    ("bfloat16", None, [raddle.Rope(64)], "sm_90a"),
    ("float16", "float8_e5m2", [], "sm_75"),
    ("bfloat16", "float8_e4m3fn", [raddle.Rope(64)], "sm_90a"),
]


def resources(log: str) -> dict[str, tuple[int, int]]:
    """Registers and spilled bytes of each kernel."""
    found = {}
    for part in log.split("Compiling entry function '")[1:]:
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill", part)))
        found[part.split("'")[0].removeprefix("raddle_kv_")] = int(re.search(r"Used (\d+) registers", part)[1]), spilled
    return found


@pytest.mark.parametrize(("dtype", "kv_dtype", "variant", "arch"), CASES)
def test_kernels_compile(dtype, kv_dtype, variant, arch, capsys):
    spec = raddle.AttentionSpec(8, 2, 64, dtype=dtype, kv_dtype=kv_dtype, variant=variant)
    got = resources(_compile(spec=spec.fields(), arch=arch)["log"])
    with capsys.disabled():
        print(f"\n{arch} {dtype} {kv_dtype} {variant}: " + ", ".join(f"{name} {n}" for name, (n, _) in got.items()), end="")
    assert set(got) == KERNELS
    for name, (registers, spilled) in got.items():
        assert spilled == 0 and registers <= 128, (name, registers, spilled)
