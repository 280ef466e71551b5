"""What compiles variants, and what drives GPUs: looked for, not needed. Each function returns a dict.

Keys that all have: ``found``; ``problem``, a sentence where something is off, else None.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from raddle import _cuda, _library

_compiler = _library.function("raddle.jit.compiler")
_folder = _library.function("raddle.cache.folder")


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
    try:
        return {**found, "found": True, **_cuda.find_nvrtc()}
    except _library.CompileError as error:
        return {**found, "problem": str(error).strip()}


def driver() -> dict[str, Any]:
    """NVIDIA's driver, the CUDA version it speaks, and its GPUs: name, arch, target, and whether kernels run there.

    The target is what kernels are compiled for: the GPU's own arch, or that of RADDLE_CUDA_ARCH.
    """
    found = {"found": False, "version": None, "gpus": [], "problem": None}
    try:
        told = _cuda.driver()
    except RuntimeError as error:
        return {**found, "problem": str(error).strip()}
    found = {**found, "found": True, **told}
    old = [f"{gpu['name']} ({gpu['arch']})" for gpu in told["gpus"] if not gpu["supported"]]
    if not told["gpus"]:
        problem = "there is a CUDA driver but no GPU that it may use (CUDA_VISIBLE_DEVICES hides some)"
        return {**found, "problem": problem}
    if old:
        return {**found, "problem": f"kernels need sm_75 or later: not {', '.join(old)}"}
    return {**found, "problem": told["problem"] or None}


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


def _cache_folder() -> tuple[Path, str]:
    """The library's own answer, and the variable that it comes from."""
    names = (name for name in ("RADDLE_CACHE_DIR", "XDG_CACHE_HOME", "HOME") if os.environ.get(name))
    return Path(_folder()), next(names, "no HOME is set")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:  # another process has just removed it
        return 0
