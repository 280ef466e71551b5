"""`raddle replay --device cuda`: small replays on a GPU. Run with --device cuda; see test_cuda.py."""

import contextlib
import sys
import time

import numpy as np
import pytest
import raddle
import tvm_ffi
from raddle.replay.cuda import CudaEngine, _Torch
from raddle.replay.engine import Batch
from raddle.replay.models import Model
from raddle.replay.span import Span
from replays import replay

# Steps of prefill, of decode, of both; more rows in some than the smallest reservation has.
TINY = "--synthetic uniform:10:30 --requests 3 --rate 10000 --pool-tokens 160 --token-budget 24 --verify 60".split()
HEADS = "--num-qo-heads 4 --num-kv-heads 2 --head-dim 32 --num-workers 3".split()

GPT_OSS = "--model gpt-oss-20b --dtype float16"


@pytest.fixture
def replayed(tmp_path, gpu, monkeypatch):
    monkeypatch.setattr("raddle.replay.cli.read_gbps", lambda device, progress: 1000.0)
    return lambda *arguments, **options: replay(tmp_path, *TINY, *HEADS, "--device", gpu, *arguments, **options)


def test_the_report(replayed, tmp_path):
    log = tmp_path / "steps.json"
    report, output = replayed("--save-steps", log)
    verified = report["verified"]
    assert verified["checked"] == 60 and verified["failed"] == 0 and 0 < verified["worst"] < 1
    assert all(verified["strata"][s] > 0 for s in ("chunk", "decode", "page edge"))
    for key in ("itl_us", "ttft_us", "plan_us", "append_us", "run_us"):
        assert 0 < report[key]["p50"] <= report[key]["p99"]
    assert report["balance"] >= 1 and report["planned_balance"] >= 1 and report["read_gbps"] == 1000.0
    assert report["decode_gbps"] > 0 and report["prefill_gflops"] > 0
    torch = sys.modules.get("torch")
    assert report["config"]["graphs"] == (torch is not None and torch.cuda.is_available())
    assert report["config"]["device"].startswith("cuda:") and report["config"]["gpu"] in " ".join(output.split())


def test_the_page_shows_items(replayed, tmp_path):
    path = tmp_path / "page.html"
    replayed("--report", path)
    text = path.read_text()
    assert text.count("<svg") == 8 and "A bar is one work item" in text and "work items for 3 workers" in text


@pytest.mark.parametrize("flags", [GPT_OSS, "--rope --layers 1 --soft-cap 5 --window 9"])
def test_models_under_every_schedule(replayed, flags):
    report, _ = replayed("--schedule", "all", *flags.split())
    assert report["verified"]["failed"] == 0
    found = report["schedules"]
    assert list(found) == ["auto", "linear", "algorithm1", "one-per-request"]
    assert all(costs[key]["p50"] > 0 for costs in found.values() for key in ("decode_us", "prefill_us", "plan_us"))


@pytest.mark.parametrize("fault", ["append", "page", "mask"])
def test_a_planted_fault_fails(replayed, fault):
    report, output = replayed("--inject", fault, exit_code=1)
    assert report["verified"]["failed"] > 0 and "verification failed; the worst:" in output


def test_prefixes_of_other_requests_and_samples(replayed, tmp_path, gpu):
    trace = tmp_path / "trace.jsonl"
    line = '{{"timestamp": {}, "input_length": {}, "output_length": 3, "hash_ids": [0, {}]}}\n'
    trace.write_text(line.format(0, 520, 1) + line.format(10**7, 530, 2))
    flags = "--rate 1 --pool-tokens 2000 --token-budget 260 --layers 1 --verify 60 --parallel 2".split()
    report, _ = replay(tmp_path, "--trace", trace, *flags, *HEADS, "--device", gpu)
    assert report["tokens"] == 2 * 2 * 3 and report["prefixes"]["tokens_saved"] == 512
    assert report["verified"]["strata"]["reused prefix"] > 0
    assert report["verified"]["failed"] == 0


def test_runs_that_mark_no_timelines(replayed, tmp_path, monkeypatch):
    """As those of long queries on Hopper: their workers are not watched, and the report does without."""
    monkeypatch.setattr(raddle.Plan, "marks_timelines", property(lambda plan: False))
    report, output = replayed("--report", tmp_path / "report.html")
    assert report["verified"]["failed"] == 0 and report["balance"] is None
    assert "these kernels mark no timelines" in " ".join(output.split())
    assert "Workers" not in (tmp_path / "report.html").read_text()


def test_what_no_run_has_written_fails(replayed, monkeypatch):
    monkeypatch.setattr(CudaEngine, "_run_layer", lambda *_: None)
    report, _ = replayed(exit_code=1)
    assert report["verified"]["failed"] == 60 and report["verified"]["worst"] > 1e300


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--dtype", "float32"], "float32"),
        (["--inject", "merge"], "--inject merge: states are merged on the host; expected --device cpu"),
        (["--inject", "prefix"], "--inject prefix: rows are written by the host; expected --device cpu"),
    ],
    ids=["dtype", "merge", "prefix"],
)
def test_what_gpus_lack_is_refused(replayed, arguments, message):
    _, output = replayed(*arguments, exit_code=2)
    assert message in " ".join(output.split())


class Captures:
    """Of torch what the replay asks for, on the emulated driver: a graph is what a stream of its own was given."""

    def __init__(self, emulator, device):
        self.emulator, self.device, self.graphs, self.replays = emulator, tvm_ffi.device(device), 0, 0
        self.cuda, captures = self, self

        class CUDAGraph:
            def __init__(self):
                captures.graphs += 1
                self.stream = 0x400 + captures.graphs

            def replay(self):
                captures.replays += 1
                emulator.raddle_emulator_replay(self.stream)

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = time.perf_counter()

            def synchronize(self):
                pass

            def elapsed_time(self, other):
                return 1e3 * (other.at - self.at)

        self.CUDAGraph, self.Event = CUDAGraph, Event

    def _sleep(self, cycles):
        pass

    @contextlib.contextmanager
    def stream(self, stream):
        with tvm_ffi.use_raw_stream(self.device, stream):
            yield

    @contextlib.contextmanager
    def graph(self, graph, stream):
        self.emulator.raddle_emulator_capture(graph.stream)
        with self.stream(graph.stream):
            yield
        self.emulator.raddle_emulator_capture(None)


def test_one_graph_a_reservation(replayed, gpu, emulator, monkeypatch):
    captures = Captures(emulator, "cuda:0" if gpu == "cuda" else gpu)
    monkeypatch.setattr("raddle.replay.cuda.torch_has_gpu", lambda: True)
    monkeypatch.setattr(tvm_ffi, "use_torch_stream", lambda context: context)
    monkeypatch.setattr(_Torch, "__init__", lambda self, device: vars(self).update(torch=captures, stream=0x400))
    report, _ = replayed("--schedule", "linear,one-per-request", *GPT_OSS.split())
    assert report["config"]["graphs"] and report["verified"]["failed"] == 0
    # Two schedules, two sizes: steps of up to 16 rows, and of more.
    assert captures.graphs == 4 and captures.replays == 2 * report["steps"] > 4


def test_pages_are_poisoned_when_nobody_holds_them(gpu):
    model = Model("tiny", 2, 1, 8, dtype="float16")
    engine = CudaEngine(model, 1, num_pages=4, page_size=4, device=gpu, max_requests=2, max_rows=8)
    k, v = engine.pools[0]
    assert np.isnan(k.numpy()).all() and np.isnan(v.numpy()).all()
    engine.step(Batch([Span(0, 0, 6)], [[3, 1]]), lambda *_: None)
    assert not np.isnan(k.numpy()[3]).any() and np.isnan(k.numpy()[1, 2:]).all()
    assert not np.isnan(v.numpy()[1, :2]).any()
    engine.release([3, 1])
    assert np.isnan(k.numpy()).all() and np.isnan(v.numpy()).all()
