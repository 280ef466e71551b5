"""`raddle bench gpu` without a GPU: its clock, processes, files and options; torch.cuda is a stand-in."""

import dataclasses
import json
import sys
import time
import types

import pytest
import raddle
import torch
from bench_gpu_cases import DECODE, PREFILL, SQUARE, Quiet, shows
from click.testing import CliRunner
from clock import Clock
from raddle.bench import engines, first_use, report, results, timing
from raddle.bench.cli import bench
from raddle.bench.gpu import host, planner, process, sections
from raddle.bench.gpu.cases import Section


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


def test_calls_are_timed_by_events(no_gpu, monkeypatch):
    clock = Clock()
    for module in (timing, sys.modules[__name__]):
        monkeypatch.setattr(module, "time", clock)
    gpu = timing.GpuClock("cpu", least_samples=3, most_samples=7, sample_us=9000.0)
    assert gpu.sampling(lambda step: clock.sleep(0.01)) == timing.Sampling(3, pytest.approx(10_000))
    assert gpu.turn(lambda step: clock.sleep(0.01))(0) == pytest.approx(10_000)
    assert gpu.sampling(lambda step: clock.sleep(0.001)).samples == 7
    times = gpu.rounds({"a": lambda step: clock.sleep(0.001 * (step + 1))}, 3)
    assert times == {"a": pytest.approx([1000, 2000, 3000])}


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
    assert [row["workload"] for row in rows[:5]] == ["plan B16", "plan B256", "run out=", "run", "flex call"]
    assert all(row["value"] > 0 for row in rows) and len(rows) == 8
    section = sections.chosen(["plan"])[0]
    shows(section, rows, "≤ 15", "of the step")


def test_a_peer_without_its_kernels_costs_raddle_no_plan(no_gpu, monkeypatch):
    def missing(*_):
        raise RuntimeError("no kernel was built")

    monkeypatch.setattr(host, "_flashinfer_plan", missing)
    attn = raddle.Attention(raddle.AttentionSpec(32, 8, 128))
    rows = host._plan(attn, 16, 15.0, 1, ("flashinfer",), "cpu")
    assert [row["engine"] for row in rows] == ["raddle", "flashinfer"] and rows[0]["value"] > 0
    assert "no kernel was built" in rows[1]["failed"] and not results.raddle_failed(rows)


def test_plans_on_the_device_are_measured(no_gpu, monkeypatch):
    """On a CPU the same calls are planned by the host."""
    monkeypatch.setattr(planner, "_HEADS", (2, 1, 16))
    rows = planner.measure("plan", 2, "cpu")
    assert not [row for row in rows if "failed" in row], rows
    assert len(rows) == 7 and all(row["value"] > 0 for row in rows) and rows[-1]["unit"] == "of the time"
    shows(sections.chosen(["plan"])[0], rows, "≤ 10", "≤ 0.333", "until enqueued")


def test_first_use_is_measured_in_processes(monkeypatch):
    script = first_use._FIRST_ON_GPU.replace("torch.cuda.synchronize()", "pass")
    monkeypatch.setattr(first_use, "_FIRST_ON_GPU", script)
    monkeypatch.setattr(first_use, "VARIANTS", ("rope",))
    rows = first_use.on_gpu(1, Quiet(), "cpu")
    expected = [[f"{kind} cache", what] for kind in ("cold", "warm") for what in first_use.RESULTS for _ in range(2)]
    assert [row["workload"].split(", ")[1:3] for row in rows] == expected, rows
    monkeypatch.setattr(first_use, "VARIANTS", ("nothing",))
    assert "KeyError: 'nothing'" in first_use.on_gpu(1, Quiet(), "cpu")[0]["failed"]


# --- processes, files, commands -------------------------------------------------------------

_CHILD = """
import json, os, sys, time
folder, hanging, names = sys.argv[1], sys.argv[2], sys.argv[3:]
def put(name, value):
    with open(f"{folder}/{name}.tmp", "w") as f: f.write(json.dumps(value))
    os.rename(f"{folder}/{name}.tmp", f"{folder}/{name}.json")
put("machine", {"gpu": "none"})
for name in names:
    if name == "dies": os.abort()
    if name == "hangs":
        open(hanging, "w").close()
        while True: time.sleep(1)
    put(name, {"name": name, "seconds": 1.0, "rows": []})
    if name == "loses": sys.exit(3)
"""


def test_sections_survive_each_other(tmp_path, monkeypatch):
    kept, hanging = [], tmp_path / "hanging"
    # Time passes where a section hangs, and nowhere else.
    clock = types.SimpleNamespace(sleep=time.sleep, monotonic=lambda: 100.0 * hanging.exists())
    monkeypatch.setattr(process, "time", clock)
    names = ["a", "dies", "b", "loses", "hangs", "c"]
    _, finished = process.run_all(
        names,
        process.Options(section_s=1.5),
        lambda machine, done: kept.append((dict(machine), len(done))),
        lambda options, folder, left: [sys.executable, "-c", _CHILD, str(folder), str(hanging), *left],
    )
    assert [part["name"] for part in finished] == names
    failures = {part["name"]: part["rows"][0]["failed"] for part in finished if part["rows"]}
    assert set(failures) == {"dies", "hangs"}
    assert "ended with -6" in failures["dies"] and "not finished after 1.5 s" in failures["hangs"]
    assert kept[-1] == ({"gpu": "none"}, 6)


def test_the_file_holds_machine_and_rows(tmp_path):
    path = tmp_path / "gpu.json"
    part = {"name": "s", "seconds": 2.0, "rows": [results.figure("s", "w", 3.0, "us", 4.0)]}
    report.write_gpu(path, {"gpu": "some", "versions": {}}, [part, {**part, "name": "t"}])
    read = json.loads(path.read_text())
    assert read["machine"]["gpu"] == "some" and read["seconds"] == {"s": 2.0, "t": 2.0}
    assert [row["met"] for row in read["rows"]] == [True, True]


def test_the_commit_may_be_given(monkeypatch):
    monkeypatch.setenv("RADDLE_COMMIT", "abc")
    assert report.commit() == "abc"
    assert "commit abc" in report.gpu_header({"gpu": "G", "commit": report.commit(), "versions": {"torch": "2"}})


def test_absent_engines_are_named(monkeypatch):
    monkeypatch.setitem(engines.FAMILIES, "nobody", ("nobody", "no_such_module"))
    assert engines.versions(("nobody",)) == {"nobody": "absent: ModuleNotFoundError: No module named 'no_such_module'"}
    assert engines.versions(("fa2",))["fa2"] == torch.__version__


@pytest.mark.parametrize(
    "arguments, code, text",
    [
        (["--list", "--only", "quest"], 0, "    64 pages of 16k\n"),
        (["--only", "nothing"], 2, "no section fits 'nothing'"),
        (["--timeline-of", "decode,nothing"], 2, "--timeline-of: no section fits 'nothing'"),
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
