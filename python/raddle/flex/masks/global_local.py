"""Global and local attention: a window, and tokens that see and are seen by all (Longformer)."""

from __future__ import annotations

from typing import Any, Callable

from raddle.flex._arrays import integer


def global_local(window: int, global_tokens: int) -> Callable[..., Any]:
    """Mask: keeps keys at most ``window`` tokens away, the first ``global_tokens`` keys, and all keys of those rows.

    Args:
        window: tokens to each side of a row, at least 0.
        global_tokens: leading tokens that see everything and are seen by everything, at least 0.

    Beltagy et al. 2020 (arXiv 2004.05150), section 3.1; BigBird's "internal" global tokens are the same.

    Returns:
        A mask mod.

    Raises:
        ValueError: numbers below these bounds.
        TypeError: what is no int.

    Example:
        >>> mask = flex.masks.global_local(6, global_tokens=4)
        >>> bool(mask(0, 0, 50, 2)), bool(mask(0, 0, 50, 30))
        (True, False)
    """
    window, global_tokens = integer(window, "window"), integer(global_tokens, "global_tokens")

    def global_local(b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        local = (distance <= window) & (distance >= -window)
        return local | (kv_idx < global_tokens) | (q_idx < global_tokens)

    return global_local
