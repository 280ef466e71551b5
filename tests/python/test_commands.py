"""The command `raddle` as its users meet it: help everywhere, without torch, in words, and `explain` by hand."""

import os
import re
import subprocess
import sys

import click
import pytest
import raddle
from click.testing import CliRunner
from raddle import _command
from raddle.cli import main
from raddle.variants import Causal


def commands(command=main, path=()):
    yield path, command
    if isinstance(command, click.Group):
        for name, each in command.commands.items():
            yield from commands(each, (*path, name))


@pytest.mark.parametrize("path, command", [pytest.param(*each, id=" ".join(each[0])) for each in commands()])
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_every_command_has_help(path, command, option):
    command._help_option = None  # click keeps what another test's call of the command alone found
    ended = CliRunner().invoke(main, [*path, option])
    assert ended.exit_code == 0 and command.help.splitlines()[0].split(".")[0][:40] in " ".join(ended.output.split())
    options = [each for each in command.params if isinstance(each, click.Option)]
    assert all(each.help for each in options), [each.name for each in options if not each.help]


@pytest.fixture
def started(tmp_path):
    """Runs the script `raddle` in a process where importing torch fails loudly."""
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')")
    script = tmp_path / "raddle"
    script.write_text("from raddle.cli import main; main()")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}

    def start(arguments):
        command = [sys.executable, str(script), *arguments.split()]
        return subprocess.run(command, env=env, capture_output=True, text=True)

    return start


@pytest.mark.parametrize("arguments", ["-h", "--help", "doctor", "explain 1:40", "cache list", "bench gpu --help", "replay -h"])
def test_what_needs_no_torch_imports_none(started, arguments):
    ended = started(arguments)
    assert ended.returncode == 0, ended.stderr


def test_what_needs_torch_finds_it(started):
    for arguments in ("bench cpu", "replay --device cuda", "cache warm nothing:HERE"):
        assert "torch was imported" in started(arguments).stderr, arguments


def test_modules_of_specs_are_found_in_the_current_folder(tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    (here / "my_specs.py").write_text("import raddle\nSPECS = raddle.AttentionSpec(2, 1, 8)\n")
    script = tmp_path / "raddle"  # its own folder is where Python looks first
    script.write_text("from raddle.cli import main; main()")
    command = [sys.executable, str(script), "cache", "warm", "my_specs:SPECS"]
    ended = subprocess.run(command, cwd=here, capture_output=True, text=True)
    assert "1 spec; nothing left to compile" in ended.stdout, ended.stderr


def test_the_module_is_the_command():
    ended = subprocess.run([sys.executable, "-m", "raddle", "--version"], capture_output=True, text=True)
    assert ended.returncode == 0 and raddle.__version__ in ended.stdout, ended.stderr


@pytest.mark.parametrize(
    "argv, orig_argv, hidden",
    [
        (["/usr/bin/raddle", "doctor"], ["python", "/usr/bin/raddle", "doctor"], True),
        (["/usr/bin/raddle", "replay", "--requests", "3"], [], True),
        (["/usr/bin/raddle", "bench", "cpu"], [], False),
        (["/usr/bin/raddle", "bench", "cpu", "-h"], [], True),
        (["-m", "doctor"], ["python", "-X", "dev", "-m", "raddle", "doctor"], True),
        (["-m", "doctor"], ["python", "-m", "server", "-m", "raddle"], False),
        (["-m"], [], False),
        (["server.py", "doctor"], ["python", "server.py", "doctor"], False),
        (["/srv/raddle/server"], ["python", "/srv/raddle/server"], False),
        ([], [], False),
    ],
)
def test_torch_is_hidden_from_these_commands_alone(monkeypatch, argv, orig_argv, hidden):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", orig_argv, raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "torch")
    _command.hide_torch()
    assert ("torch" in sys.modules) == hidden
    sys.modules.pop("torch", None)
    given = object()
    monkeypatch.setitem(sys.modules, "torch", given)
    _command.hide_torch()
    assert sys.modules["torch"] is given, "what is imported already stays"


def plan_of(qo_len, kv_len, dim=128, heads=(32, 8), workers=2, **spec):
    attention = raddle.Attention(raddle.AttentionSpec(*heads, dim, **spec))
    return attention.plan(raddle.RaggedKV([0, qo_len], [0, kv_len]), num_workers=workers)


def test_explain_counts_in_bytes():
    # 4,096 keys and values of 8 heads, 128 numbers of 2 bytes each: 16.8 MB, half of them for each of two workers.
    text = plan_of(1, 4096).explain()
    assert "reads: 16.8 MB of keys and values, at most 8.39 MB per worker" in text, text
    # What a window hides is not read: 16 keys are left.
    text = plan_of(1, 4096, variant=[raddle.SlidingWindow(15), Causal()]).explain()
    assert "reads: 65.5 kB" in text, text
    assert "reads: 0 B" in plan_of(1, 0).explain()
    # V is a part of latent keys.
    latent = raddle.AttentionSpec(16, 1, 576, head_dim_vo=512)
    plan = raddle.Attention(latent).plan(raddle.RaggedKV([0, 1], [0, 1000]), num_workers=1)
    assert "reads: 1.15 MB" in plan.explain(), plan.explain()


def test_explain_counts_in_time():
    plan = plan_of(1, 4096)
    shown, unit = re.search(r"estimated time: ([\d.]+) (us|ms) for the busiest of 2 workers", plan.explain()).groups()
    assert float(shown) * {"us": 1, "ms": 1000}[unit] == pytest.approx(plan.estimated_us, rel=0.01)
    assert plan_of(1, 8192).estimated_us == pytest.approx(2 * plan.estimated_us, rel=0.1)
    assert not re.search(r"\d{6}", plan.explain())


def test_the_cpu_functions_have_help_of_their_own():
    for function in (raddle.cpu_isa, raddle.cpu_threads):
        assert "Returns" in function.__doc__ and "RADDLE_" in function.__doc__
    assert isinstance(raddle.cpu_isa(), str) and isinstance(raddle.cpu_threads(), int)
