"""Functions for score and mask mods that work without torch.

Of traced values they make a traced value; of numbers and numpy arrays they compute with numpy, elementwise,
so that the same function can be evaluated as it stands. With PyTorch, torch's own functions do as well.

Each returns a value of the kind that it was given. What cannot be traced raises `raddle.flex.TraceError`.
"""

from __future__ import annotations

import builtins
import sys
from typing import Any

from raddle.flex.evaluate import NUMPY
from raddle.flex.expr import Value, build, dtype_name


def _call(op: str, *operands: Any) -> Any:
    if any(isinstance(x, Value) for x in operands):
        return build(op, *operands)
    torch = sys.modules.get("torch")
    if torch is not None and any(isinstance(x, torch.Tensor) for x in operands):
        return _torch_call(torch, op, operands)
    return NUMPY[op](*operands)


def _torch_call(torch: Any, op: str, operands: tuple[Any, ...]) -> Any:
    if op == "tanh_approx":
        op = "tanh"
    like = next(x for x in operands if isinstance(x, torch.Tensor))
    # torch.minimum and torch.maximum take no numbers.
    return getattr(torch, op)(*(torch.as_tensor(x, device=like.device) for x in operands))


def where(condition: Any, a: Any, b: Any) -> Any:
    """``a`` where the condition holds, else ``b``. Both are computed.

    Example:
        >>> flex.ops.where(np.array([True, False]), 1.0, 2.0).tolist()
        [1.0, 2.0]
    """
    return _call("where", condition, a, b)


def abs(x: Any) -> Any:
    """The magnitude of x.

    Example:
        >>> float(flex.ops.abs(-2.0))
        2.0
    """
    return _call("abs", x)


def minimum(a: Any, b: Any) -> Any:
    """The lesser; NaN where either is NaN.

    Example:
        >>> float(flex.ops.minimum(1.0, 2.0))
        1.0
    """
    return _call("minimum", a, b)


def maximum(a: Any, b: Any) -> Any:
    """The greater; NaN where either is NaN.

    Example:
        >>> float(flex.ops.maximum(1.0, 2.0))
        2.0
    """
    return _call("maximum", a, b)


def clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    """``x`` held in [min, max]; None: no bound.

    Example:
        >>> flex.ops.clamp(np.arange(5), 1, 3).tolist()
        [1, 1, 2, 3, 3]
    """
    if min is not None:
        x = maximum(x, min)
    return x if max is None else minimum(x, max)


def exp(x: Any) -> Any:
    """e to the x.

    Example:
        >>> float(flex.ops.exp(0.0))
        1.0
    """
    return _call("exp", x)


def exp2(x: Any) -> Any:
    """2 to the x.

    Example:
        >>> float(flex.ops.exp2(3.0))
        8.0
    """
    return _call("exp2", x)


def log(x: Any) -> Any:
    """Natural logarithm; -inf at 0, NaN below.

    Example:
        >>> float(flex.ops.log(1.0))
        0.0
    """
    return _call("log", x)


def log2(x: Any) -> Any:
    """Logarithm to base 2; -inf at 0, NaN below.

    Example:
        >>> float(flex.ops.log2(8.0))
        3.0
    """
    return _call("log2", x)


def tanh(x: Any) -> Any:
    """Hyperbolic tangent within 2.4e-7, an absolute error. GPUs take their own approximations of its parts.

    Example:
        >>> float(flex.ops.tanh(0.0))
        0.0
    """
    return _call("tanh", x)


def tanh_approx(x: Any) -> Any:
    """Hyperbolic tangent within 1e-4, without an exponential; the same bits on every backend.

    Example:
        >>> round(float(flex.ops.tanh_approx(1.0)), 3)
        0.762
    """
    return _call("tanh_approx", x)


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)).

    Example:
        >>> float(flex.ops.sigmoid(0.0))
        0.5
    """
    return _call("sigmoid", x)


def sin(x: Any) -> Any:
    """Sine of x radians, within 1e-7 for magnitudes up to 2^20.

    Example:
        >>> float(flex.ops.sin(0.0))
        0.0
    """
    return _call("sin", x)


def cos(x: Any) -> Any:
    """Cosine of x radians, within 1e-7 for magnitudes up to 2^20.

    Example:
        >>> float(flex.ops.cos(0.0))
        1.0
    """
    return _call("cos", x)


def floor(x: Any) -> Any:
    """The greatest integer not above x, in x's own dtype.

    Example:
        >>> float(flex.ops.floor(-1.5))
        -2.0
    """
    return _call("floor", x)


def sqrt(x: Any) -> Any:
    """Square root, correctly rounded; NaN below 0.

    Example:
        >>> float(flex.ops.sqrt(9.0))
        3.0
    """
    return _call("sqrt", x)


def cast(x: Any, dtype: Any) -> Any:
    """``x`` as "bool", "int32" or "int64" (towards 0, held within their bits) or "float32".

    Example:
        >>> int(flex.ops.cast(-1.5, "int32"))
        -1
    """
    name = dtype_name(dtype)
    if isinstance(x, Value):
        return x.astype(name)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return x.to(getattr(torch, {"bool": "bool", "int": "int32", "long": "int64", "float": "float32"}[name]))
    return NUMPY["cast_" + name](x)


def smallest(*args: Any, **kwargs: Any) -> Any:
    """What ``min`` means inside a traced function."""
    return _fold(minimum, builtins.min, args, kwargs)


def largest(*args: Any, **kwargs: Any) -> Any:
    """What ``max`` means inside a traced function."""
    return _fold(maximum, builtins.max, args, kwargs)


def _fold(function: Any, builtin: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    items = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
    if kwargs or not any(isinstance(x, Value) for x in items):
        return builtin(*args, **kwargs)
    result = items[0]
    for x in items[1:]:
        result = function(result, x)
    return result
