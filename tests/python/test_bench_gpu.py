"""`raddle bench gpu` without a GPU: its workloads, outputs, rounds and ratios; Raddle and stand-ins on the CPU."""

import dataclasses
import json
import os

import numpy as np
import pytest
import torch
from bench_gpu_cases import CASES, DECODE, PREFILL, SQUARE, STEP, Clock, Quiet, shows, stand_in
from raddle.bench import engines, results, timing, workloads
from raddle.bench.gpu import check, measure, own, sections, variants
from raddle.bench.gpu.cases import Case, Section, lengths
from raddle.bench.gpu.problem import Problem
from raddle.bench.peers import sdpa
from raddle.timeline import Marks


# --- workloads ------------------------------------------------------------------------------


def test_lengths_are_those_of_the_cpu_bench_and_drawn_beyond():
    assert lengths("uniform", 16, 8192) == workloads.lengths("uniform", 16, 8192)
    assert lengths("skewed", 16, 1024) == workloads.lengths("skewed", 16, 1024)
    assert lengths("constant", 64, 4096) == (4096,) * 64
    drawn = lengths("uniform", 128, 4096)
    assert drawn == lengths("uniform", 128, 4096) and len(drawn) == 128
    assert min(drawn) >= 2048 and max(drawn) <= 4096 and len(set(drawn)) > 64
    with pytest.raises(ValueError, match="expected"):
        lengths("skewed", 128, 4096)


def test_every_case_is_named_once_and_refers_to_a_case_of_its_section():
    assert len({section.name for section in sections.SECTIONS}) == len(sections.SECTIONS)
    for section in sections.SECTIONS:
        names = [case.name for case in section.cases]
        assert len(set(names)) == len(names)
        assert bool(names) != bool(section.rows)
        for case in section.cases:
            assert case.versus in ("", *names), case
            assert set(case.peers) <= set(engines.FAMILIES)
            assert len(case.qo_len) == len(case.kv_len)


def test_the_first_table_reads_what_it_says():
    table = {case.name: case.bytes_read / 1e6 for case in sections.chosen(["decode"])[0].cases}
    assert len(table) == 9
    expected = {1024: ("B16", 67.1), 8192: ("B16", 536.9), 4096: ("B64", 1073.7)}
    for length, (batch, megabytes) in expected.items():
        assert round(table[f"constant {length} {batch}"], 1) == megabytes
    assert round(table["constant 8192 B1"], 1) == 33.6
    assert 1500 < table["uniform 4096 B128"] < 1700
    prefix = {case.name: case.bytes_read / 1e6 for case in sections.chosen(["prefix"])[0].cases}
    assert round(prefix["8192 + 256 B16"], 1) == round((8192 + 16 * 256) * 4096 / 1e6, 1)


@pytest.mark.parametrize("variant", ["causal", "window"])
@pytest.mark.parametrize("qo, kv", [(1, 40), (40, 40), (2500, 2500), (7, 1500), (1300, 2600)])
def test_kept_pairs_are_counted(variant, qo, kv):
    case = Case("x", (qo,), (kv,), (1, 1, 1), variant=variant)
    kept = sum(min(row + 1, 1025 if variant == "window" else kv) for row in range(kv - qo, kv))
    assert case.flops == 4 * kept


def test_pairs_within_documents_are_counted():
    case = Case("x", (480, 240), (480, 240), (1, 1, 1), variant="documents")
    document = [variants.documents(n) for n in case.kv_len]
    kept = sum(int((d[:, None] == d[None]).tril().sum()) for d in document)
    assert case.flops == 4 * kept and all(len(d.unique()) == 12 for d in document)


def test_sections_are_chosen_by_name_or_pattern():
    assert [s.name for s in sections.chosen(["decode"])] == ["decode"]
    every = ["decode", "decode-pages", "decode-families", "decode-variants"]
    assert [s.name for s in sections.chosen(["decode*"])] == every
    assert [s.name for s in sections.chosen(["long", "mixed"])] == ["mixed", "long"]
    assert sections.chosen([]) == list(sections.SECTIONS)
    with pytest.raises(ValueError, match="'fp4'.*decode, decode-pages"):
        sections.chosen(["fp4"])


def test_shrunk_cases_keep_their_form():
    for section in sections.SECTIONS:
        for case in section.cases:
            small = case.shrunk()
            problem = Problem(small, "cpu")
            assert max(small.kv_len) <= 96 and (small.form, small.variant) == (case.form, case.variant)
            assert bool(small.prefix) == bool(case.prefix) and problem.q.shape[0] == sum(small.qo_len)


# --- outputs --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_raddle_computes_every_form_and_variant(case):
    """On the CPU, through the code that runs it on a GPU, against the fp64 rows of the check."""
    problem = Problem(case, "cpu")
    reference = check.exact(problem, case, check.all_rows(case))
    (name, make), *rest = own.contestants(problem, case)
    assert name == "raddle" and not rest
    assert check.error(make().outcome(), reference) < check.TOLERANCE
    if case.variant in ("plain", "causal"):
        assert check.error(sdpa.exact_enough(problem, case), reference) < check.TOLERANCE


def test_kernel_families_are_asked_for_one_by_one(monkeypatch):
    """Whatever the environment asks for, and it does so again afterwards."""
    asked = []

    def prepared(problem, case, backend=""):
        with own.asking_for(backend):
            asked.append(os.environ.get("RADDLE_BACKEND"))

    monkeypatch.setattr(own, "_prepared", prepared)
    case = next(s for s in sections.SECTIONS if s.name == "decode-families").cases[0]
    for before in (None, "mma"):
        monkeypatch.delenv("RADDLE_BACKEND", raising=False)
        if before:
            monkeypatch.setenv("RADDLE_BACKEND", before)
        names = ["raddle", "raddle mma", "raddle wgmma"]
        assert [(name, make()) for name, make in own.contestants(None, case)] == [(name, None) for name in names]
        assert os.environ.get("RADDLE_BACKEND") == before
    assert asked == [None, "mma", "wgmma", "mma", "mma", "wgmma"]


def test_a_rotation_pass_is_another_way_to_the_same(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    case = dataclasses.replace(DECODE, variant="rope", peers=("flashinfer",))
    problem = Problem(case, "cpu")
    reference = check.exact(problem, case, check.all_rows(case))
    made = dict(own.contestants(problem, case))
    assert check.error(made["rotation + raddle"]().outcome(), reference) < check.TOLERANCE


def test_dense_keys_are_those_of_the_pages():
    case = dataclasses.replace(DECODE, kv_len=(40, 40, 40))
    problem = Problem(case, "cpu")
    k, v = problem.dense
    assert k.shape == (3, 2, 40, 32) and torch.equal(k[1].transpose(0, 1), problem.tokens(1)[0])
    assert torch.equal(v[2].transpose(0, 1), problem.tokens(2)[1])
    with pytest.raises(ValueError, match="equal lengths"):
        Problem(DECODE, "cpu").dense


def test_wrong_outputs_are_named():
    problem = Problem(PREFILL, "cpu")
    rows = check.sampled_rows(PREFILL)
    assert (0, 0) in rows and (1, 8) in rows
    reference = check.exact(problem, PREFILL, rows)
    right = sdpa.exact_enough(problem, PREFILL)
    assert check.verify("x", right, problem, rows, reference) < check.TOLERANCE
    unsampled = next(row for row in range(49) if row not in check.flat_rows(problem, rows))
    wrong = right.clone()
    wrong[unsampled] = float("nan")
    with pytest.raises(check.WrongOutput, match="x: 128 elements are not finite"):
        check.verify("x", wrong, problem, rows, reference)
    wrong[unsampled] = right[unsampled] * 1.5
    check.agree("x", right, right.clone())
    with pytest.raises(check.WrongOutput, match=f"row {unsampled} differs"):
        check.agree("x", wrong, right)
    with pytest.raises(check.WrongOutput, match="error 1.0e"):
        check.verify("x", right * 2, problem, rows, reference)


CALLS = dataclasses.replace(SQUARE, variant="documents", is_call=True)


@pytest.mark.parametrize("variant", ["causal", "softcap", "alibi", "window"])
@pytest.mark.parametrize("case", [SQUARE, STEP, CALLS], ids=["prefill", "decode", "calls"])
def test_torch_engines_compute_the_same(case, variant, monkeypatch):
    """Uncompiled, on the CPU: what is checked is how they are called."""
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    if case is CALLS and variant == "causal":
        variant = "documents"  # which only masks of Python have
    case = dataclasses.replace(case, variant=variant)
    if case.is_decode and variant != "causal":
        case = dataclasses.replace(case, qo_len=(1,), kv_len=(40,))
    problem = Problem(case, "cpu")
    reference = check.exact(problem, case, check.all_rows(case))
    made = dict(engines.makers(case, problem, ("flex", "fa2", "flashinfer")))
    assert set(made) == {"raddle", "flex"} | ({"fa2"} if variant == "causal" else set())
    for name, make in made.items():
        assert check.error(make().outcome(), reference) < check.TOLERANCE, name


# --- rounds and ratios ----------------------------------------------------------------------


def test_engines_take_turns_and_failures_drop_out():
    seen, failures = [], []

    def call(name):
        def timed(number):
            seen.append(name)
            if name == "b" and number == 1:
                raise RuntimeError("no more")
            return float(len(seen))

        return timed

    drop = lambda name, error: failures.append((name, str(error)))  # noqa: E731
    times = timing.interleaved({n: call(n) for n in "abc"}, 3, failed=drop)
    assert [sorted(seen[:3]), sorted(seen[3:6]), sorted(seen[6:])] == [["a", "b", "c"], ["a", "b", "c"], ["a", "c"]]
    assert failures == [("b", "no more")]
    assert {name: len(found) for name, found in times.items()} == {"a": 3, "c": 3}


def _section(*cases):
    return Section("try", "Trials", tuple(cases), None)


def test_a_section_is_measured_with_stand_ins():
    """Right, wrong, unwritten and breaking engines: each has its row, and the others their times."""
    base = dataclasses.replace(DECODE, peers=("fast",), at_least={"fast": 1.0, "floor": 0.5})
    other = dataclasses.replace(base, name="other", versus="decode", at_least={"versus": 0.9})

    def makers(case, problem, families):
        right = sdpa.exact_enough(problem, case)
        nan = torch.full_like(right, float("nan"))
        yield stand_in("raddle", right, 10.0 if case.name == "decode" else 20.0)
        yield stand_in("fast a", right, 5.0)
        yield stand_in("fast b", right, 30.0)
        yield stand_in("wrong", right * 1.2, 1.0)
        yield stand_in("silent", nan, 1.0)
        yield stand_in("breaks", right, 1.0, fails_at=4)

    run = measure.SectionRun(_section(base, other), (), 3, Quiet(), "cpu", Clock(), makers)
    rows = run.run()
    timed = {(row["workload"], row["engine"]): row for row in rows if "rounds" in row}
    assert set(timed) == {(w, e) for w in ("decode", "other") for e in ("raddle", "fast a", "fast b")}
    ours, theirs = timed["decode", "raddle"], timed["other", "raddle"]
    assert ours["ratios"] == {"fast a": 0.5, "fast b": 3.0} and ours["met"] == {"fast": False}
    assert theirs["ratios"]["versus"] == 0.5 and theirs["met"] == {"versus": False}
    assert ours["us"] == 10.0 and ours["rounds"] == [10.0] * 3 and ours["error"] < check.TOLERANCE
    assert ours["value"] == pytest.approx(DECODE.bytes_read / 10.0 / 1e3)
    failures = {(row["workload"], row["engine"]): row["failed"] for row in rows if "failed" in row}
    assert set(failures) == {(w, e) for w in ("decode", "other") for e in ("wrong", "silent", "breaks")}
    assert failures["decode", "breaks"] == "RuntimeError: broke" and "WrongOutput" in failures["other", "wrong"]
    assert not results.raddle_failed(rows)
    shows(_section(base, other), rows, "0.50× ✗", "3.00× ✗", "0.500 ✗", "failed: breaks on decode")


def test_timelines_are_written_beside(tmp_path):
    """A stand-in's marks: those of the second run after a flush; a timeline that fails is a row, and costs no other."""
    marks = Marks(np.array([[[100, 0], [1100, 1], [4100, 2]]], np.int32))
    seen = []

    def makers(case, problem, families):
        (name, make) = stand_in("raddle", sdpa.exact_enough(problem, case), 10.0)

        def watched(before):
            before()
            if case.name == "other":
                raise RuntimeError("no marks")
            return marks

        yield name, lambda: dataclasses.replace(make(), watched=watched)

    clock = Clock()
    clock.flush = lambda: seen.append("flush")
    other = dataclasses.replace(DECODE, name="other")
    first = dataclasses.replace(DECODE, name="decode 4/5, 6")
    run = measure.SectionRun(_section(first, other), (), 2, Quiet(), "cpu", clock, makers, tmp_path / "new")
    rows = run.run()
    written = {path.name: path.read_text() for path in (tmp_path / "new").iterdir()}
    assert set(written) == {"try-decode-4-5-6.json", "try-decode-4-5-6.txt"}
    assert json.loads(written["try-decode-4-5-6.json"]) == json.loads(marks.json())
    text = written["try-decode-4-5-6.txt"]
    assert text.startswith("try: decode 4/5, 6, 10.0 us without a timeline\n") and "1 workers end" in text
    assert len(seen) == 3 and [row["engine"] for row in rows if "failed" in row] == ["timeline"]
    assert sum("rounds" in row for row in rows) == 2 and not results.raddle_failed(rows)


def test_whole_rounds_are_kept_when_the_device_is_lost(monkeypatch):
    def makers(case, problem, families):
        right = sdpa.exact_enough(problem, case)
        yield stand_in("raddle", right, 10.0)
        yield stand_in("breaks", right, 20.0, fails_at=5)  # its outcome, its sampling, two rounds

    def lost():
        raise RuntimeError("illegal address")

    run = measure.SectionRun(_section(DECODE), (), 9, Quiet(), "cpu", Clock(), makers)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(measure.DeviceLost, match="after breaks on decode: RuntimeError: illegal address"):
        run.run()
    rounds = {row["engine"]: row["rounds"] for row in run.rows if "rounds" in row}
    assert len(rounds["raddle"]) in (2, 3) and set(rounds) == {"raddle"}
    assert [row["engine"] for row in run.rows if "failed" in row] == ["breaks"]


def test_rates_of_masks_are_set_against_each_other():
    causal = Case("causal", (2000,), (2000,), unit="TFLOP/s")
    window = dataclasses.replace(causal, name="window", variant="window", versus="causal", at_least={"versus": 0.9})
    times = {"causal": [10.0, 10.0], "window": [10.0, 10.0]}
    rows = [results.measured("s", case, "raddle", times[case.name], None) for case in (causal, window)]
    ratios = results.compared([causal, window], rows)[1]["ratios"]
    assert ratios["versus"] == pytest.approx(window.flops / causal.flops)


def test_raddle_alone_decides_about_success():
    assert results.raddle_failed([results.failed("s", "w", "raddle", "x")])
    assert results.raddle_failed([results.failed("s", "all", "all", "x")])
    missed = results.figure("s", "w", 3, "us", 1)
    assert not results.raddle_failed([results.failed("s", "w", "flashinfer", "x"), missed])


def test_errors_of_the_small_case_stand_beside_sdpa():
    section = Section("try", "Trials", (), dataclasses.replace(PREFILL, name="small"))
    rows = measure.errors_of_small(section, (), "cpu")
    found = {row["engine"]: row for row in rows}
    assert set(found) == {"raddle", "torch sdpa"} and all(0 < row["value"] < check.TOLERANCE for row in rows)
    assert found["raddle"]["ratios"]["torch sdpa"] == found["raddle"]["value"] / found["torch sdpa"]["value"]
    shows(section, rows, "error against fp64, small, ten draws")


def test_a_peer_that_fails_every_draw_is_its_own_failure():
    def makers(case, problem, families):
        yield from engines.makers(case, problem, families)
        yield "flashinfer fa2", lambda: 1 / 0

    section = Section("try", "Trials", (), dataclasses.replace(PREFILL, name="small"))
    rows = measure.errors_of_small(section, (), "cpu", makers)
    assert [row["engine"] for row in rows if "value" not in row] == ["flashinfer fa2"]
    assert {row["engine"] for row in rows if "value" in row} == {"raddle", "torch sdpa"}
