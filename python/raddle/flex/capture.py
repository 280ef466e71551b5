"""Captured arrays: what the function indexes becomes a tensor member of the variant."""

from __future__ import annotations

import operator
import sys
import weakref
from typing import Any

import numpy as np

from raddle.flex import bounds, errors, reads
from raddle.flex.expr import Value, build, narrow_bits, scalar, tensors
from raddle.flex.graph import Graph, Node, Parameter
from raddle.flex.reads import At, Of

MAX_RANK = 4


class CapturedArray:
    """One captured array: what the code depends on, and how to find it again.

    ``read`` is of the trace's `Reads`; None for one that the function made while it was traced.
    """

    def __init__(self, original: Any, hint: str, read: int | None):
        self.original: Any = original
        self.hint, self.read = hint, read
        self._element: str | None = None
        self.ndim = len(original.shape)
        self.is_int64 = str(original.dtype).endswith("int64")
        self.narrow = narrow_bits(original.dtype)

    @property
    def element(self) -> str:
        """The member's elements: "float32", "int32" or "uint8" (of bools)."""
        if self._element is None:
            check_member(self.original, self.hint)
            self._element = _ELEMENTS[_kind_of(self.original)]
        return self._element

    def forget(self) -> None:
        """Lets go of an array that each call reads anew."""
        if self.read is not None:
            self.original = None


def is_array(x: Any) -> bool:
    """A numpy, torch or JAX array (or what else tells its dtype and shape and can be exported)."""
    return isinstance(x, np.ndarray) or (
        hasattr(x, "__dlpack__") and hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, type)
    )


_ELEMENTS = {"f": "float32", "i": "int32", "u": "int32", "b": "uint8"}
_INT32 = np.iinfo(np.int32)


def _kind_of(x: Any) -> str:
    """"f", "i", "u" or "b" of numbers and bools, else what numpy calls it."""
    name = str(x.dtype).rpartition(".")[2]
    if name.startswith(("bfloat", "float")):
        return "f"
    return {"bool": "b", "int": "i", "uint": "u"}.get(name.rstrip("0123456789")) or np.asarray(x).dtype.kind


def check_member(x: Any, name: str) -> None:
    """Raises TraceError, naming the array, where it cannot be a member."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        if x.device.type not in ("cpu", "cuda"):
            raise errors.refuse(
                f"captured tensor {name} lies on {x.device}", "expected a tensor of the host or a CUDA GPU"
            )
        if x.requires_grad and torch.is_grad_enabled():
            raise errors.refuse(
                f"captured tensor {name} requires a gradient", f"attention here is forward only: {name}.detach()"
            )
    kind = _kind_of(x)
    if kind not in _ELEMENTS:
        raise errors.refuse(f"captured array {name} has dtype {x.dtype}", "expected numbers or bools")
    if not 1 <= len(x.shape) <= MAX_RANK:
        raise errors.refuse(f"captured array {name} has {len(x.shape)} dimensions", f"expected 1 to {MAX_RANK}")
    if 0 in x.shape:
        raise errors.refuse(f"captured array {name} is empty (shape {tuple(x.shape)})", "expected at least one element")
    if (found := _outside(x)) is not None:
        raise errors.refuse(
            f"captured array {name} holds {found}, which does not fit in 32 bits", "expected int32 values"
        )


def _fits(dtype: Any) -> bool:
    return str(dtype).rpartition(".")[2] in ("int8", "int16", "int32", "uint8", "uint16")


def _outside(x: Any) -> int | None:
    """An element of an array of integers that does not fit in 32 bits."""
    if _kind_of(x) not in "iu" or _fits(x.dtype):
        return None
    array = _host_array(x)
    least, most = int(array.min()), int(array.max())
    return least if least < _INT32.min else most if most > _INT32.max else None


def _host_array(x: Any) -> np.ndarray:
    """As numpy has it; bfloat16, which numpy lacks, as float32."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        x = x.detach().cpu()
        return (x.float() if _kind_of(x) == "f" else x).numpy()
    return np.asarray(x)


# As the library reads them: it converts what is wider as it copies.
_LENT = {"float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8", "bool"}


def lent_array(x: Any, name: str) -> Any:
    """A captured array as a member's value for the library: itself where it can be read where it lies."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        if not x.is_cpu or x.requires_grad or x.is_neg():
            x = _on_host(x)
        return x if str(x.dtype).rpartition(".")[2] in _LENT else member_array(x, name)
    return x if str(x.dtype) in _LENT else member_array(x, name)


_host_copies: dict[int, tuple[Any, int, Any]] = {}


def _on_host(x: Any) -> Any:
    """A torch tensor as the library can read it. To copy one from a GPU waits for the GPU, so the copy is kept until
    torch has written to the tensor."""
    known, version, copy = _host_copies.get(id(x), (None, None, None))
    if known is not None and known() is x and version == x._version:
        return copy
    copy = x.detach().cpu().resolve_neg()
    if not x.is_inference():  # which has no version
        forget = weakref.ref(x, lambda _, key=id(x): _host_copies.pop(key, None))
        _host_copies[id(x)] = forget, x._version, copy
    return copy


def member_array(x: Any, name: str) -> np.ndarray:
    """A captured array as a member holds it: C-contiguous float32, int32 or uint8 (of bools), a copy."""
    if (found := _outside(x)) is not None:  # where the trace was made with another array
        raise ValueError(f"captured array {name} holds {found}; expected 32-bit integers")
    return np.array(_host_array(x), _ELEMENTS[_kind_of(x)], order="C")


def number(graph: Graph, x: Any, hint: str, at: At) -> Any:
    """A captured number, or an array of one: a parameter, or where Python would need the number, the number itself."""
    if isinstance(x, np.generic) or hasattr(x, "item"):
        at = At(reads.number, graph.reads.add(at, reads.is_type, type(x)))
        x = x.item()
    if isinstance(x, bool) or not graph.numbers_as_parameters or isinstance(x, int) and abs(x) >= 2**31:
        graph.reads.add(at, reads.is_constant, x)
        return x
    is_integer = isinstance(x, int)
    read = graph.reads.add(at, *((reads.is_small_integer, None) if is_integer else (reads.is_type, float)))
    node = graph.node("param", "int" if is_integer else "float", (), Parameter(hint, x, read))
    graph.parameters.append(node.payload)
    return Value(graph, node)


def capture(graph: Graph, x: Any, hint: str, read: int | None = None) -> Capture:
    """The stand-in of an array; the same for the same array."""
    if id(x) not in graph.captures:
        graph.captures[id(x)] = CapturedArray(x, hint, read)
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
        if tensors.takes("getitem", (self, *items)):
            return tensors.index(self, items)
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
        dtype = {"float32": "float", "int32": "int", "uint8": "bool"}[self._source.element]
        return Value(self._graph, self._graph.node("load", dtype, nodes, self._source), self._source.narrow)

    def _index(self, i: Any, dimension: int) -> Node:
        if isinstance(i, Value):
            if i.node.dtype == "int":
                return i.node
            if i.node.dtype == "long":  # what leaves 32 bits is outside of any array
                if i.node.is_wide:
                    i = build("maximum", build("minimum", i, bounds.INT[1]), bounds.INT[0])
                return self._graph.cast(i.node, "int")
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
        return self._computed(function, (self, *args), kwargs)

    def _computed(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What a function makes of captured arrays alone: another one, or what Python then knows."""
        result = function(*unwrap(args), **{name: unwrap(x) for name, x in kwargs.items()})
        given = _by_read(args), {name: _by_read(x) for name, x in kwargs.items()}
        if scalar(result) is not None and (is_array(result) or isinstance(result, np.generic)):
            return number(self._graph, result, self._source.hint, At(reads.computed, (function, *given)))
        read = self._graph.reads.compute(function, *given, result)
        return capture(self._graph, result, self._source.hint, read) if is_array(result) else result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        whole = Capture(self._graph, self._source)
        if name == "shape":
            return self._computed(_shape_behind, (whole, len(self._leading)), {})
        if not callable(getattr(self._source.original, name)):
            return self._computed(getattr, (whole, name), {})
        if self._leading:
            return lambda *args, **kwargs: tensors.call(name, (self, *args), kwargs)
        return lambda *args, **kwargs: self._now(_method, name, *args, **kwargs)

    @property
    def described(self) -> str:
        """What it is, for an error message."""
        return f"captured array {self._source.hint} as a whole"

    @property
    def is_row(self) -> bool:
        """Whether it has indices for its first dimensions: a row, for each pair another one."""
        return bool(self._leading)

    def at(self, *nodes: Any) -> Any:
        """The element, or the row, at these indices behind those that it has."""
        return self[nodes] if nodes else self

    def __len__(self) -> int:
        return int(self.shape[0])

    def __iter__(self) -> Any:
        if not self.shape:
            raise TypeError(f"captured array {self._source.hint} has no dimensions to iterate over")
        return (self[i] for i in range(len(self)))

    def __contains__(self, x: Any) -> bool:
        if isinstance(x, Value) or self._leading:
            return any(each == x for each in self)  # which says why not
        return bool(self._now(operator.contains, x))

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        self._graph.reads.repeatable = False  # numpy has its contents now
        return np.asarray(self._source.original, *args, **kwargs)

    def __bool__(self) -> bool:
        return bool(self._computed(bool, (self,), {}))

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


def _shape_behind(array: Any, dimensions: int) -> tuple[int, ...]:
    return tuple(map(int, array.shape[dimensions:]))


def _method(array: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(array, name)(*args, **kwargs)


def unwrap(x: Any) -> Any:
    """The array itself where ``x`` stands for one."""
    if isinstance(x, Capture):
        return x._now(_itself) if x._leading else x._source.original
    return type(x)(map(unwrap, x)) if type(x) in (list, tuple) else x


def _itself(x: Any) -> Any:
    return x


def _by_read(x: Any) -> Any:
    """``x`` with the reads of captured arrays in their place."""
    if isinstance(x, Capture):
        return x._source.original if x._source.read is None else Of(x._source.read)
    return type(x)(map(_by_read, x)) if type(x) in (list, tuple) else x


def _apply(func: Any, args: Any, kwargs: Any) -> Any:
    """A library's function over captured arrays, computed now."""
    name = getattr(func, "__name__", str(func))
    if tensors.takes(name, _flat(args)):
        return tensors.call(name, args, kwargs)
    first = next(x for x in _flat(args) if isinstance(x, Capture))
    if any(isinstance(x, Value) for x in _flat(args)):
        return first._now(lambda array, *a: None, *_flat(args))  # raises
    return first._computed(func, tuple(args), kwargs)


def _flat(args: Any) -> list[Any]:
    return [y for x in args for y in (_flat(x) if isinstance(x, (list, tuple)) else (x,))]


def _operator(name: str, reflected: bool) -> Any:
    function = getattr(operator, name)

    def swapped(a: Any, b: Any) -> Any:
        return function(b, a)

    plain = name.rstrip("_")

    def method(self: Capture, *args: Any) -> Any:
        if tensors.takes(plain, (self, *args)):
            return tensors.call(plain, (*args, self) if reflected else (self, *args), {})
        return self._now(swapped if reflected else function, *args)

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift", "matmul"):
    setattr(Capture, f"__{_name.rstrip('_')}__", _operator(_name, False))
    setattr(Capture, f"__r{_name.rstrip('_')}__", _operator(_name, True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "invert", "abs"):
    setattr(Capture, f"__{_name}__", _operator(_name, False))
