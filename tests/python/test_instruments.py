"""Benchmarks and replays are instruments: the command `raddle` registers them, and the library imports nothing of them."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "python" / "raddle"
INSTRUMENTS = ("bench", "replay")
LIBRARY = [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] not in INSTRUMENTS]


def imported(path, package=PACKAGE):
    """Full names of the modules, and of what is taken from them, that a file of the package imports anywhere."""
    parents = ["raddle", *path.relative_to(package).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = parents[: len(parents) + 1 - node.level] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            yield from (f"{module}.{each.name}" for each in node.names)


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
