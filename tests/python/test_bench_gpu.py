"""`raddle bench gpu` without a GPU: its workloads, rounds, ratios and tables, Raddle and stand-ins on the CPU."""

import dataclasses
import json
import sys
import time
import types

import pytest
import torch
from click.testing import CliRunner
from raddle.bench import workloads
from raddle.bench.cli import bench
from raddle.bench.gpu import check, engines, first_use, host, measure, process, report, results, sections, timing
from raddle.bench.gpu.cases import Case, Section, lengths
from raddle.bench.gpu.engines import Contestant, own, sdpa
from raddle.bench.gpu.problem import Problem

TINY = {"heads": (4, 2, 32), "page_size": 16}
DECODE = Case("decode", (1, 1, 1), (33, 64, 5), **TINY)
PREFILL = Case("prefill", (40, 9), (40, 9), form="ragged", unit="TFLOP/s", **TINY)
CASES = [
    DECODE,
    PREFILL,
    Case("mixed", (7, 1), (40, 18), **TINY),
    Case("prefix", (1, 1, 1), (48, 41, 33), form="cascade", prefix=32, **TINY),
    Case("blocks", (1,), (128,), (4, 4, 32), form="blocks", blocks=3, variant="plain"),
    *(dataclasses.replace(DECODE, name=name, variant=name) for name in ("alibi", "sinks", "sigmoid", "rope")),
    *(dataclasses.replace(PREFILL, name=name, variant=name) for name in ("window", "wide window", "softcap")),
    dataclasses.replace(DECODE, name="turned", variant="rope interleaved"),
]


class Quiet:
    def say(self, text, total=None):
        pass

    def advance(self):
        pass


class Clock:
    """Stands in for the GPU's timer: an engine's time is written into its call."""

    def sampling(self, call):
        call()
        return call.us

    def us(self, call, how):
        call()
        return how


def stand_in(name, out, us, fails_at=None):
    """An engine that writes ``out`` and pretends to take ``us``; its call of that number raises."""
    written = torch.empty_like(out)
    count = [0]

    def call():
        count[0] += 1
        if count[0] == fails_at:
            raise RuntimeError("broke\nsecond line")
        return written.copy_(out)

    call.us = us
    return name, lambda: Contestant(name, call, written)


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


def test_sections_are_chosen_by_name_or_pattern():
    assert [s.name for s in sections.chosen(["decode"])] == ["decode"]
    assert [s.name for s in sections.chosen(["decode*"])] == ["decode", "decode-pages", "decode-variants"]
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


SQUARE = dataclasses.replace(PREFILL, qo_len=(150, 150), kv_len=(150, 150), peers=("flex", "fa2"))
STEP = dataclasses.replace(DECODE, kv_len=(40, 40, 40), peers=("flex", "fa2"))


@pytest.mark.parametrize("variant", ["causal", "softcap", "alibi", "window"])
@pytest.mark.parametrize("case", [SQUARE, STEP], ids=["prefill", "decode"])
def test_torch_engines_compute_the_same(case, variant, monkeypatch):
    """Uncompiled, on the CPU: what is checked is how they are called."""
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
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
        def timed():
            seen.append(name)
            if name == "b" and seen.count("b") == 2:
                raise RuntimeError("no more")
            return float(len(seen))

        return timed

    times = timing.interleaved({n: call(n) for n in "abc"}, 3, lambda name, error: failures.append((name, str(error))))
    assert seen == ["a", "b", "c", "b", "c", "a", "a", "c"] and failures == [("b", "no more")]
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
    _shows(_section(base, other), rows, "0.50× ✗", "3.00× ✗", "0.500 ✗", "failed: breaks on decode")


def _shows(section, rows, *texts):
    with (out := report.console()).capture() as captured:
        out.print(*report.tables(section, rows), sep="\n")
    assert all(text in captured.get() for text in texts), captured.get()


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
    _shows(section, rows, "error against fp64, small, ten draws")


# --- a device that is none ------------------------------------------------------------------


class Event:
    """An event of the CPU."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


@pytest.fixture
def no_gpu(monkeypatch):
    """The functions of torch.cuda that the bench calls, on the CPU."""
    properties = types.SimpleNamespace(name="None", major=9, minor=0, multi_processor_count=2, L2_cache_size=1 << 16)
    stand_ins = {
        "get_device_properties": lambda device: properties,
        "Event": Event,
        **{name: lambda *_: None for name in ("_sleep", "synchronize", "set_device", "empty_cache")},
    }
    for name, stand in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand)


def test_calls_are_timed_by_events(no_gpu):
    timer = timing.Timer("cpu", least_samples=3, most_samples=7, sample_us=9000.0)
    slow = timer.sampling(lambda: time.sleep(0.01))
    assert slow.samples == 3 and timer.us(lambda: time.sleep(0.01), slow) >= 10_000
    assert timer.sampling(lambda: None).samples == 7


def test_a_process_measures_sections_and_keeps_them(no_gpu, monkeypatch, tmp_path, capfd):
    case = dataclasses.replace(DECODE, floor=True, at_least={"floor": 0.5})
    section = Section("try", "Trials", (case, dataclasses.replace(PREFILL, variant="softcap")), SQUARE)
    broken = Section("broken", "Broken", (dataclasses.replace(DECODE, form="cascade", prefix=3),), None)
    monkeypatch.setattr(sections, "SECTIONS", (section, broken))
    for prepare in (True, False):
        options = dataclasses.asdict(process.Options(("fa2",), 2, "cpu", prepare))
        assert process.main([json.dumps(options), str(tmp_path), "try", "broken"]) == 0
        rows = json.loads((tmp_path / "try.json").read_text())["rows"]
        assert sum("rounds" in row for row in rows) == (0 if prepare else 2)
    assert json.loads((tmp_path / "machine.json").read_text())["versions"]["fa2"] == torch.__version__
    timed = [row for row in rows if "rounds" in row]
    assert all(len(row["rounds"]) == 2 and row["us"] > 0 for row in timed)
    assert [row["engine"] for row in rows if "failed" in row] == [results.FLOOR]  # without a GPU, CuPy has none
    assert {row["engine"] for row in rows if row.get("kind") == "error"} == {"raddle", "torch sdpa", "fa2"}
    (lost,) = json.loads((tmp_path / "broken.json").read_text())["rows"]
    assert lost["engine"] == "all" and "ends within a page" in lost["failed"] and results.raddle_failed([lost])
    assert "None, driver" in capfd.readouterr().out


def test_host_times_are_measured(no_gpu, monkeypatch):
    monkeypatch.setattr(host, "_LAYERS", 2)
    monkeypatch.setattr(host, "_CALLS", 3)
    rows = host.measure((), 1, "cpu")
    assert not [row for row in rows if "failed" in row]
    assert [row["workload"] for row in rows[:4]] == ["plan B16", "plan B256", "run out=", "run"]
    assert all(row["value"] > 0 for row in rows) and len(rows) == 7
    section = sections.chosen(["plan"])[0]
    _shows(section, rows, "≤ 15", "of the step")


def test_first_use_is_measured_in_processes(monkeypatch):
    script = first_use._FIRST_RESULT.replace("torch.cuda.synchronize()", "pass")
    monkeypatch.setattr(first_use, "_FIRST_RESULT", script)
    monkeypatch.setattr(first_use, "VARIANTS", ("rope",))
    rows = first_use.measure(1, Quiet(), "cpu")
    assert [row["workload"].split(", ")[1] for row in rows] == ["cold cache"] * 2 + ["warm cache"] * 2, rows
    monkeypatch.setattr(first_use, "VARIANTS", ("nothing",))
    assert "KeyError: 'nothing'" in first_use.measure(1, Quiet(), "cpu")[0]["failed"]


# --- processes, files, commands -------------------------------------------------------------

_CHILD = """
import json, os, sys
folder, names = sys.argv[1], sys.argv[2:]
def put(name, value):
    with open(f"{folder}/{name}.tmp", "w") as f: f.write(json.dumps(value))
    os.rename(f"{folder}/{name}.tmp", f"{folder}/{name}.json")
put("machine", {"gpu": "none"})
for name in names:
    if name == "dies": os.abort()
    if name == "hangs": import time; time.sleep(60)
    put(name, {"name": name, "seconds": 1.0, "rows": []})
    if name == "loses": sys.exit(3)
"""


def test_sections_survive_each_other(tmp_path):
    kept = []
    names = ["a", "dies", "b", "loses", "hangs", "c"]
    _, finished = process.run_all(
        names,
        process.Options(section_s=1.5),
        lambda machine, done: kept.append((dict(machine), len(done))),
        lambda options, folder, left: [sys.executable, "-c", _CHILD, str(folder), *left],
    )
    assert [part["name"] for part in finished] == names
    failures = {part["name"]: part["rows"][0]["failed"] for part in finished if part["rows"]}
    assert set(failures) == {"dies", "hangs"}
    assert "ended with -6" in failures["dies"] and "not finished after 1.5 s" in failures["hangs"]
    assert kept[-1] == ({"gpu": "none"}, 6)


def test_the_file_holds_machine_and_rows(tmp_path):
    path = tmp_path / "gpu.json"
    part = {"name": "s", "seconds": 2.0, "rows": [results.figure("s", "w", 3.0, "us", 4.0)]}
    report.write(path, {"gpu": "some", "versions": {}}, [part, {**part, "name": "t"}])
    read = json.loads(path.read_text())
    assert read["machine"]["gpu"] == "some" and read["seconds"] == {"s": 2.0, "t": 2.0}
    assert [row["met"] for row in read["rows"]] == [True, True]


def test_the_commit_may_be_given(monkeypatch):
    monkeypatch.setenv("RADDLE_COMMIT", "abc")
    assert report.commit() == "abc"
    assert "commit abc" in report.header({"gpu": "G", "commit": report.commit(), "versions": {"torch": "2"}})


def test_absent_engines_are_named(monkeypatch):
    monkeypatch.setitem(engines.FAMILIES, "nobody", ("nobody", "no_such_module"))
    assert engines.versions(("nobody",)) == {"nobody": "absent: ModuleNotFoundError: No module named 'no_such_module'"}
    assert engines.versions(("fa2",))["fa2"] == torch.__version__


@pytest.mark.parametrize(
    "arguments, code, text",
    [
        (["--list", "--only", "quest"], 0, "    64 pages of 16k\n"),
        (["--only", "nothing"], 2, "no section fits 'nothing'"),
        (["--against", "flashinfer,nobody"], 2, "--against names nobody; expected some of: flashinfer"),
        (["--out", "/nowhere/x.json"], 2, "there is no folder /nowhere"),
    ],
)
def test_the_command_names_what_is_wrong(arguments, code, text):
    done = CliRunner().invoke(bench, ["gpu", *arguments])
    assert done.exit_code == code and text in done.output


def test_without_a_gpu_the_command_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(bench, ["gpu"])
    assert done.exit_code == 1 and "no NVIDIA GPU" in done.output


@pytest.mark.parametrize("bulk, arch", [(True, b"sm_90a"), (False, b"sm_75")])
def test_the_floor_compiles(bulk, arch):
    from raddle.bench.gpu.floor import source

    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="compiles CUDA C++ without Raddle; comes with torch")
    _, program = nvrtc.nvrtcCreateProgram(source(bulk).encode(), b"floor.cu", 0, [], [])
    options = [b"-std=c++17", b"--gpu-architecture=" + arch]
    (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
    assert code == nvrtc.nvrtcResult.NVRTC_SUCCESS, (nvrtc.nvrtcGetProgramLog(program, log), log.decode())
