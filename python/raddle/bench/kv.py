"""The page pool and the radix cache: a prompt is one call from Python, as a serving engine makes it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np

import raddle
from raddle.bench import timing
from raddle.bench.results import Measured

PAGE_SIZE = 16
#: Insertions that cut an older prompt somewhere and go on differently: two edges each, one of them a split one.
_PROMPTS = 60_000
#: Pages of what is new in a prompt, 1 to twice the mean; halves of it, by splitting, make edges of 256 tokens.
_MEAN_PAGES = 27
#: Pages of an older prompt that a new one shares at most.
_SHARED_PAGES = 128
#: Prompts are made in groups, outside the clock.
_GROUP = 500
_EVICTED_PAGES = 64
_REQUESTS = 256


class Prompts:
    """Prompts that share prefixes as a tree: each is an older one's beginning, and tokens of its own."""

    def __init__(self, rng: np.random.Generator) -> None:
        pages = rng.integers(1, 2 * _MEAN_PAGES, _PROMPTS)
        self.older = [int(rng.integers(0, n)) if n else -1 for n in range(_PROMPTS)]
        ids = rng.integers(0, 128_000, int(pages.sum()) * PAGE_SIZE, np.int32)
        self.own = np.split(ids, np.cumsum(pages)[:-1] * PAGE_SIZE)
        self.shared = np.zeros(_PROMPTS, np.int64)
        length = np.zeros(_PROMPTS, np.int64)
        for n, older in enumerate(self.older):
            if older >= 0:
                self.shared[n] = PAGE_SIZE * rng.integers(0, min(_SHARED_PAGES, length[older] // PAGE_SIZE) + 1)
            length[n] = self.shared[n] + len(self.own[n])

    def __getitem__(self, number: int) -> np.ndarray:
        parts, end = [self.own[number]], self.shared[number]
        while end > 0:
            number = self.older[number]
            own = end - self.shared[number]
            if own > 0:
                parts.append(self.own[number][:own])
                end = self.shared[number]
        return np.concatenate(parts[::-1])


def measure(seed: int, say: Callable[[str], None]) -> list[Measured]:
    """Speed and memory of a tree of 100,000 edges, and the pool's calls of a decoding step."""
    rng = np.random.default_rng(seed)
    prompts = Prompts(rng)
    tokens = sum(map(len, prompts.own))
    pool = raddle.PagePool(tokens // PAGE_SIZE + 4 * _SHARED_PAGES, PAGE_SIZE)
    cache = raddle.RadixCache(pool)
    resident = _resident_bytes()
    say("inserting")
    insert_s = _insert(cache, prompts)
    counts = cache.counts()
    grown = _resident_bytes() - resident
    say("matching")
    match_s, matched = _match(cache, prompts, rng.integers(0, _PROMPTS, 5_000))
    say("evicting")
    evict_s, evicted = _evict(cache)
    edge = counts.tokens / counts.nodes
    ids = counts.tokens * 4
    return [
        Measured("edges of the tree", None, counts.nodes / 1e3, "thousand"),
        Measured("an edge, mean", None, edge, "tokens"),
        _rate("match with a lock, and unlock: two calls a prompt", match_s, matched, 5.0),
        _rate("insert, one call a prompt; new tokens count", insert_s, counts.tokens, 1.0),
        _rate(f"evict, {_EVICTED_PAGES} pages a call", evict_s, evicted, 1.0),
        Measured("memory of the tree over that of its 32-bit ids", None, counts.memory_bytes / ids, "×", 1.5),
        Measured("growth of the process over that of the ids", None, grown / ids, "×", 1.5),
        *_steps(),
    ]


def _rate(name: str, seconds: float, tokens: int, bar: float) -> Measured:
    return Measured(name, seconds * 1e6, tokens / seconds / 1e6, "M tokens/s", bar, at_least=True)


def _groups(prompts: Prompts, numbers: Any) -> Iterator[list[np.ndarray]]:
    for begin in range(0, len(numbers), _GROUP):
        yield [prompts[n] for n in numbers[begin : begin + _GROUP]]


def _insert(cache: raddle.RadixCache, prompts: Prompts) -> float:
    """Seconds of all insertions. A prompt's pages are its request's, which ends; duplicates become free."""
    seconds = 0.0
    for group in _groups(prompts, range(_PROMPTS)):
        for prompt in group:
            pages = cache.pool.allocate(len(prompt) // PAGE_SIZE)
            start = time.perf_counter()
            cache.insert(prompt, pages)
            seconds += time.perf_counter() - start
            cache.pool.release(pages)
    return seconds


def _match(cache: raddle.RadixCache, prompts: Prompts, numbers: np.ndarray) -> tuple[float, int]:
    seconds, matched = 0.0, 0
    for group in _groups(prompts, numbers):
        for prompt in group:
            start = time.perf_counter()
            found = cache.match(prompt, lock=True)
            cache.unlock(found.node)
            seconds += time.perf_counter() - start
            if found.num_tokens != len(prompt):
                raise RuntimeError(f"a prompt of {len(prompt)} tokens is cached, {found.num_tokens} were found")
            matched += found.num_tokens
    return seconds, matched


def _evict(cache: raddle.RadixCache) -> tuple[float, int]:
    tokens = cache.counts().tokens
    start = time.perf_counter()
    while len(cache.evict(_EVICTED_PAGES)):
        pass
    seconds = time.perf_counter() - start
    if cache.pool.used:
        raise RuntimeError(f"{cache.pool.used} pages are used after all were evicted")
    return seconds, tokens


def _steps() -> list[Measured]:
    """What a decoding step of many requests asks of the pool."""
    pool = raddle.PagePool(_REQUESTS * 256, PAGE_SIZE)
    requests = np.array([pool.add() for _ in range(_REQUESTS)])
    ones = np.ones(_REQUESTS, np.int32)
    pool.append(requests, 1500)
    append = timing.median(timing.repeated(lambda: pool.append(requests, ones), 1000))
    layout = timing.median(timing.repeated(lambda: pool.layout(requests, ones), 200))
    return [
        Measured(f"append a token to each of {_REQUESTS} requests, one call", append, append, "us"),
        Measured(f"their layout, {pool.kv_len(requests[0]):,} keys each", layout, layout, "us"),
    ]


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
