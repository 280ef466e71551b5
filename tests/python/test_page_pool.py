"""The page pool against a model that counts by looking: over long random histories, with a memory behind it."""

from __future__ import annotations

import numpy as np
import pytest
import raddle
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

NUM_PAGES, PAGE_SIZE = 14, 3
EVERY_PAGE = np.arange(NUM_PAGES)


class PoolHistory(RuleBasedStateMachine):
    """Requests write tokens to the pages that they are given; whatever happens to others, they read them back."""

    def __init__(self):
        super().__init__()
        self.pool = raddle.PagePool(NUM_PAGES, PAGE_SIZE)
        self.requests: dict[int, list[int]] = {}  # the tokens of each
        self.held: list[int] = []  # the caller's references
        self.finished: list[int] = []
        self.memory = np.full((NUM_PAGES, PAGE_SIZE), -1)
        self.written = 0

    def state(self):
        return (
            self.pool.references(EVERY_PAGE).tolist(),
            [self.pool.pages(r).tolist() for r in self.requests],
            [self.pool.kv_len(r) for r in self.requests],
            self.pool.num_requests,
        )

    def references(self):
        held = [page for r in self.requests for page in self.pool.pages(r).tolist()] + self.held
        return np.bincount(held, minlength=NUM_PAGES)

    def some(self, data):
        return data.draw(st.lists(st.sampled_from(sorted(self.requests)), unique=True, max_size=6))

    @rule()
    def add(self):
        self.requests[self.pool.add()] = []

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def add_on_pages(self, data):
        other = data.draw(st.sampled_from(sorted(self.requests)))
        tokens = self.requests[other][: data.draw(st.integers(0, len(self.requests[other])))]
        pages = self.pool.pages(other)[: -(-len(tokens) // PAGE_SIZE)]
        self.requests[self.pool.add(pages, len(tokens))] = list(tokens)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(0, 3))
    def fork(self, data, count):
        parent = data.draw(st.sampled_from(sorted(self.requests)))
        for request in self.pool.fork(parent, count):
            assert request not in self.requests and request not in self.finished
            self.requests[request] = list(self.requests[parent])

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def append(self, data):
        chosen = self.some(data)
        counts = data.draw(st.lists(st.integers(0, 7), min_size=len(chosen), max_size=len(chosen)))
        before, needed = self.state(), self.needed(chosen, counts)
        free = self.pool.free
        grown = self.pool.append(chosen, counts)
        assert grown.missing == max(0, needed - free)
        if grown.missing:
            assert self.state() == before and len(grown.from_pages) == 0
            return
        assert self.pool.free == free - needed
        assert not set(grown.from_pages.tolist()) & set(grown.to_pages.tolist())
        self.memory[grown.to_pages] = self.memory[grown.from_pages]
        for request, count in zip(chosen, counts):
            pages = self.pool.pages(request)
            for _ in range(count):
                page, slot = divmod(len(self.requests[request]), PAGE_SIZE)
                self.memory[pages[page], slot] = self.written
                self.requests[request].append(self.written)
                self.written += 1

    def needed(self, chosen, counts):
        """Pages that an append takes, request after request."""
        references, needed = self.references(), 0
        for request, count in zip(chosen, counts):
            kv_len, pages = len(self.requests[request]), self.pool.pages(request)
            needed += -(-(kv_len + count) // PAGE_SIZE) - len(pages)
            if count and kv_len % PAGE_SIZE and references[pages[-1]] > 1:
                references[pages[-1]] -= 1
                needed += 1
        return needed

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def truncate(self, data):
        chosen = self.some(data)
        lengths = [data.draw(st.integers(0, len(self.requests[r]))) for r in chosen]
        self.check_freed(lambda: self.pool.truncate(chosen, lengths))
        for request, length in zip(chosen, lengths):
            del self.requests[request][length:]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data):
        chosen = self.some(data)
        self.check_freed(lambda: self.pool.finish(chosen))
        for request in chosen:
            del self.requests[request]
        self.finished += chosen

    @rule(count=st.integers(0, NUM_PAGES))
    def allocate(self, count):
        free = self.pool.free
        pages = self.pool.allocate(count)
        assert (pages is None) == (count > free)
        if pages is not None:
            assert (self.references()[pages] == 0).all()
            self.held += pages.tolist()
        if len(self.held) > NUM_PAGES // 2:
            self.release_all()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def retain(self, data):
        pages = self.pool.pages(data.draw(st.sampled_from(sorted(self.requests))))
        self.pool.retain(pages)
        self.held += pages.tolist()

    @rule()
    def release_all(self):
        self.check_freed(lambda: self.pool.release(self.held))
        self.held = []

    def check_freed(self, call):
        """The pages that a call frees are those that it says."""
        before = self.pool.references(EVERY_PAGE)
        freed = call()
        after = self.pool.references(EVERY_PAGE)
        assert sorted(freed) == np.flatnonzero((before > 0) & (after == 0)).tolist()

    @rule(data=st.data())
    def refused(self, data):
        before = self.state()
        running, gone = sorted(self.requests), self.finished + [1 << 40, -1]
        bad = data.draw(st.sampled_from(gone))
        free = np.flatnonzero(self.references() == 0).tolist()
        not_held = sorted(set(range(NUM_PAGES)) - set(self.held))
        calls = [
            (lambda: self.pool.fork(bad), "request is "),
            (lambda: self.pool.finish([*running, bad]), rf"requests\[{len(running)}\] is "),
            (lambda: self.pool.append([*running, bad], 1), rf"requests\[{len(running)}\] is "),
            (lambda: self.pool.truncate([bad], [0]), r"requests\[0\] is "),
            (lambda: self.pool.layout([bad]), r"requests\[0\] is "),
        ]
        if not_held:
            calls.append((lambda: self.pool.release([*self.held, not_held[0]]), rf"pages\[{len(self.held)}\] is "))
        if free:
            calls += [
                (lambda: self.pool.retain([free[0]]), r"pages\[0\] is .* which is free"),
                (lambda: self.pool.add([free[0]]), r"pages\[0\] is .* which is free"),
            ]
        if running:
            calls += [
                (lambda: self.pool.finish([running[0], running[0]]), r"requests\[1\] is .* again"),
                (lambda: self.pool.append(running, -1), r"counts\[0\] is -1"),
                (lambda: self.pool.append(running, [1] * len(running) + [1]), "counts has "),
                (lambda: self.pool.truncate(running[:1], [1 << 20]), r"kv_len\[0\] is "),
            ]
        for call, message in calls:
            with pytest.raises(ValueError, match=message):
                call()
        assert self.state() == before

    @invariant()
    def counts_are_exact(self):
        references = self.references()
        assert self.pool.references(EVERY_PAGE).tolist() == references.tolist()
        assert self.pool.used == (references > 0).sum() and self.pool.shared == (references > 1).sum()
        assert self.pool.used + self.pool.free == NUM_PAGES
        assert self.pool.num_requests == len(self.requests)

    @invariant()
    def everybody_reads_their_own(self):
        tables = self.pool.tables(list(self.requests))
        for i, tokens in enumerate(self.requests.values()):
            pages = tables.page_indices[tables.page_indptr[i] : tables.page_indptr[i + 1]]
            assert tables.kv_len[i] == len(tokens) and len(pages) == -(-len(tokens) // PAGE_SIZE)
            assert self.memory[pages].ravel()[: len(tokens)].tolist() == tokens

    def teardown(self):
        self.pool.finish(list(self.requests))
        self.pool.release(self.held)
        assert self.pool.used == self.pool.shared == self.pool.num_requests == 0


TestPoolHistory = PoolHistory.TestCase
TestPoolHistory.settings = settings(max_examples=40, stateful_step_count=60)


def test_a_layout_of_the_pool_attends_like_one_made_by_hand(rng):
    pool = raddle.PagePool(8, 4)
    requests = [pool.add(), pool.add()]
    assert pool.append(requests, [6, 3]).missing == 0
    k, v = pool.make_kv(2, 16, "float32")
    assert k.shape == (8, 4, 2, 16) and k.dtype == np.float32
    assert pool.make_kv(2, 16, head_dim_vo=8, kv_layout="HND")[1].shape == (8, 2, 4, 8)
    with pytest.raises(ValueError, match="kv_layout is 'DNH'"):
        pool.make_kv(2, 16, kv_layout="DNH")
    k[:], v[:] = rng.standard_normal((2, *k.shape))
    layout = pool.layout(requests, [2, 1])
    assert isinstance(layout, raddle.PagedKV) and layout.num_rows == 3
    by_hand = raddle.PagedKV([0, 2, 3], [0, 2, 3], [0, 1, 2], [6, 3], page_size=4)
    attention = raddle.Attention(raddle.AttentionSpec(4, 2, 16, dtype="float32", variant=[raddle.Causal()]))
    q = rng.standard_normal((3, 4, 16)).astype(np.float32)
    mine, expected = (attention.run(attention.plan(each), q, (k, v)) for each in (layout, by_hand))
    np.testing.assert_array_equal(mine, expected)
    assert pool.layout([]).num_requests == 0
    assert pool.layout(requests, discover_prefixes=True).num_levels == 2
    with pytest.raises(ValueError, match="qo_len has 3 entries; expected 2, one a request"):
        pool.layout(requests, [1, 1, 1])
    with pytest.raises(ValueError, match=r"qo_len\[1\] is -1"):
        pool.layout(requests, [1, -1])


def test_a_request_without_room_is_no_part_of_a_layout():
    """Its append changed nothing: its query rows would see keys that are none of theirs, or nothing."""
    pool = raddle.PagePool(3, 4)
    held, waiting = pool.add(), pool.add()
    assert pool.append([held], 8).missing == 0
    assert pool.append([held, waiting], [1, 8]).missing == 2
    for requests in ([waiting], [held, waiting], [held]):
        with pytest.raises(ValueError, match=r"requests\[0\] has no room for its query rows.* 2 missing pages"):
            pool.layout(requests)
    assert pool.layout([held, waiting], 0).num_rows == 0  # without rows of its own a request asks for no room
    assert pool.append([held], 1).missing == 0
    assert pool.layout([held]).num_rows == 1
    pool.truncate([held], [4])
    assert pool.append([waiting], 8).missing == 0
    assert pool.layout([held, waiting], [1, 8]).num_rows == 9


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="num_pages is 0"):
        raddle.PagePool(0)
    with pytest.raises(ValueError, match="page_size is -4"):
        raddle.PagePool(1, -4)
    pool = raddle.PagePool(4)
    assert pool.page_size == 16 and "4 pages of 16: 0 used" in repr(pool)
    with pytest.raises(ValueError, match="count is -1"):
        pool.allocate(-1)
    with pytest.raises(ValueError, match=r"pages\[0\] is 4; expected 0 to 3"):
        pool.references([4])
    with pytest.raises(ValueError, match="kv_len is 5 for 0 pages of 16"):
        pool.add(kv_len=5)
    with pytest.raises(ValueError, match="kv_len is -1 for 0 pages"):
        pool.add(kv_len=-1)
    with pytest.raises(TypeError, match="num_pages is None; expected an int"):
        raddle.PagePool(None)
    with pytest.raises(TypeError, match="requests has dtype float64"):
        pool.finish(np.zeros(1))
    with pytest.raises(TypeError, match="pages is "):
        pool.release(3)
    for call in (pool.kv_len, pool.pages, pool.fork):
        with pytest.raises(TypeError, match="request is a float; expected an integer"):
            call(0.7)
    with pytest.raises(ValueError, match="requests has 0 dimensions; expected 1"):
        pool.append(np.array(0), 1)
    with pytest.raises(ValueError, match=f"counts is {2**70}; expected at most 2147483647"):
        pool.append([0], 2**70)
    assert pool.used == 0 and pool.num_requests == 0
