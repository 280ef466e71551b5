"""Dilated sliding window: a window with holes, wider at the same cost (Longformer)."""

from __future__ import annotations

from typing import Any, Callable

from raddle.flex._arrays import integer


def dilated_window(window: int, dilation: int) -> Callable[..., Any]:
    """Mask: a row keeps the keys at distances 0, ±dilation, ±2·dilation … up to ``window`` steps.

    Args:
        window: steps to each side, at least 0.
        dilation: tokens of a step, at least 1.

    Beltagy et al. 2020 (arXiv 2004.05150), section 3.1.

    Returns:
        A mask mod.

    Raises:
        ValueError: numbers below these bounds.
        TypeError: what is no int.

    Example:
        >>> mask = flex.masks.dilated_window(window=5, dilation=3)
        >>> bool(mask(0, 0, 20, 14)), bool(mask(0, 0, 20, 15))
        (True, False)
    """
    dilation = integer(dilation, "dilation", 1)
    reach = integer(window, "window") * dilation

    def dilated_window(b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return (distance <= reach) & (distance >= -reach) & (distance % dilation == 0)

    return dilated_window
