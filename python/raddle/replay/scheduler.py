"""Which rows each step computes: continuous batching with chunked prefill over a paged pool.

A request of n prompt tokens and m generated ones is n rows of prefill, in chunks, then m - 1 rows of decode:
the step that ends the prefill gives the first token, and the last token is never attended to. Of several samples of a
request all have their first token then, and decode apart. With speculation a decode has the rows of a tree.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Iterable, Sequence

import numpy as np

import raddle

from .prefix_cache import NO_PAGES, NoPrefixCache
from .span import Span
from .speculation import Shape, Tree, drafted
from .traces import Request


@dataclass
class Running:
    """A request that holds pages, or another sample of one."""

    index: int
    """As a `Span` has it."""
    request: Request
    key: int
    """Its number in the pool."""
    pages: int
    """Pages that it needs in the end, and was promised; with those of its other samples until its prompt is computed."""
    reused: int
    """Tokens of its prompt that others computed."""
    kv_len: int
    token_times: list[float] = field(default_factory=list)
    """Clock at each generated token."""

    @property
    def prefill_left(self) -> int:
        return max(0, self.request.input_tokens - self.kv_len)


class Scheduler:
    """The queue of waiting requests, those that run, and the pool.

    A request's room is promised as a whole when it is admitted, and taken from the pool step by step. What is done
    with prompts that begin alike is for `prefixes` to say.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        pool: raddle.PagePool,
        token_budget: int,
        prefixes: type[NoPrefixCache] = NoPrefixCache,
        samples: int = 1,
        shape: Shape | None = None,
        seed: int = 0,
    ) -> None:
        """Raises ``ValueError`` for a request that the pool can't hold alone, and a budget without room for a decode.

        shape, seed: of the trees that requests draft; None: none. Not with samples.
        """
        self.requests, self.pool, self.token_budget, self.samples = requests, pool, token_budget, samples
        self.shape, self.seed = shape, seed
        self.decode_rows = shape.nodes if shape else 1
        self.trees: list[Tree | None] = []
        """Of the scheduled step's spans."""
        self.prefixes = prefixes(pool)
        for i, r in enumerate(requests):
            if self.pages_of(r) > pool.num_pages:
                raise ValueError(
                    f"request {i} needs {self.pages_of(r)} pages ({r.input_tokens} + {samples * r.output_tokens} "
                    f"tokens), the pool has {pool.num_pages}; raise --pool-tokens or lower --max-context"
                )
        if token_budget < self.decode_rows:
            raise ValueError(f"token budget is {token_budget}; expected at least {self.decode_rows}, a decode's rows")
        self.waiting = deque(range(len(requests)))
        self.running: dict[int, Running] = {}
        self.queued: set[int] = set()
        """Requests that had to wait for pages."""
        self.tokens_done = 0
        """Prompt tokens in the pool and tokens generated until now, of `tokens_to_do`."""
        self._freed: list[np.ndarray] = []
        self.copies: tuple[np.ndarray, np.ndarray] = (NO_PAGES, NO_PAGES)
        """Pages to copy before the scheduled step's keys are written, and where to."""

    def schedule(self, now: float) -> list[Span]:
        """The next step: a row or a tree for every decode, then prefill from the rest of the token budget.

        Requests are admitted in the order of their arrival, while the pool can promise all that they will
        need. Empty: nothing to do before `next_arrival`.
        """
        budget = self.token_budget
        step: list[Span] = []
        decoding = [r for r in self.running.values() if r.prefill_left == 0]
        prefilling = deque(r for r in self.running.values() if r.prefill_left > 0)
        for r in decoding[: budget // self.decode_rows]:
            step.append(Span(r.index, r.kv_len, self.decode_rows))
        budget -= self.decode_rows * len(step)
        while budget > 0 and (prefilling or self._admit(now, prefilling)):
            r = prefilling.popleft()
            step.append(Span(r.index, r.kv_len, min(budget, r.prefill_left)))
            budget -= step[-1].length
        self._take_pages(step)
        return step

    def complete(self, step: Sequence[Span], now: float) -> list[Running]:
        """Books a step that ended at `now`. Returns the requests that are done."""
        done = []
        for span, tree in zip(step, self.trees):
            r = self.running[span.request]
            self.tokens_done += min(span.length, r.prefill_left)
            r.kv_len += tree.kept if tree else span.length
            if tree:
                self._freed.append(self.pool.truncate([r.key], [r.kv_len]))
            samples = [r]
            if r.kv_len == r.request.input_tokens:
                self._freed.append(self.prefixes.computed(r.key, r.request))
                samples += self._fork(r)
            for sample in samples if r.prefill_left == 0 else ():
                generated = tree.kept if tree else 1
                sample.token_times += [now] * generated
                self.tokens_done += generated
                if len(sample.token_times) == sample.request.output_tokens:
                    done.append(self.running.pop(sample.index))
                    self._freed.append(self.prefixes.finish(sample.key))
        return done

    def take_freed(self) -> np.ndarray:
        """Pages that became free since this was last asked; some may be in use again, with nothing written to them."""
        freed = np.concatenate([NO_PAGES, *self._freed])
        self._freed.clear()
        return freed

    def tables(self, step: Sequence[Span]) -> list[np.ndarray]:
        """The pages of each span's request."""
        return [self.pool.pages(self.running[span.request].key) for span in step]

    def reused(self, step: Sequence[Span]) -> list[int]:
        """Tokens that each span's request took over."""
        return [self.running[span.request].reused for span in step]

    def pages_of(self, request: Request) -> int:
        """Pages that a request needs for all its tokens; its samples share the prompt's full ones."""
        shared = request.input_tokens // self.pool.page_size
        return shared + self.samples * (self._most_pages(request) - shared)

    @property
    def promised(self) -> int:
        """Pages that requests which run will still take."""
        kv_len = {r.index: self.pool.kv_len(r.key) for r in self.running.values()}
        # Samples that have not decoded share the prompt's last page; if it is not full, all but one will copy it.
        sharing = Counter(
            r.index % len(self.requests)
            for r in self.running.values()
            if kv_len[r.index] == r.request.input_tokens and r.request.input_tokens % self.pool.page_size
        )
        left = sum(r.pages - self._pages(kv_len[r.index]) for r in self.running.values())
        return left + sum(n - 1 for n in sharing.values())

    @property
    def tokens_to_do(self) -> int:
        """Tokens of all prompts, and those that all samples generate."""
        return sum(r.input_tokens + self.samples * r.output_tokens for r in self.requests)

    @property
    def done(self) -> bool:
        return not self.waiting and not self.running

    @property
    def next_arrival(self) -> float:
        return self.requests[self.waiting[0]].arrival

    def _admit(self, now: float, prefilling: deque[Running]) -> bool:
        if not self.waiting or self.next_arrival > now:
            return False
        request = self.requests[self.waiting[0]]
        pages = self.pages_of(request)
        if self.prefixes.spare(request, pages) < self.promised:
            arrived = takewhile(lambda i: self.requests[i].arrival <= now, self.waiting)
            self.queued.update(arrived)
            return False
        index = self.waiting.popleft()
        key, reused = self.prefixes.add(request)
        self.tokens_done += reused
        self.running[index] = Running(index, request, key, pages, reused, kv_len=reused)
        prefilling.append(self.running[index])
        return True

    def _take_pages(self, step: Sequence[Span]) -> None:
        keys = [self.running[span.request].key for span in step]
        grown = self.prefixes.append(keys, [span.length for span in step])
        self._freed.append(grown.freed)
        self.copies = grown.from_pages, grown.to_pages
        self.trees = [self._drafted(span) for span in step]

    def _drafted(self, span: Span) -> Tree | None:
        r = self.running[span.request]
        if self.shape is None or r.prefill_left:
            return None
        return drafted(self.shape, self.seed, span, r.request.output_tokens - len(r.token_times), len(self.requests))

    def _fork(self, r: Running) -> list[Running]:
        """The other samples of a request whose prompt is computed."""
        r.pages = self._most_pages(r.request)
        keys = self.prefixes.fork(r.key, self.samples - 1) if self.samples > 1 else []
        forks = [
            Running(r.index + s * len(self.requests), r.request, key, r.pages, r.kv_len, r.kv_len)
            for s, key in enumerate(keys, 1)
        ]
        self.running.update((fork.index, fork) for fork in forks)
        return forks

    def _most_pages(self, request: Request) -> int:
        """Of one sample; the last tree reaches beyond the text's end."""
        return self._pages(request.tokens + self.decode_rows - 1)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.pool.page_size)


class Playback(Scheduler):
    """Repeats the steps of a log, whatever they cost now."""

    def __init__(
        self,
        requests: Sequence[Request],
        pool: raddle.PagePool,
        steps: Sequence[Sequence[Span]],
        queued: Iterable[int] = (),
        prefixes: type[NoPrefixCache] = NoPrefixCache,
        samples: int = 1,
        shape: Shape | None = None,
        seed: int = 0,
    ) -> None:
        budget = shape.nodes if shape else 1  # the log keeps to its own
        super().__init__(requests, pool, budget, prefixes, samples, shape, seed)
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
            if r is None or span.begin != r.kv_len or not self._is_next(r, span.length):
                raise ValueError(f"the log computes {span}, which is not what that request has next")
        self.steps.popleft()
        self._take_pages(step)
        return step

    def _is_next(self, r: Running, length: int) -> bool:
        return 1 <= length <= r.prefill_left if r.prefill_left else length == self.decode_rows

    @property
    def done(self) -> bool:
        return not self.steps
