"""What a replay does with prompts that begin alike: each computes all of it, or takes over what an earlier one left.

A scheduler asks for room, adds a request, appends to it, forks it into samples, and says when its prompt is computed
and when it is done. The pages that these calls return are no longer held by any request.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Iterable, NamedTuple, Sequence

import numpy as np

import raddle

from .traces import BLOCK_TOKENS, Request

NO_PAGES = np.zeros(0, np.int32)


class Added(NamedTuple):
    """A request that is in the pool."""

    key: int
    """Its number there."""
    reused: int
    """Tokens of its prompt that need not be computed, whole pages of them."""


class Appended(NamedTuple):
    """Room for more tokens."""

    freed: np.ndarray
    """Pages that were taken from the cache for it."""
    from_pages: np.ndarray
    """Pages to copy before tokens are written, which samples shared …"""
    to_pages: np.ndarray
    """… and where to."""


class NoPrefixCache:
    """Every request computes its whole prompt, on pages of its own."""

    evicted_tokens = 0
    idle_pages = 0
    """Pages that no request holds, and that come back when others need them."""

    def __init__(self, pool: raddle.PagePool) -> None:
        self.pool = pool

    def spare(self, request: Request, num_pages: int) -> int:
        """Pages left to others if ``request`` is added and grows to ``num_pages``; nothing changes by asking."""
        return self.pool.free - num_pages

    def add(self, request: Request) -> Added:
        return Added(self.pool.add(), 0)

    def append(self, keys: Sequence[int], counts: Sequence[int]) -> Appended:
        """Makes room for more tokens of requests, which they were promised."""
        grown = self.pool.append(keys, counts)
        assert grown.missing == 0, "what was promised is there"
        return Appended(NO_PAGES, grown.from_pages, grown.to_pages)

    def fork(self, key: int, count: int) -> list[int]:
        """So many more requests with the same keys, on the same pages."""
        return self.pool.fork(key, count)

    def computed(self, key: int, request: Request) -> np.ndarray:
        """The keys of the request's whole prompt are in the pool now."""
        return NO_PAGES

    def finish(self, key: int) -> np.ndarray:
        return self.pool.finish([key])


class PrefixCache(NoPrefixCache):
    """Prompts stay in a `RadixCache` until their pages are needed; a request begins after the longest known prefix.

    Only a prompt's whole blocks are known by a name, so they are what is cached. They go into the cache when the prompt
    is computed, not when its request is done: those that arrive meanwhile find them. Of requests that computed the same
    at the same time the later one gives its pages back for those of the first. What a request generated stays its
    own: a trace doesn't say which prompts continue it.
    """

    def __init__(self, pool: raddle.PagePool) -> None:
        super().__init__(pool)
        self.cache = raddle.RadixCache(pool, token_bits=64)
        self.locked: dict[int, int] = {}
        """Of each request, the node where it keeps the cache's pages from being evicted."""
        self.evicted_tokens = 0

    @property
    def idle_pages(self) -> int:
        counts = self.cache.counts()
        return counts.pages - counts.locked_pages

    def spare(self, request: Request, num_pages: int) -> int:
        # A failed admission must leave no trace, or a log's repetition would evict other pages: don't touch.
        found = self.cache.match(_reusable(request), touch=False).pages
        # Pages that only the cache holds cannot be evicted once a request takes them over.
        kept = int(np.count_nonzero(self.pool.references(found) == 1))
        return super().spare(request, num_pages - len(found)) + self.idle_pages - kept

    def add(self, request: Request) -> Added:
        found = self.cache.match(_reusable(request), lock=True)
        key = self.pool.add(found.pages)
        self.locked[key] = found.node
        return Added(key, found.num_tokens)

    def append(self, keys: Sequence[int], counts: Sequence[int]) -> Appended:
        grown = self.pool.append(keys, counts)
        if not grown.missing:
            return Appended(NO_PAGES, grown.from_pages, grown.to_pages)
        freed = self.cache.evict(grown.missing)
        self.evicted_tokens += len(freed) * self.pool.page_size
        return super().append(keys, counts)._replace(freed=freed)

    def fork(self, key: int, count: int) -> list[int]:
        samples = super().fork(key, count)
        for sample in samples:
            self.cache.lock(self.locked[key])
            self.locked[sample] = self.locked[key]
        return samples

    def computed(self, key: int, request: Request) -> np.ndarray:
        kept = self.cache.insert(_tokens(request), self.pool.pages(key), lock=True)
        freed = self.pool.replace(key, kept.pages)
        self.cache.unlock(self.locked[key])
        self.locked[key] = kept.node
        return freed

    def finish(self, key: int) -> np.ndarray:
        freed = super().finish(key)
        self.cache.unlock(self.locked.pop(key))
        return freed


def allowed_tokens(requests: Iterable[Request], page_size: int) -> int:
    """Prompt tokens that a cache without limits would save if each request came when all before it are computed."""
    seen: set[int] = set()
    total = 0
    for request in requests:
        known = sum(1 for _ in takewhile(seen.__contains__, request.blocks)) * BLOCK_TOKENS
        total += min(known, request.input_tokens - 1) // page_size * page_size
        seen.update(request.blocks)
    return total


def _tokens(request: Request) -> np.ndarray:
    """Token ids of the prompt's whole blocks: those of one block are nowhere else."""
    blocks = np.array(request.blocks, np.int64)
    return (blocks[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).reshape(-1)


def _reusable(request: Request) -> np.ndarray:
    """Those that may come from a cache: one token of a prompt is always computed, for its logits."""
    return _tokens(request)[: request.input_tokens - 1]
