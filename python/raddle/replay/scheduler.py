"""Which rows each step computes: continuous batching with chunked prefill over a paged pool.

A request of n prompt tokens and m generated ones is n rows of prefill, in chunks, then m - 1 rows of decode:
the step that ends the prefill gives the first token, and the last token is never attended to.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Iterable, NamedTuple, Sequence

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
    reserved: int
    """Pages promised to it."""
    pages: list[int] = field(default_factory=list)
    kv_len: int = 0
    token_times: list[float] = field(default_factory=list)
    """Clock at each generated token."""

    @property
    def prefill_left(self) -> int:
        return max(0, self.request.input_tokens - self.kv_len)


class PagePool:
    """Pages of a KV pool. A request's room is promised as a whole and taken page by page, last freed first."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.free = list(range(num_pages - 1, -1, -1))
        self.promised = 0

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def promise(self, tokens: int) -> int | None:
        """Pages promised for so many tokens, or None when too few are left."""
        pages = self.pages(tokens)
        if self.promised + pages > self.num_pages:
            return None
        self.promised += pages
        return pages

    def extend(self, running: Running, tokens: int) -> None:
        while len(running.pages) < self.pages(tokens):
            running.pages.append(self.free.pop())

    def release(self, running: Running) -> None:
        self.free.extend(reversed(running.pages))
        self.promised -= running.reserved


class Scheduler:
    """The queue of waiting requests, those that run, and the pool."""

    def __init__(self, requests: Sequence[Request], pool: PagePool, token_budget: int) -> None:
        """Raises ``ValueError`` for a request that the pool can't hold alone."""
        for i, r in enumerate(requests):
            if pool.pages(r.tokens) > pool.num_pages:
                raise ValueError(
                    f"request {i} needs {pool.pages(r.tokens)} pages ({r.input_tokens} + {r.output_tokens} "
                    f"tokens), the pool has {pool.num_pages}; raise --pool-tokens or lower --max-context"
                )
        if token_budget < 1:
            raise ValueError(f"token budget is {token_budget}; expected at least 1")
        self.requests, self.pool, self.token_budget = requests, pool, token_budget
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
                self.pool.release(r)
        return done

    @property
    def done(self) -> bool:
        return not self.waiting and not self.running

    @property
    def next_arrival(self) -> float:
        return self.requests[self.waiting[0]].arrival

    def _admit(self, now: float, prefilling: deque[Running]) -> bool:
        if not self.waiting or self.next_arrival > now:
            return False
        pages = self.pool.promise(self.requests[self.waiting[0]].tokens)
        if pages is None:
            arrived = takewhile(lambda i: self.requests[i].arrival <= now, self.waiting)
            self.queued.update(arrived)
            return False
        index = self.waiting.popleft()
        self.running[index] = Running(index, self.requests[index], pages)
        prefilling.append(self.running[index])
        return True

    def _take_pages(self, step: Sequence[Span]) -> None:
        for span in step:
            self.pool.extend(self.running[span.request], span.begin + span.length)


class Playback(Scheduler):
    """Repeats the steps of a log, whatever they cost now."""

    def __init__(
        self,
        requests: Sequence[Request],
        pool: PagePool,
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
