"""Small tensors of traced values: rows of a captured array, stacked values, and what is reduced of them.

Their shapes are known while tracing, so an operation on one is written out element by element.
"""

from __future__ import annotations

import math
from typing import Any, Callable, NamedTuple

import numpy as np

from raddle.flex import errors, expr, foreign
from raddle.flex.capture import Capture
from raddle.flex.expr import Value, build

MOST_ELEMENTS = 1024
#: Functions of tensors by torch's and numpy's names; `vector_functions` fills it in.
functions: dict[str, Callable[..., Any]] = {}


class Extreme(NamedTuple):
    """What max and min along a dimension give."""

    values: Any
    indices: Any = None


class Vector:
    """Traced values and numbers of any rank above 0."""

    __slots__ = ("items",)
    __hash__ = object.__hash__
    __array_priority__ = 1001

    def __init__(self, items: np.ndarray) -> None:
        self.items = items

    @property
    def shape(self) -> tuple[int, ...]:
        return self.items.shape

    @property
    def ndim(self) -> int:
        return self.items.ndim

    @property
    def dtype(self) -> Any:
        return next(x for x in self.items.flat if isinstance(x, Value)).dtype

    @property
    def T(self) -> Any:
        return of(self.items.T)

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Any:
        return (of(each) for each in self.items)

    def __getitem__(self, index: Any) -> Any:
        items, rest = self.items, list(index) if isinstance(index, tuple) else [index]
        traced = [n for n, i in enumerate(rest) if isinstance(i, Value) and i.node.varies]
        if traced and any(i is Ellipsis or isinstance(i, Vector) for i in rest if not isinstance(i, Value)):
            raise errors.refuse("a tensor of traced values is indexed with a traced value and more", "expected numbers")
        chosen = [rest[n] for n in traced]
        for n in traced:
            rest[n] = slice(None)
        axes = [sum(i is None or isinstance(i, slice) for i in rest[:n]) for n in traced]
        items = of(items[tuple(rest)])
        for i, axis in zip(reversed(chosen), reversed(axes)):
            items = one_of(np.moveaxis(array_of(items), axis, 0), i)
        return items

    def __bool__(self) -> bool:
        raise errors.refuse("a condition on a traced value has no truth value here", errors.condition_advice())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: call(name, (self, *args), kwargs)

    @property
    def described(self) -> str:
        return f"a tensor of shape {self.shape}"

    def __repr__(self) -> str:
        return f"<traced {self.shape}>"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(getattr(func, "__name__", str(func)), args, kwargs or {})

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        return call(ufunc.__name__ if method == "__call__" else _OF_UFUNCS.get(ufunc.__name__, method), args, kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return call(func.__name__, args, kwargs)


_OF_UFUNCS = {"add": "sum", "multiply": "prod", "logical_or": "any", "logical_and": "all", "maximum": "amax"}


def of(items: Any) -> Any:
    """A vector, or where it has no dimensions its element."""
    return Vector(items) if isinstance(items, np.ndarray) and items.ndim else _element(items)


def _element(x: Any) -> Any:
    return x.item() if isinstance(x, np.ndarray) else x


def one_of(rows: np.ndarray, index: Any) -> Any:
    """The row at an index, which may be traced: then each is asked for in turn."""
    if not isinstance(index, Value) or not index.node.varies:
        return of(rows[int(index)])
    n = len(rows)
    at = build("where", build("lt", index, 0), build("add", index, n), index)
    found = of(rows[0])
    for i in range(1, n):
        chosen = build("eq", at, i)
        found = elementwise(lambda a, b: build("where", chosen, a, b), of(rows[i]), found)
    return found


def of_capture(x: Capture) -> Vector:
    """The rest of a captured array that has indices for its first dimensions, or none."""
    shape = tuple(x.shape)
    if math.prod(shape) > MOST_ELEMENTS:
        raise errors.refuse(
            f"{x.described} of shape {shape} is read for each pair", f"expected at most {MOST_ELEMENTS} elements"
        )
    items = np.empty(shape, object)
    for at in np.ndindex(shape):
        items[at] = x[at]
    return Vector(items)


def array_of(x: Any) -> np.ndarray:
    """As an array of objects: traced values and numbers."""
    if isinstance(x, Vector):
        return x.items
    if isinstance(x, Capture):
        return of_capture(x).items
    if isinstance(x, (list, tuple)):
        return np.stack([array_of(each) for each in x])
    if not isinstance(x, Value) and hasattr(x, "shape"):
        return np.asarray(x).astype(object)
    items = np.empty((), object)
    items[()] = x
    return items


def elementwise(function: Callable[..., Any], *operands: Any) -> Any:
    arrays = np.broadcast_arrays(*map(array_of, operands))
    if arrays[0].size > MOST_ELEMENTS:
        raise errors.refuse(f"a traced tensor of shape {arrays[0].shape}", f"expected at most {MOST_ELEMENTS} elements")
    result = np.empty(arrays[0].shape, object)
    for at in np.ndindex(result.shape):
        result[at] = function(*(x[at] for x in arrays))
    return of(result)


_COMPARISONS = {"lt", "le", "gt", "ge", "eq", "ne", "isin"}
_OF_VALUES = {"stack", "cat", "concatenate", "concat", "unsqueeze", "expand_dims", "getitem"}


def takes(name: str, args: Any) -> bool:
    """Whether a library's function is about more than single values."""
    if any(isinstance(x, Vector) or isinstance(x, Capture) and x.is_row for x in args):
        return name != "getitem" or any(isinstance(x, (Vector, slice, type(None), type(Ellipsis))) for x in args[1:])
    name = name.strip("_")
    has_value = any(isinstance(x, Value) for x in args)
    if name == "getitem":
        return has_value and any(isinstance(x, (slice, type(None), type(Ellipsis))) for x in args)
    if name in _COMPARISONS:
        return has_value and any(isinstance(x, Capture) for x in args)
    if name in _OF_VALUES:
        return True
    several = bool(args) and isinstance(args[0], (list, tuple))
    return several and name in _OF_VALUES or name in functions and bool(args) and type(args[0]) is Value and (
        name not in ("max", "min") or len(args) == 1
    )


def index(x: Capture, items: tuple[Any, ...]) -> Any:
    """A captured array, or a row of one, with slices, new dimensions or vectors among its indices."""
    given = sum(i is not None and i is not Ellipsis for i in items)
    if Ellipsis in [i for i in items if not isinstance(i, (Value, Vector, Capture))]:
        at = next(n for n, i in enumerate(items) if i is Ellipsis)
        items = (*items[:at], *[slice(None)] * (len(x.shape) - given), *items[at + 1 :])
    if any(isinstance(i, Vector) for i in items):
        return elementwise(lambda *each: x.at(*each), *items)
    while items and isinstance(items[-1], slice) and _is_whole(items[-1], x, sum(i is not None for i in items[:-1])):
        items = items[:-1]
    if not any(i is None or isinstance(i, slice) for i in items):
        return x.at(*items)
    fixed = [i for i in items if i is not None]
    shape, spans = x.shape, []
    for n, i in enumerate(fixed):
        spans.append(range(*i.indices(shape[n])) if isinstance(i, slice) else [i])
    rows = np.empty([len(span) for span in spans], object)
    if rows.size > MOST_ELEMENTS:
        raise errors.refuse(f"a traced tensor of shape {rows.shape}", f"expected at most {MOST_ELEMENTS} elements")
    for at in np.ndindex(rows.shape):
        rows[at] = x.at(*(span[n] for span, n in zip(spans, at)))
    each = tuple(i if i is None else slice(None) if isinstance(i, slice) else 0 for i in items)
    if isinstance(rows.flat[0], Capture):
        whole = np.empty((*rows.shape, *shape[len(fixed) :]), object)
        for at in np.ndindex(rows.shape):
            whole[at] = of_capture(rows[at]).items
        rows = whole
    return of(rows[each])


def _is_whole(span: slice, x: Capture, dimension: int) -> bool:
    """Whether a slice leaves a dimension as it is."""
    return span == slice(None) or range(*span.indices(x.shape[dimension])) == range(x.shape[dimension])


def call(name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs a library's function, or a tensor's method, on vectors."""
    plain = name.strip("_")
    function = functions.get(plain.removeprefix("special_"))
    if function is not None:
        return function(*args, **kwargs)
    if name.startswith("__r") and foreign.find(plain) is None and foreign.find(plain[1:]) is not None:
        plain, args = plain[1:], args[::-1]
    if foreign.find(plain) is None:
        raise errors.refuse(f"`{name}` of a traced tensor is unknown", foreign.instead_of(plain))
    operands = [x for x in args if isinstance(x, (Value, Vector, Capture, int, float)) or hasattr(x, "shape")]
    rest = args[len(operands) :]

    def one(*each: Any) -> Any:
        return foreign.call(plain, (*each, *rest), kwargs) if any(isinstance(x, Value) for x in each) else _now(plain, each)

    return elementwise(one, *operands)


def _now(name: str, args: Any) -> Any:
    raise errors.refuse(f"`{name}` of numbers among traced values", "compute with the numbers before")


def _operator(name: str, reflected: bool) -> Any:
    def method(self: Vector, *args: Any) -> Any:
        return call(name, (*args, self) if reflected else (self, *args), {})

    return method


for _name in "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul".split():
    setattr(Vector, f"__{_name}__", _operator(_name, False))
    setattr(Vector, f"__r{_name}__", _operator(_name, True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "invert", "abs"):
    setattr(Vector, f"__{_name}__", _operator(_name, False))

expr.tensors.takes, expr.tensors.call, expr.tensors.index = takes, call, index
