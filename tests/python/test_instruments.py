"""Benchmarks and replays are instruments: the command `raddle` registers them, and the library imports nothing of them."""

import pytest
from statements import PACKAGE, imported

INSTRUMENTS = ("bench", "replay")
LIBRARY = [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] not in INSTRUMENTS]


def of_instruments(path, package=PACKAGE):
    return {name for name in imported(path, package) if name.split(".")[:2] in [["raddle", each] for each in INSTRUMENTS]}


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_command_knows_the_instruments(path):
    registered = {"raddle.bench.cli.bench", "raddle.replay.cli.replay"}
    assert of_instruments(path) == (registered if path == PACKAGE / "cli.py" else set())


def test_every_way_to_import_is_seen(tmp_path):
    path = tmp_path / "flex" / "x.py"
    path.parent.mkdir()
    lines = ["import raddle.bench.timing", "from raddle import replay", "from ..bench import kv", "from .. import bench"]
    path.write_text("\n".join([*lines, "import raddle.benches", "def late():", "    from raddle.replay.cli import main"]))
    found = {"bench.timing", "replay", "bench.kv", "bench", "replay.cli.main"}
    assert of_instruments(path, tmp_path) == {f"raddle.{name}" for name in found}
