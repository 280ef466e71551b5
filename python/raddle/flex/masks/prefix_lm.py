"""Prefix-LM: the prompt sees all of itself, the rest is causal."""

from __future__ import annotations

from typing import Any, Callable

from raddle.flex._arrays import by_request


def prefix_lm(prefix_length: Any) -> Callable[..., Any]:
    """Mask: keeps ``kv_idx < prefix_length`` and everything up to the row itself.

    Args:
        prefix_length: tokens that every row sees: an int, or an array [requests] of ints.

    Raffel et al. 2019 (T5, arXiv 1910.10683), section 3.2.1.

    Returns:
        A mask mod.

    Raises:
        ValueError: a negative length, or no lengths at all.
        TypeError: lengths that are no integers.

    Example:
        >>> mask = flex.masks.prefix_lm(20)
        >>> bool(mask(0, 0, 3, 19)), bool(mask(0, 0, 3, 20))
        (True, False)
    """
    lengths = by_request(prefix_length, "prefix_length")
    if isinstance(lengths, int):
        length = lengths

        def prefix_lm(b, h, q_idx, kv_idx):
            return (kv_idx < length) | (kv_idx <= q_idx)

        return prefix_lm

    def prefix_lm_by_request(b, h, q_idx, kv_idx):
        return (kv_idx < lengths[b]) | (kv_idx <= q_idx)

    return prefix_lm_by_request
