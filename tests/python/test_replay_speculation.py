"""`raddle replay --speculate`: trees of drafts, what is kept of them, and that what is not is never read."""

import json
from dataclasses import replace

import numpy as np
import pytest
import raddle
from hypothesis import given, settings
from hypothesis import strategies as st
from raddle.replay.engine import Batch, Engine
from raddle.replay.scheduler import Playback, Scheduler
from raddle.replay.span import Span
from raddle.replay.speculation import Shape, drafted
from raddle.replay.traces import BLOCK_TOKENS, Request
from replays import no_bandwidth, replay  # noqa: F401: a fixture

SMALL = "--synthetic uniform:60:200 --requests 8 --rate 10000 --pool-tokens 900 --token-budget 64".split()
HEADS = "--num-qo-heads 4 --num-kv-heads 2 --head-dim 32 --verify 160".split()
TREES = ["--speculate", "2x3"]


@pytest.fixture
def replayed(tmp_path):
    return lambda *arguments, **options: replay(tmp_path, *arguments, *HEADS, **options)


# --- trees -------------------------------------------------------------------------------------

shapes = st.builds(Shape, st.integers(1, 4), st.integers(1, 5))


@given(shapes, st.integers(0, 2**63 - 1), st.integers(0, 9), st.integers(1, 10**6), st.integers(1, 9))
def test_right_nodes_are_one_path_and_wrong_ones_nobodys(shape, seed, request, begin, most):
    tree = drafted(shape, seed, Span(request, begin, shape.nodes), most, num_requests=10)
    path = [tree.last]
    while path[-1] > 0:
        path.append(int(tree.parents[path[-1]]))
    assert sorted(np.flatnonzero(tree.departs < 0)) == path[::-1] and tree.parents[0] == -1
    assert 1 <= len(path) == tree.kept <= min(most, 1 + shape.depth)
    chains = {}
    for node, parent in enumerate(tree.parents):
        assert parent < node and tree.depths[node] == (tree.depths[parent] + 1 if node else 0)
        if tree.departs[node] < 0:
            assert tree.requests[node] == request
            continue
        assert tree.requests[node] % 10 == request and tree.requests[node] >= 10
        is_first = tree.departs[parent] < 0
        assert tree.departs[node] == (begin + tree.depths[node] if is_first else tree.departs[parent])
        assert is_first == (tree.requests[node] not in chains)
        chains[tree.requests[node]] = node
    assert np.bincount(tree.parents[1:], minlength=1)[0] == shape.width
    again = drafted(shape, seed, Span(request, begin, shape.nodes), most, num_requests=10)
    assert all(np.array_equal(one, other) for one, other in zip(tree, again))


def test_every_length_and_chain_is_drawn():
    trees = [drafted(Shape(3, 2), 1, Span(0, begin, 7), 9, 1) for begin in range(1, 400)]
    assert {tree.last for tree in trees} == set(range(7))
    kept = np.bincount([tree.kept for tree in trees], minlength=4) / len(trees)
    np.testing.assert_allclose(kept, [0, 1 / 3, 1 / 3, 1 / 3], atol=0.1)


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12)), min_size=1, max_size=6),
    shapes,
    st.sampled_from([1, 4, 16]),
    st.integers(0, 60),
    st.integers(0, 3),
)
@settings(deadline=None)
def test_all_is_generated_and_given_back(sizes, shape, page_size, more, seed):
    requests = [Request(0.0, *size) for size in sizes]
    num_pages = -(-(max(map(sum, sizes)) + shape.nodes + more) // page_size)
    scheduler = Scheduler(requests, raddle.PagePool(num_pages, page_size), shape.nodes + more, shape=shape, seed=seed)
    steps, done, written = [], [], {}
    while not scheduler.done:
        step = scheduler.schedule(0.0)
        assert step and sum(span.length for span in step) <= scheduler.token_budget
        assert scheduler.pool.used + scheduler.promised <= scheduler.pool.num_pages
        for span, tree, pages in zip(step, scheduler.trees, scheduler.tables(step)):
            assert (tree is not None) == (span.begin >= requests[span.request].input_tokens)
            assert len(pages) == -(-(span.begin + span.length) // page_size)
            assert span.begin == written.get(span.request, 0)
            written[span.request] = span.begin + (tree.kept if tree else span.length)
        done += scheduler.complete(step, 1.0 + len(steps))
        for r in scheduler.running.values():
            assert scheduler.pool.kv_len(r.key) == r.kv_len == written.get(r.index, 0)
        steps.append(step)
    assert scheduler.pool.used == 0 and sorted(r.index for r in done) == list(range(len(requests)))
    for r in done:
        assert len(r.token_times) == r.request.output_tokens and written[r.index] == r.request.tokens - 1
    again = Playback(requests, raddle.PagePool(num_pages, page_size), steps, shape=shape, seed=seed)
    while not again.done:
        again.complete(again.schedule(0.0), 1.0)
    assert again.pool.used == 0


def test_a_tree_must_fit_into_a_step():
    with pytest.raises(ValueError, match="token budget is 6; expected at least 7, a decode's rows"):
        Scheduler([Request(0.0, 5, 5)], raddle.PagePool(9), 6, shape=Shape(2, 3))


# --- the command -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--speculate 1x1",
        "--speculate 4x2 --rope --dtype float32 --page-size 1",
        "--model gpt-oss-20b --window 20 --speculate 3x5",
        "--model gemma-2-9b --rope --page-size 7",
        "--schedule linear,one-per-request --num-workers 3",
    ],
)
def test_trees_pass(replayed, flags):
    report, output = replayed(*SMALL, *TREES, *flags.split())
    shape = Shape.parse(report["config"]["speculate"])
    assert report["verified"]["failed"] == 0
    assert all(report["verified"]["strata"][s] > 0 for s in ("chunk", "decode", "wrong draft"))
    assert 1 < report["accepted"] < 1 + shape.depth
    plain, _ = replayed(*SMALL)
    assert plain["tokens"] == report["tokens"] and plain["steps"] > report["steps"] and plain["accepted"] is None
    assert "tokens accepted, on average" in output and f"per tree of {shape}" in output


def test_with_a_prefix_cache(replayed, tmp_path):
    requests = [
        {"timestamp": i, "input_length": BLOCK_TOKENS + 40, "output_length": 9, "hash_ids": [0, 10 + i]}
        for i in range(4)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, requests)))
    report, _ = replayed("--trace", trace, *TREES)
    assert report["prefixes"]["tokens_saved"] > 0 and report["verified"]["failed"] == 0
    assert report["verified"]["strata"]["reused prefix"] > 0 and report["verified"]["strata"]["cascade"] == 0


def test_steps_repeat(replayed, tmp_path):
    log = tmp_path / "steps.json.gz"
    first, _ = replayed(*SMALL, *TREES, "--save-steps", log)
    again, _ = replayed("--steps", log, "--schedule", "linear")
    assert again["config"]["speculate"] == "2x3"
    assert all(again[key] == first[key] for key in ("accepted", "steps", "tokens", "pool", "mean_batch"))
    _, output = replayed("--steps", log, *TREES, exit_code=2)
    assert "--speculate can't be combined with --steps" in " ".join(output.split())


# --- faults ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["append", "page", "mask"])
def test_a_planted_fault_fails(replayed, fault):
    report, _ = replayed(*SMALL, *TREES, "--inject", fault, exit_code=1)
    assert report["verified"]["failed"] > 0


def test_what_was_accepted_but_not_moved_is_found(replayed, monkeypatch):
    monkeypatch.setattr(Engine, "_accept", lambda *_: None)
    report, _ = replayed(*SMALL, *TREES, exit_code=1)
    assert report["verified"]["failed"] > 0


def test_the_wrong_chain_is_found(replayed, monkeypatch):
    accepted = Batch.accepted.fget
    # Of the first request that keeps more than its root: another node as deep.
    monkeypatch.setattr(
        Batch,
        "accepted",
        property(lambda self: [1 + (n + 2) % 6 if tree and n else n for n, tree in zip(accepted(self), self.trees)]),
    )
    report, _ = replayed(*SMALL, *TREES, exit_code=1)
    assert report["verified"]["failed"] > 0


def test_who_sees_siblings_is_found(replayed, monkeypatch):
    layout = Batch.layout

    def chained(self, page_size):
        chains = [tree and tree._replace(parents=np.arange(-1, len(tree.parents) - 1)) for tree in self.trees]
        return layout(replace(self, trees=chains), page_size)

    monkeypatch.setattr(Batch, "layout", chained)
    monkeypatch.setattr(Engine, "_accept", lambda *_: None)
    report, output = replayed(*SMALL, *TREES, exit_code=1)
    assert report["verified"]["failed"] > 0 and "(wrong draft)" in output


# --- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--speculate", "2by3"], "found '2by3'; expected WIDTHxDEPTH"),
        (["--speculate", "0x3"], "found '0x3'; expected WIDTHxDEPTH"),
        (["--speculate", "2x3x4"], "found '2x3x4'"),
        ([*TREES, "--parallel", "2"], "--speculate can't be combined with --parallel 2"),
        ([*TREES, "--compare", "single"], "--speculate can't be combined with --compare single"),
        ([*TREES, "--inject", "merge"], "--speculate can't be combined with --inject merge"),
        ([*TREES, "--device", "cuda"], "--speculate: steps on cuda have no trees; expected --device cpu"),
        ([*TREES, "--token-budget", "6"], "token budget is 6; expected at least 7"),
    ],
)
def test_bad_input_exits_with_2(replayed, arguments, message):
    report, output = replayed(*SMALL, *arguments, exit_code=2)
    assert report is None and message in " ".join(output.split())
