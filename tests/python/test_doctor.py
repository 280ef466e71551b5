"""`raddle doctor`: stable keys, and a sentence for everything that is off."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import raddle
from click.testing import CliRunner
from raddle import _toolchain, doctor
from raddle.cli import main

KEYS = {
    "raddle": {"version", "library"},
    "python": {"version", "platform"},
    "packages": {"apache-tvm-ffi", "numpy", "ml_dtypes", "torch", "jax"},
    "cpu": {
        *("isa", "isa_reason", "supported_isas", "threads", "threads_reason", "affinity_cpus", "online_cpus"),
        *("quota_cpus", "quota_source", "pinned", "huge_pages", "problem"),
    },
    "compiler": {"found", "path", "origin", "version", "problem"},
    "nvrtc": {"found", "path", "origin", "version", "problem"},
    "driver": {"found", "version", "gpus", "problem"},
    "cache": {"found", "path", "origin", "writable", "bytes", "problem"},
}


@pytest.fixture
def compiler_script(tmp_path):
    script = tmp_path / "c++-of-tests"
    script.write_text("#!/bin/sh\necho 'c++ of tests 9.1'\necho more\n")
    script.chmod(0o755)
    return script


def test_json_has_stable_keys():
    found = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).output)
    devices = found.pop("devices")
    assert found.pop("problems") == []
    assert devices[0] == "cpu" and len(devices) <= 1 + len(found["driver"]["gpus"])
    assert {name: set(section) for name, section in found.items()} == KEYS
    assert found["cpu"]["isa"] == raddle.cpu_isa() in found["cpu"]["supported_isas"]
    assert found["cpu"]["threads"] == raddle.cpu_threads() >= 1
    assert Path(found["raddle"]["library"]).is_file()
    for tool in ("compiler", "nvrtc", "driver"):
        assert found[tool]["found"] == (found[tool]["version"] is not None), found[tool]
        assert found[tool]["found"] or found[tool]["problem"], found[tool]


@pytest.mark.parametrize(
    "content, setting, says",
    [
        ("always [madvise] never\n", "madvise", "THP_MEM_ALLOC_ENABLE=1"),
        ("[always] madvise never\n", "always", "for all memory"),
        ("always madvise [never]\n", "never", "none ("),
        ("", None, "unknown"),
        (None, None, "unknown"),
    ],
)
def test_huge_pages_are_spoken_of(monkeypatch, tmp_path, content, setting, says):
    file = tmp_path / "enabled"
    if content is not None:
        file.write_text(content)
    monkeypatch.setattr(doctor, "_HUGE_PAGES", file)
    assert doctor.facts()["cpu"]["huge_pages"] == setting
    line = next(line for line in doctor.report().splitlines() if line.startswith("huge pages: "))
    assert says in line


def test_the_text_names_the_same(monkeypatch, compiler_script, tmp_path):
    monkeypatch.setenv("RADDLE_CXX", str(compiler_script))
    monkeypatch.setenv("RADDLE_NVRTC", "/nowhere/libnvrtc.so")
    monkeypatch.setenv("RADDLE_CACHE_DIR", str(tmp_path))
    ended = CliRunner().invoke(main, ["doctor"])
    text = ended.output
    assert ended.exit_code == 1 and "Problems:\n- NVRTC: RADDLE_NVRTC is '/nowhere/libnvrtc.so'" in text
    assert f"C++ compiler: {compiler_script}, c++ of tests 9.1" in text
    assert "NVRTC: RADDLE_NVRTC is '/nowhere/libnvrtc.so', which cannot be loaded" in text
    assert f"cache: {tmp_path} (RADDLE_CACHE_DIR)" in text
    assert f"instruction set: {raddle.cpu_isa()} (" in text


def test_compilers_in_order(monkeypatch, compiler_script):
    monkeypatch.delenv("RADDLE_CXX", raising=False)
    monkeypatch.setenv("CXX", str(compiler_script))
    assert _toolchain.compiler()["origin"] == "CXX"
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert _toolchain.compiler()["origin"] != "CXX"
    monkeypatch.setenv("RADDLE_CXX", "no-such-compiler")
    found = _toolchain.compiler()
    assert not found["found"] and found["problem"].startswith("RADDLE_CXX is 'no-such-compiler', which is no program")
    monkeypatch.delenv("RADDLE_CXX")
    monkeypatch.setenv("PATH", str(compiler_script.parent))
    assert "apt install g++" in _toolchain.compiler()["problem"]
    compiler_script.rename(compiler_script.parent / "g++")
    assert _toolchain.compiler()["version"].startswith("c++ of tests 9.1")


def test_a_compiler_that_does_not_run(monkeypatch, compiler_script):
    compiler_script.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    monkeypatch.setenv("RADDLE_CXX", str(compiler_script))
    found = _toolchain.compiler()
    assert not found["found"] and "broken" in found["problem"] and "3" in found["problem"]


def test_cache_folders_in_order(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("RADDLE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    found = _toolchain.cache()
    assert found["path"] == str(tmp_path / "home/.cache/raddle") and found["origin"] == "HOME"
    assert not found["found"] and found["writable"] and found["problem"] is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert _toolchain.cache()["path"] == str(tmp_path / "xdg/raddle")
    monkeypatch.setenv("RADDLE_CACHE_DIR", str(tmp_path / "own"))
    (tmp_path / "own/entry").mkdir(parents=True)
    (tmp_path / "own/entry/code.so").write_bytes(b"x" * 1234)
    (tmp_path / "own/note").write_bytes(b"y" * 66)
    found = _toolchain.cache()
    assert found["path"] == str(tmp_path / "own") and found["found"] and found["bytes"] == 1300
    assert not (tmp_path / "home").exists() and not (tmp_path / "xdg").exists(), "looking makes nothing"


def test_a_cache_that_cannot_be_written(monkeypatch):
    monkeypatch.setenv("RADDLE_CACHE_DIR", "/dev/null/raddle")
    found = _toolchain.cache()
    assert not found["writable"] and "/dev/null cannot be written" in found["problem"]
    assert f"- cache: {found['problem']}" in doctor.report()


def test_a_compiler_that_was_named_and_is_missing_is_a_problem(monkeypatch):
    for name, problems in (("RADDLE_CXX", 1), ("CXX", 0)):
        monkeypatch.delenv("RADDLE_CXX", raising=False)
        monkeypatch.setenv(name, "no-such-compiler")
        ended = CliRunner().invoke(main, ["doctor", "--json"])
        assert len(json.loads(ended.output)["problems"]) == ended.exit_code == problems


def test_what_is_not_installed_is_no_problem(monkeypatch):
    monkeypatch.setattr(_toolchain, "driver", lambda: {"found": False, "gpus": [], "version": None, "problem": "none"})
    monkeypatch.setattr(_toolchain, "nvrtc", lambda: {"found": False, "version": None, "problem": "none"})
    assert doctor.facts()["problems"] == [] and "Everything that is installed works." in doctor.report()


def test_a_gpu_without_a_compiler_for_its_kernels_is_a_problem(monkeypatch):
    gpu = {"name": "a GPU", "arch": "sm_90", "target": "sm_90", "supported": True}
    driver = {"found": True, "gpus": [gpu], "version": "13.0", "problem": None}
    monkeypatch.setattr(_toolchain, "driver", lambda: driver)
    monkeypatch.setattr(_toolchain, "nvrtc", lambda: {"found": False, "version": None, "problem": "NVRTC is missing"})
    assert doctor.facts()["problems"] == ["NVRTC: NVRTC is missing"]


@pytest.mark.parametrize(
    "variable, value, words", [("RADDLE_CPU_ISA", "mmx", "generic"), ("RADDLE_NUM_THREADS", "0", "1 to")]
)
def test_bad_environment_is_told_and_not_fatal(variable, value, words):
    command = [sys.executable, "-c", "from raddle.cli import main; main()", "doctor", "--json"]
    ended = subprocess.run(command, env={**os.environ, variable: value}, capture_output=True, text=True)
    assert ended.returncode == 1, ended.stderr
    found = json.loads(ended.stdout)
    problem = found["cpu"]["problem"]
    assert f'{variable} is "{value}"' in problem and words in problem and found["problems"] == [f"CPU: {problem}"]
