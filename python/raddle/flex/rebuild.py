"""The user's function with what it captured replaced: numbers by parameters, arrays by stand-ins.

Closure cells, globals that its code names, and defaults are followed, through nested functions, methods,
`functools.partial`, tuples, lists and dicts. The original is never changed.
"""

from __future__ import annotations

import copy
import functools
import types
from typing import Any, Callable

import numpy as np

from raddle.flex import ops, random
from raddle.flex.capture import capture, is_array
from raddle.flex.expr import Value, scalar
from raddle.flex.graph import Graph, Parameter

_foreign = ("torch", "numpy", "jax", "jaxlib", "functools", "math", "raddle.flex.ops", "raddle.flex.expr")
_injected = {"min": ops.smallest, "max": ops.largest}


class Rebuilder:
    """Rebuilds functions for one trace; what is captured twice is one parameter."""

    def __init__(self, graph: Graph):
        self._graph = graph
        self._memo: dict[Any, Any] = {}
        self._alive: list[Any] = []  # keys are ids

    def callable(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Anything that can be called: function, method, partial, object."""
        if isinstance(fn, types.FunctionType):
            return self._function(fn)
        if isinstance(fn, types.MethodType):
            return types.MethodType(self.callable(fn.__func__), self._object(fn.__self__))
        if isinstance(fn, functools.partial):
            return self._partial(fn)
        call = getattr(type(fn), "__call__", None)
        if isinstance(call, types.FunctionType) and not isinstance(fn, type):
            return types.MethodType(self._function(call), self._object(fn))
        return fn

    def value(self, x: Any, hint: str) -> Any:
        """What stands for a captured value."""
        if isinstance(x, (Value, bool, str, bytes, type(None), type, types.ModuleType)):
            return x
        if isinstance(x, (types.FunctionType, types.MethodType, functools.partial)):
            return self.callable(x)
        if type(x) in (int, float) or isinstance(x, (np.integer, np.floating)):
            return self._number(x.item() if isinstance(x, np.generic) else x, hint)
        if is_array(x):
            known = scalar(x)
            return capture(self._graph, x, hint) if known is None else self.value(known, hint)
        if type(x) in (list, tuple):
            return type(x)(self.value(y, f"{hint}_{i}") for i, y in enumerate(x))
        if type(x) is dict:
            return {k: self.value(y, f"{hint}_{k}") for k, y in x.items()}
        if random.is_generator(x):
            random.refuse_generator(hint)
        if isinstance(x, types.SimpleNamespace) or hasattr(type(x), "__dataclass_fields__"):
            return self._object(x)
        call = getattr(type(x), "__call__", None)
        return self.callable(x) if isinstance(call, types.FunctionType) else x

    def _number(self, x: int | float, hint: str) -> Any:
        if not self._graph.numbers_as_parameters or isinstance(x, int) and abs(x) >= 2**31:
            return x
        dtype = "int" if isinstance(x, int) else "float"
        return Value(self._graph, self._graph.node("param", dtype, (), Parameter(hint, x)))

    def _once(self, key: Any, owner: Any, make: Callable[[], Any]) -> Any:
        if key not in self._memo:
            self._alive.append(owner)
            self._memo[key] = make()
        return self._memo[key]

    def _function(self, fn: types.FunctionType) -> types.FunctionType:
        module = fn.__module__ or ""
        is_foreign = any(module == name or module.startswith(name + ".") for name in _foreign)
        if is_foreign and not fn.__closure__:  # with one, it may be torch's and_masks over the user's functions
            return fn
        if ("function", id(fn)) in self._memo:
            return self._memo["function", id(fn)]
        names: dict[str, Any] = dict(fn.__globals__)
        cells = tuple(types.CellType() for _ in fn.__closure__ or ())
        new = types.FunctionType(fn.__code__, names, fn.__name__, None, cells or None)
        # Known before what it captures is looked at: functions may name each other or themselves.
        self._once(("function", id(fn)), fn, lambda: new)
        for i, (name, cell) in enumerate(zip(fn.__code__.co_freevars, fn.__closure__ or ())):
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            cells[i].cell_contents = self._once(("cell", id(cell)), cell, lambda: self.value(content, name))
        for name in () if is_foreign else _names(fn.__code__):
            if name in names:
                owner = fn.__globals__
                names[name] = self._once(("global", id(owner), name), owner, lambda: self.value(owner[name], name))
            elif name in _injected:
                names[name] = _injected[name]
        new.__defaults__ = self._defaults(fn)
        if fn.__kwdefaults__:
            new.__kwdefaults__ = {k: self.value(v, k) for k, v in fn.__kwdefaults__.items()}
        new.__dict__.update(fn.__dict__)
        new.__module__, new.__qualname__ = fn.__module__, fn.__qualname__
        return new

    def _defaults(self, fn: types.FunctionType) -> tuple[Any, ...] | None:
        if not fn.__defaults__:
            return None
        count = fn.__code__.co_argcount
        names = fn.__code__.co_varnames[count - len(fn.__defaults__) : count]
        return tuple(self.value(x, name) for name, x in zip(names, fn.__defaults__))

    def _partial(self, fn: functools.partial[Any]) -> functools.partial[Any]:
        code = getattr(fn.func, "__code__", None)
        names = code.co_varnames if code is not None else ()
        args = [self.value(x, names[i] if i < len(names) else f"arg{i}") for i, x in enumerate(fn.args)]
        return functools.partial(self.callable(fn.func), *args, **{k: self.value(v, k) for k, v in fn.keywords.items()})

    def _object(self, x: Any) -> Any:
        """A shallow copy with its attributes replaced; the object itself where that cannot be done."""
        if isinstance(x, type) or not getattr(x, "__dict__", None) or type(x).__module__.split(".")[0] == "torch":
            return x
        if any(base.__module__.split(".")[0] == "torch" for base in type(x).__mro__):
            return x

        def make() -> Any:
            new = copy.copy(x)
            for name, content in vars(x).items():
                new.__dict__[name] = self.value(content, name)
            return new

        return self._once(("object", id(x)), x, make)


def _names(code: types.CodeType) -> set[str]:
    """The global names of a function's code and of the functions inside it."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
    return found
