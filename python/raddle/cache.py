"""What was compiled just in time on this machine: variants of your own, fused compositions, traced functions.

The cache is a folder of finished entries, named by the hash of everything that they depend on:
``RADDLE_CACHE_DIR``, else ``$XDG_CACHE_HOME/raddle``, else ``~/.cache/raddle``. Entries never grow stale.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any, Iterable

from raddle import _library

_folder = _library.function("raddle.cache.folder")
_list = _library.function("raddle.cache.list")
_clear = _library.function("raddle.cache.clear")
_num_compiled = _library.function("raddle.jit.num_compiled")


def folder() -> Path:
    """Where the cache lies, whether or not it is there yet."""
    return Path(_folder())


def entries() -> list[dict[str, Any]]:
    """Finished entries: dicts of name, target, path and bytes, by name."""
    return [dict(row.items()) for row in _list()]


def clear() -> int:
    """Removes all entries; returns how many there were."""
    return int(_clear())


def num_compiled() -> int:
    """How many variants this process has compiled rather than found in the cache."""
    return int(_num_compiled())


def warm(specs: Iterable[Any]) -> int:
    """Compiles what `AttentionSpec`s need, so that later processes find it; returns how many were compiled."""
    from raddle.attention import Attention

    before = num_compiled()
    for spec in specs:
        Attention(spec)
    return num_compiled() - before


def find_specs(target: str) -> list[Any]:
    """The specs that "module:name" or "file.py:name" names: one, a list, or a function that returns either."""
    place, colon, name = target.rpartition(":")
    if not colon:
        raise ValueError(f"'{target}' names no spec; expected module:name or file.py:name")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        if spec is None or not Path(place).is_file():
            raise ValueError(f"'{place}' is no file")
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
