"""The command ``raddle bench gpu``."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import click

from raddle.bench.gpu.engines import FAMILIES


def split(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Names given with commas, or by repeating the option."""
    return tuple(dict.fromkeys(name for text in value for name in text.split(",") if name))


_BARS = "raddle.bench.bars"  # where the context keeps the flag


def _keep_flag(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    context.meta[_BARS] = value


bars_option = click.option(
    "--bars",
    is_flag=True,
    expose_value=False,
    callback=_keep_flag,
    help="Also show Raddle's own targets, and whether they were met.",
)


def wants_bars() -> bool:
    """Whether the running command was given --bars."""
    return bool(click.get_current_context().meta.get(_BARS))


@click.command()
@click.option(
    "--against",
    multiple=True,
    callback=split,
    metavar="NAMES",
    help=f"Engines to compare with, by commas: {', '.join(FAMILIES)}. Those that do not import are named as absent.",
)
@click.option(
    "--only",
    multiple=True,
    callback=split,
    metavar="NAMES",
    help="Only these sections, or patterns such as decode*; see --list.",
)
@click.option("--list", "list_only", is_flag=True, help="List the sections and their rows, and stop.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="How many rounds to time.")
@click.option("--device", default="cuda", show_default=True, help="cuda, or cuda:1.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Also write the figures to this file, as JSON.",
)
@bars_option
@click.option("--prepare", is_flag=True, help="Only compile and compare, on tiny batches: no times.")
@click.option(
    "--timeline",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write what Raddle's workers did in one run of each case here: trace events (JSON, for ui.perfetto.dev), and "
    "a summary.",
)
@click.option(
    "--timeline-of", multiple=True, callback=split, metavar="NAMES", help="Only of these sections, or patterns."
)
@click.option(
    "--section-seconds",
    type=click.FloatRange(min=1),
    default=240.0,
    show_default=True,
    help="Seconds after which a section is given up.",
)
def gpu(
    against: tuple[str, ...],
    only: tuple[str, ...],
    list_only: bool,
    rounds: int,
    device: str,
    out: Optional[Path],
    prepare: bool,
    timeline: Optional[Path],
    timeline_of: tuple[str, ...],
    section_seconds: float,
) -> None:
    """Compare decode, prefill, mixed batches and more on an NVIDIA GPU with other engines.

    Engines take turns in the rounds of one process, beside a plain read of as many bytes; ratios are medians over
    rounds. All outputs are compared before anything is timed. An engine that fails is a line in the table; if Raddle
    fails, the exit code is 1.
    """
    from raddle.bench.gpu import process, report, results, sections

    unknown = [name for name in against if name not in FAMILIES]
    if unknown:
        raise click.UsageError(f"--against names {', '.join(unknown)}; expected some of: {', '.join(FAMILIES)}")
    try:
        chosen = sections.chosen(only)
    except ValueError as error:
        raise click.UsageError(f"--only: {error}") from None
    try:
        sections.chosen(timeline_of)
    except ValueError as error:
        raise click.UsageError(f"--timeline-of: {error}") from None
    if list_only:
        click.echo(report.sections_listed(chosen))
        return
    if out and not out.parent.is_dir():
        raise click.UsageError(f"--out: there is no folder {out.parent}")
    try:
        import torch
    except ImportError:
        raise click.ClickException('benchmarks need torch: pip install "raddle[bench]"') from None
    if not torch.cuda.is_available():
        raise click.ClickException("torch finds no NVIDIA GPU here: `raddle doctor` says what there is")

    def keep(machine: dict, finished: list) -> None:
        if out:
            report.write(out, machine, finished)

    folder = str(timeline.absolute()) if timeline else ""
    options = process.Options(against, rounds, device, prepare, folder, timeline_of, section_seconds, wants_bars())
    _, finished = process.run_all([section.name for section in chosen], options, keep)
    rows = [row for section in finished for row in section["rows"]]
    lost = [row for row in rows if row.get("workload") == "all" and row["engine"] == "all"]
    for row in lost:
        click.echo(f"{row['section']}: {row['failed']}", err=True)
    if results.raddle_failed(rows):
        raise click.ClickException("Raddle failed on some workloads")
