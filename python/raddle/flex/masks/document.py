"""Documents packed one after another into a sequence."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np

from raddle.flex._arrays import integers
from raddle.flex.ops import minimum


def document(offsets: Any) -> Callable[..., Any]:
    """Mask: a row sees the document that it is part of. Joined with `causal`: what it has seen of that document.

    Args:
        offsets: [documents + 1] ascending ints from 0 on: document n is tokens ``offsets[n] … offsets[n + 1] - 1``.
            The last one is the length of the sequence; tokens beyond it count as the last document's.

    Each token's document begins and ends at captured positions, 8 bytes a token, which are looked up by row alone:
    the keys of a tile are then compared with two numbers a row.

    Returns:
        A mask mod.

    Raises:
        ValueError: offsets that do not ascend from 0 to a length above 0.
        TypeError: what is no array of integers.

    Example:
        >>> mask = flex.masks.document([0, 12, 36])
        >>> bool(mask(0, 0, 20, 12)), bool(mask(0, 0, 20, 11))
        (True, False)
    """
    bounds = integers(offsets, "offsets")
    if bounds.size < 2 or bounds[0] != 0 or (np.diff(bounds) < 0).any() or bounds[-1] == 0:
        raise ValueError("offsets do not ascend from 0 to a length above 0; expected [0, …, tokens]")
    lengths = np.diff(bounds)
    begin, end = np.repeat(bounds[:-1], lengths), np.repeat(bounds[1:], lengths)

    last = int(bounds[-1]) - 1

    def document(b, h, q_idx, kv_idx):
        token = minimum(q_idx, last)
        return (begin[token] <= kv_idx) & (kv_idx < end[token])

    return document
