"""What compiles variants, and what drives GPUs: looked for, not needed. Each function returns a dict.

Keys that all have: ``found``; ``problem``, a sentence where something is off, else None.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any, Iterator

from raddle import _library

_compiler = _library.function("raddle.jit.compiler")
_folder = _library.function("raddle.cache.folder")
_SYSTEM_NVRTC = ("libnvrtc.so.13", "libnvrtc.so.12", "/usr/local/cuda/lib64/libnvrtc.so")
_NO_DRIVER = "no libcuda.so.1: GPUs need NVIDIA's driver"


def compiler() -> dict[str, Any]:
    """The C++ compiler for variants of the user's own on CPUs: RADDLE_CXX, CXX, c++, g++, clang++."""
    found = {"found": False, "path": None, "origin": None, "version": None, "problem": None}
    try:
        tool = _compiler()
    except _library.CompileError as error:
        return {**found, "problem": str(error).strip()}
    if not tool["path"]:
        problem = "no C++ compiler for variants of your own: install g++ (Debian: apt install g++), or set RADDLE_CXX"
        return {**found, "problem": problem}
    told = {"path": tool["path"], "origin": tool["origin"], "version": tool["identity"]}
    return {**found, "found": True, **told}


def nvrtc() -> dict[str, Any]:
    """NVIDIA's run-time compiler: RADDLE_NVRTC, the wheel nvidia-cuda-nvrtc, or the system's."""
    found = {"found": False, "path": None, "origin": None, "version": None, "problem": None}
    reason = ""
    for origin, path in _nvrtc_candidates():
        try:
            library = _load_nvrtc(path)
        except (OSError, AttributeError) as error:
            if origin == "RADDLE_NVRTC":
                return {**found, "origin": origin, "problem": f"RADDLE_NVRTC cannot be loaded: {error}"}
            if "/" in path:  # a file that is there and yet does not load
                reason = reason or f" ({error})"
            continue
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        version = f"{major.value}.{minor.value}"
        return {**found, "found": True, "path": path, "origin": origin, "version": version}
    problem = f"no NVRTC for kernels on GPUs: pip install nvidia-cuda-nvrtc, or set RADDLE_NVRTC{reason}"
    return {**found, "problem": problem}


def driver() -> dict[str, Any]:
    """NVIDIA's driver, the CUDA version it speaks, and its GPUs."""
    found = {"found": False, "version": None, "gpus": [], "problem": None}
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {**found, "problem": _NO_DRIVER}
    found["found"] = True
    number = ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(number)) == 0:
        found["version"] = f"{number.value // 1000}.{number.value % 1000 // 10}"
    error = cuda.cuInit(0)
    if error != 0:
        return {**found, "problem": f"the NVIDIA driver does not start: cuInit returns {error}"}
    cuda.cuDeviceGetCount(ctypes.byref(number))
    return {**found, "gpus": [_gpu(cuda, index) for index in range(number.value)]}


def cache() -> dict[str, Any]:
    """The folder of compiled variants: RADDLE_CACHE_DIR, XDG_CACHE_HOME/raddle, ~/.cache/raddle."""
    folder, origin = _cache_folder()
    found = {"found": folder.is_dir(), "path": str(folder), "origin": origin, "writable": True, "bytes": 0}
    # What is not there yet is made in the nearest folder that is.
    nearest = folder
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    found["writable"] = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    if found["found"]:
        found["bytes"] = sum(map(_size, folder.rglob("*")))
    problem = None
    if not found["writable"]:
        problem = f"{nearest} cannot be written: what is compiled is kept in memory only; set RADDLE_CACHE_DIR"
    return {**found, "problem": problem}


def _nvrtc_candidates() -> Iterator[tuple[str, str]]:
    override = os.environ.get("RADDLE_NVRTC")
    if override:
        yield "RADDLE_NVRTC", override
        return
    for entry in filter(None, sys.path):
        for path in sorted(Path(entry, "nvidia").glob("*/lib/libnvrtc.so.*"), reverse=True):
            yield "the wheel nvidia-cuda-nvrtc", str(path)
    for name in _SYSTEM_NVRTC:
        yield "system", name


def _load_nvrtc(path: str) -> ctypes.CDLL:
    library = ctypes.CDLL(path)
    library.nvrtcVersion, library.nvrtcGetCUBIN  # noqa: B018  (raises AttributeError where too old)
    return library


def _gpu(cuda: ctypes.CDLL, index: int) -> dict[str, Any]:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(128)
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceComputeCapability(ctypes.byref(major), ctypes.byref(minor), device)
    return {"name": name.value.decode(errors="replace"), "arch": f"sm_{major.value}{minor.value}"}


def _cache_folder() -> tuple[Path, str]:
    """The library's own answer, and the variable that it comes from."""
    names = (name for name in ("RADDLE_CACHE_DIR", "XDG_CACHE_HOME", "HOME") if os.environ.get(name))
    return Path(_folder()), next(names, "no HOME is set")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:  # another process has just removed it
        return 0
