"""Runs `raddle replay` in this process."""

import json

import pytest
from click.testing import CliRunner
from raddle.bench import limits
from raddle.replay import cli


@pytest.fixture(autouse=True)
def no_bandwidth(monkeypatch):
    """The measurement takes seconds and a gigabyte: imported, it is left out of all tests of a file."""
    monkeypatch.setattr(limits, "read_gbps", lambda advance: 12.5)


def replay(folder, *arguments, exit_code=0):
    """The report, or None where there is none, and what was printed."""
    path = folder / "report.json"
    path.unlink(missing_ok=True)
    result = CliRunner().invoke(cli.replay, [str(a) for a in (*arguments, "--json", path)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == exit_code, result.output
    return (json.loads(path.read_text()) if path.exists() else None), result.output
