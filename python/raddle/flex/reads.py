"""What a trace reads of a function and what surrounds it, so that the next call reads it again instead of tracing.

A read is one captured value: of a closure cell, a global, a default, an attribute, an entry of a container, or what the
function computed of captured arrays alone. It says how the value is found for another function of the same code, and
what must hold of it if the trace is to hold: a number of the same type where a kernel has a member, the same number
where Python needed it, an array of the same dtype and rank, the same function.
"""

from __future__ import annotations

import operator
from typing import Any, Callable, NamedTuple, Optional

import numpy as np

from raddle.flex.expr import scalar

#: ``find(values, where)`` finds a value by those of earlier reads.
Find = Callable[[list[Any], Any], Any]


class At(NamedTuple):
    """Where a captured value is."""

    find: Find
    where: Any


class Of(NamedTuple):
    """Stands for the value of a read among the arguments of a computation."""

    read: int


class Reads:
    """The reads of one trace, in their order."""

    def __init__(self) -> None:
        self._reads: list[tuple[Find, Any, Callable[[Any, Any], Any], Any]] = []
        #: False: the trace saw something that cannot be read again, and holds for one call only.
        self.repeatable = True

    def add(self, at: At, check: Callable[[Any, Any], Any], expected: Any) -> int:
        """The read's number; ``check(value, expected)`` tells whether the trace holds for another value."""
        self._reads.append((*at, check, expected))
        return len(self._reads) - 1

    def next(self) -> int:
        """The number of the read that is added next."""
        return len(self._reads)

    def same(self, at: At, read: int) -> int:
        """A value that was one object with another read's, and has to be again."""
        return self.add(At(one, (*at, read)), operator.is_not, _OTHER)

    def hold(self, read: int, value: Any) -> None:
        """The trace holds for this value alone."""
        self.add(At(itself, read), is_constant, value)

    def compute(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], result: Any) -> int:
        """What was computed of captured arrays, `Of` in ``args`` and ``kwargs``: computed anew by each call."""
        at = At(computed, (function, args, kwargs))
        known = scalar(result)
        if known is not None or _is_plain(result):
            return self.add(at, is_constant, result)
        if hasattr(result, "dtype") and hasattr(result, "shape"):
            return self.add(at, is_array, kind_of_array(result))
        self.repeatable = False
        return self.add(at, is_type, type(result))

    def listed(self) -> list[tuple[Find, Any, Callable[[Any, Any], Any], Any]]:
        return self._reads

    def holds_any(self, numbers: tuple[int, ...]) -> bool:
        """Whether the trace holds only for one of these numbers, or for a shape with one."""
        held = [expected for _, _, check, expected in self._reads if check is is_constant]
        return any(x in numbers for each in held for x in (each if type(each) is tuple else (each,)) if _is_number(x))

    def is_of_array(self, read: int) -> bool:
        """Whether a number was read of an array of one element."""
        return self._reads[read][0] is number

    def number_behind(self, read: int) -> int:
        """The read of the array of which a number was read; else the read itself."""
        find, where, *_ = self._reads[read]
        return where if find is number else read

    def again(self, fn: Any) -> Optional[list[Any]]:
        """The values of all reads for another function; None where the trace does not hold for it."""
        values = [fn]
        try:
            for find, where, check, expected in self._reads:
                value = find(values, where)
                if not check(value, expected):
                    return None
                values.append(value)
        except Exception:  # noqa: BLE001: what the trace read is gone; tracing anew says what that means
            return None
        return values


_OTHER = object()


def _is_plain(x: Any) -> bool:
    """A shape, a dtype, a device, a string."""
    if x is None or isinstance(x, (str, np.dtype)):
        return True
    if isinstance(x, tuple):
        return all(type(each) is int for each in x)
    return type(x).__module__ == "torch" and type(x).__name__ in ("dtype", "device", "layout")


def _is_number(x: Any) -> bool:
    return type(x) in (int, float)


# Values lie one place behind their reads: the first is the function itself, which none has read.


def one(values: list[Any], where: tuple[Find, Any, int]) -> Any:
    find, at, read = where
    value = find(values, at)
    return value if value is values[read + 1] else _OTHER


def root(values: list[Any], _: Any) -> Any:
    return values[0]


def itself(values: list[Any], read: int) -> Any:
    return values[read + 1]


def number(values: list[Any], read: int) -> Any:
    return scalar(values[read + 1])


def cell(values: list[Any], where: tuple[int, int]) -> Any:
    return values[where[0] + 1].__closure__[where[1]].cell_contents


def global_(values: list[Any], where: tuple[int, str]) -> Any:
    return values[where[0] + 1].__globals__[where[1]]


def default(values: list[Any], where: tuple[int, Any]) -> Any:
    read, name = where
    fn = values[read + 1]
    return fn.__defaults__[name] if type(name) is int else fn.__kwdefaults__[name]


def entry(values: list[Any], where: tuple[int, Any]) -> Any:
    return values[where[0] + 1][where[1]]


def attribute(values: list[Any], where: tuple[int, str]) -> Any:
    return getattr(values[where[0] + 1], where[1])


def method_of_type(values: list[Any], where: tuple[int, str]) -> Any:
    return getattr(type(values[where[0] + 1]), where[1])


def computed(values: list[Any], where: tuple[Any, Any, dict[str, Any]]) -> Any:
    function, args, kwargs = where
    return function(*_given(values, args), **{name: _given(values, x) for name, x in kwargs.items()})


def _given(values: list[Any], x: Any) -> Any:
    if type(x) is Of:
        return values[x.read + 1]
    return type(x)([_given(values, y) for y in x]) if type(x) in (list, tuple) else x


def always(value: Any, _: Any) -> bool:
    return True


def is_type(value: Any, kind: type) -> bool:
    return type(value) is kind


def is_small_integer(value: Any, _: Any) -> bool:
    return type(value) is int and -(2**31) < value < 2**31


def is_constant(value: Any, expected: Any) -> bool:
    if type(value) is not type(expected):
        return False
    if type(value) is float:  # tells -0.0 from 0.0 and finds NaN again
        return repr(value) == repr(expected)
    return bool(value == expected)


def is_function(value: Any, expected: tuple[Any, ...]) -> bool:
    return shape_of_function(value) == expected


def shape_of_function(fn: Any) -> tuple[Any, ...]:
    """The code, by identity, and how many values are bound to it in which ways."""
    defaults, by_name, own = fn.__defaults__, fn.__kwdefaults__, fn.__dict__
    return (
        _ById(fn.__code__),
        0 if defaults is None else len(defaults),
        tuple(by_name) if by_name else (),
        tuple(own) if own else (),
    )


class _ById:
    __slots__ = ("x",)
    __hash__ = object.__hash__

    def __init__(self, x: Any) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return self.x is other.x  # type: ignore[attr-defined]


def is_sequence(value: Any, expected: tuple[type, int]) -> bool:
    return type(value) is expected[0] and len(value) == expected[1]


def is_empty(value: Any, kind: type) -> bool:
    return type(value) is kind and len(value) == 0


def is_dict(value: Any, expected: tuple[Any, ...]) -> bool:
    return type(value) is dict and tuple(value) == expected


def is_partial(value: Any, expected: tuple[Any, ...]) -> bool:
    return (type(value), len(value.args), tuple(value.keywords)) == expected


def kind_of_array(x: Any) -> tuple[Any, ...]:
    """What of an array the C++ depends on. One that is empty or requires a gradient is looked at anew: it may be
    refused."""
    return type(x), x.dtype, len(x.shape), getattr(x, "requires_grad", False)


def is_array(value: Any, expected: tuple[Any, ...]) -> bool:
    kind, dtype, rank, _ = expected
    if type(value) is not kind or value.dtype != dtype or value.ndim != rank or 0 in value.shape:
        return False
    return type(value) is np.ndarray or not getattr(value, "requires_grad", False)
