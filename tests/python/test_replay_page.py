"""`raddle replay --report`: one page of a replay that asks for nothing else, and what its pictures show."""

import json
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from raddle.replay import cli, page, pictures
from raddle.replay.engine import Engine
from raddle.replay.queues import Bar, Queues, Run, items, whole_queues
from raddle.replay.traces import BLOCK_TOKENS
from raddle.timeline import STAGES, Marks
from replays import no_bandwidth, replay  # noqa: F401: a fixture

SMALL = "--synthetic uniform:60:200 --requests 6 --rate 10000 --pool-tokens 800 --token-budget 64 --verify 0".split()
HEADS = "--num-qo-heads 8 --num-kv-heads 2 --head-dim 64 --num-workers 3".split()


@pytest.fixture
def drawn(monkeypatch):
    """What the page was made of."""
    seen = []
    write = page.write
    monkeypatch.setattr(page, "write", lambda *given: seen.append(given) or write(*given))
    return seen


class Read(HTMLParser):
    """The text and tables of a page; fails where elements are not closed, or something is to be loaded."""

    def __init__(self, path):
        super().__init__()
        self.open, self.text, self.pictures, self.rows = [], [], 0, []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == [] and "url(http" not in "".join(self.text)
        self.text = " ".join(" ".join(self.text).split())

    def handle_starttag(self, tag, attributes):
        if tag != "meta":
            self.open.append(tag)
        self.pictures += tag == "svg"
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        assert tag not in ("link", "script", "iframe", "image", "img", "pre", "b")
        for name, value in attributes:
            assert name not in ("src", "data", "href") and (name != "xlink:href" or value.startswith("#"))

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        if tag != "meta":
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_the_page(tmp_path):
    path = tmp_path / "page.html"
    report, _ = replay(tmp_path, *SMALL, *HEADS, "--report", path)
    read = Read(path)
    assert read.pictures == 8
    for text in (
        "uniform:60:200: 6 requests",
        "Requests in a step",
        "Query rows in a step",
        "requests in steps",
        "Keys of a request in a step",
        "Planning of a step",
        "New keys and values of a step",
        "Attention of a step, all layers",
        "replay's clock, s",
        "in use",
        f"size of the pool: {report['pool']['pages']}",
        "layer 1",
        "worker",
        "time since the step's attention began, ",
        "a worker is a thread on a CPU",
    ):
        assert text in read.text, text
    rows = {row[0]: row[1:] for row in read.rows if row}
    assert rows["how long it took"] == ["median", "99th percentile"]
    assert all(re.fullmatch(r"[\d.,]+ (s|ms|µs)", cell) for cell in rows["time to the first token, waiting included"])
    assert "3 workers" in rows["work"][0] and rows["schedule"][0].endswith(")")
    assert "evicted" not in read.text


def test_with_a_prefix_cache(tmp_path, drawn):
    requests = [
        {"timestamp": i, "input_length": BLOCK_TOKENS + 40, "output_length": 3, "hash_ids": [i % 2, 10 + i]}
        for i in range(5)
    ]
    trace = tmp_path / "<script>alert(1)<b> & co.jsonl"
    trace.write_text("\n".join(map(json.dumps, requests)))
    path = tmp_path / "page.html"
    report, _ = replay(tmp_path, "--trace", trace, "--pool-tokens", 800, *HEADS, "--verify", 0, "--report", path)
    read = Read(path)
    assert "<script>alert(1)<b> & co.jsonl" in read.text
    for text in ("of these: cached, and no request uses them", "read by several requests of a step", "evicted so far"):
        assert text in read.text
    ((_, _, history, _),) = drawn
    evicted = [step.evicted_tokens for step in history.steps]
    assert evicted == sorted(evicted) and evicted[-1] == report["prefixes"]["evicted_tokens"] > 0


def test_the_longest_step_is_shown(tmp_path, drawn):
    replay(tmp_path, *SMALL, *HEADS, "--schedule", "linear,algorithm1", "--report", tmp_path / "page.html")
    ((_, _, history, queues),) = drawn
    run_us = [step.cost.clocked.run_us for step in history.steps]
    assert queues.run_us == max(run_us) == run_us[queues.step]
    cost = history.steps[queues.step].cost.clocked
    assert [run.us for run in queues.runs] == [most for most, _ in cost.busy_us] and len(queues.runs) == 2
    for run in queues.runs:
        assert {bar.begin_us for bar in run.bars} == {0.0} and "schedule: linear" in run.explained
    ends = [step.end for step in history.steps]
    assert ends == sorted(ends) and ends[-1] == history.seconds


def test_items_of_a_timeline():
    marks = np.zeros((3, 9, 2), np.int32)
    told = [("started", 0, 100), ("opened", 4, 300), ("finished", 4, 1100), ("opened", 7, 1200), ("finished", 7, 1600)]
    for place, (stage, item, ns) in zip(marks[1], told):
        place[:] = ns, STAGES.index(stage) | item << 3
    found = items(Marks(marks))
    assert [bar.worker for bar in found] == [1, 1]
    np.testing.assert_allclose([bar[1:] for bar in found], [(0.0, 1.0), (1.0, 0.5)])
    assert Run(0, found, "").us == pytest.approx(1.5) and Run(0, [], "").us == 0
    assert whole_queues([3.0, 0.5]) == [Bar(0, 0.0, 3.0), Bar(1, 0.0, 0.5)]


def test_bars_lie_where_workers_were_busy():
    """Two runs, one after another: the second begins where the slowest worker of the first one ends."""
    runs = [Run(layer, whole_queues(us), "") for layer, us in enumerate([(30.0, 60.0), (40.0, 20.0)])]
    svg = pictures.gantt(Queues(0, 100.0, runs))
    shape = r'<path d="M ([\d.]+) [\d.]+ \nL ([\d.]+) [^"]*" clip-path="[^"]*" style="fill: #(?:1f77b4|ff7f0e)'
    boxes = re.findall(shape, svg)
    left, right = np.array(boxes, float).T
    scale = 40.0 / (right[2] - left[2])
    np.testing.assert_allclose((right - left) * scale, [30, 60, 40, 20], atol=0.1)
    np.testing.assert_allclose((left - left[0]) * scale, [0, 0, 60, 60], atol=0.1)


def test_without_matplotlib_nothing_is_replayed(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(Engine, "step", lambda *_: pytest.fail("it was replayed"))
    path = tmp_path / "page.html"
    _, output = replay(tmp_path, *SMALL, "--report", path, exit_code=2)
    assert '--report needs matplotlib: pip install "/path/to/raddle[pictures]"' in output and not path.exists()


def test_the_folder_must_be_there(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "serve", lambda *_: pytest.fail("it was replayed"))
    _, output = replay(tmp_path, *SMALL, "--report", tmp_path / "no" / "page.html", exit_code=2)
    assert "--report: there is no folder" in output
