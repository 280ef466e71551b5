"""Arguments of the library's masks and mods: checked once, when one is made."""

from __future__ import annotations

import inspect
import math
import types
from numbers import Integral, Real
from typing import Any, Callable

import numpy as np

from raddle._tensors import host_array, kind_of

_INT32 = np.iinfo(np.int32)


def integers(x: Any, name: str, ndim: int = 1) -> np.ndarray:
    """``x`` as a contiguous int32 array of ``ndim`` dimensions, a copy."""
    array = host_array(x, name)
    if array.size == 0 and array.dtype.kind == "f":
        array = array.astype(np.int32)  # numpy's guess for an empty list
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}; expected integers")
    if array.ndim != ndim:
        raise ValueError(f"{name} has {array.ndim} dimensions; expected {ndim}")
    if array.size and not (_INT32.min <= array.min() and array.max() <= _INT32.max):
        raise ValueError(f"{name} has values outside of 32 bits")
    return np.array(array, np.int32, order="C")


def floats(x: Any, name: str, ndim: int = 1) -> np.ndarray:
    """``x`` as a contiguous float32 array of ``ndim`` dimensions, a copy."""
    if hasattr(x, "detach"):
        x = x.detach().float()  # numpy does not know torch's bfloat16
    try:
        array = np.array(host_array(x, name), np.float32, order="C")
    except OverflowError as error:
        raise ValueError(f"{name} has a number beyond float32: {error}") from None
    if array.ndim != ndim:
        raise ValueError(f"{name} has {array.ndim} dimensions; expected {ndim}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} has values that are not finite")
    return array


_INT_MAX = 2**31 - 1


def integer(x: Any, name: str, least: int = 0) -> int:
    """``x`` as an int of at least ``least``."""
    if not isinstance(x, Integral) or isinstance(x, bool):
        raise TypeError(f"{name} is a {type(x).__name__}; expected an integer")
    if x < least:
        raise ValueError(f"{name} is {x}; expected at least {least}")
    if x > _INT_MAX:
        raise ValueError(f"{name} is {x}; expected at most {_INT_MAX}")
    return int(x)


def real(x: Any, name: str) -> float:
    """``x`` as a float; what is too large for one is infinite."""
    if not isinstance(x, Real):
        raise TypeError(f"{name} is {kind_of(x)}; expected a number")
    try:
        return float(x)
    except OverflowError:
        return math.inf if x > 0 else -math.inf


def pair(x: Any, name: str, least: int = 1) -> tuple[int, int]:
    """An int that stands for both, or a pair of ints."""
    both = (x, x) if isinstance(x, Integral) else x
    if not isinstance(both, (tuple, list)):
        raise TypeError(f"{name} is {kind_of(x)}; expected an integer or a pair of them")
    if len(both) != 2:
        raise ValueError(f"{name} has {len(both)} entries; expected one or two")
    return integer(both[0], name, least), integer(both[1], name, least)


def by_request(x: Any, name: str, least: int = 0) -> int | np.ndarray:
    """An int of all requests, or a contiguous int32 array [requests]: of at least ``least``."""
    if isinstance(x, Integral):
        return integer(x, name, least)
    found = integers(x, name)
    if found.size == 0 or found.min() < least:
        entry = "a negative entry" if least == 0 else f"an entry below {least}"
        raise ValueError(f"{name} is empty or has {entry}; expected at least {least}, one entry a request")
    return found


def num_arguments(fn: Callable[..., Any]) -> int | None:
    """Positional arguments without a default; None where a function (of C) does not tell."""
    if isinstance(fn, types.MethodType):
        count = num_arguments(fn.__func__)
        return count if count is None else count - 1
    if isinstance(fn, types.FunctionType) and not hasattr(fn, "__wrapped__"):  # which torch.compile understands, too
        return int(fn.__code__.co_argcount) - len(fn.__defaults__ or ())
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(fn).parameters.values()
    except ValueError:
        return None
    return sum(each.kind in kinds and each.default is each.empty for each in parameters)
