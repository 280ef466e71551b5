"""Sliding window: a row sees its neighbourhood (Longformer, Mistral)."""

from __future__ import annotations

from typing import Any, Callable

from raddle.flex._arrays import integer


def sliding_window(left: int, right: int = -1) -> Callable[..., Any]:
    """Mask: a row at position p keeps ``p - left … p + right``, as `raddle.SlidingWindow` does.

    Args:
        left: how many earlier positions a row sees, not counting itself; -1: no bound. Models that count the row
            itself in their window of n tokens mean ``left = n - 1``.
        right: how many later positions a row sees; -1: no bound.

    Beltagy et al. 2020 (arXiv 2004.05150), section 3.1.

    Returns:
        A mask mod.

    Raises:
        ValueError: a bound below -1.
        TypeError: what is no int.

    Example:
        >>> mask = flex.masks.sliding_window(15, 0)
        >>> bool(mask(0, 0, 20, 5)), bool(mask(0, 0, 20, 4))
        (True, False)
    """
    left, right = integer(left, "left", -1), integer(right, "right", -1)

    def sliding_window(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx <= left) & (kv_idx - q_idx <= right)

    def left_window(b, h, q_idx, kv_idx):
        return q_idx - kv_idx <= left

    def right_window(b, h, q_idx, kv_idx):
        return kv_idx - q_idx <= right

    def unbounded_window(b, h, q_idx, kv_idx):
        return kv_idx >= 0

    if left >= 0:
        return sliding_window if right >= 0 else left_window
    return right_window if right >= 0 else unbounded_window
