"""The rolling cache against a model that keeps every key and picks sinks and window by itself."""

from __future__ import annotations


import numpy as np
import pytest
import raddle
from checks import within
from draws import DTYPES, numpy_dtype
from engine import twin
from reference import Alibi, Causal, Problem, RaggedKV, Rope, RopeTables, SlidingWindow, SoftCap, attention
from small import refuses, reserved

HEADS, KV_HEADS, DIM, DIM_VO = 4, 2, 32, 24


class Texts:
    """Requests on one pool, and beside it all keys and values that they ever had."""

    def __init__(self, rng, dtype="float32", page_size=16, num_pages=200):
        self.rng, self.dtype = rng, numpy_dtype(dtype)
        self.pool = raddle.PagePool(num_pages, page_size)
        self.cache = raddle.RollingCache(self.pool)
        self.kv = self.pool.make_kv(KV_HEADS, DIM, self.dtype.name, DIM_VO)
        for part in self.kv:
            part[...] = np.nan
        self.texts = {}

    def draw(self, rows, heads, dim):
        return self.rng.standard_normal((rows, heads, dim)).astype(self.dtype)

    def add(self, num_sinks, window):
        request = self.cache.add(num_sinks, window)
        self.texts[request] = num_sinks, window, self.draw(0, KV_HEADS, DIM), self.draw(0, KV_HEADS, DIM_VO)
        return request

    def finish(self, requests):
        freed = self.cache.finish(requests)
        for request in requests:
            del self.texts[request]
        for part in self.kv:
            part[freed] = np.nan  # a request that gets these pages next must not look at what was there

    def append(self, requests, counts):
        """One step: the layout, and the problem that says what it means. Writes K and V of the new tokens."""
        step = self.cache.append(requests, counts)
        k, v = self.draw(sum(counts), KV_HEADS, DIM), self.draw(sum(counts), KV_HEADS, DIM_VO)
        before = [part.copy() for part in self.kv]
        raddle.append_kv(step.pages, self.kv, k, v)
        for part, old in zip(self.kv, before):
            bits = [x.view(f"u{x.itemsize}").reshape(-1, x.shape[2] * x.shape[3]) for x in (part, old)]
            assert (bits[0] != bits[1]).any(1).sum() == sum(counts), "other slots than those of new tokens were written"
        for request, count, *new in zip(requests, counts, *(np.split(x, np.cumsum(counts)[:-1]) for x in (k, v))):
            sinks, window, *old = self.texts[request]
            self.texts[request] = (sinks, window, *(np.concatenate(pair) for pair in zip(old, new)))
        q = self.draw(sum(counts), HEADS, DIM)
        return step.layout, lambda variant: Problem(q, [self.kept(requests)], self.ragged(requests, counts), variant)

    def kept(self, requests):
        parts = []
        for which in (2, 3):
            each = [(*self.texts[r][:2], self.texts[r][which]) for r in requests]
            parts.append(np.concatenate([np.concatenate([x[:s], x[s:][-w:]]) for s, w, x in each]))
        return tuple(parts)

    def ragged(self, requests, counts):
        lengths = [min(len(self.texts[r][2]), sum(self.texts[r][:2])) for r in requests]
        assert lengths == [self.cache.kv_len(r) for r in requests]
        return RaggedKV(*(np.cumsum([0, *x]).astype(np.int32) for x in (counts, lengths)))

    def check(self, engine, requests, counts, variant):
        layout, problem = self.append(requests, counts)
        problem = problem(variant)
        attn = engine.attention(problem)
        out, lse = attn.run(attn.plan(layout), problem.q, self.kv, return_lse=True)
        return within(attention(problem), out, lse)

    def most(self, request):
        sinks, window, k, _ = self.texts[request]
        return window + max(sinks - len(k), 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_histories(engine, rng, dtype, page_size):
    """Requests come, grow by chunks or tokens, alone or together, and go; each has sinks and a window of its own."""
    texts = Texts(rng, dtype, page_size)
    for step in range(60):
        if len(texts.texts) < 4 and rng.random() < 0.5:
            texts.add(int(rng.choice([0, 1, 4, 5, 16])), int(rng.choice([1, 2, 7, 16, 33])))
        requests = rng.permutation(sorted(texts.texts))[: rng.integers(5)].tolist()
        if rng.random() < 0.5:  # all as many: row blocks of several rows
            counts = [int(rng.integers(1, min(map(texts.most, requests), default=0) + 2)) - 1] * len(requests)
        else:
            counts = [int(rng.integers(texts.most(r) + 1)) for r in requests]
        if sum(counts) == 0:
            continue
        texts.check(engine, requests, counts, [Rope(DIM), Causal()])
        if len(texts.texts) == 4 and rng.random() < 0.1:
            texts.finish(requests[:1])
    texts.finish(sorted(texts.texts))
    assert texts.pool.used == 0 and texts.cache.num_requests == 0


@pytest.mark.parametrize(
    "parts",
    [
        [Rope(DIM, 500000.0, interleaved=True), SoftCap(20.0), Causal()],
        [Alibi(np.float32([0.5, 0.25, 0.1, 0.01])), Causal()],
        [Rope(DIM), SlidingWindow(9), Causal()],
    ],
    ids=str,
)
def test_positions_are_those_in_the_cache(engine, rng, parts):
    texts = Texts(rng)
    requests = [texts.add(4, 30), texts.add(2, 51), texts.add(0, 20)]
    for counts in ([34, 3, 0], [7, 7, 7], [1, 33, 0], [30, 10, 20], [14, 0, 7], [1, 1, 1]):
        texts.check(engine, requests, counts, parts)


def test_every_step_of_a_long_text(engine, rng):
    """Each phase of the ring, several times around."""
    texts = Texts(rng, page_size=4)
    requests = [texts.add(3, 10), texts.add(0, 8), texts.add(4, 12)]
    for _ in range(50):
        texts.check(engine, requests, [1, 1, 1], [Rope(DIM), Causal()])
    assert [texts.cache.num_tokens(r) for r in requests] == [50] * 3
    assert [texts.cache.kv_len(r) for r in requests] == [13, 8, 16]


def test_tables_of_the_kept_positions_are_enough(engine, rng):
    """A text far beyond what a model was trained on asks for no position beyond sinks and window."""
    cos, sin = Rope(DIM).cos_sin(np.arange(24))
    tables = RopeTables(cos.astype(np.float32), sin.astype(np.float32))
    texts = Texts(rng)
    request = texts.add(4, 20)
    for count in [20] * 20 + [1] * 30:
        texts.check(engine, [request], [count], [tables, Causal()])
    assert texts.cache.num_tokens(request) == 430


def test_pages_and_planned_work_stay_the_same(rng):
    """Once full, a step costs what it cost a turn of the ring before, and fits the same reservation."""
    sinks, window, page_size = 4, 60, 8
    texts = Texts(rng, page_size=page_size)
    requests = [texts.add(sinks, window), texts.add(sinks, window)]
    pages, used = [texts.cache.pages(r).tolist() for r in requests], texts.pool.used
    assert used == 2 * (sinks + window) // page_size
    problem = Problem(texts.draw(2, HEADS, DIM), [texts.kv], None, [Rope(DIM), Causal()])
    spec = raddle.AttentionSpec(HEADS, KV_HEADS, DIM, DIM_VO, dtype="float32", variant=twin(problem.variant))
    attn = raddle.Attention(spec)
    bound = len(requests) * (len(pages[0]) + 2) * page_size  # two pages may stand in two entries
    reservation = reserved(attn, max_requests=2, max_qo_tokens=2, max_kv_tokens=bound)
    costs = []
    texts.cache.append(requests, [window, 5])
    for _ in range(30 * window):
        layout = texts.cache.append(requests).layout
        reservation.update(layout)
        costs.append(attn.plan(layout).estimated_us)
    assert costs[window : 2 * window] == costs[-window:] and len(costs) % window == 0
    assert [texts.cache.pages(r).tolist() for r in requests] == pages and texts.pool.used == used


def test_rolling_rewrites_no_key(rng):
    """After thousands of tokens the pool holds the bytes that each kept token was appended with."""
    texts = Texts(rng, "bfloat16", page_size=5)
    request = texts.add(4, 33)
    for _ in range(1000):
        texts.append([request], [int(rng.integers(1, 4))])
    num_tokens = texts.cache.num_tokens(request)
    tokens = np.r_[:4, num_tokens - 33 : num_tokens]
    slot = np.where(tokens < 4, tokens, 4 + (tokens - 4) % 33)
    page = texts.cache.pages(request)[slot // 5]
    for part, all_of_it in zip(texts.kv, texts.texts[request][2:]):
        np.testing.assert_array_equal(part[page, slot % 5].view(np.uint16), all_of_it[tokens].view(np.uint16))


def test_a_step_of_nobody(rng):
    cache = raddle.RollingCache(raddle.PagePool(4, 16))
    step = cache.append([], [])
    assert step.pages.num_rows == step.layout.num_rows == 0
    request = cache.add(4, 12)
    layout = cache.append(np.int32([request]), 0).layout
    assert (layout.num_requests, layout.num_rows, cache.kv_len(request)) == (1, 0, 0)


def test_a_request_has_all_its_pages_or_is_not_there():
    pool = raddle.PagePool(4, 16)
    cache = raddle.RollingCache(pool)
    first = cache.add(4, 44)
    assert len(cache.pages(first)) == 3 and cache.add(4, 13) is None and cache.add(4, 12) is not None
    assert pool.free == 0 and cache.pool is pool and cache.num_requests == 2
    assert sorted(cache.finish([first]).tolist()) == [0, 1, 2] and pool.free == 3


@pytest.fixture
def cache():
    """Requests 0 and 2, of 3 sinks and a window of 5, with 2 and 9 tokens; request 1 is finished."""
    cache = raddle.RollingCache(raddle.PagePool(8, 4))
    assert [cache.add(3, 5) for _ in range(3)] == [0, 1, 2]
    cache.finish([1])
    cache.append([0, 2], [2, 8])
    cache.append([2])
    return cache


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda c: raddle.RollingCache(7), TypeError, ["pool is an int", "expected a PagePool"]),
        (lambda c: c.add(-1, 5), ValueError, ["num_sinks is -1", "at least 0"]),
        (lambda c: c.add(4, 0), ValueError, ["window is 0", "at least 1"]),
        (lambda c: c.add(4, 5.0), TypeError, ["window is a float", "an int"]),
        (lambda c: c.add(True, 5), TypeError, ["num_sinks is a bool", "an int"]),
        (lambda c: c.add(4, 29), ValueError, ["4 and 29", "9 pages of 4", "at most 8"]),
        (lambda c: c.append([0, 5]), ValueError, ["requests[1] is 5", "a request of this cache"]),
        (lambda c: c.append([1]), ValueError, ["requests[0] is 1", "not finished"]),
        (lambda c: c.append([2, 0, 2]), ValueError, ["requests[2] is 2 again", "each once"]),
        (lambda c: c.append([0.5]), TypeError, ["requests is float64", "int32 or int64"]),
        (lambda c: c.append([[0, 2]]), ValueError, ["requests has 2 dimensions", "1"]),
        (lambda c: c.append(0), TypeError, ["requests is a int"]),
        (lambda c: c.append([0, 2], [1, -1]), ValueError, ["counts[1] is -1", "at least 0"]),
        (lambda c: c.append([0, 2], [1]), ValueError, ["counts has 1 entries", "expected 2"]),
        (lambda c: c.append([0, 2], [1, 1.5]), TypeError, ["counts is float64"]),
        (lambda c: c.append([0, 2], [6, 6]), ValueError, ["counts[1] is 6", "at most 5", "in chunks"]),
        (lambda c: c.append([0, 2], [7, 5]), ValueError, ["counts[0] is 7", "at most 6"]),
        (lambda c: c.finish([0, 3]), ValueError, ["requests[1] is 3"]),
        (lambda c: c.num_tokens(1), ValueError, ["request is 1", "not finished"]),
        (lambda c: c.kv_len(9), ValueError, ["request is 9"]),
        (lambda c: c.pages("a"), ValueError, ["request is a"]),
    ],
)
def test_what_is_refused_changes_nothing(cache, make, error, words):
    def state():
        return cache.num_requests, cache.pool.free, [(cache.num_tokens(r), cache.kv_len(r)) for r in (0, 2)]

    before = state()
    with refuses(error, *words):
        make(cache)
    assert state() == before == (2, 4, [(2, 2), (9, 8)])
