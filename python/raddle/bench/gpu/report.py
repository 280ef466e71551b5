"""Tables of the rows that `results` describes, and the file that keeps them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from raddle._console import table_console as console  # noqa: F401
from raddle.bench.gpu import results
from raddle.bench.gpu.cases import Case, Section
from raddle.bench.gpu.engines import RADDLE, family

def commit() -> str | None:
    """RADDLE_COMMIT, else the checkout's; None where there is neither."""
    if os.environ.get("RADDLE_COMMIT"):
        return os.environ["RADDLE_COMMIT"]
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    except OSError:
        return None
    return done.stdout.strip() or None


def header(machine: dict[str, Any]) -> str:
    gpu = f"{machine.get('gpu')}, driver {machine.get('driver')}, commit {machine.get('commit')}"
    return f"{gpu}\n" + ", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items())


def sections_listed(sections: Iterable[Section]) -> str:
    lines = []
    for section in sections:
        lines.append(f"{section.name}: {section.title}")
        lines += [f"    {each}" for each in (*(case.name for case in section.cases), *section.rows)]
    return "\n".join(lines)


def tables(section: Section, rows: Sequence[results.Row], with_bars: bool = False) -> list[Any]:
    """What is printed of a section: its table, its errors against fp64, what failed.

    With Raddle's own targets where they are asked for.
    """
    shown: list[Any] = []
    figures = [row for row in rows if "bar" in row or not section.cases and "value" in row]
    if not with_bars:
        rows, figures = ([_without_bars(row) for row in each] for each in (rows, figures))
    if section.cases:
        shown.append(_compared(section, rows, with_bars))
    if figures:
        shown.append(_figures(section, figures, with_bars))
    errors = [row for row in rows if row.get("kind") == "error"]
    if errors:
        each = (f"{row['engine']} {row['value']:.3e}" for row in errors)
        shown.append(f"error against fp64, {errors[0]['workload']}, ten draws: {', '.join(each)}")
    for row in rows:
        if "failed" in row:
            style = "bold red" if row["engine"] in (RADDLE, "all") else "yellow"
            text = f"{row['engine']} on {row['workload']}: {row['failed']}".replace("[", "\\[")
            shown.append(f"[{style}]failed: {text}[/]")
    return shown


def _without_bars(row: results.Row) -> results.Row:
    return {key: value for key, value in row.items() if key not in ("bar", "met")}


def _compared(section: Section, rows: Sequence[results.Row], with_bars: bool) -> Table:
    """A line a workload; beside Raddle's time and rate, each engine's rate and how many times slower it is."""
    timed = {(row["workload"], row["engine"]): row for row in rows if "rounds" in row}
    others = dict.fromkeys(engine for _, engine in timed if engine not in (RADDLE, results.FLOOR))
    has_floor = any(engine == results.FLOOR for _, engine in timed)
    has_own = any(case.versus for case in section.cases)
    rounds = max((len(row["rounds"]) for row in timed.values()), default=0)
    table = Table(title=section.title, caption=_caption(rounds, with_bars), caption_justify="left")
    table.add_column("workload", no_wrap=True)
    heads = ["µs", "rate", *(["of floor"] if has_floor else []), *others, *(["× own"] if has_own else [])]
    for name in heads:
        table.add_column(name, justify="right")
    for case in section.cases:
        ours = timed.get((case.name, RADDLE), {})
        cells = [f"{ours['us']:,.1f}", f"{ours['value']:,.0f} {case.unit}"] if ours else ["failed", ""]
        cells += [_share(case, ours)] if has_floor else []
        cells += [_other(case, ours, timed.get((case.name, name))) for name in others]
        cells += [_own(case, ours)] if has_own else []
        table.add_row(case.name, *cells)
    return table


def _caption(rounds: int, with_bars: bool) -> str:
    return (
        f"Medians of {rounds} interleaved rounds, L2 overwritten before every call. Of others: rate, and how many "
        "times faster Raddle is (median of the rounds' ratios). × own: share of the rate of the row that it is set "
        "against." + (" ✓: target met, ✗: missed." if with_bars else "")
    )


def _judged(text: str, case: Case, ours: results.Row, *names: str) -> str:
    for name in names:
        if name in ours.get("met", {}):
            return f"[green]{text} ✓[/]" if ours["met"][name] else f"[red]{text} ✗[/]"
    return text


def _share(case: Case, ours: results.Row) -> str:
    share = ours.get("ratios", {}).get(results.FLOOR)
    return "" if share is None else _judged(f"{100 * share:.1f} %", case, ours, results.FLOOR)


def _other(case: Case, ours: results.Row, theirs: results.Row | None) -> str:
    if theirs is None:
        return ""
    ratio = ours.get("ratios", {}).get(theirs["engine"])
    rate = f"{theirs['value']:,.0f}"
    if ratio is None:
        return rate
    return f"{rate}  {_judged(f'{ratio:.2f}×', case, ours, theirs['engine'], family(theirs['engine']))}"


def _own(case: Case, ours: results.Row) -> str:
    share = ours.get("ratios", {}).get("versus")
    return "" if share is None else _judged(f"{share:.3f}", case, ours, "versus")


def _figures(section: Section, rows: Sequence[results.Row], with_bars: bool) -> Table:
    table = Table(title=section.title)
    for name in ("measured", "engine"):
        table.add_column(name)
    for name in ("value", "unit", *(["bar"] if with_bars else []), "ratio"):
        table.add_column(name, justify="right")
    for row in rows:
        bar = ""
        if "bar" in row:
            bar = f"≤ {row['bar']:g} {'[green]met[/]' if row['met'] else '[bold red]missed[/]'}"
        ratios = ", ".join(f"{ratio:.2f}× {name}" for name, ratio in row.get("ratios", {}).items())
        cells = [row["workload"], row["engine"], f"{row['value']:.4g}", row["unit"]]
        table.add_row(*cells, *([bar] if with_bars else []), ratios)
    return table


def write(path: Path, machine: dict[str, Any], sections: Sequence[dict[str, Any]]) -> None:
    """One JSON object: ``machine``, and ``rows``, one a line; seconds of each section beside."""
    rows = ",\n".join(json.dumps(row) for section in sections for row in section["rows"])
    seconds = {section["name"]: section["seconds"] for section in sections}
    head = f'"machine": {json.dumps(machine)},\n"seconds": {json.dumps(seconds)},\n'
    path.write_text(f'{{\n{head}"rows": [\n{rows}\n]\n}}\n')
