"""Expressions as a graph of nodes; equal nodes are one node, so that a common subexpression is computed once."""

from __future__ import annotations

from typing import Any, Iterable

import numpy as np

from raddle.flex import bounds, errors

def _to_int(x: bool | int | float, limits: bounds.Bounds) -> int:
    """As a kernel casts it: a float32, held within 32 or 64 bits; of an integer the low 32."""
    if isinstance(x, int):
        return x if bounds.within((x, x), limits) else (x + 2**31) % 2**32 - 2**31
    with np.errstate(over="ignore"):
        return int(min(max(float(np.float32(x)), limits[0]), limits[1]))


class Node:
    """One operation. ``payload``: a constant's value, a `Parameter`, or a captured array."""

    __slots__ = ("op", "dtype", "args", "payload", "varies", "bounds")

    def __init__(self, op: str, dtype: str, args: tuple[Node, ...], payload: Any):
        self.op, self.dtype, self.args, self.payload = op, dtype, args, payload
        # Whether it depends on the pair or on a captured array: if not, Python may know its value.
        self.varies = op in ("b", "h", "q", "kv", "score", "load") or any(a.varies for a in args)
        self.bounds = bounds.of(op, dtype, args, payload)

    @property
    def is_wide(self) -> bool:
        """Whether it is an integer that 32 bits do not hold."""
        return self.bounds is not None and not bounds.within(self.bounds, bounds.INT)


class Parameter:
    """A number that the function captured: a run-time member. ``read``: of the trace's `Reads`."""

    __slots__ = ("hint", "value", "read", "baked")

    def __init__(self, hint: str, value: int | float, read: int = 0):
        self.hint, self.value, self.read = hint, value, read
        self.baked = False  # True: Python needed its value, so the code holds for this one alone


class Graph:
    """The nodes of one trace."""

    def __init__(self, reads: Any, numbers_as_parameters: bool = True):
        self.reads = reads
        self.numbers_as_parameters = numbers_as_parameters
        self.parameters: list[Parameter] = []
        self.captures: dict[int, Any] = {}
        self._nodes: dict[Any, Node] = {}

    def node(self, op: str, dtype: str, args: Iterable[Node] = (), payload: Any = None) -> Node:
        args = tuple(args)
        # repr tells -0.0 from 0.0 and finds NaN again.
        mark = repr(payload) if op == "const" else id(payload)
        key = (op, dtype, tuple(map(id, args)), mark)
        if key not in self._nodes:
            self._nodes[key] = Node(op, dtype, args, payload)
        return self._nodes[key]

    def constant(self, x: bool | int | float) -> Node:
        if isinstance(x, bool):
            return self.node("const", "bool", payload=x)
        if isinstance(x, int):
            if not bounds.within((x, x), (-bounds.LONG[1], bounds.LONG[1])):
                raise errors.refuse(f"the integer {x} does not fit in 64 bits", "write a float, or a smaller number")
            dtype = "int" if bounds.within((x, x), bounds.INT) else "long"
            return self.node("const", dtype, payload=int(x))  # an enumeration's repr is no number
        return self.node("const", "float", payload=float(x))

    def cast(self, node: Node, dtype: str) -> Node:
        if node.dtype == dtype:
            return node
        if node.op == "const" and (dtype not in ("int", "long") or np.isfinite(node.payload)):
            if dtype in ("int", "long"):
                x = _to_int(node.payload, bounds.INT if dtype == "int" else bounds.LONG)
                return self.node("const", dtype, payload=int(x))
            return self.constant({"bool": bool, "float": float}[dtype](node.payload))
        if dtype == "bool":
            zero = self.cast(self.constant(0), node.dtype)
            return self.node("not", "bool", (self.node("eq", "bool", (node, zero)),))
        if node.dtype == "bool" and dtype in ("float", "long"):
            node = self.cast(node, "int")
        return self.node("cast", dtype, (node,))
