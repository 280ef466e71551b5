"""Raddle in place of FlashInfer's own classes, inside of the installed package."""

from __future__ import annotations

import importlib
import sys
from typing import Any

#: Modules of FlashInfer 0.6 that have names of this package.
MODULES = ("", ".attention", ".cascade", ".decode", ".mla", ".page", ".prefill", ".quantization", ".sparse")


def install() -> list[str]:
    """Puts this package's classes and functions into the installed package `flashinfer`, under their names.

    What Raddle does not have (sampling, norms, MoE, communication) stays FlashInfer's. Call it before other code takes
    the names from `flashinfer`: what has them already keeps them.

    Returns:
        The full names that were replaced.

    Raises:
        ImportError: there is no `flashinfer`; ``import raddle.compat.flashinfer as flashinfer`` does without it.

    Example:
        >>> import importlib.util
        >>> from raddle.compat import flashinfer
        >>> replaced = flashinfer.install() if importlib.util.find_spec("flashinfer") else []
    """
    ours: Any = sys.modules["raddle.compat.flashinfer"]
    replaced = []
    for suffix in MODULES:
        module = importlib.import_module(f"flashinfer{suffix}")
        for name in ours.__all__:
            if name != "install" and hasattr(module, name):
                setattr(module, name, getattr(ours, name))
                replaced.append(f"flashinfer{suffix}.{name}")
    return replaced
