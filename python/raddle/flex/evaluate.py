"""Expressions evaluated with numpy, elementwise: int32 and int64 that wrap, float32, and the engine's edge cases.

The elementary functions are numpy's own: they differ from the engine's in the last bits.
"""

from __future__ import annotations

from typing import Any, Callable

import numpy as np

from raddle.flex.graph import Node


def order(root: Node) -> list[Node]:
    """All nodes that ``root`` needs, operands first."""
    done: dict[int, Node] = {}
    stack = [(root, False)]
    while stack:
        node, ready = stack.pop()
        if ready:
            done.setdefault(id(node), node)
        elif id(node) not in done:
            stack.append((node, True))
            stack.extend((a, False) for a in reversed(node.args))
    return list(done.values())


def _floor_div(a: Any, b: Any) -> Any:
    if np.result_type(a, b).kind == "f":
        return np.floor(np.divide(a, b))
    return np.floor_divide(a, b)  # 0 where b is 0


def _floor_mod(a: Any, b: Any) -> Any:
    if np.result_type(a, b).kind == "f":
        return a - np.floor(np.divide(a, b)) * b
    return np.remainder(a, b)


def _shift_left(a: Any, n: Any) -> Any:
    inside = (n >= 0) & (n < 8 * np.asarray(a).itemsize)
    return np.where(inside, np.left_shift(a, np.where(inside, n, 0)), np.zeros_like(a))


def _shift_right(a: Any, n: Any) -> Any:
    bits = 8 * np.asarray(a).itemsize
    return np.right_shift(a, np.where((n >= 0) & (n < bits), n, bits - 1))


def _to_int(x: Any) -> Any:
    x = np.asarray(x)
    if x.dtype.kind != "f":
        return x.astype(np.int32)
    held = np.clip(np.nan_to_num(np.trunc(x).astype(np.float64), nan=0.0), -(2.0**31), 2.0**31 - 1)
    return held.astype(np.int32)


def _to_long(x: Any) -> Any:
    x = np.asarray(x)
    if x.dtype.kind != "f":
        return x.astype(np.int64)
    held = np.nan_to_num(np.trunc(x).astype(np.float64), nan=0.0)
    inside = np.abs(held) < 2.0**63
    limit = np.where(held < 0, np.iinfo(np.int64).min, np.iinfo(np.int64).max)
    return np.where(inside, np.where(inside, held, 0.0).astype(np.int64), limit)


def _tanh_approx(x: Any) -> Any:
    b = np.clip(x, -4.97, 4.97).astype(np.result_type(x, np.float32), copy=False)
    x2 = b * b
    over = b * (135135 + x2 * (17325 + x2 * (378 + x2)))
    return over / (135135 + x2 * (62370 + x2 * (3150 + x2 * 28)))


def _not(a: Any) -> Any:
    return np.invert(a)


NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.true_divide,
    "floor_div": _floor_div,
    "floor_mod": _floor_mod,
    "neg": np.negative,
    "abs": np.abs,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": _not,
    "shift_left": _shift_left,
    "shift_right": _shift_right,
    "lt": np.less,
    "le": np.less_equal,
    "eq": np.equal,
    "where": np.where,
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log2": np.log2,
    "tanh": np.tanh,
    "tanh_approx": _tanh_approx,
    "sigmoid": lambda x: 1 / (1 + np.exp(-np.asarray(x))),
    "sin": np.sin,
    "cos": np.cos,
    "floor": np.floor,
    "sqrt": np.sqrt,
    "cast_bool": lambda x: np.asarray(x).astype(bool),
    "cast_int": _to_int,
    "cast_long": _to_long,
    "cast_float": lambda x: np.asarray(x).astype(np.float32),
}


def _load(array: Any, indices: list[Any]) -> Any:
    at = []
    for i, n in zip(indices, array.shape):
        i = np.asarray(i, np.int64)
        at.append(np.clip(np.where(i < 0, i + n, i), 0, n - 1))
    return array[tuple(np.broadcast_arrays(*at))]


def evaluate(root: Node, leaves: dict[str, Any], float_type: Any = np.float32, values: Any = None) -> Any:
    """The value of ``root``, broadcast over the leaves b, h, q, kv (ints) and score (floats).

    ``values`` has the captured arrays, and numbers that differ from the traced ones: a dict by ``id`` of the payload.
    """
    kinds = {"bool": np.bool_, "int": np.int32, "long": np.int64, "float": float_type}
    values = values or {}
    results: dict[int, Any] = {}
    with np.errstate(all="ignore"):
        for node in order(root):
            args = [results[id(a)] for a in node.args]
            kind = kinds[node.dtype]
            if node.op in ("b", "h", "q", "kv", "score"):
                result = np.asarray(leaves[node.op]).astype(kind)
            elif node.op == "const":
                result = np.asarray(node.payload, kind)
            elif node.op == "param":
                result = np.asarray(values.get(id(node.payload), node.payload.value)).astype(kind)
            elif node.op == "load":
                result = _load(np.asarray(values[id(node.payload)]), args).astype(kind)
            elif node.op == "cast":
                convert = {"int": _to_int, "long": _to_long}.get(node.dtype)
                result = convert(args[0]) if convert else np.asarray(args[0]).astype(kind)
            else:
                result = np.asarray(NUMPY[node.op](*args)).astype(kind, copy=False)
            results[id(node)] = result
    return results[id(root)]


def concretise(node: Node) -> Any:
    """The present value of an expression of numbers alone, which the code is then fixed to."""
    for each in order(node):
        if each.op == "param":
            each.payload.baked = True
    return evaluate(node, {}, np.float64).item()
