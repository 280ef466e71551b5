"""Engines in turns, each in a process of its own, and what comes of their times."""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

from rich.table import Table

from raddle.bench.serve.worker import Options

#: What vLLM calls Raddle's backend.
RADDLE = "CUSTOM"
Row = dict[str, Any]
Command = Callable[[Options, Path], list[str]]


class Failed(RuntimeError):
    """An engine did not start, or ended early; the message has the last lines of what it wrote."""


def _command(options: Options, out: Path) -> list[str]:
    text = json.dumps(dataclasses.asdict(options))
    return [sys.executable, "-m", "raddle.bench.serve.worker", text, str(out)]


def run_turn(
    options: Options, seconds: float, command: Command = _command, log: Optional[Path] = None
) -> dict[str, Any]:
    """What one engine measured; what it wrote goes to ``log``. Raises `Failed`."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "measured.json", log or Path(folder) / "log"
        with log.open("wb") as file:
            try:
                ended = subprocess.run(command(options, out), stdout=file, stderr=subprocess.STDOUT, timeout=seconds)
                reason = f"exit code {ended.returncode}"
            except subprocess.TimeoutExpired:
                reason = f"not done after {seconds:g} s"
        if out.is_file():
            measured: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
            return measured
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:]
    raise Failed("\n".join([f"{options.backend}: {reason}", *last]))


def rows_of(turns: Sequence[dict[str, Any]]) -> list[Row]:
    """A row for each turn and load: medians over its rounds' requests, and how many have the first turn's tokens."""
    rows = []
    for number, turn in enumerate(turns):
        for name in dict.fromkeys(each["load"] for each in turn["loads"]):
            mine, first = _of(turn, name), _of(turns[0], name)
            tokens = [each for measured in mine for each in measured["tokens"]]
            expected = [each for measured in first for each in measured["tokens"]]
            between = sorted(gap for measured in mine for gap in measured["between_s"])
            rows.append(
                {
                    "workload": name,
                    "engine": turn["backend"],
                    "turn": number,
                    "itl_p50_ms": 1e3 * statistics.median(between),
                    "itl_p99_ms": 1e3 * between[len(between) * 99 // 100],
                    "ttft_p50_ms": 1e3 * statistics.median(s for measured in mine for s in measured["first_s"]),
                    "tokens_per_s": sum(map(len, tokens)) / sum(measured["seconds"] for measured in mine),
                    "requests": len(tokens),
                    "equal": sum(a == b for a, b in zip(tokens, expected)),
                    "ready_s": turn["ready_s"],
                }
            )
    return rows


def _of(turn: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [each for each in turn["loads"] if each["load"] == name]


_METRICS = {"itl_p50_ms": min, "ttft_p50_ms": min, "tokens_per_s": max}


def ratios(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """By load and metric: Raddle's mean over its turns, over that of the best other backend."""
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(row["workload"] for row in rows):
        by_engine: dict[str, list[Row]] = {}
        for row in rows:
            if row["workload"] == name:
                by_engine.setdefault(row["engine"], []).append(row)
        ours = by_engine.pop(RADDLE, None)
        if not ours or not by_engine:
            continue
        found[name] = {
            metric: _mean(ours, metric) / best(_mean(theirs, metric) for theirs in by_engine.values())
            for metric, best in _METRICS.items()
        }
    return found


def _mean(rows: Sequence[Row], metric: str) -> float:
    return statistics.fmean(row[metric] for row in rows)


def table(rows: Sequence[Row]) -> Table:
    """A line for each load and turn, and Raddle's ratios to the best other backend; below, how long engines took to start."""
    started = {row["turn"]: f"{row['engine']} {row['ready_s']:.1f} s" for row in rows}
    made = Table(
        title="Serving with vLLM: backends in turns",
        caption="Times in ms, p50. Raddle / best other: means of turns.\n"
        f"From an engine's start to its first token: {', '.join(started.values())}.",
    )
    for heading in ("load", "backend", "ITL", "ITL p99", "TTFT", "tokens/s", "equal tokens"):
        made.add_column(heading, justify="left" if heading in ("load", "backend") else "right")
    against = ratios(rows)
    for name in dict.fromkeys(row["workload"] for row in rows):
        for row in rows:
            if row["workload"] == name:
                times = [f"{row[each]:,.2f}" for each in ("itl_p50_ms", "itl_p99_ms", "ttft_p50_ms")]
                equal = f"{row['equal']} of {row['requests']}"
                made.add_row(name, row["engine"], *times, f"{row['tokens_per_s']:,.0f}", equal)
        if name in against:
            itl, ttft, tokens = (f"{against[name][metric]:.3f} ×" for metric in _METRICS)
            made.add_row("", "Raddle / best other", itl, "", ttft, tokens, "", end_section=True)
    return made
