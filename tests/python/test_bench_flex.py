"""The benchmarks of functions of Python and of first use, on small problems."""

import numpy as np
import pytest
from click.testing import CliRunner
from raddle.bench import first_use, traced
from raddle.bench.cli import bench
from raddle.bench.results import Measured
from raddle.bench.workloads import document_offsets


class Quiet:
    def say(self, text, total=None):
        pass

    def advance(self):
        pass


def test_kept_pairs_are_counted():
    causal, window, cap, documents = traced.cases(1500)
    assert causal.kept(1500) == cap.kept(1500) == 1500 * 1501 // 2
    assert window.kept(1500) == 1024 * 1025 // 2 + (1500 - 1024) * 1024
    lengths = np.diff(document_offsets(1500))
    assert lengths.sum() == 1500 and documents.kept(1500) == sum(n * (n + 1) // 2 for n in lengths)


def test_kept_tiles_are_counted():
    causal = traced.cases(256)[0]
    # 8 rows of tiles of 32 tokens: four see the first 128 keys alone, four see both halves.
    assert traced._tiles(causal, 256) == 4 + 8


def test_every_case_is_measured(monkeypatch):
    monkeypatch.setattr(traced, "LENGTH", 192)
    found = traced.measure((), 1, ("fp32", "bf16"), Quiet())
    names = [each.name for each in found]
    for case in traced.cases(192):
        for dtype in ("fp32", "bf16"):
            assert f"{dtype} {case.name}, raddle traced" in names
        assert f"bf16 {case.name}, × own fp32" in names
        assert (f"fp32 {case.name}, traced / shipped" in names) == (case.shipped is not None)
    assert all(np.isfinite(each.value) and each.value > 0 for each in found)
    ratio = traced.kept_tiles(1, Quiet(), length=512)[-1]
    assert ratio.value >= 1 and ratio.bar == traced.BAR_TILES


def test_first_use_compiles_once_and_then_finds():
    cold, _, warm, _ = first_use.compiles(1, 5, Quiet())  # raises if one compiles what it should not
    assert cold.value > 0 and warm.value > 0


def test_masks_are_planned_in_processes_of_their_own():
    found = first_use.masks(Quiet(), tokens=4096)
    assert len(found) == 6 and all(each.bar for each in found)
    assert all(each.value > 0 for each in found if each.unit == "s")
    assert all(each.met for each in found if each.unit == "MB"), found


@pytest.mark.parametrize("value, at_least, met", [(2.0, True, True), (0.5, True, False), (2.0, False, False)])
def test_bars_bound_from_either_side(value, at_least, met):
    assert Measured("x", None, value, "", 1.0, at_least).met is met


@pytest.mark.parametrize("command", ["flex-cpu", "first-use"])
def test_the_commands_explain_themselves(command):
    shown = CliRunner().invoke(bench, [command, "--help"])
    assert shown.exit_code == 0 and "--rounds" in shown.output
