"""A learned bias for each distance."""

from __future__ import annotations

from typing import Any, Callable

from raddle.flex._arrays import floats
from raddle.flex.ops import clamp


def relative_position_bias(bias: Any) -> Callable[..., Any]:
    """Score mod: ``score + bias[h, n + distance]`` with ``distance = kv_idx - q_idx`` clipped to -n … n.

    Args:
        bias: [Hq, 2 n + 1] floats: of distances -n (a key before the row) to n (a key after it).

    Clipped relative positions as in Shaw et al. 2018 (arXiv 1803.02155), as a bias of the score.

    Returns:
        A score mod.

    Raises:
        ValueError: an even number of distances, or values that are not finite.
        TypeError: what is no array of floats.

    Example:
        >>> mod = flex.mods.relative_position_bias([[-2.0, -1.0, 0.0, 1.0, 2.0]])      # one head, n = 2
        >>> float(mod(0.0, 0, 0, 10, 3))
        -2.0
    """
    table = floats(bias, "bias", 2)
    if table.shape[1] % 2 == 0:
        raise ValueError(f"bias has {table.shape[1]} distances; expected an odd number, from -n to n")
    most = table.shape[1] // 2

    def relative_position_bias(score, b, h, q_idx, kv_idx):
        return score + table[h, clamp(kv_idx - q_idx, -most, most) + most]

    return relative_position_bias
