"""What torch and numpy compute of tensors whose shapes are known while tracing: reductions, products, choices, shapes.

Each is written out element by element, of the operations that single values have.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Callable

import numpy as np

from raddle.flex import errors, foreign, vector
from raddle.flex.capture import Capture
from raddle.flex.expr import Value, build
from raddle.flex.vector import Extreme, Vector, array_of, elementwise, of, one_of


def _reduced(function: Callable[[Any, Any], Any], prepare: Callable[[Any], Any] = lambda x: x) -> Callable[..., Any]:
    def reduce(x: Any, dim: Any = None, keepdim: bool = False, *, axis: Any = None, keepdims: bool = False, **_: Any) -> Any:
        items, dim = array_of(elementwise(prepare, x)), axis if dim is None else dim
        dims = range(items.ndim) if dim is None else dim if isinstance(dim, (tuple, list)) else (dim,)
        dims = sorted({d % items.ndim for d in dims}, reverse=True)
        for d in dims:
            items = np.asarray(_fold(function, np.moveaxis(items, d, 0)), object)
            items = np.expand_dims(items, d) if keepdim or keepdims else items
        return of(items)

    return reduce


def _fold(function: Callable[[Any, Any], Any], rows: np.ndarray) -> Any:
    return functools.reduce(lambda a, b: array_of(elementwise(function, of(a), of(b))), rows[1:], array_of(of(rows[0])))


def _is_true(x: Any) -> Any:
    return x.bool() if isinstance(x, Value) else bool(x)


def _sum_of(name: str) -> Callable[[Any, Any], Any]:
    function = foreign.find(name)
    return lambda a, b: function(a, b) if isinstance(a, Value) or isinstance(b, Value) else _PLAIN[name](a, b)


_PLAIN = {
    "add": lambda a, b: a + b, "mul": lambda a, b: a * b, "maximum": max, "minimum": min, "or": lambda a, b: a | b,
    "and": lambda a, b: a & b,
}  # fmt: skip

def _as_summed(x: Any) -> Any:
    """Bools and narrow integers are summed as integers."""
    return x.int() if isinstance(x, Value) and (x.node.dtype == "bool" or x.narrow is not None) else x


_sum = _reduced(_sum_of("add"), _as_summed)
_prod = _reduced(_sum_of("mul"), _as_summed)
_amax, _amin = _reduced(_sum_of("maximum")), _reduced(_sum_of("minimum"))


def _each(name: str) -> Callable[..., Any]:
    """A function of single values on the elements of tensors, of which some may be numbers."""
    return lambda *operands: vector.call(name, operands, {})


_exp, _log, _sub, _mul, _div = map(_each, ("exp", "log", "sub", "mul", "div"))


def _extreme(along: Callable[..., Any], at: Callable[..., Any], pairwise: str) -> Callable[..., Any]:
    def extreme(x: Any, dim: Any = None, keepdim: bool = False, **how: Any) -> Any:
        if isinstance(dim, (Value, Vector, Capture)):  # torch.max(a, b)
            return elementwise(foreign.find(pairwise), x, dim)
        return along(x, dim, keepdim, **how) if dim is None else Extreme(along(x, dim, keepdim, **how), at(x, dim, keepdim))

    return extreme


def _first(comparison: str) -> Callable[..., Any]:
    """argmax and argmin: the index of the first of the extremes."""

    def at(x: Any, dim: Any = None, keepdim: bool = False, *, axis: Any = None, **_: Any) -> Any:
        items, dim = array_of(x), axis if dim is None else dim
        rows = items.reshape(-1) if dim is None else np.moveaxis(items, dim, 0)

        def better(best: Any, row: Any) -> Any:
            take = foreign.call(comparison, (row[1], best[1]), {})
            return tuple(build("where", take, a, b) for a, b in zip(row, best))

        found = np.empty(rows.shape[1:], object)
        for place in np.ndindex(found.shape):
            found[place] = functools.reduce(better, [(n, row[place]) for n, row in enumerate(rows)])[0]
        return of(np.expand_dims(found, dim) if keepdim and dim is not None else found)

    return at


_argmax, _argmin = _first("gt"), _first("lt")


def _count_of(x: Any, reduced: Any) -> int:
    return array_of(x).size // max(1, array_of(reduced).size)


def _mean(x: Any, dim: Any = None, keepdim: bool = False, **how: Any) -> Any:
    total = _sum(x, dim, keepdim, **how)
    return _div(total, _count_of(x, total))


def _var(x: Any, dim: Any = None, unbiased: Any = True, keepdim: bool = False, *, correction: Any = None, **how: Any) -> Any:
    if isinstance(dim, bool):  # torch.var(x, unbiased)
        dim, unbiased = None, dim
    off = _sub(x, _mean(x, dim, True, **how))
    total = _sum(_mul(off, off), dim, keepdim, **how)
    return _div(total, max(0, _count_of(x, total) - int(unbiased if correction is None else correction)))


def _norm(x: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, **how: Any) -> Any:
    if p not in (2, "fro", None, 1, math.inf):
        raise errors.refuse(f"a norm of order {p}", "expected 1, 2 or inf")
    if p == 1:
        return _sum(elementwise(abs, x), dim, keepdim)
    if p == math.inf:
        return _amax(elementwise(abs, x), dim, keepdim)
    return vector.call("sqrt", (_sum(_mul(x, x), dim, keepdim),), {})


def _vector_norm(x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, **_: Any) -> Any:
    return _norm(x, ord, dim, keepdim)


def _shifted(x: Any, dim: Any) -> tuple[Any, Any]:
    """x less its maximum along the dimension, and the logarithm of the sum of the exponentials of that."""
    below = _sub(x, _amax(x, dim, True))
    return below, _log(_sum(_exp(below), dim, True))


def _softmax(x: Any, dim: Any = None, *, axis: Any = None, **_: Any) -> Any:
    dim = axis if dim is None else dim
    weights = _exp(_sub(x, _amax(x, dim, True)))
    return _div(weights, _sum(weights, dim, True))


def _log_softmax(x: Any, dim: Any = None, *, axis: Any = None, **_: Any) -> Any:
    return _sub(*_shifted(x, axis if dim is None else dim))


def _logsumexp(x: Any, dim: Any = None, keepdim: bool = False, *, axis: Any = None, keepdims: bool = False, **_: Any) -> Any:
    dim = axis if dim is None else dim
    most = _amax(x, dim, keepdim or keepdims)
    return most + _log(_sum(_exp(_sub(x, _amax(x, dim, True))), dim, keepdim or keepdims))


def _dot(a: Any, b: Any) -> Any:
    return _sum(_mul(a, b))


def _matmul(a: Any, b: Any) -> Any:
    a, b = array_of(a), array_of(b)
    if a.ndim == b.ndim == 1:
        return _dot(of(a), of(b))
    if b.ndim == 1:
        return _sum(_mul(of(a), of(b)), -1)
    rows = a[..., :, :, None] if a.ndim > 1 else a[:, None]
    return _sum(_mul(of(rows), of(b[..., None, :, :] if a.ndim > 1 else b)), -2)


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    out = _matmul(x, of(array_of(weight).T))
    return out if bias is None else vector.call("add", (out, bias), {})


def _cosine_similarity(a: Any, b: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    norms = [elementwise(lambda n: build("maximum", n, eps), _norm(x, 2, dim)) for x in (a, b)]
    return _div(_sum(_mul(a, b), dim), _mul(*norms))


def _einsum(equation: str, *operands: Any, **_: Any) -> Any:
    """Products over all labels of the equation, summed over those that are not in its result."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    plain = equation.replace(" ", "") if isinstance(equation, str) else ""
    inputs, arrow, output = plain.partition("->")
    labels = inputs.split(",")
    arrays = [array_of(x) for x in operands]
    once = all(len(set(each)) == len(each) for each in (*labels, output))
    if not plain or "." in plain or not once or [len(each) for each in labels] != [x.ndim for x in arrays]:
        raise errors.refuse(
            f"einsum({equation!r}) of {len(arrays)} tensors", "expected one letter a dimension, each once a tensor: \"ij,j->i\""
        )
    if not arrow:
        output = "".join(sorted(c for c in set(inputs) - {","} if inputs.count(c) == 1))
    summed = "".join(dict.fromkeys(c for c in inputs if c not in output + ","))
    order = output + summed
    aligned = []
    for each, x in zip(labels, arrays):
        x = x.transpose([each.index(c) for c in order if c in each])
        aligned.append(of(x[tuple(slice(None) if c in each else None for c in order)]))
    product = functools.reduce(_mul, aligned)
    return _sum(product, tuple(range(len(output), len(order)))) if summed else product


def _along(x: Any, dim: Any, choose: Callable[[np.ndarray], np.ndarray]) -> Any:
    """What `choose` makes of the rows along a dimension, or of all elements."""
    items = array_of(x)
    if dim is None:
        return of(choose(items.reshape(-1)))
    return of(np.moveaxis(choose(np.moveaxis(items, dim, 0)), 0, dim))


def _accumulated(name: str) -> Callable[..., Any]:
    def accumulate(x: Any, dim: Any = None, *, axis: Any = None, **_: Any) -> Any:
        add = _each(name)

        def sums(rows: np.ndarray) -> np.ndarray:
            found = [of(rows[0])]
            for row in rows[1:]:
                found.append(add(found[-1], of(row)))
            return np.stack([array_of(each) for each in found])

        return _along(elementwise(_as_summed, x), axis if dim is None else dim, sums)

    return accumulate


def _take(x: Any, index: Any, axis: Any = None, **_: Any) -> Any:
    """torch.take, of all elements, and numpy.take along an axis."""
    return _along(x, axis, lambda rows: _picked(rows, index))


def _picked(rows: np.ndarray, index: Any) -> np.ndarray:
    at = array_of(index)
    found = np.empty((*at.shape, *rows.shape[1:]), object)
    for place in np.ndindex(at.shape):
        found[place] = array_of(one_of(rows, at[place]))
    return found


def _gather(x: Any, dim: Any, index: Any, **_: Any) -> Any:
    items, at = np.moveaxis(array_of(x), dim, 0), np.moveaxis(array_of(index), dim, 0)
    found = np.empty(at.shape, object)
    for place in np.ndindex(at.shape):
        found[place] = one_of(items[(slice(None), *place[1:])], at[place])
    return of(np.moveaxis(found, 0, dim))


def _shaped(x: Any, *shape: Any) -> Any:
    return of(array_of(x).reshape(*(tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape)))


def _listed(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    """Sizes or dimensions given one by one, or as one tuple."""
    return tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes


def _expanded(x: Any, *sizes: Any) -> Any:
    items, sizes = array_of(x), _listed(sizes)
    kept = (1,) * (len(sizes) - items.ndim) + items.shape
    return of(np.broadcast_to(items, [old if new == -1 else new for old, new in zip(kept, sizes)]))


def _flat(values: Any) -> list[Any]:
    return list(array_of(values).reshape(-1))


def _isin(x: Any, values: Any, **how: Any) -> Any:
    return elementwise(lambda a: foreign.find("isin")(a, _flat(values), **how), x)


def _swapped(x: Any, first: int, second: int) -> Any:
    return of(array_of(x).swapaxes(first, second))


def _transposed(x: Any, *dims: Any) -> Any:
    """torch's, of two dimensions; numpy's, of all."""
    return _swapped(x, *dims) if len(dims) == 2 else of(array_of(x).transpose(*_listed(dims)))


vector.functions.update({
    "sum": _sum,
    "prod": _prod,
    "any": _reduced(_sum_of("or"), _is_true),
    "all": _reduced(_sum_of("and"), _is_true),
    "amax": _amax,
    "amin": _amin,
    "max": _extreme(_amax, _argmax, "maximum"),
    "min": _extreme(_amin, _argmin, "minimum"),
    "argmax": _argmax,
    "argmin": _argmin,
    "count_nonzero": lambda x, dim=None, **_: _sum(elementwise(_is_true, x), dim),
    "mean": _mean,
    "var": _var,
    "std": lambda x, *args, **how: vector.call("sqrt", (_var(x, *args, **how),), {}),
    "norm": _norm,
    "vector_norm": _vector_norm,
    "linalg_vector_norm": _vector_norm,
    "linalg_norm": _vector_norm,
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "logsumexp": _logsumexp,
    "cumsum": _accumulated("add"),
    "cumprod": _accumulated("mul"),
    "dot": _dot,
    "vdot": _dot,
    "inner": _dot,
    "matmul": _matmul,
    "mm": _matmul,
    "bmm": _matmul,
    "mv": _matmul,
    "outer": lambda a, b: _mul(of(array_of(a)[:, None]), b),
    "linear": _linear,
    "einsum": _einsum,
    "cosine_similarity": _cosine_similarity,
    "take": _take,
    "index_select": lambda x, dim, index: _along(x, dim, lambda rows: _picked(rows, index)),
    "gather": _gather,
    "take_along_dim": lambda x, index, dim: _gather(x, dim, index),
    "take_along_axis": lambda x, index, axis: _gather(x, axis, index),
    "stack": lambda xs, dim=0, **_: of(np.stack([array_of(x) for x in xs], dim)),
    "cat": lambda xs, dim=0, **_: of(np.concatenate([array_of(x) for x in xs], dim)),
    "unsqueeze": lambda x, dim: of(np.expand_dims(array_of(x), dim)),
    "squeeze": lambda x, dim=None: of(np.squeeze(array_of(x), dim)),
    "reshape": _shaped,
    "view": _shaped,
    "flatten": lambda x, *_: of(array_of(x).reshape(-1)),
    "expand_dims": lambda x, axis: of(np.expand_dims(array_of(x), axis)),
    "expand": _expanded,
    "broadcast_to": _expanded,
    "flip": lambda x, *dims: of(np.flip(array_of(x), _listed(dims))),
    "roll": lambda x, shifts, dims=None: of(np.roll(array_of(x), shifts, dims)),
    "t": lambda x: of(array_of(x).T),
    "transpose": _transposed,
    "swapaxes": _swapped,
    "permute": lambda x, *dims: of(array_of(x).transpose(_listed(dims))),
    "unbind": lambda x, dim=0: tuple(of(each) for each in np.moveaxis(array_of(x), dim, 0)),
    "getitem": lambda x, index: Vector(array_of(x))[index],
    "isin": _isin,
})  # fmt: skip
vector.functions.update({"concatenate": vector.functions["cat"], "concat": vector.functions["cat"]})
