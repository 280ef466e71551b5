"""What a step computes of one request."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """Rows ``begin … begin + length`` of a request, computed in one step; of a tree of drafts its nodes.

    request: its index, and of its sample s > 0 s times the number of requests more.
    """

    request: int
    begin: int
    length: int
