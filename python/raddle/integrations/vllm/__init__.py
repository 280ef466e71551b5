"""Raddle as an attention backend of vLLM: ``vllm serve … --attention-backend CUSTOM``.

vLLM finds `register` by the entry point "vllm.general_plugins" and calls it in each of its processes.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from typing import Any

from raddle.integrations.vllm.layers import variant

__all__ = ["register", "variant"]

#: Versions of vLLM that the backend was tried with.
TRIED = ("0.24.",)
#: A module, or a file of Python, that calls `variant`.
VARIANTS = "RADDLE_VLLM_VARIANTS"

_logger = logging.getLogger("vllm.raddle")  # below vLLM's own logger, which has the handlers


def register() -> None:
    """Makes Raddle vLLM's backend CUSTOM. What RADDLE_VLLM_VARIANTS names is imported, once a process.

    Raises:
        ImportError: there is no vLLM, or RADDLE_VLLM_VARIANTS names no module or file.
    """
    registry: Any = importlib.import_module("vllm.v1.attention.backends.registry")
    registry.register_backend(registry.AttentionBackendEnum.CUSTOM, "raddle.integrations.vllm.backend.Backend")
    version = str(importlib.import_module("vllm").__version__)
    if not version.startswith(TRIED):
        _logger.warning("raddle was tried with vLLM %sx; this is %s", " and ".join(TRIED), version)
    named = os.environ.get(VARIANTS)
    if named:
        _import(named)


def _import(named: str) -> None:
    """Imports a module by its name, or a file; once, however often vLLM registers."""
    if not named.endswith(".py"):
        importlib.import_module(named)
        return
    if named in _imported:
        return
    spec = importlib.util.spec_from_file_location("raddle_vllm_variants", named)
    if spec is None or spec.loader is None or not os.path.isfile(named):
        raise ImportError(f"{VARIANTS} is '{named}'; expected a module, or a file that is there")
    _imported.add(named)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


_imported: set[str] = set()
