"""T5's bias: distances share learned biases in buckets, ever coarser with distance."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np

from raddle._tensors import lend_flag
from raddle.flex._arrays import floats, integer
from raddle.flex.mods.relative_position_bias import relative_position_bias


def t5_buckets(bias: Any, max_distance: int = 128, bidirectional: bool = False) -> Callable[..., Any]:
    """Score mod: ``score + bias[bucket(kv_idx - q_idx), h]``.

    Args:
        bias: [buckets, Hq] floats, as T5's ``relative_attention_bias.weight``.
        max_distance: from here on, distances share the last bucket.
        bidirectional: encoders: half of the buckets are for keys ahead of the row. Otherwise those are in
            bucket 0.

    Buckets are taken when the mod is made, so that no logarithm runs per score: this is a
    `relative_position_bias` by distance. Raffel et al. 2019 (arXiv 1910.10683), section 2.1.

    Returns:
        A score mod.

    Raises:
        ValueError: too few buckets or distances.
        TypeError: what is no array of floats.

    Example:
        >>> mod = flex.mods.t5_buckets(np.arange(32.0)[:, None])      # one head
        >>> float(mod(0.0, 0, 0, 10, 7))
        3.0
    """
    table, bidirectional = floats(bias, "bias", 2), lend_flag(bidirectional, "bidirectional")
    distance = np.arange(-integer(max_distance, "max_distance", 1), max_distance + 1)
    bucket = t5_bucket(distance, len(table), max_distance, bidirectional)
    return relative_position_bias(table[bucket].T)


def t5_bucket(distance: np.ndarray, num_buckets: int, max_distance: int, bidirectional: bool) -> np.ndarray:
    """The bucket of each distance ``kv_idx - q_idx``: half of them are of one distance, the others grow by a factor."""
    sides = 2 if bidirectional else 1
    buckets = num_buckets // sides
    exact = buckets // 2
    if exact < 1 or max_distance <= exact:
        raise ValueError(
            f"bias has {num_buckets} buckets and max_distance is {max_distance}; expected {2 * sides} buckets "
            "or more, and max_distance above the number of single distances"
        )
    behind = np.abs(distance) if bidirectional else np.maximum(-distance, 0)
    growth = np.log(np.maximum(behind, 1) / exact) / np.log(max_distance / exact)
    coarse = np.minimum(exact + (growth * (buckets - exact)).astype(np.int64), buckets - 1)
    return np.where(behind < exact, behind, coarse) + buckets * ((distance > 0) & (sides == 2))
