"""Attention variants as values: parts that an `AttentionSpec` lists.

    spec = AttentionSpec(32, 8, 128, variant=[SoftCap(30.0), Causal() & SlidingWindow(4095)])

Logits parts apply in written order, then all masks, joined by and. Masks also combine with ``&`` and
``|``. There is at most one sink and at most one scan.
"""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, NamedTuple

import tvm_ffi

from raddle import _library
from raddle._tensors import lend, lend_index

_make = {
    name: _library.function(f"raddle.variant.{name}")
    for name in ("causal", "window", "softcap", "sinks", "sigmoid", "rope", "all_of", "any_of", "describe")
}


@tvm_ffi.register_object("raddle.Variant")
class Variant(_library.Handle):
    """A part of an attention variant."""

    has_lse = True
    """False for a scan that is no softmax: its result has no log-sum-exp."""

    def __and__(self, other: Variant) -> Variant:
        """A mask that keeps what both masks keep. Raises TypeError if ``other`` is no variant."""
        return _make["all_of"](self, other)

    def __or__(self, other: Variant) -> Variant:
        """A mask that keeps what either mask keeps. Raises TypeError if ``other`` is no variant."""
        return _make["any_of"](self, other)

    def __repr__(self) -> str:
        return _make["describe"](self)


class Causal(Variant):
    """Mask: a row sees itself and what came before it in the request (``kv_index <= q_index``).

    ``q_index = kv_len - qo_len + r`` for row r of a request: the last row sees every key.
    """

    def __init__(self) -> None:
        self.__init_handle_by_constructor__(_make["causal"])


class SlidingWindow(Variant):
    """Mask: a row at position p sees positions ``p - left … p + right``.

    Args:
        left: tokens behind the row; -1: no bound. Models that count the row itself in their window of
            n tokens (Mistral, Gemma) mean ``left = n - 1``.
        right: tokens ahead; -1: no bound.

    Plan members: ``window.left``, ``window.right``.
    """

    def __init__(self, left: int, right: int = -1) -> None:
        self.__init_handle_by_constructor__(_make["window"], left, right)


class SoftCap(Variant):
    """Logits: ``s -> cap * tanh(s / cap)`` (Gemma 2). Raises ValueError unless cap > 0.

    Run member: ``softcap.cap``.
    """

    def __init__(self, cap: float) -> None:
        self.__init_handle_by_constructor__(_make["softcap"], cap)


class Sinks(Variant):
    """Sink: a learned logit a query head, a key without value in the softmax's denominator (gpt-oss).

    Args:
        logits: [num_qo_heads] floats: a list or a tensor of any float dtype. They are copied.

    The LSE of a finished row includes its sink. Run member: ``sinks.logit``.
    """

    def __init__(self, logits: Any) -> None:
        self.__init_handle_by_constructor__(_make["sinks"], numbers(logits, "logits"))


class Sigmoid(Variant):
    """Scan: ``O = sum of sigmoid(s + bias) * v`` instead of a softmax (FlashSigmoid). There is no LSE.

    Run member: ``sigmoid.bias``.
    """

    has_lse = False

    def __init__(self, bias: float = 0.0) -> None:
        self.__init_handle_by_constructor__(_make["sigmoid"], bias)


class Llama31Scaling(NamedTuple):
    """Llama 3.1's scaling of RoPE frequencies for contexts longer than the trained one."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: float = 8192.0


class Rope(Variant):
    """Rotary position embedding, fused: rotates Q by ``q_pos`` and K by ``kv_pos`` (RoFormer), half-split pairs.

    Args:
        rotary_dim: elements of a head that rotate, even, at most head_dim; the others pass unchanged.
        theta: base of the frequencies ``theta ** (-2 i / rotary_dim)``.
        scaling: `Llama31Scaling`, or None.
        offset: added to every position: an int, or one int32 or int64 a request.

    Run member: ``rope.offset``. Raises ValueError for a bad rotary_dim, theta or offset.
    """

    def __init__(
        self,
        rotary_dim: int,
        theta: float = 10000.0,
        scaling: Llama31Scaling | None = None,
        offset: Any = 0,
    ) -> None:
        if not isinstance(offset, Integral):
            offset = lend_index(offset, "offset")
        fields = None if scaling is None else scaling._asdict()
        self.__init_handle_by_constructor__(_make["rope"], rotary_dim, theta, offset, fields)


def numbers(x: Any, name: str) -> Any:
    """A member's value: a number, a list of numbers, or a tensor of rank 0 or 1."""
    return x if isinstance(x, (Real, list, tuple)) else lend(x, name)


def members(params: dict[str, Any] | None) -> dict[str, Any] | None:
    """``params`` of plan and run: values of members by name."""
    if not params:
        return None
    return {name: numbers(value, f"params['{name}']") for name, value in params.items()}
