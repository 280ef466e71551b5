"""The benchmarks measure what they say: literal workloads, outputs that agree, medians, rows for programs."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from clock import Clock

import raddle
from raddle._progress import Progress
from raddle.bench import (
    balance,
    cli,
    compare,
    isa,
    kv,
    limits,
    paged,
    plan_cost,
    report,
    selection,
    streaming,
    timing,
    workloads,
)
from raddle.bench.batch import TOLERANCE, Batch
from raddle.bench.compare import Result
from raddle.bench.engines import Engine, WrongOutput, error
from raddle.bench.limits import Limits
from raddle.bench.peers import sdpa, vllm_cpu
from raddle.bench.results import Measured
from raddle.bench.workloads import Workload

KEYS = {"workload", "engine", "us", "value", "unit"}
FAKE_VLLM = Path(__file__).with_name("fake_vllm_cpu.py")
HEADS = dict(num_qo_heads=4, num_kv_heads=2, head_dim=16)
SMALL = [
    Workload(phase, dtype, "tiny", kv_len, **HEADS)
    for dtype in ("bf16", "fp16", "fp32")
    for phase, kv_len in (("decode", (33, 33, 33)), ("decode", (40, 1, 17)), ("prefill", (50,)))
]
LATENT = dict(num_kv_heads=1, head_dim=48, latent=32)
MLA = [
    Workload("decode", "bf16", "tiny", (40, 1, 17), num_qo_heads=8, **LATENT),
    Workload("decode", "bf16", "tiny", (40, 1, 17), num_qo_heads=32, **LATENT),
    Workload("prefill", "bf16", "tiny", (40, 20), chunks=(9, 20), num_qo_heads=8, **LATENT),
]
MIXED = Workload("mixed", "bf16", "tiny", (50, 40, 1, 17), chunks=(50, 7, 1, 1), **HEADS)
FORMS = [
    Workload("decode", "bf16", "tiny", (40, 1, 17), page_size=1, **HEADS),
    Workload("decode", "bf16", "tiny", (40, 1, 17), page_size=32, **HEADS),
    Workload("decode", "fp8", "tiny", (40, 1, 17), **HEADS),
    Workload("decode", "int8", "tiny", (40, 1, 17), **HEADS),
    Workload("decode", "bf16", "tiny", (40, 1, 17), score="alibi", **HEADS),
    Workload("prefill", "fp32", "tiny", (50,), score="softcap", **HEADS),
]


@pytest.fixture(autouse=True)
def small_turns(monkeypatch):
    """The steps of tiny decodes have a few layers, not the thousands that would read as much as real ones."""
    monkeypatch.setattr(workloads, "TURN_BYTES", 1 << 14)


@pytest.fixture(params=[*SMALL, MIXED], ids=lambda w: f"{w.phase}-{w.dtype}-{len(set(w.kv_len))}")
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
    assert len(workloads.chosen()) == 30
    assert {w.name for w in workloads.ALL if w.phase == "mixed"} == {
        "mixed bf16 B17 1024+16x1024",
        "mixed bf16 B17 512of4096+16x1024",
    }
    forms = {w.name.removeprefix("decode bf16 B16 S1024 ") for w in workloads.ALL}
    assert {"G1", "page1", "page32", "page128", "softcap", "alibi"} < forms
    assert {"decode fp8 B16 S4096", "decode int8 B16 S4096"} < forms


def test_workloads_are_chosen_by_words():
    assert [w.name for w in workloads.chosen(("fp32 prefill", "bf16 S8192"))] == [
        "decode bf16 B1 S8192",
        "prefill fp32 B1 S1024",
        "prefill fp32 B1 S4096",
        "decode bf16 B1 S8192 mla16",
    ]
    assert [w.name for w in workloads.chosen(("decode bf16 B16 S1024",))] == ["decode bf16 B16 S1024"]
    with pytest.raises(ValueError, match="'fp64'.*decode bf16 B16 S1024"):
        workloads.chosen(("decode", "fp64"))


def test_each_instruction_set_has_its_bars():
    of_avx2 = {w.name: (w.bar, w.share_bar) for w in workloads.chosen(("16 S", "B1 S", "prefill"), "avx2")}
    for dtype in ("bf16", "fp16", "fp32"):
        for name in ("B16 S1024", "B16 S4096", "B1 S8192"):
            assert of_avx2[f"decode {dtype} {name}"] == (1.15, 0.6)
    for name in ("B1 S1024", "B1 S4096"):
        assert of_avx2[f"prefill bf16 {name}"][0] == 1.8 and of_avx2[f"prefill fp32 {name}"][0] == 1.4
    scored = {w.bar for w in workloads.chosen(("prefill softcap", "prefill alibi"), "amx")}
    assert scored == {0.8}
    assert workloads.chosen((), "avx512") == [w for w in workloads.ALL if w.usual]


def test_a_short_comparison_has_the_targets():
    few = [w.name for w in workloads.chosen((), "avx2", few=True)]
    plain = [f"decode {dtype} {n}" for dtype in ("bf16", "fp32") for n in ("B16 S1024", "B16 S4096", "B1 S8192")]
    plain += [f"prefill {dtype} B1 {n}" for dtype in ("bf16", "fp32") for n in ("S1024", "S4096")]
    causal = ("decode bf16 B16 S1024", "prefill bf16 B1 S1024")
    forms = [f"{w} {score}" for w in causal for score in ("softcap", "alibi")]
    assert few == [*plain, *forms, *(f"decode fp16 {n}" for n in ("B16 S1024", "B16 S4096", "B1 S8192"))]
    with pytest.raises(ValueError, match="no workload fits 'skewed'"):
        workloads.chosen(("skewed",), "avx2", few=True)


def test_rates_count_bytes_of_kv_and_half_the_square():
    decode = Workload("decode", "bf16", "S1024", (1024,) * 16)
    assert decode.kv_bytes == 16 * 1024 * 8 * 128 * 2 * 2 == 67_108_864
    assert decode.rate(1000.0) == pytest.approx(67.108864)
    prefill = Workload("prefill", "fp32", "S4096", (4096,))
    assert prefill.rate(1e6) == pytest.approx(4 * 32 * 128 * 4096**2 / 2 / 1e9)
    fp8 = Workload("decode", "fp8", "S1024", (1024,) * 16)
    assert 2 * fp8.kv_bytes == decode.kv_bytes


def test_a_mixed_batch_reads_and_computes():
    # Half of row i's square is what it sees of its own chunk; 10 of 30 keys are new.
    mixed = Workload("mixed", "bf16", "x", (30, 20, 5), chunks=(10, 1, 1), **HEADS)
    assert mixed.qo_len == (10, 1, 1) and mixed.read_bytes == 25 * mixed.token_bytes == 25 * 2 * 2 * 16 * 2
    assert mixed.flops == 4 * 4 * 16 * (10 * 20 + 10 * 10 / 2)
    assert mixed.rate(1000.0) == 12 and mixed.unit == "rows/ms"


def test_a_latent_is_read_once():
    """Sixteen heads read; more of them compute, and so does a prompt."""
    decode, wide, chunk = MLA
    names = ["decode bf16 B3 tiny mla8", "decode bf16 B3 tiny mla32", "prefill bf16 B2 tiny mla8"]
    assert [w.name for w in MLA] == names
    assert decode.unit == "GB/s" and decode.flops == 0 and decode.read_bytes == decode.kv_bytes == 58 * 48 * 2
    assert wide.unit == "GFLOP/s" and wide.read_bytes == 0 and wide.flops == 2 * 32 * (48 + 32) * 58
    assert wide.rate(1.0) == wide.flops / 1e3
    assert chunk.unit == "GFLOP/s" and chunk.flops == 2 * 8 * (48 + 32) * (9 * 35.5 + 20 * 10)


@pytest.mark.parametrize("workload", MLA, ids=lambda w: w.name)
def test_latents_are_computed_without_peers(workload):
    def refused(batch, pool_bytes):
        raise AssertionError("no peer takes latents")

    with Progress() as progress:
        result = compare.measure(workload, {"peer": refused}, 2, progress, 3 * workload.kv_bytes)
    assert set(result.times) == {"raddle"}
    batch = paged.PagedBatch(Batch.random(workload), 3 * workload.kv_bytes)
    k, v = batch.pools
    assert v.data_ptr() == k.data_ptr() and v.shape[-1] == 32 and batch.out.shape[-1] == 32


def test_short_decodes_are_steps_of_layers(monkeypatch):
    assert SMALL[1].kv_bytes == 58 * 128 and SMALL[1].layers == 3 and SMALL[2].layers == MIXED.layers == 1
    monkeypatch.undo()
    layers = {w.name: w.layers for w in workloads.ALL}
    assert layers["decode bf16 B16 S1024"] == 8 and layers["decode fp8 B16 S1024"] == 16
    assert layers["decode bf16 B1 S8192"] == 16 and layers["decode bf16 B1 S8192 mla16"] == 55
    for w in workloads.ALL:
        assert w.layers == 1 or w.is_decode and 0 <= w.layers * w.kv_bytes - 512e6 < w.kv_bytes


@pytest.mark.parametrize("form", FORMS, ids=lambda w: w.name)
def test_forms_are_compared_with_the_plain_one(form):
    assert not form.is_plain and form.plain.is_plain
    assert form.plain.kv_len == form.kv_len and form.plain.page_size == 16


# --- timing ---------------------------------------------------------------------------------


def test_engines_take_turns():
    seen, ticks = [], []
    calls = {name: functools.partial(lambda name, step: seen.append((name, step)), name) for name in "abc"}
    times = timing.HostClock(settle_s=0.0).rounds(calls, 5, lambda: ticks.append(1))
    assert {name: len(found) for name, found in times.items()} == {"a": 5, "b": 5, "c": 5}
    assert len(ticks) == 18
    for step in range(6):  # every engine once a round, each time with the next pool
        assert sorted(seen[3 * step : 3 * step + 3]) == [("a", step), ("b", step), ("c", step)]
    orders = ["".join(name for name, _ in seen[3 * step : 3 * step + 3]) for step in range(6)]
    assert len(set(orders)) > 2  # no engine comes behind the same one each time
    again = timing.interleaved({name: lambda _, name=name: seen.append(name) or 1.0 for name in "abc"}, 6)
    assert len(again) == 3 and "".join(seen[18:]) == "".join(orders)


def test_a_turn_is_a_step_of_layers():
    seen, ticks = [], []
    calls = {name: functools.partial(lambda name, step: seen.append((name, step)), name) for name in "ab"}
    times = timing.HostClock(layers=3, settle_s=0.0).rounds(calls, 3, lambda: ticks.append(1))
    assert [len(found) for found in times.values()] == [3, 3] and len(ticks) == 8
    names = "".join(name for name, _ in seen)
    assert {names[at : at + 6] for at in range(0, 24, 6)} == {"aaabbb", "bbbaaa"}
    for name in "ab":  # no two calls of an engine share a pool
        assert [step for each, step in seen if each == name] == list(range(12))


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(timing, "time", clock := Clock())
    return clock


def test_a_step_of_layers_counts_a_calls_mean(clock):
    calls = {"slow": lambda step: clock.sleep(0.004 if step % 2 else 0.0), "far": lambda step: timing.Elapsed(step)}
    times = timing.HostClock(layers=4).rounds(calls, 2)
    assert times == {"slow": [2000.0, 2000.0], "far": [5.5, 9.5]}


def test_a_call_that_waits_is_measured(clock):
    assert timing.HostClock().rounds({"slow": lambda step: clock.sleep(0.003)}, 3) == {"slow": [3000.0] * 3}
    assert timing.repeated(lambda: clock.sleep(0.001), 30) == [1000.0] * 30


def test_a_call_may_time_itself():
    times = timing.HostClock().rounds({"far": lambda step: timing.Elapsed(2.5), "near": lambda step: 2.5}, 2)
    assert times["far"] == [2.5, 2.5] and 2.5 not in times["near"]


def test_speedup_is_the_median_of_ratios_in_rounds():
    # A disturbance in the last two rounds slows both engines; the ratio of medians would be 4.5.
    ours, theirs = [1.0, 1.0, 1.0, 9.0, 9.0], [2.0, 2.0, 2.0, 18.0, 9.0]
    assert timing.speedup(ours, theirs) == 2.0
    assert timing.best({"a": [1.0, 9.0, 9.0], "b": [5.0, 5.0, 5.0]}) == "b"
    with pytest.raises(ValueError, match="rounds"):
        timing.speedup([1.0], [1.0, 2.0])


# --- instruction sets -----------------------------------------------------------------------


def test_torch_is_limited_as_raddle_is():
    script = "from raddle.bench import cli, isa; cli.bench(['cpu', '--list'], standalone_mode=False); "
    script += "print(isa.torch_limit(), isa.torch_described(), sep='; ')"
    env = {**os.environ, "RADDLE_CPU_ISA": "generic"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "generic; limited to generic"


def test_a_limit_that_came_too_late_is_not_claimed(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setenv("RADDLE_CPU_ISA", "avx2")
    assert isa.torch_limit() is None
    assert isa.torch_described() == "on avx512: it was used before it could be limited to avx2"
    monkeypatch.delenv("RADDLE_CPU_ISA")
    assert isa.torch_limit() is None and isa.torch_described() == "on avx512"


# --- engines --------------------------------------------------------------------------------


def test_all_engines_compute_the_same_from_every_pool(small):
    assert paged.copies(67_108_864) * 67_108_864 >= 2 * 10**9
    batch = Batch.random(small)
    reference = batch.reference()
    assert reference.shape == batch.q.shape
    pool_bytes = 3 * small.kv_bytes
    found = [*paged.raddle_engines(batch, pool_bytes), *sdpa.torch_engines(batch, pool_bytes)]
    ragged = len(set(small.kv_len)) > 1
    assert len(found) == (2 if ragged else 3)
    for engine in found:
        for step in range(4):
            assert error(engine.outcome(step), reference) <= TOLERANCE[small.dtype], (engine.name, step)


@pytest.mark.parametrize("form", FORMS, ids=lambda w: w.name)
def test_forms_compute_what_they_say(form):
    batch = Batch.random(form)
    found = paged.raddle_engines(batch, 3 * form.kv_bytes)
    assert [engine.score for engine in found] == [form.score, None]
    for engine in found:
        for step in range(4):
            assert error(engine.outcome(step), batch.reference(engine.score)) <= TOLERANCE[form.dtype]
    if form.score:  # and the score matters
        assert error(found[0].outcome(), batch.reference()) > 10 * TOLERANCE[form.dtype]


def test_the_reference_is_sdpas():
    batch = Batch.random(SMALL[-1])
    q, k, v = (x.transpose(0, 1)[None] for x in (batch.q, batch.k, batch.v))
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(batch.reference(), right[0].transpose(0, 1), rtol=1e-4, atol=1e-5)


def test_a_wrong_output_is_not_timed():
    wrong = Engine("wrong", lambda step: None, rows=lambda out: torch.full((3, 4, 16), float("nan")))
    with Progress() as progress, pytest.raises(WrongOutput, match="wrong on decode bf16.*nan"):
        compare.measure(SMALL[0], {"torch": lambda *_: [wrong]}, 1, progress, pool_bytes=1)


def test_a_peer_that_refuses_is_named_and_the_others_are_timed():
    def refuses(batch, pool_bytes):
        raise vllm_cpu.PeerError("vllm-cpu: no such heads")

    with Progress() as progress:
        peers = {"vllm-cpu": refuses, "torch": sdpa.torch_engines}
        result = compare.measure(SMALL[0], peers, 1, progress, pool_bytes=1)
    assert result.refused == ["vllm-cpu: no such heads"]
    assert set(result.times) == {"raddle", "torch sdpa gqa", "torch sdpa grouped"}


# --- a peer in a process of its own -----------------------------------------------------------


@pytest.mark.parametrize("workload", [*SMALL[:3], MIXED], ids=lambda w: w.name)
def test_the_peers_process_computes_and_times_itself(workload):
    # Its operators are PyTorch's here; pages, tables, pipe and clock are the worker's own.
    batch = Batch.random(workload)
    with vllm_cpu.VllmCpu(sys.executable, 1, FAKE_VLLM) as peer:
        assert peer.version == f"1.2.3 (torch {torch.__version__})"
        for _ in range(2):  # a second batch takes the place of the first
            found = peer.engines(batch, 3 * workload.kv_bytes)
            assert [engine.name for engine in found] == ["vllm-cpu block 32", "vllm-cpu block 128"]
            for engine in found:
                for step in range(4):
                    assert error(engine.outcome(step), batch.reference()) <= TOLERANCE["bf16"]
                assert 0 < engine.call(0) < 1e6


def test_a_peer_that_is_not_there_is_named(tmp_path):
    with pytest.raises(vllm_cpu.PeerError, match="/nowhere/python does not start"):
        vllm_cpu.VllmCpu("/nowhere/python", 1)
    script = tmp_path / "ends.py"
    script.write_text("raise SystemExit(3)")
    with pytest.raises(vllm_cpu.PeerError, match="ended with 3"):
        vllm_cpu.VllmCpu(sys.executable, 1, script)
    script.write_text("""input(), print('{"error": "ImportError: no vllm here"}')""")
    with pytest.raises(vllm_cpu.PeerError, match="vllm-cpu: ImportError: no vllm here"):
        vllm_cpu.VllmCpu(sys.executable, 1, script)


# --- rolling caches -------------------------------------------------------------------------


def test_rolling_caches_are_compared_with_what_says_the_same(monkeypatch):
    monkeypatch.setattr(streaming, "CASES", ((64, 2),))
    with Progress() as progress:
        found = streaming.rolling("cpu", "float32", 1, progress)
        assert [each.unit for each in found] == ["x"] * 3 and min(each.value for each in found) > 0
    bed = streaming.Bed("cpu", "float32", 64, 2)
    bed.rows = bed.rows.roll(1, 0)
    with pytest.raises(RuntimeError, match="tiny: keys turned inside of attention and before it differ by"):
        streaming._check_equal("tiny", bed.runs())


# --- limits ---------------------------------------------------------------------------------


LIMITS = Limits(2, 40.0, 30.0, 300.0, 15.0, 4000.0, plausible_gbps=30.0)


def test_limits_are_measured():
    found = limits.measure(1, read_bytes=1 << 24)
    assert min(found.sequential_gbps, found.pages_gbps, found.fma_gflops, found.exp2_gelems) > 0
    assert found.bf16_gflops > found.fma_gflops or not found.bf16_gflops
    assert [row["unit"] for row in found.rows()][:4] == ["GB/s", "GB/s", "GFLOP/s", "Gelem/s"]


def test_a_disturbed_bandwidth_is_no_limit(monkeypatch):
    reads = iter([20.0, 25.0, 31.0, 20.0, 20.0, 20.0])
    monkeypatch.setattr(limits, "_read_sequential", lambda **_: next(reads))
    monkeypatch.setattr(limits, "_read_pages", lambda **_: 10.0)
    monkeypatch.setattr(limits, "_rate", lambda **_: 100.0)
    monkeypatch.setattr(limits, "has_amx", lambda: True)
    assert limits.measure(2).read_gbps == 31.0  # at the third try
    found = limits.measure(2)
    assert found.read_gbps is None and found.least_us("bf16", 1.0, 0.0) is None
    assert found.least_us("bf16", 0.0, 1e5) == 1.0  # arithmetic is known
    assert [row["engine"] for row in found.rows()][:3] == ["disturbed", "disturbed", "limit"]
    with (out := report.console()).capture() as text:
        out.print(report.limits(found))
    assert "disturbed: below 30" in text.get()


def test_the_kind_of_machine_is_told_by_its_cpu(tmp_path):
    (tmp_path / "cpuinfo").write_text("flags : fpu amx_bf16 avx2\n")
    assert limits.has_amx(tmp_path / "cpuinfo") and not limits.has_amx(tmp_path / "none")


def test_one_threads_bandwidth_may_be_half(monkeypatch):
    monkeypatch.setattr(limits, "_read_sequential", lambda **_: 16.0)
    monkeypatch.setattr(limits, "has_amx", lambda: True)
    monkeypatch.setattr(limits, "_read_pages", lambda **_: 10.0)
    assert limits.measure(1).read_gbps == 16.0


def test_the_least_time_adds_reading_and_arithmetic():
    assert LIMITS.least_us("bf16", 40e3, 4e6) == pytest.approx(1.0 + 1.0)
    assert LIMITS.least_us("fp32", 0.0, 3e5) == pytest.approx(1.0)
    assert LIMITS.best_of(Limits(2, 35.0, 33.0, 310.0, 14.0, 0.0)) == Limits(2, 40.0, 33.0, 310.0, 15.0, 4000.0, 30.0)
    without = Limits(2, 40.0, 30.0, 300.0, 15.0, 0.0)
    assert without.flops_rate("bf16") == 300.0 and len(without.rows()) == 4


# --- reports --------------------------------------------------------------------------------


@pytest.fixture
def result():
    times = {"raddle": [10.0, 11.0, 12.0], "torch a": [30.0, 33.0, 40.0], "torch b": [20.0, 22.0, 24.0]}
    return Result(Workload("decode", "bf16", "S1024", (1024,) * 16, bar=1.5), times)


def test_rows_have_the_promised_keys(result, tmp_path):
    rows = report.rows([result], LIMITS)
    path = tmp_path / "rows.json"
    report.write_json(path, rows)
    assert json.loads(path.read_text()) == rows
    assert all(KEYS <= set(row) for row in rows)
    ours, *others = rows[len(LIMITS.rows()) :]
    assert (rows[0]["value"], rows[0]["unit"]) == (40.0, "GB/s")
    assert (ours["engine"], ours["us"], ours["ratio"]) == ("raddle", 11.0, 2.0)
    assert ours["value"] == pytest.approx(67_108_864 / 11.0 / 1e3)
    assert ours["share"] == pytest.approx(ours["value"] / 40.0)
    assert [row["engine"] for row in others] == ["torch a", "torch b"]
    assert all(set(row) == {*KEYS, "share", "layers", "isa"} and row["layers"] == 1 for row in others)
    assert ours["isa"] == raddle.cpu_isa() and [row["isa"] for row in others] == [isa.torch_limit()] * 2


def test_alone_there_is_no_ratio(result):
    alone = Result(result.workload, {"raddle": [1.0]})
    assert alone.best_peer is None and alone.speedup is None
    assert report.rows([alone], LIMITS)[-1]["ratio"] is None
    assert report.comparison([alone], LIMITS, 1).row_count == 1


def shown(result, found=LIMITS, with_bars=True):
    with (out := report.console()).capture() as text:
        out.print(report.comparison([result], found, 3, with_bars))
    return text.get()


def test_the_table_shows_the_best_peer_and_the_bars(result):
    text = shown(result)
    assert "≥ 1.5 met" in text and "2.00" in text
    plain = shown(result, with_bars=False)
    assert "2.00" in plain and "bar" not in plain and "met" not in plain
    assert result.best_peer == "torch b"
    # 67 MB in a millisecond and a half are 45 GB/s of 60.
    slower = {name: [1500.0 * us for us in us_of] for name, us_of in {"raddle": [1.0]}.items()}
    w = Workload("decode", "bf16", "S1024", (1024,) * 16, share_bar=0.7)
    assert "75 %" in shown(Result(w, slower), Limits(2, 60.0, 0.0, 1.0, 1.0, 0.0))
    assert "≥ 0.7 met" in shown(Result(w, slower), Limits(2, 60.0, 0.0, 1.0, 1.0, 0.0))
    assert "≥ 0.7 missed" in shown(Result(w, slower), Limits(2, 70.0, 0.0, 1.0, 1.0, 0.0))
    disturbed = shown(Result(w, slower), Limits(2, 20.0, 0.0, 1.0, 1.0, 0.0, plausible_gbps=30.0))
    assert "?" in disturbed and "≥ 0.7" not in disturbed and "disturbed" in disturbed


def test_a_form_counts_its_own_bytes():
    w = Workload("decode", "fp8", "S1024", (1024,) * 16, bar=1.4)
    rows = report.rows([Result(w, {"raddle": [10.0], "raddle bf16, page 16": [15.0]}, ["vllm-cpu: no"])], LIMITS)[-2:]
    assert rows[0]["value"] == pytest.approx(0.75 * rows[1]["value"])
    assert rows[0]["ratio"] == 1.5
    assert "vllm-cpu: no" in shown(Result(w, {"raddle": [1.0]}, ["vllm-cpu: no"]))


def test_bars_are_met_or_missed():
    barless = Measured("c", 1.0, 1.0, "us")
    found = [Measured("a", None, 1.1, "x", 1.15), Measured("b", 3.0, 20.0, "us", 15.0), barless]
    assert [m.met for m in found] == [True, False, None]
    with (out := report.console()).capture() as text:
        out.print(report.figures("some", found, with_bars=True))
    assert "≤ 1.15 met" in text.get() and "≤ 15 missed" in text.get()
    with out.capture() as text:
        out.print(report.figures("some", found))
    assert "1.1" in text.get() and "bar" not in text.get() and "missed" not in text.get()
    assert all(set(row) == KEYS for row in report.bar_rows(found))


@pytest.fixture
def tiny_bench(monkeypatch):
    """The commands on small shapes, so that only their wiring takes time."""
    monkeypatch.setattr(cli, "chosen", lambda *_: [*SMALL[:3], FORMS[2]])
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 24)
    monkeypatch.setattr(limits, "has_amx", lambda: False)  # out of a cache this is no bandwidth
    monkeypatch.setattr(paged, "POOL_BYTES", 1 << 16)
    return CliRunner()


def test_bench_cpu(tiny_bench, tmp_path):
    path = tmp_path / "cpu.json"
    done = tiny_bench.invoke(cli.bench, ["cpu", "--against", "torch", "--rounds", "3", "--json", str(path)])
    assert done.exit_code == 0, done.output
    rows = json.loads(path.read_text())
    assert {row["engine"] for row in rows} >= {"raddle", "torch sdpa gqa", "torch sdpa grouped"}
    assert all(row["value"] > 0 for row in rows)
    timed = [row for row in rows if row["engine"] not in ("limit", "disturbed")]
    assert all(row["us"] > 0 and row["share"] > 0 for row in timed)
    assert all(row["ratio"] > 0 for row in timed if row["engine"] == "raddle")
    assert "raddle bf16, page 16" in done.output


def test_bench_cpu_against_a_peer_in_its_own_environment(tiny_bench, monkeypatch):
    monkeypatch.setattr(vllm_cpu, "_SCRIPT", FAKE_VLLM)
    options = ["cpu", "--against", "torch,vllm-cpu", "--vllm-cpu-python", sys.executable, "--rounds", "2"]
    done = tiny_bench.invoke(cli.bench, options)
    assert done.exit_code == 0, done.output
    assert "vllm-cpu block 128" in done.output and "torch sdpa" in done.output and "vllm-cpu 1.2.3" in done.output


def test_bench_cpu_limits(tiny_bench, tmp_path):
    path = tmp_path / "limits.json"
    done = tiny_bench.invoke(cli.bench, ["cpu", "--limits", "--json", str(path)])
    assert done.exit_code == 0 and "fp32 FMA" in done.output and "decode" not in done.output
    rows = json.loads(path.read_text())
    assert rows[0]["workload"] == "memory read" and all(set(row) == KEYS for row in rows)


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
        (["--against", "nobody"], "--against is nobody; expected torch or vllm-cpu"),
        (["--against", "torch,vllm-cpu"], "name its environment by --vllm-cpu-python"),
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
    assert len(rows) == 12 and all(set(row) == KEYS for row in rows)
    words = "what Python adds", ", check of ", "above plan and run"
    differences = [row for row in rows if any(each in row["workload"] for each in words)]
    assert len(differences) == 4 and all(row["value"] > 0 for row in rows if row not in differences)


def test_a_run_of_the_host_has_a_bar():
    bars = {each.name: each.bar for each in plan_cost.run_overhead(10.0, 3)}
    assert bars["run from Python on torch tensors, one key"] == bars["run, what Python adds"] == 10.0


def test_a_call_of_flex_attention_has_a_bar():
    assert [each.bar for each in plan_cost.flex_cost(150.0, 30.0, 3)] == [150.0, 30.0]


def test_plan_batches_are_decodes_of_1024_to_2048_keys():
    qo_indptr, page_indptr, page_indices, kv_len = plan_cost.batch(np.random.default_rng(0), 16)
    assert kv_len.min() >= 1024 and kv_len.max() <= 2048
    assert qo_indptr.tolist() == list(range(17))
    assert np.array_equal(np.sort(page_indices), np.arange(page_indptr[-1]))
    assert np.array_equal(np.diff(page_indptr), -(-kv_len // 16))


def test_balance_is_planned_and_measured(monkeypatch):
    monkeypatch.setattr(paged, "POOL_BYTES", 1 << 16)
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


# --- important pages ------------------------------------------------------------------------


def test_important_pages_are_compared_with_all(monkeypatch):
    monkeypatch.setattr(selection, "CONTEXTS", (128, 256))
    monkeypatch.setattr(selection, "BARRED", 256)
    monkeypatch.setattr(selection, "KEPT", 4)
    with Progress() as progress:
        found = selection.quest("float32", 1, progress)
    names = [each.name for each in found]
    assert names[0] == "4 pages of 128 float32: choose, plan, attend, gain on all" and len(names) == 6
    assert [each.bar for each in found] == [None, 1.05, None, 6.0, 1.05, None]
    assert found[1].value == 1.0 and all(each.us > 0 and each.value > 0 for each in found)


def test_important_pages_of_all_contexts_take_turns(monkeypatch):
    monkeypatch.setattr(selection, "CONTEXTS", (128, 256))
    monkeypatch.setattr(selection, "KEPT", 4)
    names = [f"{kind} {context}" for kind in ("all", "choose", "attend", "step") for context in (128, 256)]
    us = dict(zip(names, (20.0, 30.0, 8.0, 16.0, 10.0, 11.0, 4.0, 5.0)))

    def rounds_of(clock, calls, rounds, tick):
        assert list(calls) == list(us) and clock.layers == selection.LAYERS == 4
        for call in calls.values():
            for step in range(clock.layers):
                call(step)
        return {name: [of_a_layer] * rounds for name, of_a_layer in us.items()}

    monkeypatch.setattr(timing.HostClock, "rounds", rounds_of)
    with Progress() as progress:
        found = selection.quest("float32", 2, progress)
    assert [each.us for each in found] == [4.0, 10.0, 8.0, 5.0, 11.0, 16.0]
    assert [each.value for each in found] == pytest.approx([5.0, 1.0, 1000.0, 6.0, 1.1, 1000.0])
