"""Captured arrays: what the function indexes becomes a tensor member of the variant."""

from __future__ import annotations

import operator
import sys
from typing import Any

import numpy as np

from raddle.flex import errors
from raddle.flex.expr import Value, scalar
from raddle.flex.graph import Graph, Node

MAX_RANK = 4


class CapturedArray:
    """One captured array: as the user gave it, and as the member holds it."""

    def __init__(self, original: Any, hint: str):
        self.original, self.hint = original, hint
        self._array: np.ndarray | None = None

    @property
    def array(self) -> np.ndarray:
        """C-contiguous float32, int32 or uint8 (from bools), a copy. Made when it is first indexed."""
        if self._array is None:
            self._array = member_array(self.original, self.hint)
        return self._array


def is_array(x: Any) -> bool:
    """A numpy, torch or JAX array (or what else tells its dtype and shape and can be exported)."""
    return isinstance(x, np.ndarray) or (
        hasattr(x, "__dlpack__") and hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, type)
    )


def member_array(x: Any, name: str) -> np.ndarray:
    """A captured array as a member holds it. Raises TraceError, naming it, where it cannot be one."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        x = _torch_array(torch, x, name)
    array = np.asarray(x)
    kind = "f" if array.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2") else array.dtype.kind
    if kind not in "fiub":
        raise errors.refuse(f"captured array {name} has dtype {array.dtype}", "expected numbers or bools")
    if not 1 <= array.ndim <= MAX_RANK:
        raise errors.refuse(f"captured array {name} has {array.ndim} dimensions", f"expected 1 to {MAX_RANK}")
    if array.size == 0:
        raise errors.refuse(f"captured array {name} is empty (shape {array.shape})", "expected at least one element")
    if kind == "b":
        return np.array(array, np.uint8, order="C")
    if kind == "f":
        return np.array(array, np.float32, order="C")
    info = np.iinfo(np.int32)
    least, most = array.min(), array.max()
    if least < info.min or most > info.max:
        found = int(least if least < info.min else most)
        raise errors.refuse(
            f"captured array {name} holds {found}, which does not fit in 32 bits", "expected int32 values"
        )
    return np.array(array, np.int32, order="C")


def _torch_array(torch: Any, x: Any, name: str) -> Any:
    if x.device.type not in ("cpu", "cuda"):
        raise errors.refuse(f"captured tensor {name} lies on {x.device}", "expected a tensor of the host or a CUDA GPU")
    if x.requires_grad and torch.is_grad_enabled():
        raise errors.refuse(
            f"captured tensor {name} requires a gradient", f"attention here is forward only: {name}.detach()"
        )
    x = x.detach().cpu()  # masks are evaluated on the host, too: waits for the GPU
    return x.float().numpy() if x.is_floating_point() else x.numpy()


def capture(graph: Graph, x: Any, hint: str) -> Capture:
    """The stand-in of an array; the same for the same array."""
    if id(x) not in graph.captures:
        graph.captures[id(x)] = CapturedArray(x, hint)
    return Capture(graph, graph.captures[id(x)])


class Capture:
    """Stands for a captured array inside a traced function.

    Indexing it with traced values gives a traced value. Everything else (slices, arithmetic with numbers,
    methods) is computed now and gives another captured array.
    """

    __slots__ = ("_graph", "_source", "_leading")
    __hash__ = object.__hash__
    __array_priority__ = 1000

    def __init__(self, graph: Graph, source: CapturedArray, leading: tuple[Node, ...] = ()):
        self._graph, self._source, self._leading = graph, source, leading

    def __getitem__(self, index: Any) -> Any:
        items = index if isinstance(index, tuple) else (index,)
        if not self._leading and not any(isinstance(i, Value) for i in items):
            if not all(_is_integer(i) for i in items):
                return self._now(operator.getitem, index)
        rank = len(self._source.original.shape)
        nodes = self._leading + tuple(self._index(i, len(self._leading) + n) for n, i in enumerate(items))
        if len(nodes) > rank:
            raise errors.refuse(
                f"captured array {self._source.hint} has {rank} dimensions and gets {len(nodes)} indices",
                f"expected {rank}",
            )
        if len(nodes) < rank:
            return Capture(self._graph, self._source, nodes)
        dtype = {"f": "float", "i": "int", "u": "bool"}[self._source.array.dtype.kind]
        return Value(self._graph, self._graph.node("load", dtype, nodes, self._source))

    def _index(self, i: Any, dimension: int) -> Node:
        if isinstance(i, Value):
            if i.node.dtype == "int":
                return i.node
            advice = "write i.int(), or // instead of /" if i.node.dtype == "float" else "write i.int()"
            raise errors.refuse(f"captured array {self._source.hint} is indexed with a {i.node.dtype}", advice)
        if not _is_integer(i):
            raise errors.refuse(
                f"captured array {self._source.hint} is indexed with {i!r} beside a traced index", "expected integers"
            )
        shape = self._source.original.shape
        if dimension < len(shape) and not -shape[dimension] <= i < shape[dimension]:
            raise errors.refuse(
                f"captured array {self._source.hint} is indexed with {i} where it has {shape[dimension]} elements",
                "expected an index within",
            )
        return self._graph.constant(int(i))

    def _now(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Computes with the array itself."""
        if self._leading:
            raise errors.refuse(
                f"captured array {self._source.hint} has indices for some of its dimensions only", "index all of them"
            )
        if any(isinstance(x, Value) for x in (*args, *kwargs.values())):
            raise errors.refuse(
                f"{self.described} meets a traced value", "expected a number; index arrays with b, h, q_idx or kv_idx"
            )
        return self._wrap(function(self._source.original, *map(unwrap, args), **kwargs))

    def _wrap(self, result: Any) -> Any:
        if not is_array(result):
            return result
        known = scalar(result)
        return capture(self._graph, result, self._source.hint) if known is None else known

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self._leading and name != "shape":
            raise AttributeError(name)
        found = getattr(self._source.original, name)
        if name == "shape":
            return tuple(found)[len(self._leading) :]
        if not callable(found):
            return self._wrap(found)
        return lambda *args, **kwargs: self._now(lambda _, *a, **k: found(*a, **k), *args, **kwargs)

    @property
    def described(self) -> str:
        return f"captured array {self._source.hint} as a whole"

    def __len__(self) -> int:
        return int(self.shape[0])

    def __iter__(self) -> Any:
        if not self.shape:
            raise TypeError(f"captured array {self._source.hint} has no dimensions to iterate over")
        return (self[i] for i in range(len(self)))

    def __contains__(self, x: Any) -> bool:
        if isinstance(x, Value) or self._leading:
            return any(each == x for each in self)  # which says why not
        return bool(self._now(lambda array: x in array))

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        return np.asarray(self._source.original, *args, **kwargs)

    def __bool__(self) -> bool:
        return bool(self._source.original)

    def __repr__(self) -> str:
        return f"<captured {self._source.hint}>"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _apply(func, args, kwargs or {})

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        return _apply(getattr(ufunc, method), args, kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _apply(func, args, kwargs)


def _is_integer(i: Any) -> bool:
    return isinstance(i, (int, np.integer)) and not isinstance(i, bool)


def unwrap(x: Any) -> Any:
    """The array itself where ``x`` stands for one."""
    if isinstance(x, Capture):
        return x._now(lambda array: array) if x._leading else x._source.original
    return type(x)(map(unwrap, x)) if type(x) in (list, tuple) else x


def _apply(func: Any, args: Any, kwargs: Any) -> Any:
    """A library's function over captured arrays, computed now."""
    first = next(x for x in _flat(args) if isinstance(x, Capture))
    if any(isinstance(x, Value) for x in _flat(args)):
        return first._now(lambda array, *a: None, *_flat(args))  # raises
    return first._wrap(func(*map(unwrap, args), **{k: unwrap(v) for k, v in kwargs.items()}))


def _flat(args: Any) -> list[Any]:
    return [y for x in args for y in (_flat(x) if isinstance(x, (list, tuple)) else (x,))]


def _operator(name: str, reflected: bool) -> Any:
    function = getattr(operator, name)

    def method(self: Capture, *args: Any) -> Any:
        return self._now((lambda a, b: function(b, a)) if reflected else function, *args)

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift"):
    setattr(Capture, f"__{_name.rstrip('_')}__", _operator(_name, False))
    setattr(Capture, f"__r{_name.rstrip('_')}__", _operator(_name, True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "invert", "abs"):
    setattr(Capture, f"__{_name}__", _operator(_name, False))
