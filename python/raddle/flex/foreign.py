"""Functions and methods of torch and numpy by name, as operations on traced values."""

from __future__ import annotations

import contextlib
import difflib
import math
import sys
from typing import Any, Callable

from raddle.flex import activations, elementary, errors, ops, random
from raddle.flex.capture import capture
from raddle.flex.expr import Value, build, tensors
from raddle.flex.graph import Graph


def _binary(op: str) -> Callable[..., Any]:
    return lambda a, b: build(op, a, b)


def _unary(op: str) -> Callable[..., Any]:
    return lambda x: build(op, x)


def _ceil(x: Value) -> Value:
    return x if x.node.dtype != "float" else build("neg", build("floor", build("neg", x)))


def _divide(a: Any, b: Any, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return build("div", a, b)
    if rounding_mode == "floor":
        return build("floor_div", a, b)
    if any(isinstance(x, Value) and x.node.dtype == "float" or isinstance(x, float) for x in (a, b)):
        return elementary.trunc(build("div", a, b))
    # In integers: a float32 would not hold them.
    up = build("ne", build("floor_mod", a, b), 0) & ((a < 0) ^ (b < 0))
    return build("add", build("floor_div", a, b), up)


def _clip(x: Any, min: Any = None, max: Any = None, a_min: Any = None, a_max: Any = None) -> Any:
    return ops.clamp(x, min if a_min is None else a_min, max if a_max is None else a_max)


def _full_like(x: Any, value: Any, dtype: Any = None, **_: Any) -> Value:
    return x.new_full((), value, dtype=dtype)


def _add(a: Any, b: Any, alpha: Any = 1) -> Value:
    return build("add", a, b if alpha == 1 else b * alpha)


def _sub(a: Any, b: Any, alpha: Any = 1) -> Value:
    return build("sub", a, b if alpha == 1 else b * alpha)


def _same(x: Any, *args: Any, **kwargs: Any) -> Any:
    return x


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": _add,
    "sub": _sub,
    "div": _divide,
    "pow": elementary.power,
    "float_power": lambda x, n: elementary.power(build("mul", x, 1.0), n),
    "round": elementary.round_,
    "log10": lambda x: build("log2", x) * math.log10(2.0),
    "exp10": lambda x: elementary.power(10.0, x),
    "relu6": lambda x, inplace=False: activations.hardtanh(x, 0.0, 6.0),
    "softsign": lambda x: x / (build("abs", x) + 1.0),
    "rad2deg": lambda x: x * (180.0 / math.pi),
    "deg2rad": lambda x: x * (math.pi / 180.0),
    "signbit": lambda x: build("lt", elementary.copysign(1.0, x), 0.0),
    "isposinf": lambda x: build("eq", x, math.inf),
    "isneginf": lambda x: build("eq", x, -math.inf),
    "addcmul": lambda x, a, b, value=1: x + a * b * value,
    "addcdiv": lambda x, a, b, value=1: x + build("div", a, b) * value,
    "frac": lambda x: x - elementary.trunc(x),
    "type_as": lambda x, other: x.to(other),
    "xlogy": lambda x, y: build("where", build("eq", x, 0), 0.0, x * build("log", y)),
    "logaddexp2": lambda a, b: elementary.logaddexp(a * math.log(2.0), b * math.log(2.0)) / math.log(2.0),
    "sinc": lambda x: build("where", build("eq", x, 0), 1.0, build("sin", x * math.pi) / (x * math.pi)),
    "heaviside": lambda x, value: build("where", build("eq", x, 0), value, build("where", build("lt", x, 0), 0, 1)),
    "ceil": _ceil,
    "clamp": _clip,
    "clamp_min": lambda x, min: ops.clamp(x, min),
    "clamp_max": lambda x, max: ops.clamp(x, None, max),
    "where": lambda c, a, b: build("where", c, a, b),
    "masked_fill": lambda x, mask, value: build("where", mask, value, x),
    "relu": lambda x, inplace=False: build("maximum", x, 0),
    "square": lambda x: build("mul", x, x),
    "rsqrt": lambda x: build("div", 1.0, build("sqrt", x)),
    "reciprocal": lambda x: build("div", 1.0, x),
    "isnan": lambda x: build("ne", x, x),
    "sign": lambda x: build("where", build("lt", x, 0), -1, build("where", build("gt", x, 0), 1, 0)).astype(x.dtype),
    "divmod": lambda a, b: (build("floor_div", a, b), build("floor_mod", a, b)),
    "full_like": _full_like,
    "ones_like": lambda x, **k: _full_like(x, 1, **k),
    "zeros_like": lambda x, **k: _full_like(x, 0, **k),
    "cpu": _same,
    "cuda": _same,
    "detach": _same,
    "contiguous": _same,
    "clone": _same,
    "positive": _same,
    "to": lambda x, *a, **k: x.to(*a, **k),
    "float": lambda x: x.float(),
    "int": lambda x: x.int(),
    "long": lambda x: x.long(),
    "bool": lambda x: x.bool(),
    "half": lambda x: x.float(),
    "double": lambda x: x.float(),
    "bfloat16": lambda x: x.float(),
    "item": lambda x: x.item(),
}
_FUNCTIONS.update({name: _unary(name) for name in (
    "exp", "exp2", "log", "log2", "tanh", "tanh_approx", "sigmoid", "sin", "cos", "floor", "sqrt", "neg", "abs",
    "logical_not", "not",
)})
_FUNCTIONS.update({name: _binary(name) for name in (
    "mul", "minimum", "maximum", "floor_div", "floor_mod", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "xor",
    "logical_and", "logical_or", "logical_xor", "shift_left", "shift_right",
)})

_FUNCTIONS.update({name: getattr(elementary, name) for name in (
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "copysign", "cosh", "erf", "erfc", "expm1", "fmod",
    "hypot", "isfinite", "isin", "isinf", "lerp", "log1p", "logaddexp", "nan_to_num", "sinh", "tan", "trunc",
)})  # fmt: skip
_FUNCTIONS.update({name: getattr(activations, name) for name in (
    "celu", "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid", "mish",
    "selu", "silu", "softplus", "softshrink", "tanhshrink", "threshold",
)})  # fmt: skip

_ALIASES = {
    "subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div", "truediv": "div",
    "floor_divide": "floor_div", "floordiv": "floor_div", "remainder": "floor_mod", "mod": "floor_mod",
    "power": "pow", "negative": "neg", "absolute": "abs", "less": "lt", "less_equal": "le", "greater": "gt",
    "greater_equal": "ge", "equal": "eq", "not_equal": "ne", "bitwise_and": "and", "bitwise_or": "or",
    "bitwise_xor": "xor", "bitwise_not": "not", "invert": "not", "bitwise_invert": "not",
    "bitwise_left_shift": "shift_left", "bitwise_right_shift": "shift_right", "left_shift": "shift_left",
    "right_shift": "shift_right", "lshift": "shift_left", "rshift": "shift_right", "min": "minimum",
    "max": "maximum", "fmin": "minimum", "fmax": "maximum", "clip": "clamp", "type": "to",
    "expit": "sigmoid", "sgn": "sign", "log_sigmoid": "logsigmoid", "around": "round", "rint": "round", "swish": "silu",
    "arccos": "acos", "arccosh": "acosh", "arcsin": "asin", "arcsinh": "asinh", "arctan": "atan", "arctan2": "atan2",
    "arctanh": "atanh", "fix": "trunc", "pos": "positive",
}  # fmt: skip


def find(name: str) -> Callable[..., Any] | None:
    """The operation that torch or numpy calls ``name``."""
    name = name.removeprefix("special_")
    return _FUNCTIONS.get(_ALIASES.get(name, name))


def call(name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs a library's function on traced values."""
    plain = name.strip("_")
    if tensors.takes(name, args):
        return tensors.call(name, args, kwargs)
    if plain == "where" and len(args) == 3 and kwargs == {}:
        first = args[0]
        if isinstance(first, Value) and first.node.dtype == "float":  # Tensor.where(self, condition, other)
            return build("where", args[1], first, args[2])
    function = find(plain)
    if function is None and plain.startswith("r"):
        swapped = find(plain[1:])
        if swapped is not None:
            return swapped(args[1], args[0], **kwargs)
    if function is None:
        raise errors.refuse(f"`{name}` of a traced value is unknown", instead_of(plain))
    try:
        return function(*args, **kwargs)
    except TypeError as error:
        if isinstance(error, errors.TraceError):
            raise
        raise errors.refuse(f"`{name}` is called with arguments that the tracer does not know", str(error)) from error


def instead_of(name: str) -> str:
    """What to write for a function that is not known."""
    near = difflib.get_close_matches(name, [*_FUNCTIONS, *_ALIASES], 2)
    known = f"; known are {' and '.join(near)}" if near else ""
    return f"write it with arithmetic, comparisons, where and the functions of raddle.flex.ops, or index a table{known}"


def tensors_indexed(graph: Graph) -> Any:
    """A context in which torch tensors take traced indices too; nothing without torch."""
    torch = sys.modules.get("torch")
    if torch is None:
        return contextlib.nullcontext()
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.__getitem__:
                items = args[1] if isinstance(args[1], tuple) else (args[1],)
                if any(isinstance(i, Value) for i in items):
                    return capture(graph, args[0], "tensor")[args[1]]
            random.refuse_function(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    return Mode()


def _attribute(self: Value, name: str) -> Any:
    """A tensor's method of that name."""
    if name.startswith("__"):
        raise AttributeError(name)
    function = find(name)
    if function is None and tensors.takes(name, (self,)):
        return lambda *args, **kwargs: tensors.call(name, (self, *args), kwargs)
    if function is None:
        raise errors.refuse(f"a traced value has no .{name}", instead_of(name))
    return lambda *args, **kwargs: function(self, *args, **kwargs)


def _torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return call(getattr(func, "__name__", str(func)), args, kwargs or {})


def _array_ufunc(self: Value, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    return call(ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}", args, kwargs)


def _array_function(self: Value, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return call(func.__name__, args, kwargs)


def _method(name: str, reflected: bool = False) -> Any:
    function = find(name)
    assert function is not None, name

    def method(self: Value, *args: Any) -> Any:
        if tensors.takes(name, (self, *args)):
            return tensors.call(name, (*args, self) if reflected else (self, *args), {})
        # Where the other is no number, it may know what to do: an array says what is wrong better.
        return function(*args, self) if reflected else function(self, *args)

    return method


for _name, _function in (
    ("__getattr__", _attribute),
    ("__torch_function__", classmethod(_torch_function)),
    ("__array_ufunc__", _array_ufunc),
    ("__array_function__", _array_function),
):
    setattr(Value, _name, _function)
for _name in "add sub mul truediv floordiv mod pow and or xor lshift rshift divmod".split():
    setattr(Value, f"__{_name}__", _method(_name))
    setattr(Value, f"__r{_name}__", _method(_name, True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "invert", "abs", "pos", "trunc", "ceil", "floor"):
    setattr(Value, f"__{_name}__", _method(_name))
# math.floor, math.ceil and math.trunc give Python integers.
for _name in ("floor", "ceil", "trunc"):
    setattr(Value, f"__{_name}__", lambda self, _f=find(_name): _f(self).int())
