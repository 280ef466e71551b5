"""What the benchmarks say: tables for people, rows for programs."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from rich.table import Table

import raddle
from raddle._console import table_console as console  # noqa: F401
from raddle.bench import isa
from raddle.bench.bars import Measured
from raddle.bench.compare import RADDLE, Result
from raddle.bench.limits import Limits
from raddle.bench.workloads import Workload

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


def limits(found: Limits) -> Table:
    """What the machine can do at best."""
    table = Table(title=f"Limits of {found.threads} threads on {raddle.cpu_isa()}", caption=_CAPTION_LIMITS)
    table.caption_justify = "left"
    table.add_column("limit")
    table.add_column("rate", justify="right")
    for row in found.rows():
        note = f"  [bold red]disturbed: below {found.plausible_gbps:.0f}[/]" if row["engine"] == "disturbed" else ""
        table.add_row(row["workload"], f"{row['value']:,.1f} {row['unit']}{note}")
    return table


_CAPTION_LIMITS = "The best of several loops and rounds. A bandwidth too low for this kind of machine is no limit."


def comparison(results: Sequence[Result], found: Limits, rounds: int, with_bars: bool = False) -> Table:
    """All engines on all workloads; with Raddle's own targets beside where they are asked for."""
    read = f"{found.read_gbps:.1f} GB/s" if found.read_gbps else "unknown: its measurement was disturbed"
    rates = [f"{found.fma_gflops:,.0f} GFLOP/s of FMA"]
    if found.bf16_gflops:
        rates.append(f"{found.bf16_gflops:,.0f} of products of bf16")
    table = Table(
        title=(
            "Attention on the CPU, 32 query heads, 8 KV heads (G1: 32), head dim 128; Raddle on pages of 16\n"
            "mla16, mla128: so many query heads over one latent of 576, V its first 512"
        ),
        caption=(
            f"Medians of {rounds} interleaved rounds, KV cold; short decodes are timed as steps of several layers. "
            "Decode counts bytes of K and V, prefill half the square, mla128 the operations of both. × best: median of "
            "the rounds' ratios to the fastest form of the others; of other pages, K and V of 8 bits and scores to "
            "Raddle's own plain form. Of limit: share of what the same threads reached in this run; "
            f"memory read {read}, {', '.join(rates)}; mixed: both, one after the other. Raddle on {raddle.cpu_isa()}, "
            f"torch {isa.torch_described()}."
        ),
        caption_justify="left",
    )
    for name in ("workload", "engine"):
        table.add_column(name, no_wrap=True)
    bar = ["bar"] if with_bars else []
    for name in ("µs", "rate", "of limit", *bar, "× best", *bar):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        for engine in result.times:
            table.add_row(*_cells(result, engine, found, with_bars))
        for reason in result.refused:
            table.add_row("", reason)
        table.add_section()
    return table


def _cells(result: Result, engine: str, found: Limits, with_bars: bool) -> list[str]:
    w, us, ours = result.workload, result.us(engine), engine == RADDLE
    share = _share(result, engine, found)
    speedup = result.speedup if ours else None
    return [
        w.name if ours else "",
        f"[bold]{engine}[/]" if engine == result.best_peer else engine,
        f"{us:,.0f}",
        f"{_form(result, engine).rate(us):,.1f} {w.unit}",
        "?" if share is None else f"{100 * share:.0f} %",
        *([_bar_cell(w.share_bar if ours else None, share)] if with_bars else []),
        "" if speedup is None else f"{speedup:.2f}",
        *([_bar_cell(w.bar, speedup)] if with_bars else []),
    ]


def _bar_cell(bar: Optional[float], value: Optional[float]) -> str:
    return "" if bar is None or value is None else f"≥ {bar:.3g} {verdict(value >= bar)}"


def _form(result: Result, engine: str) -> Workload:
    """What the engine computed: beside a form of another workload, Raddle's row is of that one."""
    w = result.workload
    return w if engine == RADDLE else w.plain


def _share(result: Result, engine: str, found: Limits) -> Optional[float]:
    """Of the machine's limit; None where that is not known."""
    form = _form(result, engine)
    least = found.least_us(form.dtype, form.read_bytes, form.flops)
    return None if least is None else least / result.us(engine)


def figures(title: str, found: Sequence[Measured], with_bars: bool = False) -> Table:
    """Single figures; with Raddle's own targets beside where they are asked for."""
    table = Table(title=title)
    table.add_column("measured")
    table.add_column("value", justify="right")
    table.add_column("unit")
    if with_bars:
        table.add_column("bar", justify="right")
    for each in found:
        bar = "" if each.bar is None else f"{'≥' if each.at_least else '≤'} {each.bar:g} {verdict(each.met)}"
        table.add_row(each.name, f"{each.value:.4g}", each.unit, *([bar] if with_bars else []))
    return table


def bar_rows(found: Sequence[Measured]) -> list[dict[str, Any]]:
    """The same for programs, with the keys of `rows`; ``us`` is null where no time was measured."""
    return [
        {"workload": m.name, "engine": RADDLE, "us": m.us, "value": m.value, "unit": m.unit}
        for m in found
    ]


def rows(results: Sequence[Result], found: Limits) -> list[dict[str, Any]]:
    """One row for each limit, and one for each engine on each workload.

    Keys: ``workload``, ``engine``, ``us`` (median), ``value`` in ``unit``, of engines also ``share`` of the limit (null
    where that was disturbed) and ``layers``, the calls of a step that was timed. Rows of Raddle also have ``ratio``, the
    speed relative to the best of the others (null where it ran alone). ``isa``: Raddle's instruction set, and the one
    that torch was limited to (null where an engine chose its own).
    """
    all_rows, isas = found.rows(), {RADDLE: raddle.cpu_isa(), "torch": isa.torch_limit()}
    for result in results:
        for engine in result.times:
            us, form = result.us(engine), _form(result, engine)
            row = {"workload": result.workload.name, "engine": engine, "us": us, "value": form.rate(us)}
            row.update(unit=form.unit, share=_share(result, engine, found), layers=result.workload.layers)
            row.update(isa=isas.get(engine.split()[0]))
            all_rows.append({**row, "ratio": result.speedup} if engine == RADDLE else row)
    return all_rows


def write_json(path: Path, found: Sequence[dict[str, Any]]) -> None:
    """A JSON list with one row a line."""
    lines = ",\n".join(json.dumps(row) for row in found)
    path.write_text(f"[\n{lines}\n]\n")
