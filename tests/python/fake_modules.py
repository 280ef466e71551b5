"""Modules of an engine that is not installed, for what imports them."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any


def modules(members: dict[str, dict[str, Any]]) -> dict[str, types.ModuleType]:
    """The modules by name, for sys.modules, of what each has; each is an attribute of the one above it."""
    made: dict[str, types.ModuleType] = {}
    for name, own in members.items():
        made[name] = module = types.ModuleType(name)
        module.__dict__.update(own)
        module.__path__ = []
        above, _, last = name.rpartition(".")
        if above:
            setattr(made[above], last, module)
    return made


def imported(name: str, members: dict[str, dict[str, Any]]) -> types.ModuleType:
    """The module ``name``, which finds these modules while it is imported."""
    had = {each: sys.modules.get(each) for each in members}
    sys.modules.update(modules(members))
    try:
        return importlib.import_module(name)
    finally:
        for each, module in had.items():
            sys.modules.pop(each) if module is None else sys.modules.__setitem__(each, module)
