"""The user's function with what it captured replaced: numbers by parameters, arrays by stand-ins.

Closure cells, globals that its code names, defaults, and attributes of objects are followed, through nested functions,
methods, `functools.partial`, tuples, lists, dicts and modules of one's own. The original is never changed. What was
looked at is noted in the graph's `Reads`.
"""

from __future__ import annotations

import dis
import enum
import functools
import operator
import sys
import types
from typing import Any, Callable

import numpy as np

from raddle.flex import ops, random, reads
from raddle.flex.capture import capture, is_array, number
from raddle.flex.expr import scalar
from raddle.flex.graph import Graph
from raddle.flex.reads import At

_foreign = ("torch", "numpy", "jax", "jaxlib", "functools", "math", "raddle.flex.ops", "raddle.flex.expr")
_standard = getattr(sys, "stdlib_module_names", frozenset({"math", "functools", "operator", "typing", "builtins"}))
_injected = {"min": ops.smallest, "max": ops.largest}

# What holds no numbers that could change.
_fixed = (enum.Enum, np.dtype, np.ufunc, range, slice, complex, frozenset, type(Ellipsis), types.BuiltinFunctionType)
_fixed += (types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType)
# Containers that a stand-in of the same type would not hold.
_containers = (list, dict, tuple, set, frozenset, str, bytes, bytearray, np.ndarray)
_called = ("__call__", "__getitem__", "__len__", "__iter__", "__contains__", "__bool__")


class Rebuilder:
    """Rebuilds functions for one trace; what is captured twice is one parameter."""

    def __init__(self, graph: Graph):
        self._graph, self._reads = graph, graph.reads
        self._memo: dict[Any, tuple[Any, int]] = {}  # what was made, and the read that it was made of
        self._alive: list[Any] = []  # keys are ids

    def callable(self, fn: Callable[..., Any], at: At) -> Callable[..., Any]:
        """Anything that can be called: function, method, partial, object."""
        if isinstance(fn, types.FunctionType):
            return self._function(fn, at)
        if isinstance(fn, types.MethodType):
            read = self._reads.add(at, reads.is_type, types.MethodType)
            function = self.callable(fn.__func__, At(reads.attribute, (read, "__func__")))
            return types.MethodType(function, self.value(fn.__self__, "self", At(reads.attribute, (read, "__self__"))))
        if isinstance(fn, functools.partial):
            return self._partial(fn, at)
        return self.value(fn, type(fn).__name__, at)

    def value(self, x: Any, hint: str, at: At) -> Any:
        """What stands for a captured value."""
        if isinstance(x, (bool, str, bytes, type(None))):
            self._reads.add(at, reads.is_constant, x)
            return x
        if isinstance(x, (types.FunctionType, types.MethodType, functools.partial)):
            return self.callable(x, at)
        if type(x) in (int, float) or isinstance(x, (np.integer, np.floating)):
            return number(self._graph, x, hint, at)
        if is_array(x):
            return self._array(x, hint, at)
        if isinstance(x, tuple) and hasattr(x, "_fields") or type(x) in (list, tuple):
            read = self._reads.add(at, reads.is_sequence, (type(x), len(x)))
            each = [self.value(y, f"{hint}_{i}", At(reads.entry, (read, i))) for i, y in enumerate(x)]
            return type(x)._make(each) if hasattr(x, "_fields") else type(x)(each)
        if type(x) is dict:
            read = self._reads.add(at, reads.is_dict, tuple(x))
            return {k: self.value(y, f"{hint}_{k}", At(reads.entry, (read, k))) for k, y in x.items()}
        if random.is_generator(x):
            random.refuse_generator(hint)
        return self._object(x, at)

    def _array(self, x: Any, hint: str, at: At) -> Any:
        if scalar(x) is not None:
            return number(self._graph, x, hint, at)
        made = self._known(("array", id(x)), at)
        if made is None:
            read = self._reads.add(at, reads.is_array, reads.kind_of_array(x))
            made = capture(self._graph, x, hint, read)
            self._remember(("array", id(x)), x, made, read)
        return made

    def _known(self, key: Any, at: At) -> Any:
        """What was made of an object that was met before; notes that it is the same one."""
        if key not in self._memo:
            return None
        made, read = self._memo[key]
        self._reads.same(at, read)
        return made

    def _remember(self, key: Any, owner: Any, made: Any, read: int) -> None:
        self._alive.append(owner)
        self._memo[key] = made, read

    def _function(self, fn: types.FunctionType, at: At) -> types.FunctionType:
        is_foreign = _is_of(fn.__module__ or "", _foreign)
        if is_foreign and not fn.__closure__:  # with one, it may be torch's and_masks over the user's functions
            self._reads.add(at, operator.is_, fn)
            return fn
        known = self._known(("function", id(fn)), at)
        if known is not None:
            return known
        read = self._reads.add(at, reads.is_function, reads.shape_of_function(fn))
        names: dict[str, Any] = dict(fn.__globals__)
        cells = tuple(types.CellType() for _ in fn.__closure__ or ())
        new = types.FunctionType(fn.__code__, names, fn.__name__, None, cells or None)
        # Known before what it captures is looked at: functions may name each other or themselves.
        self._remember(("function", id(fn)), fn, new, read)
        for i, (name, cell) in enumerate(zip(fn.__code__.co_freevars, fn.__closure__ or ())):
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            cells[i].cell_contents = self._once(("cell", id(cell)), cell, content, name, At(reads.cell, (read, i)))
        for name in () if is_foreign else _globals_of(fn.__code__):
            if name in names:
                key, here = ("global", id(fn.__globals__), name), At(reads.global_, (read, name))
                names[name] = self._once(key, fn.__globals__, fn.__globals__[name], name, here)
            elif name in _injected:
                names[name] = _injected[name]
        new.__defaults__ = self._defaults(fn, read)
        if fn.__kwdefaults__:
            by_name = {k: self.value(v, k, At(reads.default, (read, k))) for k, v in fn.__kwdefaults__.items()}
            new.__kwdefaults__ = by_name
        for name, content in fn.__dict__.items():
            new.__dict__[name] = self.value(content, name, At(reads.attribute, (read, name)))
        new.__module__, new.__qualname__ = fn.__module__, fn.__qualname__
        return new

    def _once(self, key: Any, owner: Any, content: Any, name: str, at: At) -> Any:
        """One parameter for a cell or global that several functions name."""
        if key in self._memo:
            made, read = self._memo[key]
            self._reads.same(at, read)
            return made
        read = self._reads.next()
        made = self.value(content, name, at)
        self._remember(key, owner, made, read)
        return made

    def _defaults(self, fn: types.FunctionType, read: int) -> tuple[Any, ...] | None:
        if not fn.__defaults__:
            return None
        count = fn.__code__.co_argcount
        names = fn.__code__.co_varnames[count - len(fn.__defaults__) : count]
        each = enumerate(zip(names, fn.__defaults__))
        return tuple(self.value(x, name, At(reads.default, (read, i))) for i, (name, x) in each)

    def _partial(self, fn: functools.partial[Any], at: At) -> functools.partial[Any]:
        read = self._reads.add(at, reads.is_partial, (type(fn), len(fn.args), tuple(fn.keywords)))
        function = self.callable(fn.func, At(reads.attribute, (read, "func")))
        of = lambda name: self._reads.add(At(reads.attribute, (read, name)), reads.always, None)  # noqa: E731
        places = of("args"), of("keywords")
        code = getattr(fn.func, "__code__", None)
        names = code.co_varnames if code is not None else ()
        args = [
            self.value(x, names[i] if i < len(names) else f"arg{i}", At(reads.entry, (places[0], i)))
            for i, x in enumerate(fn.args)
        ]
        keywords = {k: self.value(v, k, At(reads.entry, (places[1], k))) for k, v in fn.keywords.items()}
        return functools.partial(function, *args, **keywords)

    def _object(self, x: Any, at: At) -> Any:
        """A stand-in whose attributes are looked up, and replaced, when the function asks for them."""
        if isinstance(x, _fixed) or type(x).__module__ == "torch":
            self._reads.add(at, reads.is_constant, x)
            return x
        if isinstance(x, _containers) and len(x) == 0:
            self._reads.add(at, reads.is_empty, type(x))
            return x
        if isinstance(x, (type, types.ModuleType)):
            module = x.__module__ if isinstance(x, type) else x.__name__
            if not _is_users(module) or isinstance(x, enum.EnumMeta):
                self._reads.add(at, operator.is_, x)
                return x
        known = self._known(("object", id(x)), at)
        if known is not None:
            return known
        if isinstance(x, (type, types.ModuleType)):
            read = self._reads.add(at, operator.is_, x)
            stand_in = self._class_standing_in(x, read) if isinstance(x, type) else self._standing_in(x, _Module, read)
        else:
            read = self._reads.add(at, reads.is_type, type(x))
            stand_in = self._standing_in(x, type(x), read) if _has_attributes(x) else None
        if stand_in is None:
            self._reads.repeatable = False
            return x
        self._remember(("object", id(x)), x, stand_in, read)
        return stand_in

    def _attributes(self, x: Any, read: int, plain: Any) -> dict[str, Any]:
        """Methods of a stand-in that looks up attributes of ``x``; ``plain`` looks up the stand-in's own."""
        found: dict[str, Any] = {}

        def get(stand_in: Any, name: str) -> Any:
            if name.startswith("__") and name.endswith("__"):
                return plain(stand_in, name)
            if name not in found:
                found[name] = self.value(getattr(x, name), name, At(reads.attribute, (read, name)))
            return found[name]

        return {"__getattribute__": get, "__setattr__": lambda _, name, value: found.update({name: value})}

    def _class_standing_in(self, x: type, read: int) -> Any:
        """A subclass whose attributes are looked up in ``x``."""
        body = self._attributes(x, read, type.__getattribute__)
        body["__instancecheck__"] = lambda _, instance: isinstance(instance, x)
        try:
            return type("_Class", (type(x),), body)(x.__name__, (x,), {})
        except Exception:  # noqa: BLE001: a class that does not allow it
            return None

    def _standing_in(self, x: Any, kind: type, read: int) -> Any:
        """An object of a subclass of ``kind`` that has what ``x`` has; None where there cannot be one."""
        body = self._attributes(x, read, object.__getattribute__)
        for name in _called:
            method = getattr(kind, name, None)
            if isinstance(method, types.FunctionType) and not _is_of(method.__module__ or "", _foreign):
                body[name] = self._function(method, At(reads.method_of_type, (read, name)))
        try:
            subclass = type(kind)(kind.__name__, (kind,), body)
            return object.__new__(subclass) if kind.__new__ is object.__new__ else kind.__new__(subclass)
        except Exception:  # noqa: BLE001: a class that does not allow it
            return None


class _Module:
    """Stands for a module of the user's."""


def _is_of(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in packages)


def _is_users(module: str) -> bool:
    """Whether a module is neither Python's, nor of a library of arrays, nor this one."""
    top = module.split(".")[0]
    return top not in _standard and top != "raddle" and not _is_of(module, _foreign)


def _has_attributes(x: Any) -> bool:
    """Whether an object is of a class written in Python, whose attributes are all that it has."""
    heap_type = 1 << 9
    if isinstance(x, types.SimpleNamespace):
        return True
    if isinstance(x, (*_containers, int, float)) or not type(x).__flags__ & heap_type:
        return False
    torch = sys.modules.get("torch")
    of_torch = torch is not None and isinstance(x, torch.nn.Module)
    return of_torch or _is_users(type(x).__module__)


@functools.lru_cache(maxsize=512)
def _globals_of(code: types.CodeType) -> frozenset[str]:
    """The globals that a function's code reads, and the functions inside it."""
    found = {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _globals_of(constant)
    return frozenset(found)
