"""Attention implementations in turns, and what comes of their times."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, Optional

from rich.table import Table

from raddle.bench import timing
from raddle.bench.serve.loads import Load

RADDLE = "raddle"
Row = dict[str, Any]
Tokens = list[list[int]]

# 2,000 is no power of two, as few lengths of prompts are.
LOADS = [
    Load("first", 8, 0, 2000, 1),
    Load("equal", 8, 0, 2000, 64),
    Load("padded", 8, 0, (128, 2000), 64),
    Load("continuous", 32, 0, (128, 2000), 64),
]
#: Rounds that are not timed: PyTorch's compiler compiles flex_attention again for the second length of a mask.
WARM_UPS = 2


class Answer(NamedTuple):
    """New tokens of each request, and how long they took."""

    tokens: Tokens
    seconds: float


#: The answer in the round whose number it is given.
Call = Callable[[int], Answer]


def measure(load: str, calls: Mapping[str, Call], rounds: int, tick: Callable[[], None]) -> list[Row]:
    """A row for each implementation: its times of a call, and how many tokens of a request are the first one's.

    An implementation that raises has a reason in place of times. The first one is the first that does not.
    """
    tokens: dict[str, list[list[int]]] = {name: [] for name in calls}
    failed: dict[str, str] = {}

    def fails(name: str, error: Exception) -> None:
        failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]

    def turn(name: str) -> timing.Turn:
        def timed(number: int) -> float:
            answer = calls[name](number)
            tokens[name] += answer.tokens
            return 1e6 * answer.seconds

        return timed

    times = timing.interleaved({name: turn(name) for name in calls}, rounds, WARM_UPS, tick, fails)
    rows: list[Row] = []
    for name, mine in tokens.items():
        row: Row = {"workload": load, "engine": name}
        if name in failed:
            rows.append({**row, "failed": failed[name]})
            continue
        first = next(each for each in calls if each not in failed)
        seconds = timing.median(times[name]) / 1e6
        row["seconds"], row["rounds_s"] = seconds, [us / 1e6 for us in times[name]]
        row["tokens_per_s"] = sum(map(len, mine)) / (rounds + WARM_UPS) / seconds
        row["like"], row["new"] = first, len(mine[0])
        row["equal"] = statistics.fmean(map(_leading, mine, tokens[first]))
        rows.append(row)
    return rows


def _leading(some: list[int], others: list[int]) -> int:
    """How many tokens are equal before the first that is not."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(some, others)))


def failures(rows: Sequence[Row]) -> list[str]:
    """A line for each load and implementation that failed."""
    return [f"{row['workload']}, {row['engine']}: {row['failed']}" for row in rows if "failed" in row]


def ratio(rows: Sequence[Row], load: str) -> Optional[float]:
    """Raddle's time over that of the best other implementation, if there are both: the median of the rounds' ratios."""
    times = {row["engine"]: row["rounds_s"] for row in rows if row["workload"] == load and "rounds_s" in row}
    ours = times.pop(RADDLE, None)
    return 1 / timing.speedup(ours, times[timing.best(times)]) if ours and times else None


def table(rows: Sequence[Row]) -> Table:
    """A line for each load and implementation, and Raddle's ratio to the best other."""
    made = Table(
        title="Generating with transformers: implementations in turns",
        caption="Seconds of a call, medians. Equal tokens: of a request, before the first that differs from the "
        "first implementation's; with random weights in 16 bits many logits are near ties.",
    )
    for heading in ("load", "implementation", "seconds", "tokens/s", "equal tokens"):
        made.add_column(heading, justify="left" if heading in ("load", "implementation") else "right")
    for load in dict.fromkeys(row["workload"] for row in rows):
        for row in rows:
            if row["workload"] != load:
                continue
            if "failed" in row:
                made.add_row(load, row["engine"], "failed", "", "")
                continue
            equal = f"{row['equal']:.1f} of {row['new']}"
            made.add_row(load, row["engine"], f"{row['seconds']:.3f}", f"{row['tokens_per_s']:,.0f}", equal)
        found = ratio(rows, load)
        made.add_row("", "Raddle / best other", "" if found is None else f"{found:.3f} ×", "", "", end_section=True)
    return made
