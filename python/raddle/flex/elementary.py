"""Functions that the kernels do not have, of those that they have: in float32, errors given for each.

The forms are the usual ones of numerical libraries: Kahan's for log1p and expm1, reduction to an octant for atan, and
for erf the series near 0 and Abramowitz and Stegun's 7.1.26 elsewhere.
"""

from __future__ import annotations

import math
from typing import Any

from raddle.flex import errors
from raddle.flex.expr import Value, build, scalar

_LARGE = 4194304.0  # from 2^22 on, adding 1.5 * 2^23 no longer rounds to an integer


def _float(x: Value) -> Value:
    return x.astype("float32")


def _values(*operands: Any) -> list[Value]:
    """Numbers among traced values as traced values."""
    like = next(x for x in operands if isinstance(x, Value))
    return [x if isinstance(x, Value) else like._constant(scalar(x)) for x in operands]


def where(condition: Any, a: Any, b: Any) -> Any:
    return build("where", condition, a, b)


def log1p(x: Value) -> Value:
    """Within 4e-7 of its value."""
    x = _float(x)
    above = x + 1.0
    rest = above - 1.0
    finite = where((rest == 0.0) | (above == math.inf), 1.0, rest)
    return where(rest == 0.0, x, where(above == math.inf, above, build("log", above) * (x / finite)))


def expm1(x: Value) -> Value:
    """Within 5e-7 of its value."""
    x = _float(x)
    power = build("exp", x)
    rest = power - 1.0
    middle = (power != 1.0) & (rest != -1.0) & (power != math.inf)
    log = build("log", where(middle, power, 2.0))
    return where(power == 1.0, x, where(middle, rest * (x / log), rest))


def sinh(x: Value) -> Value:
    x = _float(x)
    size = abs(x)
    half = expm1(size) * 0.5
    part = where(size < 20.0, half + half / (half * 2.0 + 1.0), build("exp", size - math.log(2.0)))
    return where(x < 0.0, -part, part)


def cosh(x: Value) -> Value:
    power = build("exp", abs(_float(x)) - math.log(2.0))
    return power + 0.25 / power


def asinh(x: Value) -> Value:
    x = _float(x)
    size = abs(x)
    held = build("minimum", size, 1e9)
    near = log1p(held + held * held / (build("sqrt", held * held + 1.0) + 1.0))
    part = where(size < 1e9, near, build("log", size) + math.log(2.0))
    return where(x < 0.0, -part, part)


def acosh(x: Value) -> Value:
    x = _float(x)
    above = x - 1.0
    held = build("minimum", above, 1e9)
    near = log1p(held + build("sqrt", held * 2.0 + held * held))
    return where(above < 0.0, math.nan, where(above < 1e9, near, build("log", x) + math.log(2.0)))


def atanh(x: Value) -> Value:
    x = _float(x)
    size = abs(x)
    part = log1p(size * 2.0 / (1.0 - size)) * 0.5
    return where(x < 0.0, -part, part)


def tan(x: Value) -> Value:
    return build("sin", _float(x)) / build("cos", _float(x))


def atan(x: Value) -> Value:
    """Within 3e-7 of its value."""
    x = _float(x)
    size = abs(x)
    steep, middle = size > 2.414213562373095, size > 0.4142135623730950
    reduced = where(steep, -1.0 / size, where(middle, (size - 1.0) / (size + 1.0), size))
    square = reduced * reduced
    series = ((8.05374449538e-2 * square - 1.38776856032e-1) * square + 1.99777106478e-1) * square - 3.33329491539e-1
    part = where(steep, math.pi / 2, where(middle, math.pi / 4, 0.0)) + (series * square * reduced + reduced)
    return where(x < 0.0, -part, where(x == 0.0, x, part))


def atan2(y: Value | float, x: Value | float) -> Value:
    y, x = _values(y, x)
    y, x = _float(y), _float(x)
    infinite = (abs(y) == math.inf) & (abs(x) == math.inf)
    part = atan(where(infinite, 1.0, abs(y) / abs(x)))
    part = where((x == 0.0) & (y == 0.0), 0.0, part)
    part = where((x < 0.0) | (1.0 / x < 0.0), math.pi - part, part)
    return where((y < 0.0) | (1.0 / y < 0.0), -part, part)


def asin(x: Value) -> Value:
    x = _float(x)
    return atan(x / build("sqrt", (1.0 - x) * (1.0 + x)))


def acos(x: Value) -> Value:
    x = _float(x)
    return atan(build("sqrt", (1.0 - x) / (1.0 + x))) * 2.0


def erf(x: Value) -> Value:
    """Within 3e-7, an absolute error, and of its value near 0."""
    x = _float(x)
    size, square = abs(x), x * x
    coefficients = (1.0, -1 / 3, 1 / 10, -1 / 42, 1 / 216, -1 / 1320, 1 / 9360)
    series: Any = 0.0
    for each in reversed(coefficients):
        series = series * square + each
    t = 1.0 / (size * 0.3275911 + 1.0)
    tail: Any = 0.0
    for each in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        tail = (tail + each) * t
    far = 1.0 - tail * build("exp", -square)
    return where(size < 0.75, x * series * (2 / math.sqrt(math.pi)), where(x < 0.0, -far, far))


def erfc(x: Value) -> Value:
    return 1.0 - erf(x)


def round_(x: Value, decimals: Any = 0) -> Value:
    """To the nearest integer, halves to the even one."""
    if x.node.dtype != "float":
        return x
    if decimals:
        return round_(x * 10.0**decimals) / 10.0**decimals
    size = abs(x)
    nearest = (build("minimum", size, _LARGE) + 3.0 * _LARGE) - 3.0 * _LARGE
    # From 2^22 to 2^23 a float may still have a half.
    whole = build("floor", size)
    rest = size - whole
    odd = whole - build("floor", whole * 0.5) * 2.0
    up = (rest > 0.5) | ((rest == 0.5) & (odd == 1.0))
    part = where(size < _LARGE, nearest, where(up, whole + 1.0, whole))
    return where(size < math.inf, where(x < 0.0, -part, part), x)


def trunc(x: Value) -> Value:
    if x.node.dtype != "float":
        return x
    return where(x < 0.0, -build("floor", -x), build("floor", x))


def fmod(a: Any, b: Any) -> Value:
    """The remainder of a division rounded towards 0, with the sign of ``a``. Of floats exact while the quotient is."""
    a, b = _values(a, b)
    rest = build("floor_mod", abs(a), abs(b))
    return where(a < 0, -rest, rest)


def nan_to_num(x: Value, nan: Any = 0.0, posinf: Any = None, neginf: Any = None) -> Value:
    if x.node.dtype != "float":
        return x
    largest = 3.4028234663852886e38
    x = where(x != x, 0.0 if nan is None else nan, x)
    x = where(x == math.inf, largest if posinf is None else posinf, x)
    return where(x == -math.inf, -largest if neginf is None else neginf, x)


def lerp(a: Any, b: Any, weight: Any) -> Value:
    a, b, weight = _values(a, b, weight)
    difference = build("sub", b, a)
    return where(build("lt", weight, 0.5), build("mul", weight, difference) + a, b - difference * (1.0 - weight))


def isinf(x: Value) -> Value:
    return abs(_float(x)) == math.inf


def isfinite(x: Value) -> Value:
    return abs(_float(x)) < math.inf


def logaddexp(a: Any, b: Any) -> Value:
    a, b = _values(a, b)
    most, difference = build("maximum", a, b), abs(build("sub", a, b))
    return where(difference != difference, most, most + log1p(build("exp", -difference)))


def hypot(a: Any, b: Any) -> Value:
    a, b = _values(a, b)
    return build("sqrt", build("mul", a, a) + build("mul", b, b))


def copysign(a: Any, b: Any) -> Value:
    a, b = _values(a, b)
    size = abs(_float(a))
    return where((b < 0.0) | (1.0 / b < 0.0), -size, size)


def isin(x: Value, values: Any, *, assume_unique: bool = False, invert: bool = False) -> Value:
    """Whether any of ``values`` equals x: of a list or an array that is captured, whose length is fixed."""
    most = 256
    values = list(values) if hasattr(values, "__iter__") else [values]
    if len(values) > most:
        raise errors.refuse(
            f"isin of {len(values)} values", f"expected at most {most}: capture an array of bools and index it"
        )
    found: Any = x != x
    for each in values:
        found = found | (x == each)
    return ~found if invert else found


def power(x: Any, n: Any) -> Any:
    """x to the n: multiplied out for small integers, else 2 to the n log2(x), which errs by n log2(x) 2^-24 of it."""
    if isinstance(n, Value) and not n.node.varies:
        n = n.item()
    if not isinstance(n, Value):
        return _constant_power(x, n)
    if n.node.dtype != "float" and (isinstance(x, int) or isinstance(x, Value) and x.node.dtype != "float"):
        return _integer_power(x, n)
    return _power_of_floats(x, n)


def _power_of_floats(x: Any, n: Any) -> Value:
    known = scalar(x) if not isinstance(x, Value) else None
    if known == 2:
        return build("exp2", n)
    n = _float(n) if isinstance(n, Value) else x._constant(float(n))
    if known is not None and known > 0:
        return build("exp2", n * math.log2(known))
    size = build("abs", build("mul", x, 1.0))
    part = build("exp2", n * build("log2", size))
    part = where(n == 0.0, 1.0, part)
    whole = build("floor", n)
    odd = (whole == n) & (whole - build("floor", whole * 0.5) * 2.0 == 1.0)
    negative = where(odd, -part, where((whole == n) | (size == math.inf), part, math.nan))
    return where(build("lt", x, 0.0), negative, part)


def _constant_power(x: Value, n: Any) -> Value:
    n = scalar(n)
    if n is None:
        raise errors.refuse("a power that is no number", "expected a number or a traced value")
    if n == 0.5:
        return build("sqrt", x)
    if n == int(n) and abs(n) <= 16:
        result = x if n else x._constant(1)
        for _ in range(int(abs(n)) - 1):
            result = build("mul", result, x)
        return build("div", 1.0, result) if n < 0 else result
    return _power_of_floats(_float(x), n)


def _integer_power(x: Any, n: Value) -> Value:
    """By squaring, as integers wrap. Of a negative power 0, but 1 and -1 as they are."""
    x = x if isinstance(x, Value) else n._constant(x)
    result, square = n._constant(1), x
    for bit in range(5):
        result = where((n >> bit) & 1, result * square, result)
        square = square * square
    negative = where(x == 1, 1, where(x == -1, where(n & 1, -1, 1), 0))
    return where(n < 0, negative, where((n > 31) & (x != 1) & (x != -1), 0, result))
