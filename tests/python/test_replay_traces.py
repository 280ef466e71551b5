"""What arrives in a replay: trace files, synthetic requests, and the steps that a scheduler makes of them."""

import gzip
import itertools
import re

import pytest
import raddle
from hypothesis import given
from hypothesis import strategies as st
from raddle.replay import steplog
from raddle.replay.scheduler import Playback, Scheduler
from raddle.replay.span import Span
from raddle.replay.speculation import Shape
from raddle.replay.traces import EXCERPT, Request, TraceError, read_trace, select, synthetic

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:16:50.9951690,396,109\n"
)
MOONCAKE = (
    '{"timestamp": 3000, "input_length": 6758, "output_length": 500}\n'
    '{"timestamp": 4500, "input_length": 1030, "output_length": 1, "hash_ids": [7, 9, 12]}\n'
    '{"timestamp": 5000, "input_length": 512, "output_length": 1, "hash_ids": [7]}\n'
    '{"timestamp": 6000, "input_length": 511, "output_length": 1, "hash_ids": [13]}\n'
)


def written(folder, name, text):
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


# --- files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_azure(tmp_path, ending):
    first, second = read_trace(written(tmp_path, "azure.csv" + ending, AZURE.replace("\n", "\r\n")))
    assert first == Request(0.0, 374, 44)
    assert (second.input_tokens, second.output_tokens) == (396, 109)
    assert second.arrival == pytest.approx(64.314579)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_mooncake(tmp_path, ending):
    found = list(read_trace(written(tmp_path, "mooncake.jsonl" + ending, MOONCAKE + "\n")))
    assert found == [
        Request(0.0, 6758, 500),
        Request(1.5, 1030, 1, (7, 9)),
        Request(2.0, 512, 1, (7,)),
        Request(3.0, 511, 1),
    ]


@pytest.mark.parametrize(
    "text, line",
    [
        ("", 1),
        ("time,tokens\n", 1),
        (AZURE + "2023-11-16 18:17:00.0,1\n", 4),
        (AZURE + "yesterday,1,2\n", 4),
        (AZURE + "2023-11-16 18:17:00.0,many,2\n", 4),
        (AZURE + "2023-11-16 18:17:00.0,5,0\n", 4),
        (AZURE + "2020-11-16 18:17:00.0,5,1\n", 4),
        (MOONCAKE + "{\n", 5),
        (MOONCAKE + "[1, 2, 3]\n", 5),
        (MOONCAKE + '{"timestamp": 7000, "input_length": 5}\n', 5),
        (MOONCAKE + '{"timestamp": 7000, "input_length": "5", "output_length": 2}\n', 5),
        (MOONCAKE + '{"timestamp": 7000, "input_length": 0, "output_length": 2}\n', 5),
        *(
            (MOONCAKE + f'{{"timestamp": 7000, "input_length": 513, "output_length": 2, "hash_ids": {ids}}}\n', 5)
            for ids in ("[0]", "[0, 1, 2]", "[0, -1]", "[0, 18014398509481984]", "[0, 0.5]", "[0, true]", "7")
        ),
    ],
)
def test_a_malformed_line_is_named(tmp_path, text, line):
    with pytest.raises(TraceError, match=rf"^broken\.txt:{line}: "):
        list(read_trace(written(tmp_path, "broken.txt", text)))


def test_the_excerpt_is_whole():
    requests = list(read_trace(EXCERPT))
    assert len(requests) >= 64
    assert requests == sorted(requests, key=lambda r: r.arrival)
    assert "CC BY 4.0" in (EXCERPT.parent / "ATTRIBUTION.md").read_text()


def test_synthetic_requests():
    drawn = list(itertools.islice(synthetic("uniform:512:2048", seed=3), 500))
    assert drawn == list(itertools.islice(synthetic("uniform:512:2048", seed=3), 500))
    assert drawn != list(itertools.islice(synthetic("uniform:512:2048", seed=4), 500))
    assert all(512 <= r.input_tokens <= 2048 and 64 <= r.output_tokens <= 256 for r in drawn)
    assert drawn[-1].arrival == pytest.approx(499, rel=0.25)


@pytest.mark.parametrize("text", ["", "uniform", "uniform:5", "uniform:9:5", "uniform:0:5", "zipf:1:2", "uniform:a:b"])
def test_other_synthetic_requests_are_refused(text):
    with pytest.raises(ValueError, match="found"):
        synthetic(text, seed=0)


def test_select_drops_before_it_counts():
    requests = [Request(float(i), n, 1) for i, n in enumerate([50, 5, 60, 6, 7])]
    chosen = select(requests, max_context=10, count=2)
    assert chosen == [Request(0.0, 5, 1), Request(2.0, 6, 1)]


# --- the scheduler -----------------------------------------------------------------------------


def run_to_end(scheduler, seconds=lambda step: 0.01):
    """All steps, with each one's page tables, checked against each other."""
    steps, clock = [], 0.0
    while not scheduler.done:
        step = scheduler.schedule(clock)
        if not step:
            assert scheduler.next_arrival > clock, "nothing runs and nothing is to come"
            clock = scheduler.next_arrival
            continue
        held = [page for r in scheduler.running.values() for page in scheduler.pool.pages(r.key).tolist()]
        assert len(held) == len(set(held)), "a page belongs to two requests"
        assert len(held) == scheduler.pool.used <= scheduler.pool.num_pages - scheduler.promised
        for span, pages in zip(step, scheduler.tables(step)):
            assert scheduler.running[span.request].request.arrival <= clock
            assert len(pages) == -(-(span.begin + span.length) // scheduler.pool.page_size)
        clock += seconds(step)
        scheduler.complete(step, clock)
        steps.append(step)
    return steps


requests_strategy = st.lists(
    st.builds(Request, st.floats(0, 3), st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=12
).map(lambda requests: sorted(requests, key=lambda r: r.arrival))


@given(requests_strategy, st.integers(1, 7), st.integers(80, 200), st.integers(1, 40))
def test_every_row_is_computed_once_and_in_order(requests, page_size, pool_tokens, budget):
    pool = raddle.PagePool(-(-pool_tokens // page_size), page_size)
    scheduler = Scheduler(requests, pool, budget)
    steps = run_to_end(scheduler)
    rows = {i: [] for i in range(len(requests))}
    for step in steps:
        assert sum(span.length for span in step) <= budget
        for span in step:
            prompt = requests[span.request].input_tokens
            assert span.length == 1 or span.begin + span.length <= prompt
            rows[span.request] += range(span.begin, span.begin + span.length)
    for i, request in enumerate(requests):
        assert rows[i] == list(range(request.input_tokens + request.output_tokens - 1))
    assert pool.used == scheduler.promised == 0


@given(requests_strategy, st.integers(1, 7), st.integers(1, 40), st.floats(0.1, 10))
def test_a_log_repeats_whatever_a_step_costs(requests, page_size, budget, speed):
    make_pool = lambda: raddle.PagePool(-(-90 // page_size), page_size)  # noqa: E731
    steps = run_to_end(Scheduler(requests, make_pool(), budget))
    assert run_to_end(Playback(requests, make_pool(), steps), lambda step: 0.01 * speed) == steps


def test_token_times():
    scheduler = Scheduler([Request(1.0, 5, 3)], raddle.PagePool(2, 4), token_budget=4)
    assert scheduler.schedule(0.5) == [] and scheduler.next_arrival == 1.0
    ends = {1.5: [Span(0, 0, 4)], 2.0: [Span(0, 4, 1)], 3.0: [Span(0, 5, 1)], 4.5: [Span(0, 6, 1)]}
    for end, expected in ends.items():
        step = scheduler.schedule(1.0)
        assert step == expected
        done = scheduler.complete(step, end)
    assert done[0].token_times == [2.0, 3.0, 4.5]
    assert scheduler.done


def test_decodes_come_first_and_a_full_pool_queues():
    requests = [Request(0.0, 4, 10), Request(0.0, 20, 4), Request(0.0, 2, 2)]
    scheduler = Scheduler(requests, raddle.PagePool(10, 4), token_budget=6)
    scheduler.complete(scheduler.schedule(0.0), 1.0)
    assert scheduler.schedule(1.0) == [Span(0, 4, 1), Span(1, 2, 5)]
    assert scheduler.queued == set(), "the budget, not the pool, kept request 2 waiting"
    scheduler = Scheduler(requests, raddle.PagePool(10, 4), token_budget=60)
    assert scheduler.schedule(0.0) == [Span(0, 0, 4), Span(1, 0, 20)]
    assert scheduler.queued == {2}


def test_a_request_that_never_fits_is_refused_at_start():
    with pytest.raises(ValueError, match=r"request 1 needs 4 pages \(12 \+ 2 tokens\), the pool has 3"):
        Scheduler([Request(0.0, 8, 4), Request(0.0, 12, 2)], raddle.PagePool(3, 4), token_budget=8)
    with pytest.raises(ValueError, match="token budget is 0"):
        Scheduler([Request(0.0, 8, 4)], raddle.PagePool(3, 4), token_budget=0)


@pytest.mark.parametrize(
    "steps", [[[Span(0, 1, 4)]], [[Span(0, 0, 9)]], [[Span(0, 0, 8)], [Span(0, 8, 2)]], [[Span(5, 0, 1)]]]
)
def test_a_log_that_makes_no_sense_is_refused(steps):
    playback = Playback([Request(0.0, 8, 4)], raddle.PagePool(3, 4), steps)
    with pytest.raises(ValueError, match="the log computes"):
        run_to_end(playback)


def test_a_log_survives_its_file(tmp_path):
    steps = [[Span(0, 0, 8)], [Span(0, 8, 1)]]
    requests = [Request(0.5, 8, 4), Request(0.7, 1030, 4, (3, 4))]
    for name, samples, shape in (("log.json", 4, None), ("log.json.gz", 1, Shape(2, 3))):
        log = steplog.StepLog("trace", 5, 16, 8, 512, True, samples, shape, 2.0, requests, steps, [0])
        steplog.save(log, tmp_path / name)
        assert steplog.load(tmp_path / name) == log
    for text in ("", "{}", "[]", '{"format": "another"}', '{"format": "raddle replay steps 3", "seed": 1}'):
        with pytest.raises(ValueError, match=r"^broken\.json is not a log"):
            steplog.load(written(tmp_path, "broken.json", text))


@pytest.mark.parametrize("speed", [1, 4, 16])
def test_two_cores_keep_up_with_the_default_rate(speed):
    """On machines from one to sixteen times as fast as two cores with 150 GFLOP/s and 15 GB/s, no request queues."""
    from raddle.replay.cli import replay

    default = {option.name: option.default for option in replay.params}
    requests = select(read_trace(EXCERPT))
    requests = [Request(r.arrival / default["rate"], r.input_tokens, r.output_tokens) for r in requests]
    pool = raddle.PagePool(default["pool_tokens"] // default["page_size"], default["page_size"])
    scheduler = Scheduler(requests, pool, default["token_budget"])

    def seconds(step):
        flops = sum(4 * 32 * 128 * n * (begin + n / 2) for _, begin, n in step if n > 1)
        read = sum(2 * 8 * 128 * 2 * begin for _, begin, n in step if n == 1)
        return default["layers"] * (flops / 150e9 + read / 15e9) / speed

    steps = run_to_end(scheduler, seconds)
    assert sum(map(seconds, steps)) < 0.7 * max(r.arrival for r in requests)
    assert not scheduler.queued
    assert any(span.begin < span.begin + span.length < requests[span.request].input_tokens for s in steps for span in s)


_LINE = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
_HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize(
    "data, line",
    [
        (_HEAD + "2023-11-16 18:17:03.9799600," + "9" * 200_000 + ",5\n", 2),  # more than csv's longest field
        (_HEAD + "2023-11-16 18:17:03.9799600," + "9" * 5000 + ",5\n", 2),
        (_LINE + "[" * 100_000 + "\n", 2),
        (_LINE + '{"timestamp": ' + "[" * 100_000 + "\n", 2),
        (_LINE + '{"timestamp": 1' + "0" * 400 + ', "input_length": 1, "output_length": 1}\n', 2),
        (_LINE + '{"timestamp": 1, "input_length": 1' + "0" * 30 + ', "output_length": 1}\n', 2),
        (_LINE + '{"timestamp": 1, "input_length": 1e308, "output_length": 1}\n', 2),
        (_LINE + '{"timestamp": "' + "9" * 5000 + '", "input_length": 1, "output_length": 1}\n', 2),
        (_LINE.encode() + b"\xff\xfe\xff\n", 2),
        (_LINE + "x" * (17 << 20), 2),
    ],
)
def test_hostile_lines_are_named(tmp_path, data, line):
    path = tmp_path / "hostile.txt"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    # Text is decoded in pieces, so a bad byte may show before its line.
    with pytest.raises(TraceError, match=rf"^hostile\.txt:(1|{line}): ") as raised:
        list(read_trace(path))
    assert len(str(raised.value)) < 500


def test_numbers_of_many_digits_are_not_read(tmp_path):
    """Python reads them in the square of their length, or, since 3.11, refuses those of more than 4,300 digits."""
    path = tmp_path / "digits.csv"
    path.write_text(_HEAD + "2023-11-16 18:17:03.9799600," + "9" * 21 + ",5\n")
    with pytest.raises(TraceError, match=r"^digits\.csv:2: a number of more than 20 digits; found "):
        list(read_trace(path))


@pytest.mark.parametrize("damage", [lambda b: b[:-20], lambda b: b[:40] + b"\0" * 20 + b[60:], lambda b: b"\x1f\x8b" + b[9:]])
def test_damaged_gzip_is_named(tmp_path, damage):
    path = tmp_path / "damaged.gz"
    lines = "".join(_LINE.replace('"timestamp": 0', f'"timestamp": {n * 7919 % 10007}') for n in range(10007))
    path.write_bytes(damage(gzip.compress((_LINE + lines).encode())))
    with pytest.raises(TraceError, match=r"^damaged\.gz:\d+: "):
        list(read_trace(path))


def test_a_line_without_end_takes_bounded_memory(tmp_path):
    """A gigabyte of one line, a megabyte of gzip."""
    import resource

    from forked import outcome

    path = tmp_path / "endless.gz"
    with gzip.open(path, "wb", 1) as file:
        for _ in range(1024):
            file.write(b"x" * (1 << 20))

    def read():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            list(read_trace(path))
        except TraceError as error:
            return str(error), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    message, kilobytes = outcome(read, seconds=120)
    assert message.startswith("endless.gz:1: more than") and kilobytes < 300_000


_LOG = (
    '{"format": "raddle replay steps 3", "trace": "t", "seed": 0, "page_size": 16, "num_pages": 9, "token_budget": 9, '
    '"prefix_cache": false, "samples": 1, "speculate": null, "rate": 1.0, "requests": [[0.0, 5, 2, []]], '
    '"steps": [[[0, 0, 5]]], "queued": []}'
)


@pytest.mark.parametrize(
    "name, data",
    [
        ("deep.json", b"[" * 100_000),
        ("no list.json", b"[]"),
        ("endless.json", _LOG.replace("5, 2", "Infinity, 2").encode()),
        ("strange.json", _LOG.replace('"queued"', '"' + "x" * 5000 + '"').encode()),
        ("short.gz", gzip.compress(_LOG.encode())[:-20]),
        ("damaged.gz", gzip.compress(_LOG.encode())[:40] + b"\0" * 20 + gzip.compress(_LOG.encode())[60:]),
        ("no gzip.gz", _LOG.encode()),
    ],
)
def test_damaged_logs_of_steps_are_named(tmp_path, name, data):
    path = tmp_path / name
    path.write_bytes(_LOG.encode())
    if not name.endswith(".gz"):
        assert steplog.load(path).steps == [[(0, 0, 5)]]
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"^{re.escape(name)} is not a log of steps") as raised:
        steplog.load(path)
    assert len(str(raised.value)) < 500


def test_a_log_without_end_takes_bounded_memory(tmp_path, monkeypatch):
    """What lies behind the most bytes is not read, and its beginning is not taken for the whole."""
    import resource

    from forked import outcome

    path = tmp_path / "endless.gz"
    with gzip.open(path, "wb", 1) as file:
        file.write(_LOG.encode())
        for _ in range(512):
            file.write(b" " * (1 << 20))
    monkeypatch.setattr(steplog, "_MOST_BYTES", 1 << 20)

    def read():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            return steplog.load(path), 0
        except ValueError as error:
            return str(error), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    message, kilobytes = outcome(read, seconds=120)
    assert "more than 1048576 bytes" in message and kilobytes < 200_000
