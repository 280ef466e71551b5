"""Attention variants as values: parts that an `AttentionSpec` lists.

    spec = AttentionSpec(32, 8, 128, variant=[SoftCap(30.0), Causal() & SlidingWindow(4095)])

Logits parts apply in written order, then all masks, joined by and. Masks also combine with ``&`` and
``|``. There is at most one sink and at most one scan.
"""

from __future__ import annotations

from numbers import Real
from typing import Any, Mapping, NamedTuple

import tvm_ffi

from raddle import _library
from raddle._keywords import answered
from raddle._tensors import kind_of, lend, plain, refuse_tracer, restorable

_make = {
    name: _library.function(f"raddle.variant.{name}")
    for name in ("causal", "window", "softcap", "alibi", "sinks", "sigmoid", "all_of", "any_of", "describe")
    + ("source", "source_of", "bind", "check_indices", "state", "restore")
}
_alibi_slopes = _library.function("raddle.alibi_slopes")

_ELEMENTS = {float: "float32", int: "int32", bool: "uint8"}
_EXTENTS = {None: "any", "Hq": "qo_heads", "Hkv": "kv_heads", "requests": "one_or_requests"}


class TensorType(NamedTuple):
    """The type of a captured tensor: element dtype, and the extent of each of its 1 to 4 dimensions."""

    dtype: str
    extents: tuple


class Tensor:
    """Types of captured tensors, for the ``params`` of a `Variant`.

    ``Tensor["Hq"]`` has one float32 a query head; ``Tensor[int, None, "Hkv"]`` is int32 with two dimensions.
    Elements: float (float32, the default), int (int32), bool (uint8), or the names "float32", "int32",
    "uint32", "uint8". Extents: "Hq", "Hkv", "requests" (1, or one a request of the batch), None (any).

    Raises:
        ValueError: no extent, more than four, or an unknown one.

    Example:
        >>> raddle.Tensor[int, None, "Hkv"]
        TensorType(dtype='int32', extents=(None, 'Hkv'))
    """

    def __class_getitem__(cls, items: Any) -> TensorType:
        items = items if isinstance(items, tuple) else (items,)
        dtype = _ELEMENTS.get(items[0], items[0]) if items[0] is not None else None
        named = dtype in ("float32", "int32", "uint32", "uint8")
        extents = items[1:] if named else items
        if not 1 <= len(extents) <= 4 or any(each not in _EXTENTS for each in extents):
            raise ValueError(f"Tensor{list(items)}: expected 1 to 4 extents of {list(_EXTENTS)}")
        return TensorType(dtype if named else "float32", tuple(extents))


@tvm_ffi.register_object("raddle.Variant")
class Variant(_library.Handle):
    """A part of an attention variant: a shipped one (the subclasses), or C++ source of your own.

    Args:
        name: of the struct that source defines; its members are known as "name.member".
        source: C++20 that defines ``struct <name>`` of the variant contract, described in
            ``raddle/engine/variant/contract.h``; `raddle.math` functions are in namespace ``math``.
        params: members by name, with their types: float, int, or `Tensor` with extents.

    ``variant(bias=0.5)`` gives members their values. Those that a mask, its spans or its coverage read are plan
    members, all others run members. It is compiled when an `Attention` is made of it, once a machine (see
    ``raddle cache``); `CompileError` shows your own lines.

    The idea, and FlashSigmoid, are those of the FlashInfer paper, section 3.2.3.

    Raises:
        ValueError: a name that C++ does not take as one, or that Raddle has taken.
        TypeError: ``params`` of other types.

    Example:
        >>> FlashSigmoid = raddle.Variant("FlashSigmoid", '''
        ...     struct FlashSigmoid {
        ...       static constexpr Scan scan = Scan::sum;
        ...       float bias;
        ...       RADDLE_FN float logits(float s, const Row&, const Key&) const { return math::sigmoid(s + bias); }
        ...     };''', params={"bias": float})
        >>> spec = raddle.AttentionSpec(32, 8, 128, variant=[FlashSigmoid(bias=-1.0), raddle.Causal()])
    """

    def __init__(self, name: str, source: str, params: dict[str, Any] | None = None) -> None:
        if params is not None and not isinstance(params, Mapping):
            raise TypeError(f"params is {kind_of(params)}; expected a dict of types by member: {{'bias': float}}")
        types = {member: _type_of(member, kind) for member, kind in (params or {}).items()}
        self.__move_handle_from__(_make["source"](name=name, source=source, params=types, expr=None))

    @classmethod
    def _of_expression(cls, name: str, source: str, params: dict[str, Any], nodes: list[dict[str, Any]]) -> Variant:
        """A traced function, with the expression by which its indices are checked (`raddle.flex.trace`)."""
        made = cls.__new__(cls)
        types = {member: _type_of(member, kind) for member, kind in params.items()}
        made.__move_handle_from__(_make["source"](name=name, source=source, params=types, expr=nodes))
        return made

    def __call__(self, **values: Any) -> Variant:
        """The same variant with values for some of its members.

        Args:
            values: by the member's name: numbers, or arrays, which are copied.

        Returns:
            A `Variant`.

        Raises:
            ValueError: an unknown member, or an array of another shape.
            TypeError: a value of another type.
        """
        members = {name: numbers(value, name) for name, value in values.items()}
        return _make["bind"](variant=self, values=members)

    @property
    def source(self) -> str:
        """The C++ of a variant of your own; empty for shipped ones, whose files come with Raddle."""
        return _make["source_of"](self)

    def __and__(self, other: Variant) -> Variant:
        """Returns a mask that keeps what both masks keep. Raises TypeError if ``other`` is no variant."""
        return _make["all_of"](left=self, right=other)

    def __or__(self, other: Variant) -> Variant:
        """Returns a mask that keeps what either mask keeps. Raises TypeError if ``other`` is no variant."""
        return _make["any_of"](left=self, right=other)

    def _text(self) -> str:
        return _make["describe"](self)

    def __reduce__(self) -> Any:
        # Also of a traced function, which is C++ by now: the function itself need not pickle.
        return _restored, (type(self), plain(_make["state"](self)))


class Causal(Variant):
    """Mask: a row sees itself and what came before it in the request (``kv_index <= q_index``).

    ``q_index = kv_len - qo_len + r`` for row r of a request: the last row sees every key.

    Example:
        >>> spec = raddle.AttentionSpec(32, 8, 128, variant=raddle.Causal())
    """

    def __init__(self) -> None:
        self.__move_handle_from__(_make["causal"]())


class SlidingWindow(Variant):
    """Mask: a row at position p sees positions ``p - left … p + right``.

    Args:
        left: how many earlier positions a row sees, not counting itself; -1: no bound. Models that count the row
            itself in their window of n tokens (Mistral, Gemma) mean ``left = n - 1``.
        right: how many later positions a row sees; -1: no bound.

    Plan members: ``window.left``, ``window.right``.

    Raises:
        ValueError: a bound below -1.

    Example:
        >>> spec = raddle.AttentionSpec(32, 8, 128, variant=[raddle.Causal(), raddle.SlidingWindow(1023)])
    """

    @answered("SlidingWindow")
    def __init__(self, left: int, right: int = -1) -> None:
        self.__move_handle_from__(_make["window"](left=left, right=right))


class SoftCap(Variant):
    """Logits: ``s -> cap * tanh(s / cap)`` (Gemma 2).

    Args:
        cap: bound of a logit's magnitude, above 0.

    tanh has an absolute error of up to 2^-21 (2^-16.9 on Hopper), a capped logit ``cap`` times that: to switch a cap off,
    leave it out rather than make it huge.

    Run member: ``softcap.cap``.

    Raises:
        ValueError: a cap that is not above 0.

    Example:
        >>> spec = raddle.AttentionSpec(32, 8, 128, variant=[raddle.SoftCap(50.0), raddle.Causal()])
    """

    @answered("SoftCap")
    def __init__(self, cap: float) -> None:
        refuse_tracer(cap, "cap")
        self.__move_handle_from__(_make["softcap"](cap))


class Sinks(Variant):
    """Sink: a learned logit a query head, a key without value in the softmax's denominator (gpt-oss).

    Args:
        logits: [num_qo_heads] floats: a list or a tensor of any float dtype. They are copied.

    The LSE of a finished row includes its sink. Run member: ``sinks.logit``.

    Raises:
        ValueError: logits that are not one a query head (when the `Attention` is made), or NaN.
        TypeError: what is no array of floats.

    Example:
        >>> spec = raddle.AttentionSpec(32, 8, 128, variant=[raddle.Sinks(np.zeros(32, np.float32)), raddle.Causal()])
    """

    @answered("Sinks")
    def __init__(self, logits: Any) -> None:
        self.__move_handle_from__(_make["sinks"](numbers(logits, "logits")))


class Sigmoid(Variant):
    """Scan: ``O = sum of sigmoid(s + bias) * v`` instead of a softmax (FlashSigmoid). There is no LSE.

    Args:
        bias: added to every logit; models often take ``-log(n)`` for n keys.

    Run member: ``sigmoid.bias``.

    Raises:
        TypeError: a bias that is no number.

    Example:
        >>> spec = raddle.AttentionSpec(32, 8, 128, variant=[raddle.Sigmoid(-4.0), raddle.Causal()])
    """

    def __init__(self, bias: float = 0.0) -> None:
        refuse_tracer(bias, "bias")
        self.__move_handle_from__(_make["sigmoid"](bias))


class Alibi(Variant):
    """Logits: ``s -> s + slope * (kv_pos - q_pos)``, a penalty that grows with distance (Press et al. 2021,
    arXiv 2108.12409).

    Args:
        slopes: [num_qo_heads] floats: a list or a tensor of any float dtype; they are copied.
            `alibi_slopes` has the paper's.

    The bias is added after the softmax scale. Run member: ``alibi.slopes``.

    Raises:
        ValueError: slopes that are not finite.
        TypeError: what is no array of floats.

    Example:
        >>> spec = raddle.AttentionSpec(32, 8, 128, variant=[raddle.Alibi(raddle.alibi_slopes(32)), raddle.Causal()])
    """

    @answered("Alibi")
    def __init__(self, slopes: Any) -> None:
        self.__move_handle_from__(_make["alibi"](numbers(slopes, "slopes")))


def _restored(kind: type[Variant], state: dict[str, Any]) -> Variant:
    variant = kind.__new__(kind)
    variant.__move_handle_from__(_make["restore"](restorable(state)))
    return variant


def alibi_slopes(num_heads: int) -> list[float]:
    """The slopes of the ALiBi paper, one a head: ``2 ** (-8 h / n)`` for h = 1 … n, n a power of two.

    Between powers of two, the heads beyond the largest one take every second slope of twice as many heads, as
    the authors' code does.

    Args:
        num_heads: query heads.

    Returns:
        A list of num_heads floats.

    Raises:
        ValueError: num_heads that is not above 0.

    Example:
        >>> raddle.alibi_slopes(4)
        [0.25, 0.0625, 0.015625, 0.00390625]
    """
    return list(_alibi_slopes(num_heads))


def _type_of(name: str, kind: Any) -> Any:
    if kind in (float, int):
        return kind.__name__
    if isinstance(kind, TensorType):
        return {"dtype": kind.dtype, "extents": [_EXTENTS[each] for each in kind.extents]}
    raise TypeError(f"params['{name}'] is {kind!r}; expected float, int, or a raddle.Tensor[...]")


def numbers(x: Any, name: str) -> Any:
    """A member's value: a number, a list of numbers, or a tensor of rank 0 to 4."""
    if isinstance(x, bool):
        raise TypeError(f"{name} is a bool; expected a number, a list of numbers or an array")
    if isinstance(x, (list, tuple)):
        _library.refuse_unmade(x, name)
        return x
    return x if isinstance(x, Real) else lend(x, name)


def members(params: dict[str, Any] | None) -> dict[str, Any] | None:
    """``params`` of plan and run: values of members by name."""
    if params is None:
        return None
    if not isinstance(params, Mapping):
        raise TypeError(f"params is {kind_of(params)}; expected a dict of members by name: {{'window.left': 1023}}")
    for name in params:
        if not isinstance(name, str):
            raise TypeError(f"params has {name!r} as a key; expected names of members, such as 'window.left'")
    return {name: numbers(value, f"params['{name}']") for name, value in params.items()}
