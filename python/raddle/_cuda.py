"""GPU kernels without an `Attention`: compiled and reported on; and what this machine has for GPUs."""

from __future__ import annotations

import atexit
import importlib.util
from typing import Any

from raddle import _library
from raddle.spec import AttentionSpec

_compile = _library.function("raddle.cuda.compile")
_compile_planner = _library.function("raddle.cuda.compile_planner")
_kernels = _library.function("raddle.cuda.kernels")
_warm = _library.function("raddle.cuda.warm")
_machine = _library.function("raddle.cuda.machine")
_driver = _library.function("raddle.cuda.driver")
_nvrtc = _library.function("raddle.cuda.nvrtc")
_nvrtc_version = _library.function("raddle.cuda.nvrtc_version")
_add_search_folder = _library.function("raddle.cuda.add_search_folder")


def _search_wheels() -> None:
    """Tells the library where this Python's NVIDIA wheels are, should it not lie beside them."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except ImportError:
        return
    for folder in (spec.submodule_search_locations or []) if spec else []:
        _add_search_folder(str(folder))


_search_wheels()
# What Attentions still have compiled is stopped while the compiler is whole: libraries end after Python.
atexit.register(_library.function("raddle.cuda.stop_compiling"))


def nvrtc_version() -> str:
    """Version of the NVRTC in use. Raises CompileError where there is none."""
    return _nvrtc_version()


def compile_kernel(
    spec: AttentionSpec,
    arch: str,
    short_only: bool = False,
    family: str = "mma",
    short_rows: int = 0,
    levels: bool = False,
    rows: bool = False,
    scales_output: bool = False,
    clusters: bool = False,
) -> dict[str, Any]:
    """Compiles the spec's GPU kernel for ``arch`` ("sm_80", "sm_90a", as PTX "compute_75"); needs NVRTC, no GPU.

    ``family`` is "mma" or "wgmma"; with ``short_only`` mma's one of plans that have short queries only; with
    ``short_rows`` (8, 16, 32 or 64) wgmma's one of such plans, whose tiles have as many rows, with ``levels`` of plans
    that may have several levels; with ``rows`` wgmma's one of keys that boxes cannot copy, too; with ``scales_output`` the
    one like it of runs with a v_scale of 16-bit V; with ``clusters`` wgmma's one of long queries by clusters of two blocks.
    Returns registers a thread, spill_bytes, shared_bytes a block, seconds, log, cubin (PTX, for a virtual architecture).
    Raises CompileError, and ValueError where the family does not serve the spec.
    """
    serves = dict(levels=levels, rows=rows, clusters=clusters, scales_output=scales_output)
    which = dict(family=family, short_only=short_only, short_rows=short_rows, **serves)
    return dict(_compile(spec=spec.fields(), arch=arch, **which))


def compile_planner(
    spec: AttentionSpec, arch: str, prefixes: bool = False, in_shared: bool = True
) -> dict[str, Any]:
    """`compile_kernel` for the kernel that plans on the GPU (`Attention.reserve` with ``device_lengths=True``).

    With ``prefixes`` the one of reservations with max_levels=2. Without ``in_shared`` the one of maxima that are too
    large for its arrays to lie in shared memory. What it takes of shared memory depends on the maxima.
    """
    return dict(_compile_planner(spec=spec.fields(), arch=arch, prefixes=prefixes, in_shared=in_shared))


def kernels(spec: AttentionSpec, arch: str, all_kernels: bool = False) -> list[str]:
    """Names of the kernels that an `Attention` of the spec has compiled when it is made, or of all that it may need."""
    number = arch.removeprefix("sm_")
    if number == arch or not number.removesuffix("a").isdecimal():
        raise ValueError(f"arch is {arch!r}; expected one such as 'sm_80' or 'sm_90a'")
    if number.isdecimal() and int(number) >= 90:
        raise ValueError(f"arch is {arch!r}; expected '{arch}a', which kernels for such GPUs are compiled for")
    return [str(label) for label in _kernels(spec=spec.fields(), arch=arch, all=all_kernels)]


def warm(spec: AttentionSpec, arch: str, kernel: str) -> bool:
    """Sees to it that one of the `kernels` is in the cache; needs NVRTC, no GPU. Whether it was compiled now."""
    return bool(_warm(spec=spec.fields(), arch=arch, label=kernel))


def machine() -> dict[str, str]:
    """The GPU's name and architecture, and the versions of driver and NVRTC. Raises RuntimeError without a GPU."""
    return dict(_machine())


def driver() -> dict[str, Any]:
    """Version of the CUDA driver, its GPUs, and what is wrong with RADDLE_CUDA_ARCH, if anything.

    GPUs are dicts of name, arch, target (what kernels are compiled for) and supported. Raises RuntimeError without a
    driver.
    """
    found = dict(_driver())
    return {**found, "gpus": [dict(gpu.items()) for gpu in found["gpus"]]}


def find_nvrtc() -> dict[str, str]:
    """Where NVRTC is (path, origin) and its version, looked for anew. Raises CompileError where there is none."""
    return dict(_nvrtc())
