"""`raddle replay` end to end, on small models: what it reports, that it repeats, and that no fault passes."""

import math
import re

import numpy as np
import pytest
from raddle.bench import limits
from raddle.replay import metrics, native, sampling
from raddle.replay import report as words_of
from raddle.replay.engine import Batch, Engine
from raddle.replay.faults import INJECT
from raddle.replay.models import MODELS, LayerKind, Model, reference
from raddle.replay.span import Span
from replays import replay

# All arrive at once, in a pool that holds about four of them.
SMALL = "--synthetic uniform:60:200 --requests 10 --rate 10000 --pool-tokens 800 --token-budget 64".split()
HEADS = ["--num-qo-heads", "8", "--num-kv-heads", "2", "--head-dim", "64"]


@pytest.fixture(autouse=True)
def no_bandwidth(monkeypatch):
    """The measurement takes seconds and a gigabyte."""
    monkeypatch.setattr(limits, "read_gbps", lambda advance: 12.5)


@pytest.fixture
def replayed(tmp_path):
    return lambda *arguments, **options: replay(tmp_path, *arguments, **options)


def test_the_report(replayed):
    report, output = replayed(*SMALL, *HEADS)
    assert report["requests"] == 10 and report["trace"] == "uniform:60:200"
    verified = report["verified"]
    assert verified["checked"] == 200 and verified["failed"] == 0 and 0 < verified["worst"] < 1
    assert all(verified["strata"][s] > 0 for s in ("chunk", "decode", "page edge"))
    for key in ("itl_us", "ttft_us", "plan_us"):
        assert 0 < report[key]["p50"] <= report[key]["p99"]
    assert report["decode_gbps"] > 0 and report["prefill_gflops"] > 0
    assert report["read_gbps"] == 12.5
    assert report["decode_share"] == report["decode_gbps"] / 12.5
    assert report["tokens"] > 0 and report["tokens_per_s"] > 0
    assert report["queued_requests"] > 0 and report["chunked_prefills"] > 0
    assert report["mean_batch"] > 1 and 0 < report["pool"]["mean"] <= report["pool"]["peak"] <= 1
    assert report["balance"] >= 1 and report["planned_balance"] >= 1
    assert "verification passed" in output


@pytest.mark.parametrize("read", [1e-6, 1e6, None])
def test_decode_is_a_share_of_the_read_bandwidth(replayed, monkeypatch, read):
    monkeypatch.setattr(limits, "read_gbps", lambda advance: read)
    report, output = replayed(*SMALL, *HEADS, "--requests", 2, "--verify", 0)
    assert (report["decode_share"] is None) == (read is None)
    # What Raddle itself aims at is no business of a report on the user's machine.
    assert "so attention reaches" in output and not re.search("missed|met|✗|✓|≥", output)


def test_the_output_says_what_it_means(replayed, tmp_path):
    trace = tmp_path / "[bold]my trace[red].jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 90, "output_length": 3}\n' * 3)
    report, output = replayed("--trace", trace, *HEADS, "--verify", 0)
    words = " ".join(output.split())
    assert "[bold]my trace[red].jsonl: 3 requests" in words and "Attention alone: a whole model has more layers" in words
    assert "Requests arrived 0.4 times as fast as in the trace" in words and 0 < report["busy"] <= 1


def test_a_queue_is_pointed_out():
    config = {"rate": 16.0, "device": "cpu", "isa": "avx2", "threads": 2, "schedule": "auto", "seed": 0}
    counts = dict.fromkeys(("steps", "prompt_tokens", "tokens", "decode_steps", "prefill_steps"), 1)
    result = {**counts, "config": config, "chunked_prefills": 1, "queued_requests": 2, "seconds": 30.0}
    late = {**result, "busy": 1.0, "ttft_us": {"p50": 24.8e6, "p99": 30e6}}
    assert "a lower --rate" in words_of.conditions(late)[-1]
    for fine in ({"busy": 0.7}, {"ttft_us": {"p50": 2e5, "p99": 1e6}}, {"busy": None, "ttft_us": None}):
        assert "--rate shows" not in "".join(words_of.conditions({**late, **fine}))


@pytest.mark.parametrize("flags", [(), ("--parallel", 2), ("--speculate", "2x2"), ("--schedule", "all")])
def test_progress_counts_all_tokens(replayed, monkeypatch, flags):
    """From the first step on, up to exactly as many as there are to do."""
    schedulers, seen = [], []

    def shown_by(progress, scheduler):
        schedulers.append(scheduler)
        return lambda history: seen.append(scheduler.tokens_done)

    monkeypatch.setattr(words_of, "shown_by", shown_by)
    replayed(*SMALL, *HEADS, "--requests", 3, "--verify", 0, *flags)
    assert 0 < seen[0] < seen[-1] == schedulers[0].tokens_to_do and seen == sorted(set(seen))


def test_verifying_tells_of_every_output(replayed, monkeypatch):
    told, verify = [], sampling.Sampler.verify

    def watched(sampler, done):
        assert sampler.num_drawn == 37
        return verify(sampler, told.append)

    monkeypatch.setattr(sampling.Sampler, "verify", watched)
    replayed(*SMALL, *HEADS, "--requests", 3, "--verify", 37)
    assert sum(told) == 37 and max(told) <= 8


def test_values_without_such_a_step_are_null(replayed, tmp_path):
    trace = tmp_path / "one.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 20, "output_length": 1}\n')
    report, _ = replayed("--trace", trace, *HEADS, "--verify", 0)
    assert report["decode_gbps"] is None and report["itl_us"] is None
    assert report["prefill_gflops"] > 0 and report["tokens"] == 1
    assert report["verified"]["checked"] == 0 and report["verified"]["worst"] is None


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_models_pass(replayed, model, dtype):
    report, _ = replayed(*SMALL, "--requests", 4, "--model", model, "--dtype", dtype)
    assert report["verified"]["checked"] == 200


@pytest.mark.parametrize(
    "flags",
    [
        "--rope",
        "--dtype float16 --page-size 1",
        "--window 20 --soft-cap 5 --sinks --layers 1",
        "--model gpt-oss-20b --no-sinks --window 0 --layers 3",
        "--model gemma-2-9b --rope --page-size 7",
        "--num-workers 5 --schedule algorithm1",
    ],
)
def test_flags_pass(replayed, flags):
    replayed(*SMALL, "--requests", 4, *HEADS, *flags.split())


# --- faults ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [name for name in INJECT if name != "prefix"])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "gpt-oss-20b"])
def test_a_planted_fault_fails(replayed, fault, model):
    report, output = replayed(*SMALL, "--model", model, *HEADS, "--inject", fault, exit_code=1)
    assert report["verified"]["failed"] > 0 and report["verified"]["worst"] > 1
    assert "verification failed; the worst:" in output and "of its budget" in output


def test_nan_is_a_number_in_the_report(replayed, monkeypatch):
    real = Engine._run

    def broken(self, batch, plan, layer, q, out):
        real(self, batch, plan, layer, q, out)
        out[:] = math.nan

    monkeypatch.setattr(Engine, "_run", broken)
    report, _ = replayed(*SMALL, *HEADS, exit_code=1)
    assert report["verified"]["failed"] == 200 and report["verified"]["worst"] > 1e300


# --- schedules ---------------------------------------------------------------------------------


def test_schedules_are_compared(replayed):
    report, output = replayed(*SMALL, *HEADS, "--schedule", "linear,one-per-request", "--num-workers", 3)
    assert report["verified"]["failed"] == 0 and report["config"]["schedule"] == "linear,one-per-request"
    found = report["schedules"]
    assert list(found) == ["linear", "one-per-request"]
    assert found["linear"]["run_us"] == report["run_us"] and found["linear"]["balance"] == report["balance"]
    for costs in found.values():
        assert all(costs[key]["p50"] > 0 for key in ("decode_us", "prefill_us", "run_us", "plan_us"))
    assert found["one-per-request"]["planned_balance"] > found["linear"]["planned_balance"] >= 1
    assert "under each schedule" in " ".join(output.split())


def test_schedules_take_turns(replayed, monkeypatch):
    seen = []
    turns = Engine._turns
    monkeypatch.setattr(Engine, "_turns", lambda self: seen.append(turns(self)) or seen[-1])
    report, output = replayed(*SMALL, *HEADS, "--schedule", "all", "--requests", 2, "--layers", 1)
    names = ["auto", "linear", "algorithm1", "one-per-request"]
    assert seen[0] == names and seen[1] == names[1:] + names[:1]
    assert list(report["schedules"]) == names and len(seen) == report["steps"]


# --- repeating ---------------------------------------------------------------------------------


def test_steps_repeat_exactly(replayed, tmp_path, monkeypatch):
    found = []
    verify = native.verify
    monkeypatch.setattr(native, "verify", lambda *args: found.append(args) or verify(*args))
    log = tmp_path / "steps.json.gz"
    first, _ = replayed(*SMALL, *HEADS, "--seed", 7, "--save-steps", log)
    again, _ = replayed("--steps", log, *HEADS)
    other, _ = replayed("--steps", log, *HEADS, "--schedule", "one-per-request", "--num-workers", 3)
    for report in (again, other):
        for key in ("trace", "requests", "tokens", "steps", "mean_batch", "queued_requests", "pool"):
            assert report[key] == first[key]
        assert report["config"]["seed"] == 7 and report["config"]["repeated"]
    # The second replay computed equal outputs of equal rows: each replay verifies equally many groups of rows.
    groups, left = divmod(len(found), 3)
    assert groups > 0 and left == 0
    for one, two in zip(found[:groups], found[groups : 2 * groups]):
        assert one[0] == two[0]
        for x, y in zip(one[1:5], two[1:5]):
            np.testing.assert_array_equal(x, y)


def test_another_seed_is_another_replay(replayed):
    worst = {replayed(*SMALL, *HEADS, "--seed", seed)[0]["verified"]["worst"] for seed in (1, 2)}
    assert len(worst) == 2


# --- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--trace", "{broken}"], "broken.csv:2: "),
        (["--synthetic", "normal:1:2"], "expected uniform:LOW:HIGH"),
        (["--pool-tokens", "1000"], "the pool has 62; raise --pool-tokens"),
        (["--max-context", "1"], "has no request"),
        (["--synthetic", "uniform:5:9", "--max-context", "2"], "has no request"),
        (["--num-qo-heads", "9"], "a multiple of KV heads"),
        (["--head-dim", "9"], "head_dim"),
        (["--model", "gpt-oss-20b", "--rope"], "YaRN"),
        (["--trace", "{broken}", "--synthetic", "uniform:5:9"], "can't be combined"),
        (["--steps", "{broken}"], "is not a log of steps"),
        (["--steps", "{broken}", "--seed", "3"], "--seed can't be combined with --steps"),
        (["--save-steps", "/nowhere/at/all"], "there is no folder"),
        (["--trace", "nowhere.csv"], "does not exist"),
        (["--schedule", "linear,fastest"], "found 'fastest'"),
        (["--prefix-cache"], "has no hashes of whole blocks of prompts"),
        (["--inject", "prefix"], "expected --prefix-cache"),
        (["--steps", "{broken}", "--no-prefix-cache"], "can't be combined with --steps"),
        (["--device", "cuda:77"], "--device cuda:77: "),
        (["--device", "gpu"], "device is 'gpu'; expected 'cpu'"),
    ],
)
def test_bad_input_exits_with_2(replayed, tmp_path, arguments, message):
    broken = tmp_path / "broken.csv"
    broken.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nno time,1,2\n")
    report, output = replayed(*(a.format(broken=broken) for a in arguments), exit_code=2)
    assert report is None
    assert message in " ".join(output.split())


# --- the parts ---------------------------------------------------------------------------------


def test_work_is_counted_as_the_masks_keep_it():
    spans = [Span(0, 0, 30), Span(1, 17, 12), Span(2, 90, 1)]
    for window in (None, 1, 20, 200):
        kind = LayerKind(window=window)
        pairs = sum(min(row + 1, window or row + 1) for s in spans for row in range(s.begin, s.begin + s.length))
        assert metrics._pairs(spans, kind) == pairs
        assert metrics._keys(spans[2:], kind) == min(91, window or 91)


def test_pages_are_poisoned_when_nobody_holds_them():
    engine = Engine(Model("tiny", 2, 1, 8, dtype="float16"), num_layers=1, num_pages=4, page_size=4)
    assert np.isnan(engine.pools[0][0]).all() and np.isnan(engine.pools[0][1]).all()
    engine.step(Batch([Span(0, 0, 6)], [[3, 1]]), lambda *_: None)
    k, v = engine.pools[0]
    assert not np.isnan(k[3]).any() and np.isnan(k[1, 2:]).all() and not np.isnan(v[1, :2]).any()
    engine.release([3, 1])
    assert np.isnan(k).all() and np.isnan(v).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounded_weights_have_a_larger_budget(dtype):
    model = Model("tiny", 2, 1, 8, dtype=dtype)
    at = np.zeros(1, np.int32), np.array([40], np.int32), np.zeros(1, np.int32)
    plain, rounded = (
        native.verify(reference(model, 0, 3, rounds), np.zeros((1, 8), np.float32), *at)[0] for rounds in (False, True)
    )
    assert rounded["expected"] == plain["expected"] and plain["budget"] < rounded["budget"] < 100 * plain["budget"]


def test_data_does_not_depend_on_the_batch():
    request, position = np.array([4, 9, 4], np.int32), np.array([0, 7, 30], np.int32)
    together, alone = np.empty((3, 2, 16), np.float32), np.empty((1, 2, 16), np.float32)
    native.fill("key", 1, 0, request, position, together)
    for i in range(3):
        native.fill("key", 1, 0, request[i : i + 1], position[i : i + 1], alone)
        np.testing.assert_array_equal(together[i], alone[0])
    native.fill("value", 1, 0, request, position, together[..., :8])
    assert not (together[0, :, :8] == alone[0, :, :8]).all()
