"""Logit soft capping (Gemma 2)."""

from __future__ import annotations

import math
from typing import Any, Callable

from raddle._tensors import lend_flag
from raddle.flex._arrays import real
from raddle.flex.ops import tanh, tanh_approx


def softcap(cap: float, fast: bool = False) -> Callable[..., Any]:
    """Score mod: ``cap * tanh(score / cap)``.

    Args:
        cap: bound of the score's magnitude, above 0.
        fast: tanh by an approximation (`raddle.flex.ops.tanh_approx`) that needs no exponential.

    Gemma 2 (arXiv 2408.00118), section 2.

    Returns:
        A score mod.

    Raises:
        ValueError: a cap that is not above 0.
        TypeError: a cap that is no number.

    Example:
        >>> mod = flex.mods.softcap(30.0)
        >>> round(float(mod(1000.0, 0, 0, 10, 3)), 3)
        30.0
    """
    cap, fast = real(cap, "cap"), lend_flag(fast, "fast")
    if not (cap > 0.0 and math.isfinite(cap)):
        raise ValueError(f"cap is {cap}; expected a finite number above 0")

    def softcap(score, b, h, q_idx, kv_idx):
        return cap * tanh(score / cap)

    def fast_softcap(score, b, h, q_idx, kv_idx):
        return cap * tanh_approx(score / cap)

    return fast_softcap if fast else softcap
