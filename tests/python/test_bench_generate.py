"""`raddle bench generate`: what implementations are asked in turns, and what comes of their times."""

import json

import pytest
from click.testing import CliRunner
from raddle.bench.cli import bench
from raddle.bench.generate import turns
from raddle.bench.serve.loads import Load, chosen
from small import refuses
from small_models import config_of

SMALL = [Load("prompts", 2, 0, 12, 4), Load("padded", 3, 0, (3, 20), 4), Load("batch", 3, 0, (3, 20), 4)]


@pytest.fixture
def folder(tmp_path):
    """A model without weights, whose vocabulary has all tokens of prompts."""
    config_of("llama", vocab_size=30000).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def run(*arguments):
    return CliRunner().invoke(bench, ["generate", *map(str, arguments)])


def test_each_implementation_is_asked_the_same():
    asked = {"sdpa": [], "raddle": [], "none": []}

    def caller(name):
        def call(number):
            asked[name].append(number)
            if name == "none" and number == 1:
                raise RuntimeError("no such kernel\nmore of it")
            return [[number, 1], [number, 2 if name == "raddle" and number == 2 else 3]]

        return call

    ticks = []
    rows = turns.measure("prompts", {name: caller(name) for name in asked}, 2, lambda: ticks.append(None))
    assert asked == {"sdpa": [0, 1, 2], "raddle": [0, 1, 2], "none": [0, 1]} and len(ticks) == 8
    assert [row["engine"] for row in rows] == ["sdpa", "raddle", "none"]
    assert [(row["equal"], row["requests"], len(row["rounds_s"])) for row in rows[:2]] == [(6, 6, 2), (5, 6, 2)]
    assert rows[0]["tokens_per_s"] == 4 / rows[0]["seconds"] > 0
    assert turns.failures(rows) == ["prompts, none: RuntimeError: no such kernel"]


def test_ratio_to_the_best_other():
    def rows(**seconds):
        return [{"workload": "batch", "engine": name, "seconds": each} for name, each in seconds.items()]

    assert turns.ratio(rows(sdpa=2.0, raddle=1.0, flex_attention=4.0), "batch") == 0.5
    assert turns.ratio(rows(sdpa=2.0), "batch") is None and turns.ratio(rows(raddle=2.0), "batch") is None
    failed = [*rows(raddle=3.0, sdpa=2.0), {"workload": "batch", "engine": "flex_attention", "failed": "why"}]
    assert turns.ratio(failed, "batch") == 1.5 and turns.ratio(failed, "prompts") is None


def test_a_model_of_random_weights(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(turns, "LOADS", SMALL)
    written = tmp_path / "found.json"
    names = ("--implementations", "eager,raddle", "--device", "cpu", "--dtype", "float32")
    found = run("--model", folder, "--dummy-weights", *names, "--rounds", 1, "--json", written)
    assert found.exit_code == 0, found.output
    rows = json.loads(written.read_text())
    assert [(row["workload"], row["engine"]) for row in rows] == [
        (load.name, name) for load in SMALL for name in ("eager", "raddle")
    ]
    assert all(row["equal"] == row["requests"] > 0 for row in rows), rows
    assert "Raddle / best other" in found.output and "failed" not in found.output


def test_wrong_options(folder, tmp_path):
    with refuses(ValueError, "all is no load; expected some of: prompts, padded, batch"):
        chosen(("all",), turns.LOADS)
    wrong = run("--model", folder, "--loads", "all")
    assert wrong.exit_code == 2 and "all is no load" in wrong.output
    wrong = run("--model", folder, "--json", tmp_path / "none" / "found.json")
    assert wrong.exit_code == 2 and "there is no folder" in wrong.output
