"""`raddle replay --prefix-cache --parallel N`: what requests and samples share, and that none reads other keys."""

import json

import numpy as np
import pytest
import raddle
from hypothesis import given, settings
from hypothesis import strategies as st
from raddle.bench import limits
from raddle.replay import native
from raddle.replay.engine import Engine
from raddle.replay.prefix_cache import NoPrefixCache, PrefixCache, allowed_tokens
from raddle.replay.scheduler import Playback, Scheduler
from raddle.replay.traces import BLOCK_TOKENS, Request
from replays import replay

# --- the scheduler -----------------------------------------------------------------------------


def tokens_of(index, requests):
    """What lies at each position of a request's sample: tokens of blocks, then its own, below 0."""
    request = requests[index % len(requests)]
    positions = np.arange(request.tokens)
    blocks = np.array([*request.blocks, *[0] * (request.tokens // BLOCK_TOKENS + 1)])[positions // BLOCK_TOKENS]
    is_shared = positions < len(request.blocks) * BLOCK_TOKENS
    owner = np.where(positions < request.input_tokens, index % len(requests), index)
    return np.where(is_shared, blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS, -1 - owner * 10**6 - positions)


def run_to_end(scheduler, seconds=0.01):
    """All steps, and the requests that were done; follows each token into the pool and out of it."""
    steps, done, clock = [], [], 0.0
    pool = scheduler.pool
    empty = np.iinfo(np.int64).min
    slots = np.full((pool.num_pages, pool.page_size), empty)
    while not scheduler.done:
        step = scheduler.schedule(clock)
        if not step:
            assert scheduler.next_arrival > clock, "nothing runs and nothing is to come"
            clock = scheduler.next_arrival
            continue
        slots[scheduler.take_freed()] = empty
        from_pages, to_pages = scheduler.copies
        slots[to_pages] = slots[from_pages]
        for span, pages in zip(step, scheduler.tables(step)):
            tokens = tokens_of(span.request, scheduler.requests)
            rows = np.arange(span.begin, span.begin + span.length)
            at = pages[rows // pool.page_size], rows % pool.page_size
            assert (slots[at] == empty).all(), "written twice"
            slots[at] = tokens[rows]
        for span, pages in zip(step, scheduler.tables(step)):
            end = span.begin + span.length
            tokens = tokens_of(span.request, scheduler.requests)
            np.testing.assert_array_equal(slots[pages].reshape(-1)[:end], tokens[:end])
        assert pool.used + scheduler.promised - scheduler.prefixes.idle_pages <= pool.num_pages
        clock += seconds
        done += scheduler.complete(step, clock)
        steps.append(step)
    return steps, done


@st.composite
def conversations(draw):
    """Requests whose blocks are paths in a tree: a block is named by all that is before it."""
    requests = []
    for _ in range(draw(st.integers(1, 8))):
        path = draw(st.lists(st.sampled_from("ab"), max_size=3))
        blocks = tuple(int("".join(path[: n + 1]), 16) for n in range(len(path)))
        rest = draw(st.integers(0 if path else 1, BLOCK_TOKENS - 1))
        prompt = len(blocks) * BLOCK_TOKENS + rest
        requests.append(Request(draw(st.floats(0, 0.2)), prompt, draw(st.integers(1, 5)), blocks))
    return sorted(requests, key=lambda r: r.arrival)


@given(
    conversations(),
    st.sampled_from([1, 16, 48, 512, 700]),
    st.integers(0, 3000),
    st.integers(1, 2000),
    st.sampled_from([1, 1, 2, 5]),
    st.sampled_from([PrefixCache, NoPrefixCache]),
)
@settings(deadline=None)
def test_each_token_is_computed_once_or_taken_over(requests, page_size, more_tokens, budget, samples, prefixes):
    own = (samples - 1) * (page_size + max(r.output_tokens for r in requests))
    tokens = max(r.tokens for r in requests) + own + more_tokens + samples * page_size
    budget = max(budget, max(r.input_tokens for r in requests) // 10)  # else there are too many steps to follow
    make_pool = lambda: raddle.PagePool(-(-tokens // page_size), page_size)  # noqa: E731
    scheduler = Scheduler(requests, make_pool(), budget, prefixes, samples)
    steps, done = run_to_end(scheduler)
    reused = {r.index: r.reused for r in done}
    assert len(reused) == len(done) == samples * len(requests)
    for i, first in reused.items():
        request = requests[i % len(requests)]
        rows = [row for s in steps for span in s if span.request == i for row in range(span.begin, sum(span[1:]))]
        assert rows == list(range(first, request.tokens - 1))
        assert first < request.input_tokens if i < len(requests) else first == request.input_tokens
    assert sum(reused[i] for i in range(len(requests))) <= allowed_tokens(requests, page_size)
    assert scheduler.promised == 0
    if prefixes is NoPrefixCache:
        assert scheduler.pool.used == 0
        return
    counts = scheduler.prefixes.cache.counts()
    assert scheduler.pool.used == counts.pages and counts.locked_pages == 0
    # The same batches repeat, whatever they cost, evictions included.
    again = Playback(requests, make_pool(), steps, prefixes=PrefixCache, samples=samples)
    assert run_to_end(again, seconds=0.001)[0] == steps
    assert again.prefixes.evicted_tokens == scheduler.prefixes.evicted_tokens


@given(conversations(), st.sampled_from([1, 16, 48, 512]))
@settings(deadline=None)
def test_one_after_another_they_take_over_all_that_is_allowed(requests, page_size):
    apart = [Request(1000.0 * i, r.input_tokens, r.output_tokens, r.blocks) for i, r in enumerate(requests)]
    found = {}
    for prefixes in (PrefixCache, NoPrefixCache):
        scheduler = Scheduler(apart, raddle.PagePool(20_000 // page_size, page_size), 512, prefixes)
        found[prefixes] = sum(r.reused for r in run_to_end(scheduler)[1])
        assert scheduler.prefixes.evicted_tokens == 0
    assert found == {PrefixCache: allowed_tokens(apart, page_size), NoPrefixCache: 0}


def test_what_is_allowed():
    blocks = [(0, 1), (0, 1), (0, 2), (3,), (3, 4), ()]
    requests = [Request(0.0, 512 * len(b) + 40, 1, b) for b in blocks]
    assert allowed_tokens(requests, 16) == 1024 + 512 + 512
    whole = [Request(0.0, 1024, 1, (0, 1))] * 2
    assert allowed_tokens(whole, 16) == 1008, "one token is computed, and pages are taken over whole"
    assert allowed_tokens(requests, 100) == 1000 + 500 + 500, "whole pages"


def test_two_of_one_step_keep_one_copy():
    requests = [Request(0.0, 520, 3, (0,))] * 2
    pool = raddle.PagePool(100, 16)
    scheduler = Scheduler(requests, pool, 2000, PrefixCache)
    step = scheduler.schedule(0.0)
    assert [tuple(span) for span in step] == [(0, 0, 520), (1, 0, 520)] and pool.used == 66
    scheduler.complete(step, 1.0)
    assert len(scheduler.take_freed()) == 32 and pool.used == 34
    first, second = scheduler.tables(scheduler.schedule(1.0))
    assert first[:32].tolist() == second[:32].tolist() and first[32] != second[32]


def test_who_only_asks_for_room_changes_nothing():
    pool = raddle.PagePool(66, 16)
    prefixes = PrefixCache(pool)
    first, second = (Request(0.0, 520, 1, (block,)) for block in (0, 1))
    for request in (first, second):
        key = prefixes.add(request).key
        prefixes.append([key], [520])
        prefixes.computed(key, request)
        prefixes.finish(key)
    assert prefixes.idle_pages == 64 and prefixes.spare(Request(0.0, 520, 1), 33) == 33
    assert prefixes.spare(first, 33) == 33, "32 pages less to take, and 32 less to evict"
    key = prefixes.add(Request(0.0, 160, 1)).key
    assert len(prefixes.append([key], [160]).freed) == 8 and prefixes.evicted_tokens == 128
    assert [prefixes.add(r).reused for r in (first, second)] == [512 - 128, 512], "the first is still the oldest"


def test_copies_for_samples_are_promised():
    requests = [Request(0.0, 24, 4), Request(0.5, 10, 2)]
    pool = raddle.PagePool(6, 16)
    scheduler = Scheduler(requests, pool, 30, samples=3)
    scheduler.complete(scheduler.schedule(0.0), 1.0)
    assert (pool.used, scheduler.promised) == (2, 2), "two of three samples will copy the second page"
    step = scheduler.schedule(1.0)
    assert [span.request for span in step] == [0, 2, 4] and scheduler.queued == {1}
    assert (pool.used, scheduler.promised) == (4, 0)
    with pytest.raises(ValueError, match=r"request 0 needs 4 pages \(24 \+ 12 tokens\), the pool has 3"):
        Scheduler(requests, raddle.PagePool(3, 16), 30, samples=3)


def test_keys_of_a_block_are_the_same_in_every_request():
    prompts = native.SharedPrompts.of([Request(0.0, 1100, 1, (7, 9)), Request(0.0, 40, 1), Request(0.0, 600, 1, (7,))])
    request, position = np.array([0, 1, 2, 0, 2], np.int32), np.array([5, 5, 5, 512, 512], np.int32)
    rows = {s: np.empty((5, 2, 16), np.float32) for s in ("query", "key", "value")}
    for stream, out in rows.items():
        native.fill(stream, 1, 0, request, position, out, prompts)
    for stream in ("key", "value"):
        first, alone, second, *behind = rows[stream]
        assert (first == second).all() and not (first == alone).all() and not (behind[0] == behind[1]).all()
    assert not (rows["query"][0] == rows["query"][2]).all()
    with pytest.raises(ValueError, match=r"request\[0\] is -1 of 3 requests"):
        native.fill("key", 1, 0, np.array([-1], np.int32), position[:1], rows["key"][:1], prompts)


# --- the command -------------------------------------------------------------------------------

SMALL = "--num-qo-heads 4 --num-kv-heads 2 --head-dim 32 --layers 2 --token-budget 300 --verify 100".split()
SERIAL, AT_ONCE = ["--rate", "1"], ["--rate", "1e9"]

# Prompt tokens and hashes; what each finds when all before it are computed.
ALIKE = [
    (1100, [0, 1, 2], 0),
    (1100, [0, 1, 3], 1024),
    (1024, [0, 1], 1008),
    (700, [0, 4], 512),
    (600, [5, 6], 0),
    (600, [5, 6], 512),
]
# Eight conversations of three turns with one system prompt, in turns.
CONVERSATIONS = [
    (512 * (turn + 2) + 50, [0, *(1 + 10 * c + t for t in range(turn + 1)), 1000 + 10 * c + turn], None)
    for turn in range(3)
    for c in range(8)
]
NEED = 512 * (1 + 3 * 8) + 24 * 64  # tokens


@pytest.fixture(autouse=True)
def no_bandwidth(monkeypatch):
    monkeypatch.setattr(limits, "read_gbps", lambda advance: 12.5)


@pytest.fixture
def replayed(tmp_path):
    def run(requests, *arguments, **options):
        lines = [
            {"timestamp": 10_000_000 * i, "input_length": n, "output_length": 9, "hash_ids": ids}
            for i, (n, ids, _) in enumerate(requests)
        ]
        trace = tmp_path / "trace.jsonl"
        trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return replay(tmp_path, "--trace", trace, *SMALL, *arguments, **options)

    return run


@pytest.mark.parametrize("flags", [[], ["--prefix-cache", "--rope", "--dtype", "float32"]])
def test_hits_are_those_of_the_hashes(replayed, flags):
    report, output = replayed(ALIKE, *SERIAL, *flags)
    found = report["prefixes"]
    assert found["tokens_saved"] == sum(hit for *_, hit in ALIKE) == 3056
    assert found["hit_rate"] == found["allowed_hit_rate"] == 3056 / sum(n for n, *_ in ALIKE)
    assert found["evicted_tokens"] == 0 and found["shared_pages"] == {"max": 0, "mean": 0.0}
    assert report["verified"]["failed"] == 0 and report["verified"]["strata"]["reused prefix"] > 0
    assert report["config"]["prefix_cache"] and report["pool"]["idle"] > 0
    words = " ".join(output.replace("│", " ").split())
    assert "prompt tokens found in the prefix cache 59.6 %" in words and "tokens not computed again 3,056" in words


def test_without_the_cache_nothing_is_taken_over(replayed):
    report, output = replayed(ALIKE, *SERIAL, "--no-prefix-cache")
    found = report["prefixes"]
    assert found["hit_rate"] == found["tokens_saved"] == 0 and found["allowed_hit_rate"] > 0.5
    assert report["verified"]["failed"] == report["verified"]["strata"]["reused prefix"] == report["pool"]["idle"] == 0
    assert "prefix cache" not in output


def test_requests_that_run_together_share_pages(replayed):
    report, _ = replayed(ALIKE, *AT_ONCE)
    found = report["prefixes"]
    assert 0 < found["hit_rate"] <= found["allowed_hit_rate"]
    assert found["shared_pages"]["max"] >= 64 and found["shared_pages"]["mean"] > 0
    assert report["verified"]["failed"] == 0


@pytest.mark.parametrize("flags", [[], ["--no-prefix-cache"], ["--page-size", "1"]])
def test_samples_share_the_prompt(replayed, tmp_path, flags):
    log = tmp_path / "steps.json"
    report, _ = replayed(ALIKE, *AT_ONCE, "--parallel", 5, "--save-steps", log, *flags)
    assert report["samples"] == 5 and report["tokens"] == 6 * 9 * 5 and report["requests"] == 6
    assert report["prefixes"]["shared_pages"]["max"] >= (1024 if "--page-size" in flags else 64)
    assert report["prefixes"]["tokens_saved"] <= 3056
    assert report["verified"]["failed"] == 0 and report["verified"]["strata"]["reused prefix"] > 0
    again, _ = replay(tmp_path, "--steps", log, *SMALL[: SMALL.index("--token-budget")])
    assert all(again[key] == report[key] for key in ("prefixes", "pool", "steps", "tokens", "samples"))


def test_a_page_that_no_sample_copied_is_found(replayed, monkeypatch):
    monkeypatch.setattr(Engine, "_copy_pages", lambda *_: None)
    report, _ = replayed(ALIKE, *AT_ONCE, "--parallel", 3, exit_code=1)
    assert report["verified"]["failed"] > 0


@pytest.mark.parametrize("when", [SERIAL, AT_ONCE])
def test_a_quarter_of_the_need_evicts_and_finishes(replayed, when):
    report, _ = replayed(CONVERSATIONS, *when, "--pool-tokens", NEED // 4)
    found = report["prefixes"]
    assert report["requests"] == 24 and report["tokens"] == 24 * 9
    assert found["evicted_tokens"] > 0 and 0.2 < found["hit_rate"] < found["allowed_hit_rate"]
    assert report["verified"]["failed"] == 0 and report["verified"]["strata"]["reused prefix"] > 0


def test_a_prefix_that_is_written_to_is_found(replayed):
    report, output = replayed(ALIKE, *SERIAL, "--inject", "prefix", exit_code=1)
    assert report["verified"]["failed"] > 0 and "verification failed; the worst:" in output


def test_steps_repeat_with_the_cache(replayed, tmp_path):
    log = tmp_path / "steps.json.gz"
    first, _ = replayed(CONVERSATIONS, *AT_ONCE, "--pool-tokens", NEED // 4, "--save-steps", log)
    options = [*SMALL[: SMALL.index("--token-budget")], "--schedule", "one-per-request"]
    again, _ = replay(tmp_path, "--steps", log, *options)
    assert first["prefixes"]["evicted_tokens"] > 0 and again["config"]["prefix_cache"]
    for key in ("prefixes", "pool", "steps", "tokens", "queued_requests"):
        assert again[key] == first[key]
    _, output = replay(tmp_path, "--steps", log, "--no-prefix-cache", exit_code=2)
    assert "can't be combined with --steps" in " ".join(output.split())
