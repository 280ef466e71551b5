"""Finds the compiled library and loads it, once a process."""

from __future__ import annotations

import os
import sys
from operator import itemgetter
from pathlib import Path
from typing import Any, Callable

import tvm_ffi

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


def function(name: str) -> Callable[..., Any]:
    """A function of the library, called with its arguments by name: what place a name has is looked up once, here.

    Names other than the library's raise TypeError. Where no two arguments could change places, they are passed as they
    are: a single one, or one that any number of a kind may follow ("layout *reservations").
    """
    raw: Callable[..., Any] = tvm_ffi.get_global_func(name)
    listed = _arguments(name)
    if sum(not each.startswith("*") for each in listed) < 2:
        return raw
    in_order, count = itemgetter(*listed), len(listed)

    def call(**arguments: Any) -> Any:
        if len(arguments) == count:
            try:
                given = in_order(arguments)
            except KeyError:
                pass
            else:
                return raw(*given)
        raise TypeError(f"{name} is called with {', '.join(arguments)}; expected {', '.join(listed)}")

    return call


def function_in_order(name: str, arguments: str) -> Callable[..., Any]:
    """A function of the library for what engines call once a layer or a batch, where names would cost 0.2 us a call.

    It is called with the ``arguments`` in the order in which they are given here. Raises ImportError where the library
    lists others.
    """
    if arguments.split() != _arguments(name):
        raise ImportError(f"{name} takes {' '.join(_arguments(name))}; expected {arguments}: build the library again")
    found: Callable[..., Any] = tvm_ffi.get_global_func(name)
    return found


version = function("raddle.version")


class Handle(tvm_ffi.Object):
    """An object of the library. A copy is the object itself; values (variants, layouts) pickle, others do not."""

    __slots__ = ()

    def __repr__(self) -> str:
        # A constructor that raises leaves a handle of nothing in its frame, which error reporters show.
        return self._text() if self.__chandle__() else f"{type(self).__name__}(not made)"

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
