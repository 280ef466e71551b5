"""What an integer of an expression can be, whatever the tile: whether 64 bits are needed to hold it.

"int" is int32 that wraps, "long" is int64, as in PyTorch. A long whose bounds lie within int32 is computed in 32 bits.
"""

from __future__ import annotations

from typing import Any, Optional

Bounds = tuple[int, int]

INT: Bounds = (-(2**31), 2**31 - 1)
LONG: Bounds = (-(2**63), 2**63 - 1)
_POSITIONS = {"b": (0, INT[1]), "h": (0, INT[1]), "q": INT, "kv": INT}


def within(a: Bounds, b: Bounds) -> bool:
    return b[0] <= a[0] and a[1] <= b[1]


def of(op: str, dtype: str, args: tuple[Any, ...], payload: Any) -> Optional[Bounds]:
    """Bounds of a node, by those of its operands; None for bools and floats."""
    if dtype not in ("int", "long"):
        return None
    limits = INT if dtype == "int" else LONG
    if op == "const":
        return payload, payload
    if op in ("param", "load"):
        return INT
    if op in _POSITIONS:
        return _POSITIONS[op]
    found = _of_operation(op, args)
    return found if found is not None and within(found, limits) else limits


def _of_operation(op: str, args: tuple[Any, ...]) -> Optional[Bounds]:
    if op == "cast":
        return (0, 1) if args[0].dtype == "bool" else args[0].bounds
    if op == "where":
        return _hull(args[1].bounds, args[2].bounds)
    (a, b), *more = args[0].bounds, *(each.bounds for each in args[1:])
    if op == "neg":
        return -b, -a
    if op == "abs":
        return (0 if a <= 0 <= b else min(abs(a), abs(b))), max(-a, b)
    if op == "not":
        return ~b, ~a
    if not more:
        return None
    c, d = more[0]
    if op == "add":
        return a + c, b + d
    if op == "sub":
        return a - d, b - c
    if op == "mul":
        corners = a * c, a * d, b * c, b * d
        return min(corners), max(corners)
    if op == "minimum":
        return min(a, c), min(b, d)
    if op == "maximum":
        return max(a, c), max(b, d)
    if op == "and" and (a >= 0 or c >= 0):
        return 0, min(each for each, least in ((b, a), (d, c)) if least >= 0)
    if op in ("or", "xor") and a >= 0 and c >= 0:
        return 0, (1 << max(b, d).bit_length()) - 1
    if c == d:
        return _by_constant(op, a, b, c)
    return None


def _by_constant(op: str, a: int, b: int, n: int) -> Optional[Bounds]:
    if op == "floor_div" and n > 0:
        return a // n, b // n
    if op == "floor_mod" and n > 0:
        return 0, n - 1
    if op == "shift_right" and 0 <= n < 32:
        return a >> n, b >> n
    if op == "shift_left" and 0 <= n < 32:
        return a << n, b << n
    return None


def _hull(a: Bounds, b: Bounds) -> Bounds:
    return min(a[0], b[0]), max(a[1], b[1])
