"""Which rows each step computes: continuous batching with chunked prefill over a paged pool.

A request of n prompt tokens and m generated ones is n rows of prefill, in chunks, then m - 1 rows of decode:
the step that ends the prefill gives the first token, and the last token is never attended to.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Iterable, NamedTuple, Sequence

import numpy as np

import raddle

from .traces import Request


class Span(NamedTuple):
    """Rows ``begin … begin + length`` of a request, computed in one step."""

    request: int
    begin: int
    length: int


@dataclass
class Running:
    """A request that holds pages."""

    index: int
    request: Request
    key: int
    """Its number in the pool."""
    reserved: int
    """Pages promised to it."""
    kv_len: int = 0
    token_times: list[float] = field(default_factory=list)
    """Clock at each generated token."""
    freed: np.ndarray | None = None
    """Pages that became free when it was done."""

    @property
    def prefill_left(self) -> int:
        return max(0, self.request.input_tokens - self.kv_len)


class Scheduler:
    """The queue of waiting requests, those that run, and the pool.

    A request's room is promised as a whole when it is admitted, and taken from the pool step by step.
    """

    def __init__(self, requests: Sequence[Request], pool: raddle.PagePool, token_budget: int) -> None:
        """Raises ``ValueError`` for a request that the pool can't hold alone."""
        self.requests, self.pool, self.token_budget = requests, pool, token_budget
        self.promised = 0
        """Pages promised to requests that run."""
        for i, r in enumerate(requests):
            if self.pages_of(r) > pool.num_pages:
                raise ValueError(
                    f"request {i} needs {self.pages_of(r)} pages ({r.input_tokens} + {r.output_tokens} "
                    f"tokens), the pool has {pool.num_pages}; raise --pool-tokens or lower --max-context"
                )
        if token_budget < 1:
            raise ValueError(f"token budget is {token_budget}; expected at least 1")
        self.waiting = deque(range(len(requests)))
        self.running: dict[int, Running] = {}
        self.queued: set[int] = set()
        """Requests that had to wait for pages."""

    def schedule(self, now: float) -> list[Span]:
        """The next step: a row for every decode, then prefill from the rest of the token budget.

        Requests are admitted in the order of their arrival, while the pool can promise all that they will
        need. Empty: nothing to do before `next_arrival`.
        """
        budget = self.token_budget
        step: list[Span] = []
        decoding = [r for r in self.running.values() if r.prefill_left == 0]
        prefilling = deque(r for r in self.running.values() if r.prefill_left > 0)
        for r in decoding[:budget]:
            step.append(Span(r.index, r.kv_len, 1))
        budget -= len(step)
        while budget > 0 and (prefilling or self._admit(now, prefilling)):
            r = prefilling.popleft()
            step.append(Span(r.index, r.kv_len, min(budget, r.prefill_left)))
            budget -= step[-1].length
        self._take_pages(step)
        return step

    def complete(self, step: Sequence[Span], now: float) -> list[Running]:
        """Books a step that ended at `now`. Returns the requests that are done, whose pages are free again."""
        done = []
        for span in step:
            r = self.running[span.request]
            r.kv_len += span.length
            if r.prefill_left == 0:
                r.token_times.append(now)
            if len(r.token_times) == r.request.output_tokens:
                done.append(self.running.pop(r.index))
                r.freed = self.pool.finish([r.key])
                self.promised -= r.reserved
        return done

    def tables(self, step: Sequence[Span]) -> list[np.ndarray]:
        """The pages of each span's request."""
        return [self.pool.pages(self.running[span.request].key) for span in step]

    def pages_of(self, request: Request) -> int:
        """Pages that a request needs for all its tokens."""
        return -(-request.tokens // self.pool.page_size)

    @property
    def done(self) -> bool:
        return not self.waiting and not self.running

    @property
    def next_arrival(self) -> float:
        return self.requests[self.waiting[0]].arrival

    def _admit(self, now: float, prefilling: deque[Running]) -> bool:
        if not self.waiting or self.next_arrival > now:
            return False
        pages = self.pages_of(self.requests[self.waiting[0]])
        if self.promised + pages > self.pool.num_pages:
            arrived = takewhile(lambda i: self.requests[i].arrival <= now, self.waiting)
            self.queued.update(arrived)
            return False
        index = self.waiting.popleft()
        self.promised += pages
        self.running[index] = Running(index, self.requests[index], self.pool.add(), pages)
        prefilling.append(self.running[index])
        return True

    def _take_pages(self, step: Sequence[Span]) -> None:
        grown = self.pool.append(
            [self.running[span.request].key for span in step], [span.length for span in step]
        )
        assert grown.missing == 0, "what was promised is there"


class Playback(Scheduler):
    """Repeats the steps of a log, whatever they cost now."""

    def __init__(
        self,
        requests: Sequence[Request],
        pool: raddle.PagePool,
        steps: Sequence[Sequence[Span]],
        queued: Iterable[int] = (),
    ) -> None:
        super().__init__(requests, pool, token_budget=1)
        self.steps = deque(steps)
        self.queued.update(queued)

    def schedule(self, now: float) -> list[Span]:
        """The log's next step, once all its requests have arrived. Raises ``ValueError`` for nonsense."""
        step = list(self.steps[0])
        new: deque[Running] = deque()
        while self.waiting and any(span.request == self.waiting[0] for span in step):
            if not self._admit(now, new):
                if self.next_arrival > now:
                    return []
                raise ValueError(f"the log admits request {self.waiting[0]}, for which the pool has no room")
        for span in step:
            r = self.running.get(span.request)
            if r is None or span.begin != r.kv_len or not 1 <= span.length <= max(1, r.prefill_left):
                raise ValueError(f"the log computes {span}, which is not what that request has next")
        self.steps.popleft()
        self._take_pages(step)
        return step

    @property
    def done(self) -> bool:
        return not self.steps
