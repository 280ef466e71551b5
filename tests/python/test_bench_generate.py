"""`raddle bench generate`: what implementations are asked in turns, and what comes of their times."""

import json

import pytest
from click.testing import CliRunner
from raddle.bench.cli import bench
from raddle.bench.generate import calls, turns
from raddle.bench.generate.turns import Answer
from raddle.bench.serve.loads import Load, chosen
from small import refuses
from small_models import config_of
from transformers import AttentionInterface

SMALL = [Load("first", 2, 0, 12, 1), Load("equal", 2, 0, 12, 4), Load("padded", 3, 0, (3, 20), 4), Load("continuous", 3, 0, (3, 20), 4)]


@pytest.fixture
def folder(tmp_path):
    """A model without weights, whose vocabulary has all tokens of prompts."""
    config_of("llama", vocab_size=30000).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def run(*arguments):
    return CliRunner().invoke(bench, ["generate", *map(str, arguments)])


def test_each_implementation_is_asked_in_turns():
    asked = {"broken": [], "sdpa": [], "raddle": []}

    def caller(name, seconds):
        def call(number):
            asked[name].append(number)
            if name == "broken" and number == 1:
                raise RuntimeError("no such kernel\nmore of it")
            last = 9 if name == "raddle" and number == 3 else 3
            return Answer([[number, 1, 2, last, 4], [number, 1, 2, 3, 4]], seconds)

        return call

    ticks = []
    calls_of = {"broken": caller("broken", 1.0), "sdpa": caller("sdpa", 2.0), "raddle": caller("raddle", 0.5)}
    rows = turns.measure("equal", calls_of, 2, lambda: ticks.append(None))
    assert asked == {"broken": [0, 1], "sdpa": [0, 1, 2, 3], "raddle": [0, 1, 2, 3]} and len(ticks) == 10
    assert turns.failures(rows) == ["equal, broken: RuntimeError: no such kernel"]
    _, sdpa, ours = rows
    assert (sdpa["engine"], sdpa["seconds"], sdpa["rounds_s"], sdpa["tokens_per_s"]) == ("sdpa", 2.0, [2.0, 2.0], 5.0)
    # Compared with the first that did not fail: 7 of 8 requests have 5 equal tokens, and one has 3.
    assert sdpa["like"] == ours["like"] == "sdpa" and sdpa["equal"] == 5.0 and ours["equal"] == (7 * 5 + 3) / 8
    assert turns.ratio(rows, "equal") == 0.25


def test_ratio_to_the_best_other():
    def rows(**rounds):
        return [{"workload": "padded", "engine": name, "rounds_s": each} for name, each in rounds.items()]

    # The median of each round's ratio, to the other with the least median.
    found = rows(sdpa=[2.0, 4.0, 2.0], raddle=[1.0, 4.0, 1.0], flex_attention=[4.0, 4.0, 9.0])
    assert turns.ratio(found, "padded") == 0.5 and turns.ratio(found, "equal") is None
    assert turns.ratio(rows(sdpa=[2.0]), "padded") is None and turns.ratio(rows(raddle=[2.0]), "padded") is None
    failed = [*rows(raddle=[3.0], sdpa=[2.0]), {"workload": "padded", "engine": "flex_attention", "failed": "why"}]
    assert turns.ratio(failed, "padded") == 1.5


def test_prompts_of_a_round():
    """Their lengths are the same in all rounds, since PyTorch's compiler compiles for lengths; their tokens are not."""
    asked = []

    def generate(model, implementation, prompts, new):
        asked.append(prompts)
        return Answer([[0] * (new if model == "whole" else new - 1)] * len(prompts), 1.0)

    padded = SMALL[2]
    for name in ("raddle", "sdpa"):
        for number in (0, 1):
            calls.caller("whole", name, padded, 7, generate)(number)
    first, second, *again = asked
    assert again == [first, second] and first != second
    assert [len(each) for each in first] == [len(each) for each in second]
    with pytest.raises(RuntimeError, match=r"requests have \[3, 3, 3\] new tokens; expected 4"):
        calls.caller("cut short", "raddle", padded, 7, generate)(0)


def test_an_error_in_the_thread_that_serves_requests(folder):
    """`generate_batch` ends such requests and raises nothing."""
    asked = []

    def breaks(module, *tensors, **how):
        asked.append(module)
        if len(asked) > 6:
            raise RuntimeError("no such kernel")
        return AttentionInterface()["raddle"](module, *tensors, **how)

    continuous = SMALL[3]
    model = calls.make_model(str(folder), True, "cpu", "float32", 0)
    call = calls.caller(model, "raddle", continuous, 0, calls.generate_continuous)
    assert [len(tokens) for tokens in call(0).tokens] == [4, 4, 4]
    model.model.layers[0].self_attn.forward = breaks
    with pytest.raises(RuntimeError):
        call(1)


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
    assert [row["equal"] for row in rows] == [1, 1, 4, 4, 4, 4, 4, 4]
    assert "Raddle / best other" in found.output and "failed" not in found.output


def test_wrong_options(folder, tmp_path):
    with refuses(ValueError, "all is no load; expected some of: first, equal, padded, continuous"):
        chosen(("all",), turns.LOADS)
    wrong = run("--model", folder, "--loads", "all")
    assert wrong.exit_code == 2 and "all is no load" in wrong.output
    wrong = run("--model", folder, "--json", tmp_path / "none" / "found.json")
    assert wrong.exit_code == 2 and "there is no folder" in wrong.output
