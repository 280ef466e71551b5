"""ALiBi: attention with linear biases."""

from __future__ import annotations

from typing import Any, Callable

from raddle.flex._arrays import floats


def alibi(slopes: Any) -> Callable[..., Any]:
    """Score mod: ``score + slopes[h] * (kv_idx - q_idx)``, a penalty that grows with distance.

    Args:
        slopes: [Hq] floats. The paper's are 2^(-8/Hq), 2^(-16/Hq) …

    The bias comes after the softmax scale. Press et al. 2021 (arXiv 2108.12409).

    Returns:
        A score mod.

    Raises:
        ValueError: slopes that are not finite.
        TypeError: what is no array of floats.

    Example:
        >>> mod = flex.mods.alibi(raddle.alibi_slopes(4))
        >>> float(mod(1.0, 0, 0, 10, 6))
        0.0
    """
    slopes = floats(slopes, "slopes")

    def alibi(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    return alibi
