"""Masks that are bounds on kv_idx, as causal and windowed ones are: each row keeps an interval of keys.

The variant contract's ``kv_span`` tells the bounds. Kernels keep two columns a row of such a mask and ask it nothing
else, and a plan asks one question for each query tile.

A condition on an element of a captured array, ``document[kv_idx] == document[q_idx]``, is a bound where the array is in
order. Whether it is, is known when its values are: ``knows_spans`` tells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Iterable, Iterator, NamedTuple, Optional, Sequence

from raddle.flex import bounds
from raddle.flex.evaluate import order
from raddle.flex.graph import Node

_ADDED = -(2**61), 2**61  #: what may be added to a position, and to an offset, in 64 bits
Terms = tuple[tuple[bool, Node], ...]  # (whether it is added, what)
Names = Callable[[Node], str]  # the C++ of a node


@dataclass(frozen=True)
class Bound:
    """kv_idx <= terms + offset where ``is_upper``, else kv_idx >= terms + offset. The terms do not depend on kv_idx."""

    is_upper: bool
    terms: Terms
    offset: int

    def of_tile(self, names: Names) -> str:
        """C++ of the weakest such bound over a tile; ``names`` are those of intervals."""
        return self._text(lambda is_added, node: f"{names(node)}.{'last' if is_added == self.is_upper else 'first'}")

    def of_row(self, names: Names) -> str:
        """C++ of the bound of a row."""
        return self._text(lambda _, node: f"i64{{{names(node)}}}")

    def nodes(self) -> list[Node]:
        """What it depends on."""
        return [node for _, node in self.terms]

    def _text(self, end: Callable[[bool, Node], str]) -> str:
        ends = [f"{'+' if is_added else '-'} {end(is_added, node)}" for is_added, node in self.terms]
        if self.offset:
            ends.append(f"{'+' if self.offset > 0 else '-'} {abs(self.offset)}")
        return f"interval::{'at_most' if self.is_upper else 'at_least'}({' '.join(ends).removeprefix('+ ')})"


@dataclass(frozen=True)
class Search:
    """array[..., kv_idx] lies between two values, which do not depend on kv_idx, nor do the other indices."""

    load: Node
    least: Optional[Node | int]  #: None: no element is too small
    most: Optional[Node | int]
    is_strict: bool = False  #: a value that is a node is excluded

    def of_tile(self, names: Names, array: str) -> str:
        """C++ of the indices that may be kept over a tile; ``names`` are those of intervals."""
        least, most = (lambda node: f"{names(node)}.first"), (lambda node: f"{names(node)}.last")
        leading = map(names, self.load.args[:-1])
        return f"interval::{self._text(array, least, most, 't.kv_pos', leading)}"

    def of_row(self, names: Names, array: str, indices: Sequence[str], keys: str) -> str:
        """C++ of those of a row, of ``keys``."""

        def value(node: Node) -> str:
            return f"i64{{{names(node)}}}"

        return f"traced::{self._text(array, value, value, keys, indices)}"

    def nodes(self) -> list[Node]:
        """What it depends on."""
        return [x for x in (self.least, self.most, *self.load.args[:-1]) if isinstance(x, Node)]

    def _text(self, array: str, least: Names, most: Names, keys: str, leading: Iterable[str]) -> str:
        between = f"{self._end(self.least, least, 'int_min', ' + 1')}, {self._end(self.most, most, 'int_max', ' - 1')}"
        return f"indices_of({', '.join([array, f'{{{between}}}', keys, *leading])})"

    def _end(self, value: Optional[Node | int], end: Names, unknown: str, inwards: str) -> str:
        if isinstance(value, Node):
            return end(value) + (inwards if self.is_strict else "")
        return unknown if value is None else str(value)


class Spans(NamedTuple):
    """What a mask is the conjunction of."""

    bounds: list[Bound | Search]
    of_rows: list[tuple[Node, bool]]  #: conditions on rows, and whether each must hold or must not


def of(mask: Node) -> Optional[Spans]:
    """The bounds that a mask is the conjunction of, beside conditions on rows; None for other masks."""
    on_key = _depend_on_key(mask)
    found = Spans([], [])
    for condition, holds in _conjuncts(mask):
        if id(condition) in on_key:
            of_condition = _of_condition(condition, holds, on_key)
            if of_condition is None:
                return None
            found.bounds.extend(of_condition)
        else:
            found.of_rows.append((condition, holds))
    return found if found.bounds else None


def _depend_on_key(mask: Node) -> set[int]:
    """The ids of the nodes that depend on kv_idx."""
    found: set[int] = set()
    for node in order(mask):
        if node.op == "kv" or any(id(a) in found for a in node.args):
            found.add(id(node))
    return found


def _conjuncts(mask: Node) -> Iterator[tuple[Node, bool]]:
    """Conditions, each once, and whether each must hold or must not."""
    left, seen = [(mask, True)], set()
    while left:
        node, holds = left.pop()
        if (id(node), holds) in seen:
            continue
        seen.add((id(node), holds))
        if node.op == "not":
            left.append((node.args[0], not holds))
        elif node.op == ("and" if holds else "or"):
            left += [(each, holds) for each in reversed(node.args)]
        else:
            yield node, holds


def _of_condition(node: Node, holds: bool, on_key: set[int]) -> Optional[list[Bound | Search]]:
    if _is_searched(node, on_key):  # an array of bools
        return [Search(node, 1, None) if holds else Search(node, None, 0)]
    if node.op not in ("lt", "le", "eq") or any(a.dtype not in ("int", "long") for a in node.args):
        return None
    a, b = node.args
    if (search := _of_element(node, holds, on_key)) is not None:
        return [search]
    if node.op == "eq":
        both = [_of_order(a, b, False, on_key), _of_order(b, a, False, on_key)]
        return both[0] + both[1] if holds and both[0] and both[1] else None
    is_strict = (node.op == "lt") == holds
    return _of_order(a, b, is_strict, on_key) if holds else _of_order(b, a, is_strict, on_key)


def _is_searched(node: Node, on_key: set[int]) -> bool:
    """An element of an array of integers or bools whose last index, and no other, is kv_idx."""
    if node.op != "load" or node.dtype == "float":
        return False
    *leading, last = node.args
    return _uncast(last).op == "kv" and not any(id(index) in on_key for index in leading)


def _of_element(node: Node, holds: bool, on_key: set[int]) -> Optional[Search]:
    """a <= b, a < b or a == b, or not, where one is an element and the other does not depend on kv_idx."""
    a, b = node.args
    is_first = _is_searched(_uncast(a), on_key)
    load, value = (_uncast(a), b) if is_first else (_uncast(b), a)
    if not _is_searched(load, on_key) or id(value) in on_key:
        return None
    if not bounds.within(value.bounds or bounds.LONG, _ADDED):
        return None
    if node.op == "eq":
        return Search(load, value, value) if holds else None
    is_strict = (node.op == "lt") == holds
    return Search(load, None, value, is_strict) if is_first == holds else Search(load, value, None, is_strict)


def _of_order(a: Node, b: Node, is_strict: bool, on_key: set[int]) -> Optional[list[Bound]]:
    """a <= b, or a < b."""
    is_less = id(a) in on_key
    key_side, limit = (a, b) if is_less else (b, a)
    if id(limit) in on_key or not bounds.within(limit.bounds or bounds.LONG, _ADDED):
        return None
    if is_less and a.op == "abs":  # between -b and b
        solved = _solve(a.args[0])
        return solved and [_bound(solved, True, ((True, b),), is_strict), _bound(solved, False, ((False, b),), is_strict)]
    solved = _solve(key_side)
    return solved and [_bound(solved, is_less, ((True, limit),), is_strict)]


def _bound(solved: tuple[bool, Terms], is_less: bool, limit: Terms, is_strict: bool) -> Bound:
    """Of kv + rest, or rest - kv, which is at most the limit where ``is_less``, else at least."""
    is_added, rest = solved
    is_upper = is_less == is_added
    terms = limit + _negated(rest) if is_added else rest + _negated(limit)
    return Bound(is_upper, terms, (-1 if is_upper else 1) if is_strict else 0)


def _negated(terms: Terms) -> Terms:
    return tuple((not is_added, node) for is_added, node in terms)


def _solve(node: Node) -> Optional[tuple[bool, Terms]]:
    """(whether kv is added, the rest) of a sum of kv_idx and what does not depend on it. Of other differences than those
    of two positions, 32 bits might wrap."""
    if node.op == "cast":
        return _solve(node.args[0]) if node.args[0].dtype in ("int", "long") else None
    if node.op == "kv":
        return True, ()
    if node.op == "sub":
        a, b = map(_uncast, node.args)
        if (a.op, b.op) == ("q", "kv"):
            return False, ((True, a),)
        if (a.op, b.op) == ("kv", "q"):
            return True, ((False, b),)
    return None


def _uncast(node: Node) -> Node:
    return _uncast(node.args[0]) if node.op == "cast" and node.args[0].dtype in ("int", "long") else node
