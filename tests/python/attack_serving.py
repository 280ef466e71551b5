"""Requests that come, share prefixes, grow, fork, are cut and end, as a serving engine has them.

K and V of all layers' pool lie between guard pages and are NaN where nothing was written. What a step computes is compared
with attention over the keys that its requests remember; a refused call must leave pool and cache as they were.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import raddle
from attack_problems import guarded

HEADS, GROUP, DIM = 2, 2, 16


class Serving:
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.page_size = int(self.rng.choice([1, 4, 16]))
        self.pool = raddle.PagePool(int(self.rng.integers(6, 20)) * 16 // self.page_size, self.page_size)
        self.cache = raddle.RadixCache(self.pool)
        nothing = np.full((self.pool.num_pages, self.page_size, HEADS, DIM), np.nan, np.float32)
        self.kv = guarded((nothing, nothing), bool(self.rng.integers(2)))
        self.attn = raddle.Attention(raddle.AttentionSpec(HEADS * GROUP, HEADS, DIM, dtype="float32", variant=raddle.Causal()))
        self.reservation = self.attn.reserve(raddle.Maxima(64, 512, 4096))
        self.tokens: dict[int, list[int]] = {}  # of each request that runs
        self.locks: dict[int, int] = {}

    def rows_of(self, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """K and V of a prefix's tokens: those that share it have the same."""
        keys, state = [], 1
        for token in tokens:
            state = (state * 6364136223846793005 + token + 1) % 2**64
            keys.append(np.random.default_rng(state).standard_normal((2, HEADS, DIM), np.float32))
        both = np.stack(keys) if keys else np.zeros((0, 2, HEADS, DIM), np.float32)
        return both[:, 0], both[:, 1]

    # --- what happens -------------------------------------------------------------------------

    def arrive(self) -> None:
        prompt = self.rng.integers(0, 2, int(self.rng.integers(1, 40))).tolist()
        match = self.cache.match(prompt[:-1], lock=True)
        request = self.pool.add(match.pages) if match.num_tokens else self.pool.add()
        self.tokens[request] = prompt[: match.num_tokens]
        if match.num_tokens:
            self.locks[request] = match.node
        self.grow({request: prompt[match.num_tokens :]})

    def decode(self) -> None:
        chosen = [request for request in self.tokens if self.rng.random() < 0.7]
        self.grow({request: self.rng.integers(0, 2, int(self.rng.integers(1, 4))).tolist() for request in chosen})

    def fork(self) -> None:
        for request in self.some():
            for child in self.pool.fork(request, int(self.rng.integers(0, 3))):
                self.tokens[child] = list(self.tokens[request])

    def truncate(self) -> None:
        for request in self.some():
            kept = int(self.rng.integers(0, len(self.tokens[request]) + 1))
            self.pool.truncate([request], [kept])
            del self.tokens[request][kept:]

    def finish(self) -> None:
        for request in self.some():
            tokens = self.tokens.pop(request)
            self.cache.insert(tokens, self.pool.pages(request))
            self.pool.finish([request])
            if request in self.locks:
                self.cache.unlock(self.locks.pop(request))

    def evict(self) -> None:
        self.cache.evict(int(self.rng.integers(0, 5)))

    def some(self) -> list[int]:
        return list(self.rng.permutation(list(self.tokens))[:1].tolist()) if self.tokens else []

    # --- a step -------------------------------------------------------------------------------

    def grow(self, more: dict[int, list[int]]) -> None:
        """New keys of requests, and attention of their rows; where there is no room, some request ends."""
        while more:
            grown = self.pool.append(list(more), [len(new) for new in more.values()])
            if not grown.missing:
                break
            if len(self.cache.evict(grown.missing)) < grown.missing:
                victim = next(iter(more))
                del more[victim], self.tokens[victim]
                self.pool.finish([victim])
                if victim in self.locks:
                    self.cache.unlock(self.locks.pop(victim))
        if not more:
            return
        raddle.copy_pages(self.kv, grown.from_pages, grown.to_pages)
        for request, new in more.items():
            self.tokens[request] += new
        layout = self.pool.layout(list(more), [len(new) for new in more.values()])
        rows = [self.rows_of(self.tokens[request]) for request in more]
        new_rows = [np.concatenate([both[i][-len(new) :] for both, new in zip(rows, more.values())]) for i in (0, 1)]
        raddle.append_kv(layout, self.kv, *new_rows)
        q = self.rng.standard_normal((len(new_rows[0]), HEADS * GROUP, DIM), np.float32)
        plan = self.reservation if self.rng.integers(2) else self.attn.plan(layout, num_workers=int(self.rng.integers(1, 5)))
        if plan is self.reservation:
            plan.update(layout)
        found, at = self.attn.run(plan, q, self.kv), 0
        for (k, v), new in zip(rows, more.values()):
            expected = attend(q[at : at + len(new)], k, v)
            if not np.allclose(found[at : at + len(new)], expected, 1e-3, 1e-4):
                raise AssertionError(f"wrong numbers of a request with {len(k)} keys, {len(new)} of them new")
            at += len(new)

    def check(self) -> None:
        if self.pool.used + self.pool.free != self.pool.num_pages or self.pool.num_requests != len(self.tokens):
            raise AssertionError(f"{self.pool} with {len(self.tokens)} requests")
        for request, tokens in self.tokens.items():
            if self.pool.kv_len(request) != len(tokens):
                raise AssertionError(f"request {request} has {self.pool.kv_len(request)} keys; expected {len(tokens)}")

    def refused(self) -> None:
        """Calls that cannot be: nothing changes."""
        before = repr(self.pool), repr(self.cache)
        absent, held = 10**6, list(self.tokens)
        calls: list[Any] = [
            lambda: self.pool.append([absent], [1]),
            lambda: self.pool.append([*held, absent], 1),
            lambda: self.pool.append(held + held[:1], 1) if held else self.pool.finish([absent]),
            lambda: self.pool.finish([*held, absent]),
            lambda: self.pool.truncate(held, [10**6] * len(held)) if held else self.pool.kv_len(absent),
            lambda: self.pool.add([0, self.pool.num_pages]),
            lambda: self.pool.release([0]),
            lambda: self.cache.insert([0] * 64, []),
            lambda: self.cache.unlock(absent),
            lambda: self.reservation.update(raddle.RaggedKV([0, 513], [0, 513])),
            lambda: raddle.copy_pages(self.kv, [0, 0], [1, 1]),
            lambda: self.pool.layout([absent]),
        ]
        try:
            calls[int(self.rng.integers(len(calls)))]()
        except ValueError:
            if (repr(self.pool), repr(self.cache)) == before:
                return
            raise AssertionError("a refused call changed the pool or the cache") from None
        raise AssertionError("a call that cannot be was accepted")


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    k, v = (np.repeat(x.astype(np.float64), GROUP, 1) for x in (k, v))
    s = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(DIM)
    s[:, np.arange(len(k)) > np.arange(len(k) - len(q), len(k))[:, None]] = -np.inf
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v)


def serve(seed: int) -> str | None:
    """Thirty things that happen to a batch. Returns what went wrong."""
    serving = Serving(seed)
    kinds = [Serving.arrive, Serving.decode, Serving.decode, Serving.fork, Serving.truncate, Serving.finish, Serving.evict]
    kinds.append(Serving.refused)
    for _ in range(30):
        kinds[int(serving.rng.integers(len(kinds)))](serving)
        serving.check()
    return None
