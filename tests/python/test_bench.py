"""The benchmarks measure what they say: literal workloads, outputs that agree, medians, rows for programs."""

import functools
import json
import time

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from raddle._progress import Progress
from raddle.bench import balance, cli, compare, engines, kv, plan_cost, report, timing, workloads
from raddle.bench.bars import Measured
from raddle.bench.compare import Result
from raddle.bench.workloads import Workload

KEYS = {"workload", "engine", "us", "value", "unit"}
HEADS = dict(num_qo_heads=4, num_kv_heads=2, head_dim=16)
SMALL = [
    Workload(phase, dtype, "tiny", kv_len, **HEADS)
    for dtype in ("bf16", "fp32")
    for phase, kv_len in (("decode", (33, 33, 33)), ("decode", (40, 1, 17)), ("prefill", (50,)))
]


@pytest.fixture(params=SMALL, ids=lambda w: f"{w.phase}-{w.dtype}-{len(set(w.kv_len))}")
def small(request):
    return request.param


# --- workloads ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, sums",
    {
        "constant": {1024: 16384, 4096: 65536, 8192: 131072},
        "uniform": {1024: 12325, 4096: 49295, 8192: 98593},
        "skewed": {1024: 16381, 4096: 65531, 8192: 131065},
    }.items(),
)
def test_lengths_are_the_literal_ones(kind, sums):
    for mean, total in sums.items():
        assert sum(workloads.lengths(kind, 16, mean)) == total
        assert len(workloads.lengths(kind, 16, mean)) == 16
        assert len(workloads.lengths(kind, 1, mean)) == 1
    assert workloads.lengths("skewed", 1, 4096) == (4096,)
    assert max(workloads.lengths("skewed", 16, 4096)) == 16644


@pytest.mark.parametrize("wrong", [("constant", 2, 1024), ("constant", 1, 1000), ("zipf", 16, 1024)])
def test_unknown_lengths_are_refused(wrong):
    with pytest.raises(ValueError, match="expected"):
        workloads.lengths(*wrong)


def test_names_say_phase_and_dtype():
    names = [w.name for w in workloads.ALL]
    assert len(set(names)) == len(names)
    for w in workloads.ALL:
        assert w.phase in w.name.split() and w.dtype in w.name.split()
    assert len(workloads.chosen()) == 12


def test_workloads_are_chosen_by_words():
    assert [w.name for w in workloads.chosen(("fp32 prefill", "bf16 S8192"))] == [
        "decode bf16 B1 S8192",
        "prefill fp32 B1 S1024",
        "prefill fp32 B1 S4096",
    ]
    with pytest.raises(ValueError, match="'fp64'.*decode bf16 B16 S1024"):
        workloads.chosen(("decode", "fp64"))


def test_rates_count_bytes_of_kv_and_half_the_square():
    decode = Workload("decode", "bf16", "S1024", (1024,) * 16)
    assert decode.kv_bytes == 16 * 1024 * 8 * 128 * 2 * 2 == 67_108_864
    assert decode.rate(1000.0) == pytest.approx(67.108864)
    prefill = Workload("prefill", "fp32", "S4096", (4096,))
    assert prefill.rate(1e6) == pytest.approx(4 * 32 * 128 * 4096**2 / 2 / 1e9)


# --- timing ---------------------------------------------------------------------------------


def test_engines_take_turns():
    seen, ticks = [], []
    calls = {name: functools.partial(lambda name, step: seen.append((name, step)), name) for name in "abc"}
    times = timing.interleaved(calls, rounds=5, settle_s=0.0, tick=lambda: ticks.append(1))
    assert {name: len(found) for name, found in times.items()} == {"a": 5, "b": 5, "c": 5}
    assert len(ticks) == 18
    for step in range(6):  # every engine once a round, each time with the next pool
        assert sorted(seen[3 * step : 3 * step + 3]) == [("a", step), ("b", step), ("c", step)]
    assert [seen[3 * step][0] for step in range(4)] == ["a", "b", "c", "a"]


def test_a_call_that_waits_is_measured():
    times = timing.interleaved({"slow": lambda step: time.sleep(0.003)}, rounds=3)
    assert min(times["slow"]) >= 3000
    assert len(timing.repeated(lambda: None, 30)) == 30


def test_speedup_is_the_median_of_ratios_in_rounds():
    # A disturbance in the last two rounds slows both engines; the ratio of medians would be 4.5.
    ours, theirs = [1.0, 1.0, 1.0, 9.0, 9.0], [2.0, 2.0, 2.0, 18.0, 9.0]
    assert timing.speedup(ours, theirs) == 2.0
    assert timing.best({"a": [1.0, 9.0, 9.0], "b": [5.0, 5.0, 5.0]}) == "b"
    with pytest.raises(ValueError, match="rounds"):
        timing.speedup([1.0], [1.0, 2.0])


# --- engines --------------------------------------------------------------------------------


def test_all_engines_compute_the_same_from_every_pool(small):
    assert engines.copies(67_108_864) * 67_108_864 >= 2 * 10**9
    batch = engines.Batch.random(small)
    reference = batch.reference()
    assert reference.shape == batch.q.shape
    pool_bytes = 3 * small.kv_bytes
    found = [engines.raddle_engine(batch, pool_bytes), *engines.torch_engines(batch, pool_bytes)]
    ragged = len(set(small.kv_len)) > 1
    assert len(found) == (2 if ragged else 3)
    for engine in found:
        for step in range(4):
            assert engine.error(reference, step) <= engines.TOLERANCE[small.dtype], (engine.name, step)


def test_a_wrong_output_is_not_timed(monkeypatch):
    wrong = engines.Engine("wrong", lambda step: None, lambda out: torch.full((3, 4, 16), float("nan")))
    monkeypatch.setattr(engines, "torch_engines", lambda *_: [wrong])
    with Progress() as progress, pytest.raises(compare.WrongOutput, match="wrong on decode bf16.*nan"):
        compare.measure(SMALL[0], ["torch"], 1, progress, pool_bytes=1)


# --- reports --------------------------------------------------------------------------------


@pytest.fixture
def result():
    times = {"raddle": [10.0, 11.0, 12.0], "torch a": [30.0, 33.0, 40.0], "torch b": [20.0, 22.0, 24.0]}
    return Result(Workload("decode", "bf16", "S1024", (1024,) * 16, bar=1.5), times)


def test_rows_have_the_promised_keys(result, tmp_path):
    rows = report.rows([result], read_gbps=40.0, read_bytes=10**9)
    path = tmp_path / "rows.json"
    report.write_json(path, rows)
    assert json.loads(path.read_text()) == rows
    assert all(KEYS <= set(row) for row in rows)
    read, ours, *others = rows
    assert (read["us"], read["value"], read["unit"]) == (25_000.0, 40.0, "GB/s")
    assert (ours["engine"], ours["us"], ours["ratio"]) == ("raddle", 11.0, 2.0)
    assert ours["value"] == pytest.approx(67_108_864 / 11.0 / 1e3)
    assert [row["engine"] for row in others] == ["torch a", "torch b"]
    assert all(set(row) == KEYS for row in others)


def test_alone_there_is_no_ratio(result):
    alone = Result(result.workload, {"raddle": [1.0]})
    assert alone.best_peer is None and alone.speedup is None
    assert report.rows([alone], 40.0, 1)[1]["ratio"] is None
    assert report.comparison([alone], 40.0, 1).row_count == 1


def test_the_table_shows_the_best_peer_and_the_bar(result):
    with (out := report.console()).capture() as text:
        out.print(report.comparison([result], 40.0, 3))
    assert "≥ 1.5 met" in text.get() and "2.00" in text.get()
    assert result.best_peer == "torch b"


def test_bars_are_met_or_missed():
    barless = Measured("c", 1.0, 1.0, "us")
    found = [Measured("a", None, 1.1, "x", 1.15), Measured("b", 3.0, 20.0, "us", 15.0), barless]
    assert [m.met for m in found] == [True, False, None]
    with (out := report.console()).capture() as text:
        out.print(report.bars("some", found))
    assert "≤ 1.15 met" in text.get() and "≤ 15 missed" in text.get()
    assert all(set(row) == KEYS for row in report.bar_rows(found))


@pytest.fixture
def tiny_bench(monkeypatch):
    """The commands on small shapes, so that only their wiring takes time."""
    monkeypatch.setattr(cli, "chosen", lambda patterns: SMALL[:3])
    monkeypatch.setattr(cli, "_READ_BYTES", 1 << 24)
    monkeypatch.setattr(engines, "POOL_BYTES", 1 << 16)
    return CliRunner()


def test_bench_cpu(tiny_bench, tmp_path):
    path = tmp_path / "cpu.json"
    done = tiny_bench.invoke(cli.bench, ["cpu", "--against", "torch", "--rounds", "3", "--json", str(path)])
    assert done.exit_code == 0, done.output
    rows = json.loads(path.read_text())
    assert {row["engine"] for row in rows} >= {"raddle", "torch sdpa gqa", "torch sdpa grouped"}
    assert all(row["us"] > 0 and row["value"] > 0 for row in rows)
    assert all(row["ratio"] > 0 for row in rows if row["engine"] == "raddle")


def test_bench_cpu_alone_and_its_list(tiny_bench):
    done = tiny_bench.invoke(cli.bench, ["cpu", "--rounds", "1"])
    assert done.exit_code == 0 and "torch sdpa" not in done.output
    listed = tiny_bench.invoke(cli.bench, ["cpu", "--list"]).output
    assert "decode bf16 B16 S1024\n" in listed and "uniform8192  (only if named)" in listed


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--workloads", "nonsense"], "no workload fits 'nonsense'"),
        (["--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
        (["--against", "nobody"], "nobody"),
        (["--rounds", "0"], "0 is not in the range"),
    ],
)
def test_bad_options_are_named(arguments, text):
    done = CliRunner().invoke(cli.bench, ["cpu", *arguments])
    assert done.exit_code == 2 and text in done.output


def test_bench_plan(tmp_path):
    path = tmp_path / "plan.json"
    done = CliRunner().invoke(cli.bench, ["plan", "--rounds", "20", "--json", str(path)])
    assert done.exit_code == 0, done.output
    rows = json.loads(path.read_text())
    assert len(rows) == 5 and all(set(row) == KEYS for row in rows)
    assert all(row["value"] > 0 for row in rows[:4])


def test_plan_batches_are_decodes_of_1024_to_2048_keys():
    qo_indptr, page_indptr, page_indices, kv_len = plan_cost.batch(np.random.default_rng(0), 16)
    assert kv_len.min() >= 1024 and kv_len.max() <= 2048
    assert qo_indptr.tolist() == list(range(17))
    assert np.array_equal(np.sort(page_indices), np.arange(page_indptr[-1]))
    assert np.array_equal(np.diff(page_indptr), -(-kv_len // 16))


def test_balance_is_planned_and_measured(monkeypatch):
    monkeypatch.setattr(engines, "POOL_BYTES", 1 << 16)
    with Progress() as progress:
        found = balance.measure(SMALL[1], 2, progress)
    assert [("planned" in m.name, m.us is None) for m in found] == [(True, True)] * 3 + [(False, False)]
    assert all(m.value >= 1.0 for m in found)
    assert balance.heaviest_over_mean([3.0, 1.0]) == 1.5


# --- the page pool and the radix cache ------------------------------------------------------


def test_the_tree_of_the_cache_is_what_it_says(monkeypatch):
    monkeypatch.setattr(kv, "_PROMPTS", 200)
    prompts = kv.Prompts(np.random.default_rng(3))
    shared = 0
    for n in range(1, 200):
        older, prompt = prompts[prompts.older[n]], prompts[n]
        both = int(prompts.shared[n])
        assert len(prompt) % kv.PAGE_SIZE == 0 and len(prompt) == both + len(prompts.own[n])
        np.testing.assert_array_equal(prompt[:both], older[:both])
        shared += both
    assert shared > 0
    found = {m.name: m for m in kv.measure(3, lambda text: None)}
    assert 0.2 < found["edges of the tree"].value <= 0.4
    assert sum(m.bar is not None for m in found.values()) == 5
    assert all(m.value > 0 for m in found.values() if not m.name.startswith("growth"))
