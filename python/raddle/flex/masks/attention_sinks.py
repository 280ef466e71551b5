"""Attention sinks: the first tokens and a window (StreamingLLM)."""

from __future__ import annotations

from typing import Any, Callable

from raddle.flex._arrays import integer


def attention_sinks(sink_tokens: int, window: int) -> Callable[..., Any]:
    """Mask: causal; a row keeps the first ``sink_tokens`` keys and those at most ``window`` positions before it.

    Args:
        sink_tokens: leading tokens that stay visible, at least 0; the paper takes 4.
        window: how many earlier positions a row sees beside the sinks, not counting itself; at least 0.

    Xiao et al. 2023 (arXiv 2309.17453). Learned sinks, logits without a key, are `raddle.Sinks`.

    Returns:
        A mask mod.

    Raises:
        ValueError: numbers below these bounds.
        TypeError: what is no int.

    Example:
        >>> mask = flex.masks.attention_sinks(4, window=15)
        >>> bool(mask(0, 0, 100, 3)), bool(mask(0, 0, 100, 50))
        (True, False)
    """
    sink_tokens, window = integer(sink_tokens, "sink_tokens"), integer(window, "window")

    def attention_sinks(b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx) & ((kv_idx < sink_tokens) | (q_idx - kv_idx <= window))

    return attention_sinks
