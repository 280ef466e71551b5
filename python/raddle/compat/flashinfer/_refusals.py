"""What Raddle does not do of FlashInfer, refused by the argument's name."""

from __future__ import annotations

from typing import Any

BACKENDS = ("auto", "fa2", "fa3")


def refuse(**arguments: Any) -> None:
    """Raises NotImplementedError for the first argument that is given (not None, False or 0)."""
    for name, value in arguments.items():
        if value is not None and value is not False and not (isinstance(value, (int, float)) and value == 0):
            raise NotImplementedError(f"{name} is given; raddle.compat.flashinfer does not have it: leave it out")


def check_backend(backend: str) -> None:
    """Raises NotImplementedError for a backend whose features are its own."""
    if backend not in BACKENDS:
        raise NotImplementedError(f"backend is {backend!r}; expected one of {BACKENDS}: Raddle chooses by itself")


def check_kv_layout(kv_layout: str) -> None:
    """Raises KeyError, as FlashInfer does, for what is neither "NHD" nor "HND"."""
    if kv_layout not in ("NHD", "HND"):
        raise KeyError(f"kv_layout is {kv_layout!r}; expected 'NHD' or 'HND'")


def check_pos_encoding_mode(mode: str) -> None:
    """Raises KeyError, as FlashInfer does, for an unknown mode."""
    if mode not in ("NONE", "ROPE_LLAMA", "ALIBI"):
        raise KeyError(f"pos_encoding_mode is {mode!r}; expected 'NONE', 'ROPE_LLAMA' or 'ALIBI'")
