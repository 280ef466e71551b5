"""`raddle replay --compare single`: steps as cascades where that pays, beside the single format."""

import numpy as np
import pytest
import raddle
from raddle.replay import native
from raddle.replay.engine import Batch, Engine
from raddle.replay.models import Model
from raddle.replay.span import Span
from replays import no_bandwidth, replay  # noqa: F401: a fixture

# Samples share a prompt that is long beside what each of them generates.
SAMPLES = "--synthetic uniform:700:800 --requests 2 --rate 1e9 --pool-tokens 6000 --parallel 12 --layers 2".split()
HEADS = "--num-qo-heads 4 --num-kv-heads 2 --head-dim 32 --verify 120".split()


@pytest.fixture
def replayed(tmp_path):
    return lambda *arguments, **options: replay(tmp_path, *arguments, *HEADS, **options)


@pytest.mark.parametrize("flags", [[], ["--rope", "--dtype", "float32"], ["--model", "gemma-2-9b", "--page-size", "7"]])
def test_what_cascades_save(replayed, flags):
    report, output = replayed(*SAMPLES, "--compare", "single", *flags)
    assert report["verified"]["failed"] == 0 and report["verified"]["strata"]["cascade"] > 0
    found = report["cascades"]
    assert 0 < found["steps"] <= report["steps"] and found["levels"] >= 2
    for name in ("cascade_steps", "all_steps"):
        of = found[name]
        assert 0 < of["run_us"]["p50"] and 0 < of["single_us"]["p50"] and of["saved"] < 1
        means = of["run_us"]["mean"], of["single_us"]["mean"]
        assert of["saved"] == pytest.approx(1 - means[0] / means[1])
    assert list(report["schedules"]) == ["auto"] and found["all_steps"]["run_us"] == report["run_us"]
    words = " ".join(output.replace("│", " ").split())
    assert f"steps with a cascade {found['steps']:,} of {report['steps']:,}" in words and "cascades saved" in words


def test_formats_are_chosen_without_a_comparison(replayed):
    report, output = replayed(*SAMPLES, "--schedule", "linear,algorithm1")
    found = report["cascades"]
    assert found["steps"] > 0 and "all_steps" not in found and report["config"]["cascades"]
    assert "steps with a cascade" in output and "cascades saved" not in output


def test_where_sharing_does_not_pay(replayed):
    few = "--synthetic uniform:20:30 --requests 2 --parallel 2 --compare single".split()
    report, _ = replayed(*few)
    assert report["cascades"]["steps"] == 0 and report["cascades"]["levels"] == 1
    assert report["cascades"]["cascade_steps"] == {"run_us": None, "single_us": None, "saved": None}
    assert report["cascades"]["all_steps"]["saved"] < 1 and report["verified"]["strata"]["cascade"] == 0


def test_nobody_shares_without_samples_and_prefixes(replayed):
    report, output = replayed("--synthetic", "uniform:20:30", "--requests", 2)
    assert not report["config"]["cascades"] and "cascade" not in output


def test_cascades_are_not_a_rate_of_the_memory(replayed):
    report, _ = replayed(*SAMPLES)
    assert report["cascades"]["steps"] >= report["decode_steps"] and report["decode_gbps"] is None


def test_both_formats_say_the_same(monkeypatch):
    """Of one batch, and in turns: each writes all of its output."""
    rng = np.random.default_rng(3)
    model = Model("tiny", 4, 2, 32, dtype="float32")
    engine = Engine(model, 1, num_pages=90, page_size=16, num_workers=3, cascades=True, compares_single=True)
    prompt, pages = rng.permutation(80)[:48], iter(range(80, 90))
    engine.step(Batch([Span(0, 0, 768)], [prompt]), lambda *_: None)
    spans = [Span(sample, 768, 1) for sample in range(10)]
    seen = []

    def on_output(layer, batch, planned, out):
        seen.append((planned.layout.num_levels, out.copy()))

    cost = engine.step(Batch(spans, [[*prompt, page] for page in pages]), on_output)
    assert [levels for levels, _ in seen] == [1, 2], "the second step begins with the second way"
    assert cost.clocked.levels == 2 and cost.ways["single"].levels == 1
    single, cascade = (out for _, out in seen)
    np.testing.assert_allclose(cascade, single, rtol=0, atol=1e-5)
    assert not np.isnan(single).any() and not (cascade == single).all(), "two ways to compute it"


def test_a_wrong_level_is_found(replayed, monkeypatch):
    """A fault that only the cascade has: a shared page is another one of the pool."""
    shared = Batch.shared

    def broken(self, *arguments, **options):
        pages = self.page_indices
        try:
            self.page_indices = np.where(pages == pages[0], pages[1], pages)
            return shared(self, *arguments, **options)
        finally:
            self.page_indices = pages

    monkeypatch.setattr(Batch, "shared", broken)
    report, output = replayed(*SAMPLES, "--compare", "single", exit_code=1)
    verified = report["verified"]
    assert 0 < verified["failed"] < verified["checked"] and "verification failed" in output


def test_the_same_rows_are_checked_in_both_formats(replayed, monkeypatch):
    seen, levels = [], {}
    verify, plan = native.verify, Engine._plan
    monkeypatch.setattr(native, "verify", lambda *given: seen.append(given) or verify(*given))

    def planned(self, batch, layout, way):
        made = plan(self, batch, layout, way)
        levels.setdefault(way.cascades, set()).update(each.layout.num_levels for each in made.values())
        return made

    monkeypatch.setattr(Engine, "_plan", planned)
    replayed(*SAMPLES, "--compare", "single", "--layers", 1)
    # Two ways to compute them, whose bits may still be equal.
    assert max(levels[True]) > 1 and levels[False] == {1}
    assert seen and len(seen) % 2 == 0
    for first, second in zip(seen[::2], seen[1::2]):  # the ways of a group of rows follow one another
        for one, other in zip(first[2:5], second[2:5]):
            np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(first[1], second[1], atol=0.02)


@pytest.mark.parametrize("cascades", [False, True])
def test_either_format_may_be_wrong(replayed, monkeypatch, cascades):
    plan, run = Engine._plan, Engine._run
    wrong = []

    def planned(self, batch, layout, way):
        made = plan(self, batch, layout, way)
        if way.cascades == cascades:
            wrong[:] = [each.plan for each in made.values()]
        return made

    def broken(self, batch, plan, layer, q, out):
        run(self, batch, plan, layer, q, out)
        if any(plan is each for each in wrong):
            out[:] = 0

    monkeypatch.setattr(Engine, "_plan", planned)
    monkeypatch.setattr(Engine, "_run", broken)
    report, _ = replayed(*SAMPLES, "--compare", "single", exit_code=1)
    assert report["verified"]["failed"] == report["verified"]["checked"] == 120


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--synthetic", "uniform:5:9"], "no requests share pages; expected --prefix-cache or --parallel 2 or more"),
        ([*SAMPLES, "--schedule", "all"], "--schedule names 4; expected one"),
        ([*SAMPLES, "--device", "cuda"], "steps on cuda are never cascades; expected --device cpu"),
    ],
)
def test_where_nothing_can_be_compared(replayed, arguments, message):
    report, output = replayed(*arguments, "--compare", "single", exit_code=2)
    assert report is None and f"--compare single: {message}" in " ".join(output.split())
