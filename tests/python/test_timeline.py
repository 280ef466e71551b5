"""What workers did when: as the kernel marks it, and as it is read."""

import json
import types

import ml_dtypes
import numpy as np
import pytest
import raddle
from device_arrays import DeviceArray
from draws import draw
from engine import spec_of, twin
from raddle.timeline import STAGES, Marks
from small import refuses, reserved

HEADS = {"dim": 64, "group": 2, "num_kv_heads": 2, "dtype": "bfloat16"}
LENGTHS = [(1, 300), (70, 90), (0, 5), (2, 1)]


@pytest.fixture(autouse=True)
def mma(monkeypatch):
    """The family of kernels that marks."""
    monkeypatch.setenv("RADDLE_BACKEND", "mma")


@pytest.fixture
def problem(rng):
    return draw(rng, "paged", "causal", lengths=LENGTHS, page_size=16, **HEADS)


def run(attn, plan, problem, timeline):
    ordinal = int(attn.device.partition(":")[2])
    q, k, v, out = (DeviceArray(x, ordinal) for x in (problem.q, *problem.kv[0], np.zeros_like(problem.q)))
    attn.run(plan, q, (k, v), out=out, timeline=timeline)


def test_every_item_has_its_marks(gpu, problem):
    marks_every_item(raddle.Attention(spec_of(problem), device=gpu), problem)


def marks_every_item(attn, problem):
    plan = attn.plan(twin(problem.layout), num_workers=3)
    assert plan.marks_timelines
    timeline = raddle.Timeline(plan, attn.device)
    for _ in range(2):
        run(attn, plan, problem, timeline)
        marks = timeline.read()
        assert len(marks.workers) == 3
        items = np.concatenate([row["item"][row["stage"] == STAGES.index("computed")] for row in marks.workers])
        assert sorted(items) == list(range(plan.num_items))
        for row in marks.workers:
            assert row["stage"][0] == 0 and (np.diff(row["us"]) >= 0).all()
            # The stages of an item follow each other; what is composed of others' states comes last.
            row = row[1:-1] if row["stage"][-1] == STAGES.index("contracted") else row[1:]
            for item in set(row["item"]):
                stages = row["stage"][row["item"] == item]
                assert list(stages) == [1, 2, 3, 4][: len(stages)]
        text = marks.summary()
        assert "3 workers end" in text and f"computed   at{plan.num_items:>16}" in text
        timeline.clear()
    assert "no marks" in timeline.read().summary()


def test_marks_beyond_the_room_are_dropped(gpu, problem):
    attn = raddle.Attention(spec_of(problem), device=gpu)
    plan = attn.plan(twin(problem.layout), num_workers=1)
    timeline = raddle.Timeline(plan, attn.device, num_items=1)
    run(attn, plan, problem, timeline)
    assert plan.longest_queue == plan.num_items > 1 and len(timeline.read().workers[0]) <= 6


def test_a_reservations_plan_in_force(gpu, problem):
    attn = raddle.Attention(spec_of(problem), device=gpu)
    reservation = reserved(attn, max_requests=4, max_qo_tokens=80, max_kv_tokens=1000, num_workers=3)
    reservation.update(twin(problem.layout))
    timeline = raddle.Timeline(reservation, gpu)
    run(attn, reservation, problem, timeline)
    marks = timeline.read()
    assert sum((row["stage"] == 2).sum() for row in marks.workers) == reservation.plan.num_items


@pytest.mark.parametrize("form", ["paged", "cascade"])
def test_the_bench_watches_its_cases(gpu, form):
    """Through the code of `raddle bench gpu`; its tensors are not torch's, which knows no emulated driver."""
    pytest.importorskip("torch")
    from raddle.bench.gpu import own
    from raddle.bench.gpu.cases import Case
    from raddle.bench.gpu.problem import Problem

    case = Case("small", (1, 1, 1), (48, 41, 33), (4, 2, 32), form=form, prefix=32 if form == "cascade" else 0)
    problem = Problem(case, "cpu")
    for name in ("q", "k", "v"):
        setattr(problem, name, DeviceArray(getattr(problem, name).float().numpy().astype(ml_dtypes.bfloat16)))
    problem.device = gpu
    problem.empty = lambda: DeviceArray(np.zeros(problem.q.shape, problem.q.dtype))
    ((_, make),) = own.contestants(problem, case)
    flushed = []
    marks = make().watched(lambda: flushed.append(True))
    items = np.concatenate([row["item"][row["stage"] == 2] for row in marks.workers])
    assert flushed == [True] and len(items) >= 6 and sorted(items) == list(range(len(items)))


def test_a_cpu_has_none(problem):
    attn = raddle.Attention(spec_of(problem))
    plan = attn.plan(twin(problem.layout))
    with refuses(ValueError, "device is 'cpu'", "expected 'cuda'"):
        raddle.Timeline(plan, attn.device)


def test_a_run_on_a_cpu_takes_none(problem):
    attn = raddle.Attention(spec_of(problem))
    plan, out = attn.plan(twin(problem.layout)), np.full_like(problem.q, np.nan)
    with refuses(ValueError, "timeline is given", "'cpu'", "expected a GPU attention"):
        attn.run(plan, problem.q, problem.kv[0], out=out, timeline=np.zeros((plan.num_workers, 9, 2), np.float32))
    assert np.isnan(out).all()


def test_a_timeline_lies_where_the_attention_computes(gpu, problem):
    attn = raddle.Attention(spec_of(problem), device=gpu)
    plan = attn.plan(twin(problem.layout), num_workers=2)
    with refuses(ValueError, "timeline lies on device 'cpu'", f"expected '{attn.device}'"):
        run(attn, plan, problem, np.zeros((2, 9, 2), np.float32))


def test_a_plan_made_on_the_gpu_needs_the_number_of_items():
    plan = types.SimpleNamespace(num_workers=3, longest_queue=None)
    with refuses(ValueError, "num_items is None", "made on the GPU"):
        raddle.Timeline(plan, "cuda:0")


def test_the_longest_queue(problem):
    attn = raddle.Attention(spec_of(problem))
    one, two = (attn.plan(twin(problem.layout), num_workers=n, schedule="linear") for n in (1, 2))
    assert one.longest_queue == one.num_items and two.num_items / 2 <= two.longest_queue < two.num_items


# --- reading -----------------------------------------------------------------------------------


def marks_of(*workers):
    """Of lists of (stage, item, ns of the clock)."""
    raw = np.zeros((len(workers), 9, 2), np.int64)
    for row, marks in zip(raw, workers):
        for place, (stage, item, ns) in zip(row, marks):
            place[:] = ns, STAGES.index(stage) | item << 3
    return Marks(raw.astype(np.uint32).view(np.int32))


BEGIN = 2**32 - 1500  # the clock's 32 bits wrap around
WORKED = [
    [("started", 0, BEGIN), ("opened", 0, BEGIN + 1000), ("computed", 0, BEGIN + 3000)],
    [("started", 1, BEGIN - 500), ("opened", 1, BEGIN + 500), ("finished", 1, BEGIN + 6500)],
    [],
]


def test_times_count_from_the_first_mark():
    marks = marks_of(*WORKED)
    assert [list(row["us"]) for row in marks.workers] == [[0.5, 1.5, 3.5], [0.0, 1.0, 7.0], []]
    assert list(marks.workers[1]["item"]) == [1, 1, 1] and list(marks.busy_us) == [3.0, 7.0, 0.0]
    assert list(marks.ends_us) == [3.5, 7.0]
    stages = marks.stages()
    assert list(stages["opened"]["took"]) == [1.0, 1.0] and list(stages["finished"]["took"]) == [6.0]
    assert stages["stored"]["at"].size == 0 and stages["started"]["took"].size == 0


def test_marks_come_in_the_order_of_time():
    (row,) = marks_of([("started", 0, 100), ("computed", 0, 900), ("opened", 1, 500)]).workers
    assert [(STAGES[s], i) for s, i, _ in row] == [("started", 0), ("opened", 1), ("computed", 0)]


def test_the_summary_says_who_was_last():
    text = marks_of(*WORKED).summary()
    assert "2 workers end: p5 3.7, median 5.2, last 7.0" in text
    assert "longest busy worker over the mean: 1.400" in text
    assert "the last, worker 1: started 1 at 0.0, opened 1 at 1.0, finished 1 at 7.0" in text


def test_as_trace_events():
    read = json.loads(marks_of(*WORKED).json())
    events = [tuple(e[key] for key in ("tid", "name", "ts", "dur")) for e in read["traceEvents"]]
    first = [(0, "opened", 0.5, 1.0), (0, "computed", 1.5, 2.0)]
    assert events == [*first, (1, "opened", 0.0, 1.0), (1, "finished", 1.0, 6.0)]
    assert {(e["ph"], e["pid"], e["args"]["item"]) for e in read["traceEvents"]} == {("X", 0, 0), ("X", 0, 1)}
    assert json.loads(marks_of([], []).json())["traceEvents"] == []
