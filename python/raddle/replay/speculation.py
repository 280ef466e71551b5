"""Speculative decoding in a replay: what a request drafts in a step, and what of it turns out right.

The text that a request generates is fixed: what lies at each position is a hash of the request and the position. So a
tree is drafted around it: a root, the text's last token, and below it chains, one of which begins as the text goes on.
Tokens that are right have the text's keys and values, and become part of it; wrong ones have others, so that a
result is wrong, and found out, where a sibling was read, or a rejected draft kept.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np

from .span import Span

_LARGEST = 2**31 - 1


class Shape(NamedTuple):
    """Of every tree: so many chains below the root, each of so many tokens."""

    width: int
    depth: int

    @property
    def nodes(self) -> int:
        return 1 + self.width * self.depth

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Of "2x3". Raises ``ValueError`` for anything else."""
        parts = text.split("x")
        if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise ValueError(f"found {text!r}; expected WIDTHxDEPTH, both at least 1, as in 2x3")
        return cls(*map(int, parts))

    def __str__(self) -> str:
        return f"{self.width}x{self.depth}"


class Tree(NamedTuple):
    """What one request drafted: arrays [nodes], root first, then chain after chain."""

    parents: np.ndarray
    depths: np.ndarray
    requests: np.ndarray
    """Whose Q, K and V a node has: the request's, or where it is wrong those of a number that no request has."""
    departs: np.ndarray
    """Of a wrong node, the position of the first one on its path; -1: it is right."""
    last: int
    """The last node that is right."""
    kept: int
    """Tokens of the text up to it, the root included."""


def drafted(shape: Shape, seed: int, span: Span, most: int, num_requests: int) -> Tree:
    """The tree of a span, of which at most ``most`` tokens are accepted; the same whenever it is asked for."""
    draw = random.Random(f"{seed}:{span.request}:{span.begin}")
    right = draw.randrange(shape.width)
    accepted = min(draw.randint(0, shape.depth), most - 1)
    chains = np.repeat(np.arange(-1, shape.width), [1, *[shape.depth] * shape.width])
    depths = np.array([0, *[*range(1, shape.depth + 1)] * shape.width], np.int32)
    parents = np.where(depths == 1, 0, np.arange(shape.nodes) - 1).astype(np.int32)
    parents[0] = -1
    is_right = (chains == -1) | (chains == right) & (depths <= accepted)
    # Another number for each chain of each step, so that a draft of an earlier step is as wrong as a sibling's.
    numbers = 1 + (span.begin * shape.width + chains) % (_LARGEST // num_requests - 1)
    departs = span.begin + 1 + np.where(chains == right, accepted, 0)
    return Tree(
        parents,
        depths,
        np.where(is_right, span.request, span.request + num_requests * numbers).astype(np.int32),
        np.where(is_right, -1, departs).astype(np.int32),
        right * shape.depth + accepted if accepted else 0,
        1 + accepted,
    )
