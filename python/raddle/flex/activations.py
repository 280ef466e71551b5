"""Activations of torch.nn.functional, of the functions that kernels have and of those in `elementary`."""

from __future__ import annotations

import math
from typing import Any

from raddle.flex import errors
from raddle.flex.elementary import erf, expm1, log1p, where
from raddle.flex.expr import Value, build


def _float(x: Value) -> Value:
    return x.astype("float32")


def gelu(x: Value, approximate: str = "none") -> Value:
    x = _float(x)
    if approximate == "tanh":
        return x * 0.5 * (build("tanh", (x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)) + 1.0)
    if approximate != "none":
        raise errors.refuse(f"gelu with approximate={approximate!r}", "expected 'none' or 'tanh'")
    return x * 0.5 * (erf(x * math.sqrt(0.5)) + 1.0)


def silu(x: Value, inplace: bool = False) -> Value:
    return _float(x) * build("sigmoid", x)


def softplus(x: Value, beta: Any = 1.0, threshold: Any = 20.0) -> Value:
    scaled = _float(x) * beta
    return where(scaled > threshold, x, log1p(build("exp", build("minimum", scaled, threshold))) / beta)


def logsigmoid(x: Value) -> Value:
    return build("minimum", x, 0.0) - log1p(build("exp", -abs(_float(x))))


def elu(x: Value, alpha: Any = 1.0, inplace: bool = False) -> Value:
    return where(x > 0, x, expm1(build("minimum", x, 0.0)) * alpha)


def selu(x: Value, inplace: bool = False) -> Value:
    return elu(x, 1.6732632423543772) * 1.0507009873554805


def leaky_relu(x: Value, negative_slope: Any = 0.01, inplace: bool = False) -> Value:
    return where(x > 0, x, x * negative_slope)


def hardtanh(x: Value, min_val: Any = -1.0, max_val: Any = 1.0, inplace: bool = False) -> Value:
    return build("minimum", build("maximum", x, min_val), max_val)


def mish(x: Value, inplace: bool = False) -> Value:
    return x * build("tanh", softplus(x))


def celu(x: Value, alpha: Any = 1.0, inplace: bool = False) -> Value:
    return where(x > 0, x, expm1(build("minimum", x, 0.0) / alpha) * alpha)


def hardsigmoid(x: Value, inplace: bool = False) -> Value:
    return hardtanh(x + 3.0, 0.0, 6.0) / 6.0


def hardswish(x: Value, inplace: bool = False) -> Value:
    return x * hardsigmoid(x)


def hardshrink(x: Value, lambd: Any = 0.5) -> Value:
    return where((x >= -lambd) & (x <= lambd), 0.0, x)


def softshrink(x: Value, lambd: Any = 0.5) -> Value:
    return where(x > lambd, x - lambd, where(x < -lambd, x + lambd, x * 0.0))


def tanhshrink(x: Value) -> Value:
    return x - build("tanh", x)


def threshold(x: Value, threshold: Any, value: Any, inplace: bool = False) -> Value:
    return where(x <= threshold, value, x)
