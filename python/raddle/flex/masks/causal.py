"""Causal: a row sees itself and what came before it."""

from __future__ import annotations

from typing import Any, Callable


def causal() -> Callable[..., Any]:
    """Mask: keeps ``kv_idx <= q_idx``.

    Positions, not indices: where a layout gives positions of its own, `raddle.Causal` is the mask by order in
    the request.

    Returns:
        A mask mod.

    Example:
        >>> mask = flex.masks.causal()
        >>> bool(mask(0, 0, 5, 5)), bool(mask(0, 0, 5, 6))
        (True, False)
    """

    def causal(b, h, q_idx, kv_idx):
        return kv_idx <= q_idx

    return causal
