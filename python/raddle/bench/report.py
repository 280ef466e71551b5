"""What the benchmarks say: tables for people, rows for programs."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from rich.table import Table

import raddle
from raddle._console import table_console as console  # noqa: F401
from raddle.bench import isa, results
from raddle.bench.engines import RADDLE, family
from raddle.bench.gpu.cases import Case, Section
from raddle.bench.limits import Limits
from raddle.bench.results import Measured
from raddle.bench.workloads import Workload

if TYPE_CHECKING:  # it imports torch, which `raddle bench gpu --list` does without
    from raddle.bench.compare import Result


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


def gpu_header(machine: dict[str, Any]) -> str:
    gpu = f"{machine.get('gpu')}, driver {machine.get('driver')}, commit {machine.get('commit')}"
    return f"{gpu}\n" + ", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items())


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


def comparison(measured: Sequence[Result], found: Limits, rounds: int, with_bars: bool = False) -> Table:
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
    for result in measured:
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
    """Single figures, with their engines where those are not all Raddle, and Raddle's own targets if asked for."""
    engines, ratios = any(m.engine != RADDLE for m in found), any(m.ratios for m in found)
    table = Table(title=title)
    table.add_column("measured")
    for name, shown in (("engine", engines), ("value", True), ("unit", True), ("bar", with_bars), ("ratio", ratios)):
        if shown:
            table.add_column(name, justify="left" if name in ("engine", "unit") else "right")
    for m in found:
        bar = "" if m.bar is None else f"{'≥' if m.at_least else '≤'} {m.bar:.3g} {verdict(m.met)}"
        ratio = ", ".join(f"{ratio:.2f}× {name}" for name, ratio in m.ratios.items())
        cells = [m.name, *([m.engine] if engines else []), f"{m.value:.4g}", m.unit]
        table.add_row(*cells, *([bar] if with_bars else []), *([ratio] if ratios else []))
    return table


def bar_rows(found: Sequence[Measured]) -> list[dict[str, Any]]:
    """The same for programs, with the keys of `rows`; ``us`` is null where no time was measured."""
    return [
        {"workload": m.name, "engine": RADDLE, "us": m.us, "value": m.value, "unit": m.unit}
        for m in found
    ]


def rows(measured: Sequence[Result], found: Limits) -> list[dict[str, Any]]:
    """One row for each limit, and one for each engine on each workload.

    Keys: ``workload``, ``engine``, ``us`` (median), ``value`` in ``unit``, of engines also ``share`` of the limit (null
    where that was disturbed) and ``layers``, the calls of a step that was timed. Rows of Raddle also have ``ratio``,
    the speed relative to the best of the others (null where it ran alone). ``isa``: Raddle's instruction set, and the one
    that torch was limited to (null where an engine chose its own).
    """
    all_rows, isas = found.rows(), {RADDLE: raddle.cpu_isa(), "torch": isa.torch_limit()}
    for result in measured:
        for engine in result.times:
            us, form = result.us(engine), _form(result, engine)
            row = {"workload": result.workload.name, "engine": engine, "us": us, "value": form.rate(us)}
            row.update(unit=form.unit, share=_share(result, engine, found), layers=result.workload.layers)
            row.update(isa=isas.get(engine.split()[0]))
            all_rows.append({**row, "ratio": result.speedup} if engine == RADDLE else row)
    return all_rows


def write_json(path: Path, found: Sequence[dict[str, Any]]) -> None:
    """A JSON list with one row a line."""
    path.write_text(f"[\n{_lines(found)}\n]\n")


def write_gpu(path: Path, machine: dict[str, Any], sections: Sequence[dict[str, Any]]) -> None:
    """One JSON object: ``machine``, and ``rows``, one a line; seconds of each section beside."""
    rows = _lines(row for section in sections for row in section["rows"])
    seconds = {section["name"]: section["seconds"] for section in sections}
    head = f'"machine": {json.dumps(machine)},\n"seconds": {json.dumps(seconds)},\n'
    path.write_text(f'{{\n{head}"rows": [\n{rows}\n]\n}}\n')


def _lines(found: Iterable[dict[str, Any]]) -> str:
    return ",\n".join(json.dumps(row) for row in found)


# --- of a GPU -------------------------------------------------------------------------------


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
    single = [Measured.of(row) for row in rows if "bar" in row or not section.cases and "value" in row]
    if not with_bars:
        rows = [{key: value for key, value in row.items() if key != "met"} for row in rows]
    if section.cases:
        shown.append(_compared(section, rows, with_bars))
    if single:
        shown.append(figures(section.title, single, with_bars))
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
        cells += [_of_floor(case, ours)] if has_floor else []
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


def _of_floor(case: Case, ours: results.Row) -> str:
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
