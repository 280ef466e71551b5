"""Mask functions of transformers that say no more than how far a row sees."""

from __future__ import annotations

import inspect
from typing import Any, Callable, NamedTuple

from transformers import masking_utils


class Window(NamedTuple):
    """A row at position p sees ``p - left … p + right``; -1: no bound."""

    left: int
    right: int

    def __and__(self, other: Window) -> Window:  # type: ignore[override]
        return Window(*(max(pair) if min(pair) < 0 else min(pair) for pair in zip(self, other)))


CAUSAL = Window(-1, 0)
EVERYTHING = Window(-1, -1)

_SLIDING = masking_utils.sliding_window_overlay(1).__code__
_SLIDING_BOTH_WAYS = masking_utils.sliding_window_bidirectional_overlay(1).__code__
_AND = masking_utils.and_masks(masking_utils.causal_mask_function).__code__


def window_of(mask_function: Callable[..., Any]) -> Window | None:
    """The window that a mask function of transformers stands for; None: it is something else, and is traced."""
    if mask_function is masking_utils.causal_mask_function:
        return CAUSAL
    if mask_function is masking_utils.bidirectional_mask_function:
        return EVERYTHING
    code = getattr(mask_function, "__code__", None)
    if code not in (_SLIDING, _SLIDING_BOTH_WAYS, _AND):
        return None
    captured = inspect.getclosurevars(mask_function).nonlocals
    if code is _SLIDING:  # the row itself counts
        return Window(captured["sliding_window"] - 1, -1)
    if code is _SLIDING_BOTH_WAYS:
        return Window(captured["sliding_window"], captured["sliding_window"])
    window = EVERYTHING
    for part in captured["mask_functions"]:
        found = window_of(part)
        if found is None:
            return None
        window &= found
    return window
