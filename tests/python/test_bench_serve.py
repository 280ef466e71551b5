"""`raddle bench serve` with engines of the test's own: what is sent, what is kept of it, and what is said."""

import asyncio
import json
import sys
import types

import pytest
from click.testing import CliRunner
from raddle.bench.cli import bench
from raddle.bench.serve import turns, worker
from raddle.bench.serve.loads import LOADS, Load, chosen
from small import refuses


def options(**changes):
    return worker.Options(**{"model": "m", "backend": "CUSTOM", "loads": (), "rounds": 1, "seed": 3, "engine": {}, **changes})


class Clock:
    """Seconds pass only where the engine below says so."""

    now = 0.0

    def __call__(self):
        return self.now


def test_prompts_are_those_of_the_seed():
    prefix = next(load for load in LOADS if load.name == "prefix")
    shared, prompts = prefix.prompts(1)
    assert (shared, prompts) == prefix.prompts(1) and shared != prefix.prompts(2)[0]
    assert len(shared) == 8192 and all(each[:8192] == shared and len(each) == 8448 for each in prompts)
    assert len({tuple(each) for each in prompts}) == 32
    lengths = {len(each) for each in Load("some", 50, 0, (5, 9), 1).prompts(0)[1]}
    assert lengths <= set(range(5, 10)) and len(lengths) > 1
    assert [load.name for load in chosen(("long", "single"))] == ["long", "single"] and chosen(()) == LOADS
    with refuses(ValueError, "longest is no load; expected some of: check, single"):
        chosen(("longest",))


def test_times_of_tokens():
    """Half a second to the first token, a quarter to each further two."""
    clock, sent = Clock(), []

    async def generate(name, prompt, new):
        sent.append((name, len(prompt), new))
        clock.now += 0.5
        yield [prompt[0]]
        for at in range(1, new, 2):
            clock.now += 0.25
            yield [at, at + 1][: new - at]

    said = []
    found = asyncio.run(worker.measure(generate, options(loads=("single", "single"), rounds=2), said.append, clock))
    assert [each["load"] for each in found] == ["single"] * 4 and said == ["CUSTOM: single"] * 4
    assert found[0]["first_s"] == [0.5] and found[0]["between_s"] == [0.25] * 64 and found[0]["seconds"] == 16.5
    assert [len(each) for each in found[0]["tokens"]] == [128]
    assert [name for name, _, _ in sent][:8] == [f"warm-up-3-{n}" for n in range(8)]
    assert sent[8:] == [(f"single-{seed}-0", 2048, 128) for seed in (3, 3, 4, 4)]
    sent.clear()
    asyncio.run(worker.measure(generate, options(loads=("prefix",)), said.append, clock, warm_up=None))
    assert sent[0] == ("prefix-3-shared", 8192, 1) and len(sent) == 33


def turn(backend, itl, ttft, tokens):
    load = {"load": "short", "seconds": 2.0, "first_s": [ttft] * 2, "between_s": [itl] * 10, "tokens": tokens}
    return {"backend": backend, "vllm": "0.24.0", "ready_s": 9.0, "loads": [load, load]}


def test_ratios_to_the_best_other():
    same, other = [[1, 2], [3, 4]], [[1, 2], [3, 5]]
    found = [turn("FLASH_ATTN", 0.01, 0.2, same), turn("CUSTOM", 0.006, 0.3, other), turn("TRITON_ATTN", 0.02, 0.1, same)]
    rows = turns.rows_of([*found, turn("FLASH_ATTN", 0.014, 0.4, same)])
    assert [(row["engine"], row["turn"], row["equal"], row["requests"]) for row in rows] == [
        ("FLASH_ATTN", 0, 4, 4),
        ("CUSTOM", 1, 2, 4),
        ("TRITON_ATTN", 2, 4, 4),
        ("FLASH_ATTN", 3, 4, 4),
    ]
    assert rows[1]["itl_p50_ms"] == pytest.approx(6.0) and rows[1]["tokens_per_s"] == pytest.approx(2.0)
    ratios = turns.ratios(rows)["short"]
    assert ratios["itl_p50_ms"] == pytest.approx(0.5), "6 ms over 12, the mean of FLASH_ATTN's turns"
    assert ratios["ttft_p50_ms"] == pytest.approx(3.0) and ratios["tokens_per_s"] == pytest.approx(1.0)
    assert turns.ratios(rows[:1]) == turns.ratios(rows[1:2]) == {}


def test_an_engine_in_a_process_of_its_own(tmp_path):
    def write(given, out):
        assert given == options()
        return [sys.executable, "-c", f"open({str(out)!r}, 'w').write('{{\"backend\": \"CUSTOM\"}}')"]

    assert turns.run_turn(options(), 60.0, write) == {"backend": "CUSTOM"}
    with pytest.raises(turns.Failed, match="CUSTOM: exit code 3\n.*no such model"):
        fails = [sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)"]
        turns.run_turn(options(), 60.0, lambda *_: fails, tmp_path / "log")
    assert (tmp_path / "log").read_text() == "no such model\n"
    with pytest.raises(turns.Failed, match="CUSTOM: not done after 0.01 s"):
        turns.run_turn(options(), 0.01, lambda *_: [sys.executable, "-c", "import time; time.sleep(600)"])


def test_the_worker_asks_vllm(monkeypatch, tmp_path):
    given, ended = {}, []

    class AsyncLLM:
        @classmethod
        def from_engine_args(cls, arguments):
            given.update(arguments)
            return cls()

        async def generate(self, prompt, sampling, name):
            for token in range(sampling["max_tokens"]):
                yield types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=[token])])

        def shutdown(self):
            ended.append(True)

    members = {
        "vllm": {"__version__": "0.24.0", "SamplingParams": dict},
        "vllm.engine": {},
        "vllm.engine.arg_utils": {"AsyncEngineArgs": dict},
        "vllm.sampling_params": {"RequestOutputKind": types.SimpleNamespace(DELTA="delta")},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.async_llm": {"AsyncLLM": AsyncLLM},
    }
    for name, values in members.items():
        module = types.ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)
    told = options(loads=("check",), engine={"max_num_seqs": 8, "disable_log_stats": False})
    worker.main(json.dumps(told.__dict__), str(tmp_path / "out.json"))
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["backend"] == "CUSTOM" and found["vllm"] == "0.24.0" and ended == [True]
    assert found["loads"][0]["tokens"] == [list(range(24))] * 64 and found["ready_s"] > 0
    expected = {"model": "m", "attention_backend": "CUSTOM", "skip_tokenizer_init": True}
    assert given == {**expected, "disable_log_stats": False, "max_num_seqs": 8}


def test_the_command(monkeypatch, tmp_path):
    asked, logs = [], []

    def run_turn(given, seconds, log):
        asked.append(given)
        logs.append(log)
        if given.backend == "BROKEN":
            raise turns.Failed("BROKEN: exit code 1\nno such backend")
        return turn(given.backend, 0.01, 0.2, [[1, 2], [3, 4]])

    monkeypatch.setattr(turns, "run_turn", run_turn)
    out = tmp_path / "rows.json"
    ended = CliRunner().invoke(bench, ["serve", "--model", "m", "--dummy-weights", "--json", str(out)])
    assert ended.exit_code == 0, ended.output
    assert [each.backend for each in asked] == ["FLASH_ATTN", "CUSTOM", "FLASH_ATTN"]
    assert asked[0].engine == {"load_format": "dummy"} and "1.000 ×" in ended.output
    assert "first token: FLASH_ATTN 9.0 s, CUSTOM 9.0 s, FLASH_ATTN 9.0 s." in " ".join(ended.output.split())
    assert [row["engine"] for row in json.loads(out.read_text())] == ["FLASH_ATTN", "CUSTOM", "FLASH_ATTN"]
    ended = CliRunner().invoke(bench, ["serve", "--model", "m", "--backends", "CUSTOM,BROKEN", "--json", str(out),
                                        "--logs", str(tmp_path / "logs")])
    assert logs == [None] * 3 + [tmp_path / "logs" / "1-CUSTOM.log", tmp_path / "logs" / "2-BROKEN.log"]
    assert ended.exit_code == 1 and "no such backend" in ended.output
    assert [row["engine"] for row in json.loads(out.read_text())] == ["CUSTOM"], "the turns before it are kept"
    for arguments, words in ((["--loads", "longest"], "longest is no load"), (["--engine", "[]"], "expected an object")):
        ended = CliRunner().invoke(bench, ["serve", "--model", "m", *arguments])
        assert ended.exit_code == 2 and words in ended.output
