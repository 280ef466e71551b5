"""Attention implementations in turns, and what comes of their times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

from rich.table import Table

from raddle.bench import timing
from raddle.bench.serve.loads import Load

RADDLE = "raddle"
Row = dict[str, Any]
#: New tokens of each request, in the round whose number it is given.
Call = Callable[[int], list[list[int]]]

LOADS = [
    Load("prompts", 8, 0, 2048, 64),
    Load("padded", 8, 0, (128, 2048), 64),
    Load("batch", 32, 0, (128, 2048), 64),
]


def measure(load: str, calls: Mapping[str, Call], rounds: int, tick: Callable[[], None]) -> list[Row]:
    """A row for each implementation: its times of a call, and how many requests have the first one's tokens.

    The first round is not timed. An implementation that raises has a reason in place of times.
    """
    tokens: dict[str, list[list[list[int]]]] = {name: [] for name in calls}
    failed: dict[str, str] = {}

    def fails(name: str, error: Exception) -> None:
        failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]

    def turn(name: str) -> timing.Turn:
        return timing.HostClock().turn(lambda number: tokens[name].append(calls[name](number)))

    times = timing.interleaved({name: turn(name) for name in calls}, rounds, 1, tick, fails)
    first = tokens[next(iter(calls))]
    rows = []
    for name, mine in tokens.items():
        row: Row = {"workload": load, "engine": name}
        if name in failed:
            rows.append({**row, "failed": failed[name]})
            continue
        requests = [request for answer in mine for request in answer]
        expected = [request for answer in first for request in answer]
        seconds = timing.median(times[name]) / 1e6
        row |= {"seconds": seconds, "tokens_per_s": sum(map(len, mine[-1])) / seconds, "rounds_s": [us / 1e6 for us in times[name]]}
        rows.append({**row, "requests": len(requests), "equal": sum(a == b for a, b in zip(requests, expected))})
    return rows


def failures(rows: Sequence[Row]) -> list[str]:
    """A line for each load and implementation that failed."""
    return [f"{row['workload']}, {row['engine']}: {row['failed']}" for row in rows if "failed" in row]


def ratio(rows: Sequence[Row], load: str) -> Optional[float]:
    """Raddle's time over that of the best other implementation, if there are both."""
    times = {row["engine"]: row["seconds"] for row in rows if row["workload"] == load and "seconds" in row}
    ours = times.pop(RADDLE, None)
    return ours / min(times.values()) if ours and times else None


def table(rows: Sequence[Row]) -> Table:
    """A line for each load and implementation, and Raddle's ratio to the best other."""
    made = Table(title="Generating with transformers: implementations in turns", caption="Seconds of a call: medians.")
    for heading in ("load", "implementation", "seconds", "tokens/s", "equal tokens"):
        made.add_column(heading, justify="left" if heading in ("load", "implementation") else "right")
    for load in dict.fromkeys(row["workload"] for row in rows):
        for row in rows:
            if row["workload"] != load:
                continue
            if "failed" in row:
                made.add_row(load, row["engine"], "failed", "", "")
                continue
            equal = f"{row['equal']} of {row['requests']}"
            made.add_row(load, row["engine"], f"{row['seconds']:.3f}", f"{row['tokens_per_s']:,.0f}", equal)
        found = ratio(rows, load)
        made.add_row("", "Raddle / best other", "" if found is None else f"{found:.3f} ×", "", "", end_section=True)
    return made
