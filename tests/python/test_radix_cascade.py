"""Levels for requests that hold prefixes in a radix cache: those of their page lists, over the keys of their tokens."""

from __future__ import annotations

import numpy as np
import pytest
import raddle
from checks import within
from layout_draws import indptr
from reference import Causal, Problem, RaggedKV, SlidingWindow, attention
from small import refuses

HQ, HKV, DIM = 4, 2, 32


def attention_of(*variant):
    return raddle.Attention(raddle.AttentionSpec(HQ, HKV, DIM, dtype="float32", variant=[*variant, raddle.Causal()]))


class Request:
    """A text that runs; its match is locked as long as it does."""

    def __init__(self, number, key, tokens, match):
        self.number, self.key, self.tokens, self.match = number, key, tokens, match


class Engine:
    """A pool, a cache and K and V, in which a key depends on its text's extra key and all tokens up to it."""

    def __init__(self, rng, page_size=16, num_pages=2000):
        self.rng, self.pool = rng, raddle.PagePool(num_pages, page_size)
        self.cache = raddle.RadixCache(self.pool)
        self.kv = tuple(np.full((num_pages, page_size, HKV, DIM), np.nan, np.float32) for _ in range(2))
        self.known = {}  # text up to a token, hashed → its row of K and V
        self.running = []

    def rows(self, key, tokens):
        """K and V of a text's tokens, [2, tokens, HKV, DIM]."""
        path, rows = hash(key), []
        for token in tokens:
            path = hash((path, token))
            if path not in self.known:
                self.known[path] = self.rng.standard_normal((2, HKV, DIM)).astype(np.float32)
            rows.append(self.known[path])
        return np.stack(rows, axis=1)

    def grow(self, requests, new_tokens):
        """Appends tokens; pages that become free on the way hold NaN, so that reading them is found out."""
        arguments = [request.number for request in requests], [len(tokens) for tokens in new_tokens]
        grown = self.pool.append(*arguments)
        if grown.missing:
            self.forget(self.cache.evict(grown.missing))
            grown = self.pool.append(*arguments)
            assert grown.missing == 0
        for part in self.kv:
            part[grown.to_pages] = part[grown.from_pages]
        for request, tokens in zip(requests, new_tokens):
            first = len(request.tokens)
            request.tokens = request.tokens + list(tokens)
            at = np.arange(first, len(request.tokens))
            pages = self.pool.pages(request.number)[at // self.pool.page_size]
            rows = self.rows(request.key, request.tokens)[:, first:]
            for part, values in zip(self.kv, rows):
                part[pages, at % self.pool.page_size] = values

    def start(self, texts):
        """Requests of (extra key, tokens), which are matched, and then all computed."""
        found = [self.cache.match(tokens[:-1], key, lock=True) for key, tokens in texts]
        requests = [
            Request(self.pool.add(match.pages), key, list(tokens[: match.num_tokens]), match)
            for (key, tokens), match in zip(texts, found)
        ]
        self.running += requests
        self.grow(requests, [tokens[match.num_tokens :] for (_, tokens), match in zip(texts, found)])
        return requests

    def insert(self, request):
        done = self.cache.insert(request.tokens, self.pool.pages(request.number), request.key, lock=True)
        self.cache.unlock(request.match.node)
        request.match = done

    def fork(self, request, count):
        made = [
            Request(n, request.key, request.tokens, request.match) for n in self.pool.fork(request.number, count)
        ]
        for each in made:
            self.cache.lock(each.match.node)
        self.running += made
        return made

    def finish(self, request):
        self.running.remove(request)
        self.cache.unlock(request.match.node)
        self.forget(self.pool.finish([request.number]))

    def forget(self, pages):
        for part in self.kv:
            part[pages] = np.nan

    def numbers(self):
        return [request.number for request in self.running]

    def matches(self):
        return [request.match for request in self.running]

    def chosen(self, attn, rows, **options):
        return raddle.Cascade.from_radix(attn, self.cache, self.numbers(), self.matches(), indptr(rows), **options)

    def from_lists(self, attn, rows, **options):
        """What `from_page_tables` makes of the matches' pages and those behind them."""
        lists = [
            [*request.match.pages, *self.pool.pages(request.number)[len(request.match.pages) :]]
            for request in self.running
        ]
        counts, pages = indptr([len(each) for each in lists]), np.int32(sum(lists, []))
        kv_len = [len(request.tokens) for request in self.running]
        return raddle.Cascade.from_page_tables(
            attn, indptr(rows), counts, pages, kv_len, self.pool.page_size, **options
        )

    def check(self, attn, variant, rows, **options):
        """The layout, after its outputs were those of the reference on the texts, without any page."""
        found, expected = self.chosen(attn, rows, **options), self.from_lists(attn, rows, **options)
        assert type(found) is type(expected) and found.explain() == expected.explain()
        q = self.rng.standard_normal((sum(rows), HQ, DIM)).astype(np.float32)
        plans = [attn.plan(layout, **options) for layout in (found, expected)]
        assert plans[0].explain() == plans[1].explain()
        out, lse = attn.run(plans[0], q, self.kv, return_lse=True)
        np.testing.assert_array_equal(out, attn.run(plans[1], q, self.kv))
        k, v = np.concatenate([self.rows(each.key, each.tokens) for each in self.running], axis=1)
        ragged = RaggedKV(indptr(rows), indptr([len(each.tokens) for each in self.running]))
        within(attention(Problem(q, [(k, v)], ragged, variant)), out, lse)
        return found


def words(rng, count):
    return rng.integers(0, 30000, count).tolist()


@pytest.mark.parametrize("page_size", [1, 7, 16])
@pytest.mark.parametrize("window", [None, 700])
def test_histories_of_nested_texts(rng, page_size, window):
    """System prompts, examples behind them, conversations behind those; requests come, fork, grow and end."""
    engine = Engine(rng, page_size, num_pages=9000 // page_size)
    variant = [Causal()] if window is None else [SlidingWindow(window), Causal()]
    attn = attention_of(*([] if window is None else [raddle.SlidingWindow(window)]))
    texts = [(key, prompt) for prompt in [words(rng, 500)] for key in (None, "tenant", 3)]
    for length in (300, 300, 120, 120, 120):
        key, text = texts[rng.integers(len(texts))]
        texts.append((key, text + words(rng, length)))
    levels = []
    for _ in range(6):
        drawn = [texts[n] for n in rng.integers(len(texts), size=5)]
        started = engine.start([(key, text + words(rng, rng.integers(0, 20))) for key, text in drawn])
        for request in started:
            if rng.random() < 0.8:
                engine.insert(request)
                if rng.random() < 0.3:
                    engine.forget(engine.pool.replace(request.number, request.match.pages))
        engine.fork(started[0], 2)
        rows = [int(n) for n in rng.integers(1, 4, len(engine.running))]
        engine.grow(engine.running, [words(rng, n) for n in rows])
        rows[-1] = 0
        levels.append(engine.check(attn, variant, rows, num_workers=int(rng.choice([1, 3]))).num_levels)
        for request in [each for each in engine.running if rng.random() < 0.4]:
            engine.finish(request)
        engine.forget(engine.cache.evict(int(rng.integers(0, 20))))
    assert max(levels) > 1


def test_three_depths(rng):
    """A system prompt for all, examples for quarters, a conversation a pair: every depth is a level."""
    engine = Engine(rng)
    system = words(rng, 2048)
    shots = [system + words(rng, 1024) for _ in range(4)]
    talks = [shots[n // 4] + words(rng, 512) for n in range(16)]
    for n in range(32):  # one after another, so that each finds what those before it have cached
        [request] = engine.start([(None, talks[n // 2] + words(rng, 9))])
        engine.insert(request)
        assert n == 0 or request.match.num_cached >= 2048
    engine.grow(engine.running, [words(rng, 1) for _ in range(32)])
    found = engine.check(attention_of(), [Causal()], [1] * 32, num_workers=3)
    assert type(found) is raddle.Cascade and found.num_levels == 4, found.explain()
    for part in ("2048 keys of 1 group", "4096 keys of 4 groups", "8192 keys of 16 groups"):
        assert f"reads {part} once for 32 requests" in found.explain()


def test_what_was_computed_twice_is_read_once(rng):
    """Requests that came together hold a copy of the prompt each; what was inserted names the first one's."""
    engine = Engine(rng)
    prompt = words(rng, 2000)
    requests = engine.start([(None, prompt + words(rng, 20)) for _ in range(8)])
    attn = attention_of()
    assert engine.check(attn, [Causal()], [1] * 8).num_levels == 1
    for request in requests:
        engine.insert(request)
    tables = engine.pool.tables(engine.numbers())
    assert raddle.Cascade.from_page_tables(attn, np.arange(9), *tables).num_levels == 1
    found = engine.check(attn, [Causal()], [1] * 8)
    assert "reads 2000 keys of 1 group once for 8 requests" in found.explain()
    engine.finish(requests[0])  # whose pages the cache keeps for the others
    engine.forget(engine.cache.evict(1000))
    engine.check(attn, [Causal()], [1] * 7)


def test_extra_keys_have_nothing_in_common(rng):
    engine = Engine(rng)
    prompt = words(rng, 2048)
    for key in ("a", "b", 1, None):
        for _ in range(2):
            engine.insert(engine.start([(key, prompt + words(rng, 3))])[0])
    found = engine.check(attention_of(), [Causal()], [1] * 8, num_workers=2)
    assert "reads 8192 keys of 4 groups once for 8 requests" in found.explain()


def test_samples_share_all_full_pages_before_their_rows(rng):
    engine = Engine(rng)
    [request] = engine.start([(None, words(rng, 1500))])  # 93 pages and a part
    engine.insert(request)
    engine.fork(request, 7)
    engine.grow(engine.running, [words(rng, 1) for _ in range(8)])
    found = engine.check(attention_of(), [Causal()], [1] * 8)
    assert "reads 1488 keys of 1 group once for 8 requests" in found.explain()


def test_requests_without_a_match(rng):
    engine = Engine(rng)
    prompt = words(rng, 1600)
    engine.insert(engine.start([(None, prompt)])[0])
    engine.start([(None, prompt + words(rng, n)) for n in (1, 30)])
    engine.start([("alone", words(rng, 50))])
    assert engine.running[3].match.num_tokens == 0
    found = engine.check(attention_of(), [Causal()], [1] * 4)
    assert found.num_levels == 2
    # They were added with the pages that they matched, so the choice is the same for those that kept no match.
    nothing = raddle.Cascade.from_radix(attention_of(), engine.cache, engine.numbers(), [None] * 4, np.arange(5))
    assert nothing.explain() == found.explain()
    empty = raddle.Cascade.from_radix(attention_of(), engine.cache, [], [], [0])
    assert type(empty) is raddle.PagedKV and "no requests share" in empty.explain()


def test_options_are_those_of_page_tables(rng):
    engine = Engine(rng)
    prompt = words(rng, 2000)
    for _ in range(4):
        engine.insert(engine.start([(None, prompt + words(rng, 5))])[0])
    attn = attention_of(raddle.SlidingWindow(100))
    assert engine.chosen(attn, [1] * 4).num_levels == 1
    assert engine.chosen(attn, [1] * 4, params={"window.left": 4000}).num_levels == 2
    for options in (dict(kv_layout="HND"), dict(num_workers=7), dict(qo_pos=np.arange(4))):
        found, expected = (make(attention_of(), [1] * 4, **options) for make in (engine.chosen, engine.from_lists))
        assert found.explain() == expected.explain()
    with refuses(ValueError, "kv_layout is 'HDN'"):
        engine.chosen(attn, [1] * 4, kv_layout="HDN")
    with refuses(ValueError, "schedule is 'best'"):
        engine.chosen(attn, [1] * 4, schedule="best")
    with refuses(ValueError, "qo_indptr has 4 entries; expected 5"):
        engine.chosen(attn, [1] * 3)


def test_matches_that_are_refused(rng):
    engine, other = Engine(rng), Engine(rng)
    prompt = words(rng, 64)
    for made in (engine, other):
        made.insert(made.start([(None, prompt + words(rng, 40))])[0])
    first = engine.running[0]
    second, third = engine.start([(None, prompt + words(rng, 40)), ("b", words(rng, 40))])
    match = second.match
    assert match.num_tokens == 64
    cache, pool, requests = engine.cache, engine.pool, engine.numbers()

    def refused(error, *message, matches, of=requests, cache=cache):
        with refuses(error, *message):
            raddle.Cascade.from_radix(attention_of(), cache, of, matches, indptr([1] * len(of)))

    refused(ValueError, "matches has 2 entries; expected 3, one a request", matches=[None, match])
    refused(TypeError, "matches is None; expected a list, one a request", matches=None)
    refused(TypeError, "matches[1] is a list; expected a Match, an Inserted or None", matches=[None, [1], None])
    refused(TypeError, "cache is a PagePool; expected a RadixCache", matches=[None] * 3, cache=pool)
    refused(ValueError, "requests[1] is 99", matches=[None, None], of=[requests[0], 99])
    refused(ValueError, "matches[2] has 64 tokens; expected at most", "kv_len, 40", matches=[None, None, match])
    refused(ValueError, "matches[1] has 65 tokens on 4 pages", matches=[None, match._replace(num_tokens=65), None])
    refused(ValueError, "matches[1].node is 999", "not evicted", matches=[None, match._replace(node=999), None])
    # What is a request's own does not lie on others' pages: these matches stand at the wrong requests.
    engine.insert(third)
    refused(ValueError, "matches[0].pages[0] is", "the request's own", matches=[third.match, None, None])
    refused(ValueError, "matches[1].pages[4] is", "the request's own", matches=[None, first.match, None])
    untouched = cache.match(prompt, touch=False)
    refused(ValueError, "matches[1].node is -2", "did not touch", matches=[None, untouched, None])
    # The same number of a node in another cache, whose pages are others.
    other.start([(None, words(rng, 64))])
    other.insert(other.running[1])
    foreign = other.running[1].match._replace(node=first.match.node)
    refused(ValueError, "matches[0] ends on page", "expected one of this cache", matches=[foreign, None, None])
    assert pool.pages(second.number)[:4].tolist() == match.pages.tolist()

    alone = cache.match(third.tokens, "b", lock=True)
    cache.unlock(third.match.node)
    engine.chosen(attention_of(), [1] * 3)  # the other lock holds
    cache.unlock(alone.node)
    refused(ValueError, "matches[2].node is", "not locked", matches=[None, None, third.match])
    cache.evict(100)
    refused(ValueError, "matches[2].node is", "has not evicted", matches=[None, None, third.match])
