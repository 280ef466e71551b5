"""Random functions of score, b, h, q_idx and kv_idx, written with Python's operators."""

from __future__ import annotations

import operator
import warnings

import numpy as np

from raddle.flex import ops

_int_binary = [operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.and_, operator.or_]
_int_binary += [operator.xor, ops.minimum, ops.maximum, lambda a, n: a << (n & 7), lambda a, n: a >> (n & 7)]
_float_binary = [operator.add, operator.sub, operator.mul, operator.truediv, ops.minimum, ops.maximum]
_float_unary = [operator.neg, abs, ops.floor, lambda x: ops.sqrt(abs(x))]
_compare = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]


def draw_int(rng, depth, arrays):
    kind = rng.integers(10)
    if depth == 0 or kind == 0:
        name = str(rng.choice(["b", "h", "q", "kv", "q", "kv"]))
        return lambda e: e[name]
    if kind == 9:
        x, factor = draw_int(rng, depth - 1, arrays), int(rng.choice([1, 3, 73856093, 2**33 + 1]))
        return lambda e: ops.cast(x(e), "int64") * factor
    a, b = (draw_int(rng, depth - 1, arrays) for _ in range(2))
    n = int(rng.integers(-9, 20))
    if kind == 1:
        return lambda e: abs(-a(e))
    if kind == 2:
        c = draw_bool(rng, depth - 1, arrays)
        return lambda e: ops.where(c(e), a(e), b(e))
    if kind == 3:
        array = arrays[int(rng.integers(2))]
        size = len(array)
        return lambda e: array[ops.clamp(a(e), -size, size - 1)]
    if kind == 4:
        return lambda e: ~a(e)
    f = _int_binary[int(rng.integers(len(_int_binary)))]
    return (lambda e: f(a(e), b(e))) if kind < 7 else (lambda e: f(a(e), n))


def draw_bool(rng, depth, arrays):
    kind = rng.integers(6)
    if kind < 3 or depth == 0:
        f = _compare[int(rng.integers(len(_compare)))]
        if kind == 0 and depth > 0:
            x, y = (draw_float(rng, depth - 1, arrays, score=False) for _ in range(2))
            return lambda e: f(x(e), y(e))
        a, b = (draw_int(rng, max(depth - 1, 0), arrays) for _ in range(2))
        return lambda e: f(a(e), b(e))
    c, d = (draw_bool(rng, depth - 1, arrays) for _ in range(2))
    if kind == 3:
        return lambda e: c(e) & d(e)
    return (lambda e: c(e) | d(e)) if kind == 4 else (lambda e: ~c(e) ^ d(e))


def draw_float(rng, depth, arrays, score=True):
    """Only operations that IEEE rounds correctly, so that numpy gives the same bits."""
    kind = rng.integers(8)
    if depth == 0 or kind == 0:
        name = str(rng.choice(["score", "score", "h", "kv"] if score else ["q", "kv"]))
        return lambda e: ops.cast(e[name], "float32")
    x, y = (draw_float(rng, depth - 1, arrays, score) for _ in range(2))
    if kind == 1:
        c = draw_bool(rng, depth - 1, arrays)
        return lambda e: ops.where(c(e), x(e), y(e))
    if kind == 2:
        a = draw_int(rng, depth - 1, arrays)
        return lambda e: ops.cast(a(e), "float32")
    if kind == 3:
        a, array = draw_int(rng, depth - 1, arrays), arrays[2]
        size = len(array)
        return lambda e: array[ops.clamp(a(e), -size, size - 1)]
    if kind == 4:
        f = _float_unary[int(rng.integers(len(_float_unary)))]
        return lambda e: f(x(e))
    f = _float_binary[int(rng.integers(len(_float_binary)))]
    number = float(np.float32(rng.normal()))
    return (lambda e: f(x(e), y(e))) if kind < 7 else (lambda e: f(x(e), number))


def draw_score(rng, arrays, depth=4):
    e = draw_float(rng, depth, arrays)
    return lambda score, b, h, q, kv: e({"score": score, "b": b, "h": h, "q": q, "kv": kv})


def draw_mask(rng, arrays, depth=4):
    e = draw_bool(rng, depth, arrays)
    return lambda b, h, q, kv: e({"b": b, "h": h, "q": q, "kv": kv})


def draw_arrays(rng):
    """Two int32 arrays and a float32 one; the first is sorted, as documents are."""
    return (
        np.sort(rng.integers(0, 6, 50)).astype(np.int32),
        rng.integers(-30, 80, 37).astype(np.int32),
        rng.standard_normal(61).astype(np.float32),
    )


def draw_points(rng, n):
    """[n, 4] b, h, q_idx, kv_idx."""
    at = np.stack([rng.integers(0, 3, n), rng.integers(0, 8, n), rng.integers(0, 60, n), rng.integers(0, 60, n)], 1)
    at[: n // 10, 2] = rng.integers(-5, 0, n // 10)
    return at.astype(np.int32)


def with_numpy(fn, at, score=None):
    """The function itself, on numpy arrays: int32 wraps, x // 0 is 0."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fn(*([] if score is None else [score]), *at.T)
