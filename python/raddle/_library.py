"""Finds the compiled library and loads it, once a process."""

from __future__ import annotations

import os
import sys
from operator import itemgetter
from pathlib import Path
from typing import Any, Callable, NoReturn

import numpy as np
import tvm_ffi
from tvm_ffi import core

# The base of all its objects, tensors and functions among them; until 0.1.9 it was Object.
CObject = getattr(core, "CObject", core.Object)

_NAME = "libraddle_ffi.so"


def find() -> Path:
    """Path of the compiled library: ``RADDLE_LIBRARY`` if set, else the one installed with raddle.

    Raises ``ImportError`` if there is none.
    """
    override = os.environ.get("RADDLE_LIBRARY")
    if override:
        # A wrong override is an error: a silent second choice would test the wrong library.
        if not Path(override).is_file():
            raise ImportError(f"RADDLE_LIBRARY names no file: {override}")
        return Path(override)
    # An editable install has two folders: the sources and the one with the library.
    folders = [Path(entry) for entry in sys.modules["raddle"].__path__]
    for folder in folders:
        if (folder / _NAME).is_file():
            return folder / _NAME
    raise ImportError(f"{_NAME} is in none of {', '.join(map(str, folders))}; reinstall raddle")


@tvm_ffi.register_error("CompileError")
class CompileError(RuntimeError):
    """A variant's source does not compile, or there is no compiler; the message shows your own lines first."""


# Loading registers the functions "raddle.*". A second copy in the same process would end it.
module = tvm_ffi.load_module(find())


def _arguments(name: str) -> list[str]:
    """Names of a function's arguments in their order, as the library lists them (src/ffi)."""
    listed = tvm_ffi.get_global_func_metadata(name).get("arguments")
    if listed is None:
        raise ImportError(f"{find()} lists no arguments of {name}: it is older than this code; build it again")
    return str(listed).split()


#: Types that cross to the library as they are; any other may be, or hold, a handle that no constructor made.
PLAIN = frozenset((type(None), bool, int, float, str, bytes, np.ndarray))

_DEEPEST = 8  # lists and dicts in each other; tvm-ffi converts them by recursion, without a bound


def refuse_unmade(x: Any, name: str, depth: int = 0) -> None:
    """Raises ValueError where the argument ``name`` is, or holds, a handle that no constructor made.

    ``X.__new__(X)`` is one, as is what a constructor that raised leaves in its frame. tvm-ffi would read through its
    null pointer.
    """
    if isinstance(x, CObject):
        if not x.__chandle__() and not isinstance(x, tvm_ffi.Tensor):  # a tensor may be a view without a handle
            raise ValueError(f"{name} is a {type(x).__name__} that was not made; expected what its constructor returns")
    elif isinstance(x, (list, tuple, dict)):
        if depth == _DEEPEST:
            raise ValueError(f"{name} holds more than {_DEEPEST} lists in each other; expected a flat one")
        for each in x if not isinstance(x, dict) else (*x.keys(), *x.values()):
            if each.__class__ not in PLAIN:
                refuse_unmade(each, name, depth + 1)


def refuse_arrays(error: Exception, **given: Any) -> NoReturn:
    """Raises TypeError where an argument is, or holds, a tensor that DLPack does not hand over; else ``error`` again.

    tvm-ffi asks for it in the call, and its error, or the framework's, names no argument.
    """
    for name, x in given.items():
        for each in x if isinstance(x, (list, tuple)) else (x,):
            if hasattr(each, "__dlpack__"):
                try:
                    tvm_ffi.from_dlpack(each)
                except Exception as refused:
                    why = str(refused).partition("\n")[0]
                    raise TypeError(f"{name} is a {type(each).__name__} that cannot be used: {why}") from None
    raise error


def function(name: str) -> Callable[..., Any]:
    """A function of the library, called with its arguments by name: what place a name has is looked up once, here.

    Names other than the library's raise TypeError. Where no two arguments could change places, they have no names: a
    single one, or one that any number of a kind may follow ("layout *reservations"). Handles that no constructor made
    raise ValueError.
    """
    raw: Callable[..., Any] | None = tvm_ffi.get_global_func(name, allow_missing=True)
    if raw is None:
        raise ImportError(f"{find()} has no {name}: it is older than this code; build it again")
    listed = _arguments(name)
    if sum(not each.startswith("*") for each in listed) < 2:
        last = len(listed) - 1

        def call_in_order(*given: Any) -> Any:
            for n, value in enumerate(given):
                if value.__class__ not in PLAIN and last >= 0:
                    argument = listed[min(n, last)]
                    refuse_unmade(value, f"{argument[1:]}[{n - last}]" if argument[0] == "*" else argument)
            try:
                return raw(*given)
            except (BufferError, RuntimeError) as error:
                first = dict(zip(listed[:last], given))
                refuse_arrays(error, **first, **({listed[last].lstrip("*"): given[last:]} if listed else {}))

        return call_in_order
    in_order, count = itemgetter(*listed), len(listed)

    def call(**arguments: Any) -> Any:
        for argument, value in arguments.items():
            if value.__class__ not in PLAIN:
                refuse_unmade(value, argument)
        if len(arguments) == count:
            try:
                given = in_order(arguments)
            except KeyError:
                pass
            else:
                try:
                    return raw(*given)
                except (BufferError, RuntimeError) as error:
                    refuse_arrays(error, **arguments)
        raise TypeError(f"{name} is called with {', '.join(arguments)}; expected {', '.join(listed)}")

    return call


def function_in_order(name: str, arguments: str) -> Callable[..., Any]:
    """A function of the library for what engines call once a layer or a batch, where names would cost 0.2 us a call.

    It is called with the ``arguments`` in the order in which they are given here. Raises ImportError where the library
    lists others. Callers refuse handles that no constructor made (`refuse_unmade`).
    """
    if arguments.split() != _arguments(name):
        raise ImportError(f"{name} takes {' '.join(_arguments(name))}; expected {arguments}: build the library again")
    found: Callable[..., Any] = tvm_ffi.get_global_func(name)
    return found


version = function("raddle.version")


class Handle(tvm_ffi.Object):
    """An object of the library. A copy is the object itself; values (variants, layouts) pickle, others do not."""

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        """In the class itself, copying is kept by tvm-ffi 0.1.9 and 0.1.11, which else refuse it."""
        super().__init_subclass__(**options)
        cls.__copy__, cls.__deepcopy__ = Handle.__copy__, Handle.__deepcopy__

    def __repr__(self) -> str:
        # A constructor that raises leaves a handle of nothing in its frame, which error reporters show.
        if not self.__chandle__():
            return f"{type(self).__name__}(not made)"
        try:
            return self._text()
        except ValueError:  # an object of the library without a value: raddle.Layout()
            return f"{type(self).__name__}(empty)"

    def _text(self) -> str:
        return super().__repr__()

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        name = type(self).__name__
        article = "an" if name[0] in "AEIOU" else "a"
        raise TypeError(f"{article} {name} cannot be pickled; make it again from its arguments")
