"""The radix cache against a model that keeps every page by itself: the same matches, the same evictions."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
import raddle
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

NUM_PAGES = 24
EVERY_PAGE = np.arange(NUM_PAGES)
KEYS = st.sampled_from([None, 7, "7", b"7"])


class Prefixes:
    """Every cached page by itself, under all tokens up to its end."""

    def __init__(self, page_size):
        self.page_size, self.pages, self.used, self.locks, self.clock = page_size, {}, {}, {}, 0

    def path(self, key, tokens):
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [(key, tuple(tokens[:end])) for end in ends]

    def match(self, key, tokens):
        path = self.path(key, tokens)
        known = next((n for n, prefix in enumerate(path) if prefix not in self.pages), len(path))
        return path[:known]

    def touch(self, path):
        for prefix in reversed(path):
            self.clock += 1
            self.used[prefix] = self.clock

    def insert(self, key, tokens, pages):
        path = self.path(key, tokens)
        for prefix, page in zip(path, pages):
            self.pages.setdefault(prefix, page)
        self.touch(path)
        return path

    def lock(self, path):
        for prefix in path:
            self.locks[prefix] = self.locks.get(prefix, 0) + 1

    def unlock(self, path):
        for prefix in reversed(path):
            self.locks[prefix] -= 1
            if self.locks[prefix] == 0:
                del self.locks[prefix]
                self.touch([prefix])

    def evict_one(self):
        """The page that goes next, or None."""
        inner = {(key, tokens[: -self.page_size]) for key, tokens in self.pages}
        leaves = [prefix for prefix in self.pages if prefix not in inner and prefix not in self.locks]
        if not leaves:
            return None
        return self.pages.pop(min(leaves, key=self.used.__getitem__))


class CacheHistory(RuleBasedStateMachine):
    """Requests that match, run, insert and end, over a pool that is soon full."""

    @initialize(page_size=st.integers(1, 4), token_bits=st.sampled_from([32, 64]))
    def begin(self, page_size, token_bits):
        self.pool = raddle.PagePool(NUM_PAGES, page_size)
        self.cache = raddle.RadixCache(self.pool, token_bits)
        self.model = Prefixes(page_size)
        self.dtype = np.int64 if token_bits == 64 else np.int32
        self.base = 1 << 40 if token_bits == 64 else 0  # ids that 32 bits would confuse
        self.running = {}  # request → (key, tokens, the locked node, its path)
        self.nodes = {}  # node → path, of all that were ever seen and not locked

    def draw_tokens(self, data):
        ids = data.draw(st.lists(st.integers(0, 1), max_size=8 * self.pool.page_size))
        return [self.base + token for token in ids]

    def references(self):
        held = [*self.model.pages.values()]
        held += [page for request in self.running for page in self.pool.pages(request).tolist()]
        return np.bincount(held, minlength=NUM_PAGES) if held else np.zeros(NUM_PAGES, int)

    def evict(self, count):
        """Both evict; returns how many pages became free."""
        freed = []
        while len(freed) < count:
            references = self.references()
            page = self.model.evict_one()
            if page is None:
                break
            if references[page] == 1:
                freed.append(page)
        assert self.cache.evict(count).tolist() == freed
        return len(freed)

    @rule(data=st.data(), key=KEYS, lock=st.booleans(), as_list=st.booleans())
    def match(self, data, key, lock, as_list):
        tokens = self.draw_tokens(data)
        path = self.model.match(key, tokens)
        found = self.cache.match(tokens if as_list else np.array(tokens, self.dtype), key, lock=lock)
        assert found.num_tokens == len(path) * self.pool.page_size
        assert found.pages.dtype == np.int32 and found.pages.tolist() == [self.model.pages[p] for p in path]
        self.model.touch(path)
        self.nodes[found.node] = path
        if lock:
            self.model.lock(path)
            request = self.pool.add(found.pages)
            self.running[request] = key, tokens, found.node, path

    @rule(data=st.data(), key=KEYS)
    def ask(self, data, key):
        tokens = self.draw_tokens(data)
        found = self.cache.match(tokens, key, touch=False)
        assert found.pages.tolist() == [self.model.pages[p] for p in self.model.match(key, tokens)]
        assert found.node == (-2 if found.num_tokens else -1)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), end=st.booleans(), deduplicate=st.booleans())
    def compute(self, data, end, deduplicate):
        """A request appends what it lacks, evicting where it must, and is inserted; perhaps it ends."""
        request = data.draw(st.sampled_from(sorted(self.running)))
        key, tokens, node, path = self.running[request]
        rest = len(tokens) - self.pool.kv_len(request)
        grown = self.pool.append([request], [rest])
        if grown.missing:
            before = self.pool.references(EVERY_PAGE).tolist()
            assert before == self.references().tolist()
            if self.evict(grown.missing) < grown.missing:
                return
            assert self.pool.append([request], [rest]).missing == 0
        known = self.model.match(key, tokens)
        done = self.cache.insert(np.array(tokens, self.dtype), self.pool.pages(request), key, lock=True)
        new_path = self.model.insert(key, tokens, self.pool.pages(request).tolist())
        assert done.num_cached == len(known) * self.pool.page_size
        assert done.num_tokens == len(new_path) * self.pool.page_size
        assert done.pages.tolist() == [self.model.pages[p] for p in new_path]
        self.model.lock(new_path)
        if deduplicate:
            self.pool.replace(request, done.pages)
        self.unlock(node, path)
        self.running[request] = key, tokens, done.node, new_path
        if end:
            self.pool.finish([request])
            del self.running[request]
            self.unlock(done.node, new_path)

    def unlock(self, node, path):
        self.cache.unlock(node)
        self.model.unlock(path)
        self.nodes[node] = path

    @rule(count=st.integers(1, 3) | st.integers(0, NUM_PAGES))
    def make_room(self, count):
        self.evict(count)

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def lock_later(self, data):
        """A number that was seen long ago: it names the same prefix, or is refused."""
        node = data.draw(st.sampled_from(sorted(self.nodes)))
        path = self.nodes[node]
        try:
            self.cache.lock(node)
        except ValueError as error:
            assert f"node is {node}" in str(error)
            del self.nodes[node]
            return
        assert all(prefix in self.model.pages for prefix in path)
        self.model.lock(path)
        assert self.cache.counts().locked_pages == len(self.model.locks)
        self.unlock(node, path)

    @rule(data=st.data(), key=KEYS)
    def refused(self, data, key):
        before = self.cache.counts(), self.pool.references(EVERY_PAGE).tolist()
        tokens = [self.base] * self.pool.page_size
        free = np.flatnonzero(self.references() == 0)
        calls = [
            (lambda: self.cache.match([*tokens, -1], key), rf"tokens\[{len(tokens)}\] is -1; expected 0 to "),
            (lambda: self.cache.insert(tokens, [], key), "pages has 0 entries; expected at least 1"),
            (lambda: self.cache.insert(tokens, [NUM_PAGES], key), r"pages\[0\] is 24; expected 0 to 23"),
            (lambda: self.cache.unlock(1 << 50), "node is "),
            (lambda: self.cache.lock(-2), "node is -2, of a match that did not touch"),
            (lambda: self.cache.evict(-1), "num_pages is -1"),
        ]
        if len(free):
            calls.append((lambda: self.cache.insert(tokens, free[:1], key), r"pages\[0\] is .*, which is free"))
        if self.dtype == np.int32:
            calls.append((lambda: self.cache.match([1 << 31], key), r"tokens\[0\] is 2147483648; expected 0 to 2147"))
        locked = {node for *_, node, _ in self.running.values()}
        for node in self.nodes.keys() - locked:
            calls.append((lambda node=node: self.cache.unlock(node), f"node is {node}"))
        for call, message in calls:
            with pytest.raises(ValueError, match=message):
                call()
        assert (self.cache.counts(), self.pool.references(EVERY_PAGE).tolist()) == before

    @invariant()
    def nothing_is_leaked_or_freed_in_use(self):
        if not hasattr(self, "pool"):
            return
        assert self.pool.references(EVERY_PAGE).tolist() == self.references().tolist()
        counts = self.cache.counts()
        assert counts.pages == len(self.model.pages)
        assert counts.tokens == counts.pages * self.pool.page_size
        assert counts.locked_pages == len(self.model.locks)

    @invariant()
    def iteration_shows_the_tree(self):
        if not hasattr(self, "pool"):
            return
        entries = {entry.node: entry for entry in self.cache}
        assert len(entries) == self.cache.counts().nodes
        found = {}
        for entry in entries.values():
            above, parent = [], entry.parent
            while parent != -1:
                above[:0] = entries[parent].tokens.tolist()
                parent = entries[parent].parent
            tokens = above + entry.tokens.tolist()
            path = self.model.path(entry.extra_key, tokens)[-len(entry.pages) :]
            found.update(zip(path, entry.pages.tolist()))
            assert all(self.model.locks.get(prefix, 0) == entry.locks for prefix in path)
        assert found == self.model.pages

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        for _, _, node, _ in self.running.values():
            self.cache.unlock(node)
        self.pool.finish(list(self.running))
        self.cache.evict(NUM_PAGES)
        assert self.pool.used == 0 and self.cache.counts()[:4] == (0, 0, 0, 0)


TestCacheHistory = CacheHistory.TestCase
TestCacheHistory.settings = settings(max_examples=60, stateful_step_count=60)


def test_bad_arguments_are_named():
    pool = raddle.PagePool(4)
    with pytest.raises(ValueError, match="token_bits is 16; expected 32 or 64"):
        raddle.RadixCache(pool, 16)
    with pytest.raises(TypeError, match="pool is an int; expected a raddle.PagePool"):
        raddle.RadixCache(3)
    cache = raddle.RadixCache(pool)
    assert cache.pool.same_as(pool) and "0 tokens" in repr(cache)
    with pytest.raises(TypeError, match="extra_key is a float"):
        cache.match([1], 0.5)
    with pytest.raises(TypeError, match="tokens has dtype float64"):
        cache.match(np.zeros(3))
    with pytest.raises(ValueError, match="tokens has 2 dimensions"):
        cache.match(np.zeros((3, 3), np.int32))
    with pytest.raises(TypeError, match="tokens is "):
        cache.match(None)


def test_strided_and_wide_tokens_are_the_same_tokens():
    pool = raddle.PagePool(4, 2)
    cache = raddle.RadixCache(pool)
    cache.insert([1, 2, 3, 4], pool.allocate(2))
    for dtype in (np.int32, np.int64):
        strided = np.array([[1, 9], [2, 9], [3, 9], [5, 9]], dtype)[:, 0]
        assert cache.match(strided).num_tokens == 2


def test_a_cache_gives_its_pages_back_at_its_end():
    pool = raddle.PagePool(4, 2)
    cache = raddle.RadixCache(pool)
    pages = pool.allocate(2)
    cache.insert([1, 2, 3, 4], pages, lock=True)
    pool.release(pages)
    assert pool.used == 2
    del cache
    assert pool.used == 0


def test_threads_share_a_cache():
    """What a locked match says of a page is what its writer put there, however much is evicted meanwhile."""
    pool = raddle.PagePool(32, 2)
    cache = raddle.RadixCache(pool)
    memory = np.zeros((32, 2), np.int32)
    wrong = []

    def serve(seed):
        rng = np.random.default_rng(seed)
        for _ in range(300):
            tokens = rng.integers(0, 2, rng.integers(4, 13)).astype(np.int32)
            found = cache.match(tokens, lock=True)
            if memory[found.pages].ravel().tolist() != tokens[: found.num_tokens].tolist():
                wrong.append(tokens)
            request = pool.add(found.pages)
            rest = len(tokens) - found.num_tokens
            while True:
                grown = pool.append([request], rest)
                if not grown.missing or not len(cache.evict(grown.missing)):
                    break
            if not grown.missing:
                pages = pool.pages(request)
                for i in range(found.num_tokens, len(tokens)):
                    memory[pages[i // 2], i % 2] = tokens[i]
                cache.insert(tokens, pages)
            pool.finish([request])
            cache.unlock(found.node)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert pool.shared == 0 and pool.used == cache.counts().pages and cache.counts().locked_pages == 0
