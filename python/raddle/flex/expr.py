"""Symbolic values: what a traced function computes with.

dtypes are "bool", "int" (int32), "long" (int64) and "float" (float32), promoted in this order as PyTorch does.
"""

from __future__ import annotations

import sys
from typing import Any, Iterable

import numpy as np

from raddle.flex import errors
from raddle.flex.evaluate import NUMPY, concretise
from raddle.flex.graph import Graph, Node

_rank = {"bool": 0, "int": 1, "long": 2, "float": 3}


def _plain_name(dtype: Any) -> str:
    """"int32" for torch.int32, np.int32, np.dtype("int32") and their name."""
    name = getattr(dtype, "__name__", None) or str(getattr(dtype, "name", dtype))
    return name.rsplit(".", 1)[-1]


def dtype_name(dtype: Any) -> str:
    """"bool", "int", "long" or "float" for a dtype of torch, numpy, Python or its name."""
    if dtype in (bool, int, float):
        return dtype.__name__
    name = _plain_name(dtype)
    if name.startswith("bool"):
        return "bool"
    if name in ("int64", "uint64", "uint32", "long"):
        return "long"
    if name.startswith(("int", "uint", "short")):
        return "int"
    if name.startswith(("float", "bfloat", "half", "double")):
        return "float"
    raise errors.refuse(f"{dtype!r} is no dtype of a traced value", "expected bool, int32, int64 or float32")


def narrow_bits(dtype: Any) -> int | None:
    """8, 16 or 32 for an unsigned integer dtype of so many bits, -8 or -16 for a signed one; None for others."""
    return _NARROW.get(_plain_name(dtype))


_NARROW = {"uint8": 8, "uint16": 16, "uint32": 32, "int8": -8, "int16": -16, "short": -16}
_NAMES = {bits: name for name, bits in _NARROW.items() if name != "short"}


def scalar(x: Any) -> Any:
    """A Python number for anything that is one: numpy, torch and JAX scalars included; else None."""
    if isinstance(x, (bool, int, float)):
        return x
    if isinstance(x, np.generic) or getattr(x, "shape", None) == () and hasattr(x, "item"):
        x = x.item()
        return x if isinstance(x, (bool, int, float)) else None
    return None


class _Tensors:
    """What `vector`, which knows the modules that meet tensors of traced values, does with them."""

    takes: Any  #: ``takes(name, args)``: whether a library's function is about more than single values
    call: Any  #: ``call(name, args, kwargs)``: runs it
    index: Any  #: ``index(capture, items)``: a captured array with slices or vectors among its indices


tensors = _Tensors()


class Value:
    """A bool, int32, int64 or float32 that is known when the kernel runs.

    ``narrow``: of an int32 that is an integer of fewer bits in PyTorch, which wraps there: of `narrow_bits`.
    """

    __slots__ = ("node", "graph", "narrow")
    __hash__ = object.__hash__
    __array_priority__ = 1000

    def __init__(self, graph: Graph, node: Node, narrow: int | None = None):
        self.graph, self.node, self.narrow = graph, node, narrow

    # --- what Python would have to know now --------------------------------------------------------

    def _known(self, found: str, instead: str) -> Any:
        if self.node.varies:
            raise errors.refuse(found, instead)
        return concretise(self.node)

    def __bool__(self) -> bool:
        if self.node.varies:
            raise errors.refuse("a condition on a traced value has no truth value here", errors.condition_advice())
        return bool(concretise(self.node))

    def __index__(self) -> int:
        value = self._known(
            "a traced value is used where Python needs an integer now (a list's index, range(), the index of "
            "an array that the tracer does not see)",
            "capture a tensor or numpy array in a variable of its own and index that",
        )
        return value.__index__()

    def __int__(self) -> int:
        return int(self._known("int() of a traced value", "write x.int() or raddle.flex.ops.cast(x, 'int32')"))

    def __float__(self) -> float:
        if self.node.varies:
            raise errors.refuse("a traced value is used where Python needs a float now", errors.float_advice(NUMPY))
        return float(concretise(self.node))

    def item(self) -> Any:
        return self._known(".item() of a traced value", "compute with the value itself")

    def tolist(self) -> Any:
        return self.item()

    def __round__(self, digits: Any = None) -> Any:
        instead = "write torch.round(x), or raddle.flex.ops.floor(x + 0.5)"
        return round(self._known("round() of a traced value", instead))

    def __iter__(self) -> Any:
        raise errors.refuse("a traced value is a scalar and cannot be iterated", "compute with the value itself")

    def __len__(self) -> int:
        raise errors.refuse("a traced value is a scalar without a length", "compute with the value itself")

    def __getitem__(self, index: Any) -> Any:
        if all(i is None or i is Ellipsis for i in (index if isinstance(index, tuple) else (index,))):
            return tensors.call("getitem", (self, index), {})
        raise errors.refuse("a traced value is a scalar and cannot be indexed", "index a captured tensor with it")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise errors.refuse(
            "a traced value is used where numpy needs an array now (the index of an array that the tracer does not "
            "see, a function of numpy)",
            "capture the array in a variable of its own, and use the functions of raddle.flex.ops",
        )

    # --- as a tensor of rank 0 ---------------------------------------------------------------------

    shape = ()
    ndim = 0

    @property
    def dtype(self) -> Any:
        name = {"bool": "bool", "int": "int32", "long": "int64", "float": "float32"}[self.node.dtype]
        name = _NAMES.get(self.narrow, name)
        torch = sys.modules.get("torch")
        return getattr(torch, name) if torch is not None else np.dtype(name)

    @property
    def device(self) -> str:
        return "cpu"

    def to(self, *args: Any, **kwargs: Any) -> Value:
        """A cast; devices are ignored."""
        for x in (*args, *kwargs.values()):
            if isinstance(x, Value):
                x = x.dtype
            if not isinstance(x, bool) and x is not None and ("device" not in type(x).__name__ and x not in (
                "cpu", "cuda"
            )):
                return self.astype(x)
        return self

    def astype(self, dtype: Any) -> Value:
        """A cast; integers of 8 and 16 bits wrap, floats of 16 count as float32."""
        cast = Value(self.graph, self.graph.cast(self.node, dtype_name(dtype)))
        bits = narrow_bits(dtype)
        return cast if bits is None else cast._wrapped(bits)

    type = astype

    def _wrapped(self, bits: int) -> Value:
        """Its low bits, as a signed number where ``bits`` is negative."""
        low = build("and", Value(self.graph, self.node), (1 << abs(bits)) - 1)
        sign = 1 << (abs(bits) - 1)
        low = low if bits > 0 else build("sub", build("xor", low, sign), sign)
        return Value(self.graph, low.node, bits)

    def float(self) -> Value:
        return self.astype("float32")

    def int(self) -> Value:
        return self.astype("int32")

    def long(self) -> Value:
        return self.astype("int64")

    def bool(self) -> Value:
        return self.astype("bool")

    def where(self, condition: Any, other: Any) -> Value:
        """As a tensor's: self where the condition holds."""
        return build("where", condition, self, other)

    def new_full(self, size: Any, value: Any, **kwargs: Any) -> Value:
        if tuple(size) != ():
            raise errors.refuse(f"a tensor of shape {tuple(size)} is made while tracing", "expected shape ()")
        dtype = kwargs.get("dtype")
        known = scalar(value)
        return self.astype(self.dtype)._constant(known).astype(dtype if dtype is not None else self.dtype)

    def new_ones(self, size: Any = (), **kwargs: Any) -> Value:
        return self.new_full(size, 1, **kwargs)

    def new_zeros(self, size: Any = (), **kwargs: Any) -> Value:
        return self.new_full(size, 0, **kwargs)

    def new_tensor(self, value: Any, **kwargs: Any) -> Value:
        return self.new_full((), value, **kwargs)

    def _constant(self, x: Any) -> Value:
        return Value(self.graph, self.graph.constant(x))

    def __repr__(self) -> str:
        return f"<traced {self.node.dtype}: {self.node.op}>"

    # Operators, and what numpy and torch call, are in `foreign`, which knows their functions.


def lift(graph: Graph, x: Any) -> Node:
    """The node of an operand: a traced value or a number."""
    if isinstance(x, Value):
        return x.node
    known = scalar(x)
    if known is None:
        what = getattr(x, "described", None) or (
            f"an array of shape {tuple(x.shape)}" if hasattr(x, "shape") else f"{x!r:.60}"
        )
        raise errors.refuse(
            f"{what} meets a traced value", "expected a number; index arrays with b, h, q_idx or kv_idx"
        )
    return graph.constant(known)


def promoted(nodes: Iterable[Node]) -> str:
    """The dtype that holds all of them."""
    return max((n.dtype for n in nodes), key=_rank.__getitem__)


_bool_twin = {"add": "or", "mul": "and", "minimum": "and", "maximum": "or"}
_floats_only = {"exp", "exp2", "log", "log2", "tanh", "tanh_approx", "sigmoid", "sin", "cos", "sqrt", "div"}


_no_bools = {"neg", "abs", "floor", "floor_div", "floor_mod", "shift_left", "shift_right", "lt", "le"}


_closed = {"and", "or", "xor", "minimum", "maximum", "where", "floor_mod", "shift_right"}
_wrapping = {"add", "sub", "mul", "neg", "not", "abs", "floor_div", "shift_left"}


def build(op: str, *operands: Any) -> Value:
    """The value of an operation, of which at least one operand is traced."""
    operands = _without_uint64(operands)
    result = _build(op, *operands)
    if op in _closed or op in _wrapping:
        bits = _narrow(operands[1:] if op == "where" else operands)
        if bits is not None and result.node.dtype == "int":
            return result._wrapped(bits) if op in _wrapping else Value(result.graph, result.node, bits)
    return result


def _narrow(operands: tuple[Any, ...]) -> int | None:
    """The narrow integer that holds all operands in PyTorch; numbers of Python take the others' dtype."""
    found = None
    for x in operands:
        if not isinstance(x, Value) or x.node.dtype == "bool" or x.node.op in ("const", "param"):
            continue
        if x.narrow is None:
            return None
        found = x.narrow if found in (None, x.narrow) else -16 if max(found, x.narrow) <= 8 else None
        if found is None:
            return None
    return found


def _without_uint64(operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """Numbers from 2^63 to 2^64 as PyTorch takes them: among integers the int64 of these bits, among floats a float."""
    if not any(type(x) is int and 2**63 <= x < 2**64 for x in operands):
        return operands
    floats = any(isinstance(x, float) or isinstance(x, Value) and x.node.dtype == "float" for x in operands)
    convert = float if floats else lambda x: x - 2**64
    return tuple(convert(x) if type(x) is int and 2**63 <= x < 2**64 else x for x in operands)


def _build(op: str, *operands: Any) -> Value:
    graph = next(x.graph for x in operands if isinstance(x, Value))
    args = [lift(graph, x) for x in operands]
    if op in ("gt", "ge"):
        op, args = {"gt": "lt", "ge": "le"}[op], args[::-1]
    if op == "ne":
        return build("not", build("eq", *operands))
    if op == "where":
        args[0] = graph.cast(args[0], "bool")
        dtype = promoted(args[1:])
        args[1:] = [graph.cast(a, dtype) for a in args[1:]]
        return Value(graph, graph.node(op, dtype, args))
    if op in ("logical_and", "logical_or", "logical_xor", "logical_not"):
        op, args = op[len("logical_") :], [graph.cast(a, "bool") for a in args]
    if op in ("mul", "shift_left") and any(_is_of_int64(a) for a in args):
        args = [graph.cast(a, "long") if a.dtype in ("bool", "int") else a for a in args]
    dtype = _operand_dtype(op, args)
    op = _bool_twin.get(op, op) if dtype == "bool" else op
    args = [graph.cast(a, dtype) for a in args]
    if op == "floor" and dtype in ("int", "long"):
        return Value(graph, args[0])
    if op in ("eq", "lt", "le") and args[0] is args[1] and dtype != "float":  # compilers warn of it
        return Value(graph, graph.constant(op != "lt"))
    if op == "eq" and dtype == "bool":
        return Value(graph, graph.node("not", "bool", (graph.node("xor", "bool", args),)))
    return Value(graph, graph.node(op, "bool" if op in ("lt", "le", "eq") else dtype, args))


def _is_of_int64(node: Node) -> bool:
    """Whether it is an element of an int64 array, which lies in 32 bits: a hash of it may not."""
    return node.op == "load" and node.dtype == "int" and getattr(node.payload, "is_int64", False)


def _operand_dtype(op: str, args: list[Node]) -> str:
    """What the operands become."""
    dtype = promoted(args)
    if op in _floats_only:
        return "float"
    if op in ("and", "or", "xor", "not", "shift_left", "shift_right") and dtype == "float":
        raise errors.refuse(f"`{op}` of a float", "bitwise operators take bools or ints; cast with .int()")
    if op == "sub" and dtype == "bool":
        raise errors.refuse("the difference of two bools", "write a & ~b, or a ^ b")
    return "int" if dtype == "bool" and op in _no_bools else dtype
