"""Raddle as an attention backend of SGLang: ``python -m sglang.launch_server … --attention-backend raddle``.

SGLang finds `register` by the entry point "sglang.srt.plugins" and calls it in each of its processes.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

__all__ = ["register"]

#: What the user writes after ``--attention-backend``.
NAME = "raddle"
#: The version of SGLang whose interface the backend was written for.
WRITTEN_FOR = "0.5.23"

_logger = logging.getLogger("sglang.raddle")


def register() -> None:
    """Makes Raddle SGLang's attention backend "raddle".

    Raises:
        ImportError: there is no SGLang, or one without plugins for attention backends.
    """
    registry: Any = importlib.import_module("sglang.srt.layers.attention.attention_registry")
    arguments: Any = importlib.import_module("sglang.srt.server_args")
    registry.register_attention_backend(NAME)(_make)
    arguments.add_attention_backend_choices([NAME])
    version = str(importlib.import_module("sglang").__version__)
    if version != WRITTEN_FOR:
        _logger.warning("raddle's backend was written for SGLang %s; this is %s", WRITTEN_FOR, version)


def _make(runner: Any) -> Any:
    """The backend of a model that SGLang has loaded; imported here, since it imports SGLang."""
    backend: Any = importlib.import_module("raddle.integrations.sglang.backend")
    return backend.Backend(runner)
