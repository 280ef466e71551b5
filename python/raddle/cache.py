"""What was compiled just in time on this machine: variants of your own, fused compositions, traced functions.

The cache is a folder of finished entries, named by the hash of everything that they depend on:
``RADDLE_CACHE_DIR``, else ``$XDG_CACHE_HOME/raddle``, else ``~/.cache/raddle``. Entries never grow stale.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any, Callable, Iterable

from raddle import _library

_folder = _library.function("raddle.cache.folder")
_list = _library.function("raddle.cache.list")
_clear = _library.function("raddle.cache.clear")
_num_compiled = _library.function("raddle.jit.num_compiled")


def folder() -> Path:
    """Returns where the cache lies, whether or not it is there yet: a pathlib.Path."""
    return Path(_folder())


def entries() -> list[dict[str, Any]]:
    """Returns the finished entries, in the order of their names.

    Each is a dict of name; kind, "CPU variant" or "GPU kernel"; target, the instruction set or architecture that it was
    compiled for; time, seconds since 1970 when it was; bytes of the binary; path of its folder; key, the
    folder's name, which no other entry has.
    """
    return [_entry(dict(row.items())) for row in _list()]


def _entry(row: dict[str, Any]) -> dict[str, Any]:
    path = Path(row["path"])
    kind = "GPU kernel" if row["target"].startswith(("sm_", "compute_")) else "CPU variant"
    try:
        time = path.stat().st_mtime
    except OSError:  # another process has just removed it
        time = 0.0
    return {**row, "kind": kind, "time": time, "key": path.name}


def clear() -> int:
    """Removes all entries; returns how many there were."""
    return int(_clear())


def num_compiled() -> int:
    """Returns how many variants this process has compiled rather than found in the cache."""
    return int(_num_compiled())


def warm(
    specs: Iterable[Any],
    arch: str | None = None,
    all_kernels: bool = False,
    tell: Callable[[str], None] | None = None,
) -> int:
    """Compiles ahead of time, so that later processes find it.

    Args:
        specs: `AttentionSpec` values.
        arch: None: for the CPU. A GPU's architecture, such as "sm_90a" (`raddle doctor` prints it): its kernels, by
            NVRTC, where the GPU need not be. Entries are of one version of NVRTC: compile with the one that will be
            there.
        all_kernels: with an arch, all kernels that plans and reservations may need, rather than the two that an
            `Attention` starts with: of decodes, and of long queries.
        tell: is called with the name of each of an arch's kernels before it is compiled.

    Returns:
        How many variants, or kernels, were compiled; the others were there, or need no compiling.

    Raises:
        ValueError: a spec that cannot be computed, or an unknown arch.
        CompileError: a variant that does not compile, or no compiler.

    Example:
        >>> raddle.cache.warm([raddle.AttentionSpec(8, 2, 64, variant=raddle.Causal())])
        0
    """
    if arch is None:
        from raddle.attention import Attention

        before = num_compiled()
        for spec in specs:
            Attention(spec)
        return num_compiled() - before
    from raddle import _cuda

    compiled = 0
    for spec in specs:
        for kernel in _cuda.kernels(spec, arch, all_kernels):
            if tell is not None:
                tell(kernel)
            compiled += _cuda.warm(spec, arch, kernel)
    return compiled


def find_specs(target: str) -> list[Any]:
    """Finds specs by name: what `raddle cache warm` takes.

    Args:
        target: "module:name" or "file.py:name" of a spec, a list of specs, or a function that returns either.

    Returns:
        A list of `AttentionSpec` values.

    Raises:
        ValueError: a text without a colon, a file that is not there, or a name that is not in it.
        ImportError: a module that is not there.

    Example:
        >>> raddle.cache.find_specs("no_colon")
        Traceback (most recent call last):
        ...
        ValueError: 'no_colon' does not name a spec; expected module:name or file.py:name
    """
    place, colon, name = target.rpartition(":")
    if not colon:
        raise ValueError(f"'{target}' does not name a spec; expected module:name or file.py:name")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        if spec is None or not Path(place).is_file():
            raise ValueError(f"there is no file '{place}'")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    if not hasattr(module, name):
        raise ValueError(f"'{place}' has no '{name}'")
    found = getattr(module, name)
    found = found() if callable(found) else found
    return list(found) if isinstance(found, (list, tuple)) else [found]
