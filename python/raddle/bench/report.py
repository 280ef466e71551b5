"""What the benchmarks say: tables for people, rows for programs."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from rich.console import Console
from rich.table import Table

import raddle
from raddle.bench.bars import Measured
from raddle.bench.compare import RADDLE, Result

#: Columns of a table that goes into a file; a terminal has its own width.
_FILE_WIDTH = 120


def console() -> Console:
    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=_FILE_WIDTH)


def header(threads: int, **versions: str) -> str:
    """On which machine, with what, and under which load."""
    lines = [
        f"{cpu_name()}, {threads} threads, Raddle on {raddle.cpu_isa()}",
        ", ".join([f"raddle {raddle.__version__}", *(f"{name} {v}" for name, v in versions.items())]),
    ]
    load = os.getloadavg()[0]
    if load > 0.5:
        lines.append(f"[bold]load average {load:.1f}: other work on this machine disturbs the figures[/]")
    return "\n".join(lines)


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def verdict(met: Optional[bool]) -> str:
    return "" if met is None else "[green]met[/]" if met else "[bold red]missed[/]"


def comparison(results: Sequence[Result], read_gbps: float, rounds: int) -> Table:
    """All engines on all workloads."""
    table = Table(
        title="Attention on the CPU, 32 query heads, 8 KV heads, head dim 128; Raddle on pages of 16",
        caption=(
            f"Medians of {rounds} interleaved rounds, KV cold. Decode counts bytes of K and V, prefill "
            "half the square. × best: median of the rounds' ratios to the fastest form of the others. "
            f"Of read: share of the {read_gbps:.1f} GB/s at which the same threads read memory in this run."
        ),
        caption_justify="left",
    )
    for name in ("workload", "engine"):
        table.add_column(name, no_wrap=True)
    for name in ("µs", "rate", "of read", "× best", "bar"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        for engine in result.times:
            table.add_row(*_cells(result, engine, read_gbps))
        table.add_section()
    return table


def _cells(result: Result, engine: str, read_gbps: float) -> list[str]:
    w, us, ours = result.workload, result.us(engine), engine == RADDLE
    rate = w.rate(us)
    speedup = result.speedup if ours else None
    bar = w.bar if speedup is not None else None
    return [
        w.name if ours else "",
        f"[bold]{engine}[/]" if engine == result.best_peer else engine,
        f"{us:,.0f}",
        f"{rate:,.1f} {w.unit}",
        f"{100 * rate / read_gbps:.0f} %" if w.is_decode else "",
        "" if speedup is None else f"{speedup:.2f}",
        "" if bar is None else f"≥ {bar} {verdict(speedup >= bar)}",
    ]


def bars(title: str, found: Sequence[Measured]) -> Table:
    """Single figures beside their bars."""
    table = Table(title=title)
    table.add_column("measured")
    table.add_column("value", justify="right")
    table.add_column("unit")
    table.add_column("bar", justify="right")
    for each in found:
        bar = "" if each.bar is None else f"{'≥' if each.at_least else '≤'} {each.bar:g} {verdict(each.met)}"
        table.add_row(each.name, f"{each.value:.4g}", each.unit, bar)
    return table


def bar_rows(found: Sequence[Measured]) -> list[dict[str, Any]]:
    """The same for programs, with the keys of `rows`; ``us`` is null where no time was measured."""
    return [
        {"workload": m.name, "engine": RADDLE, "us": m.us, "value": m.value, "unit": m.unit}
        for m in found
    ]


def rows(results: Sequence[Result], read_gbps: float, read_bytes: int) -> list[dict[str, Any]]:
    """One row for each engine on each workload, and one for the read bandwidth.

    Keys: ``workload``, ``engine``, ``us`` (median), ``value`` in ``unit``. Rows of Raddle also have
    ``ratio``, the speed relative to the best of the others (null where it ran alone).
    """
    found = [
        {
            "workload": "memory read",
            "engine": "read loop",
            "us": read_bytes / read_gbps / 1e3,
            "value": read_gbps,
            "unit": "GB/s",
        }
    ]
    for result in results:
        w = result.workload
        for engine in result.times:
            us = result.us(engine)
            row = {"workload": w.name, "engine": engine, "us": us, "value": w.rate(us), "unit": w.unit}
            found.append({**row, "ratio": result.speedup} if engine == RADDLE else row)
    return found


def write_json(path: Path, found: Sequence[dict[str, Any]]) -> None:
    """A JSON list with one row a line."""
    lines = ",\n".join(json.dumps(row) for row in found)
    path.write_text(f"[\n{lines}\n]\n")
