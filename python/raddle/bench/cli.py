"""The command ``raddle bench``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Optional

import click

from raddle.bench.gpu.cli import gpu
from raddle.bench.workloads import ALL, chosen

_JSON = click.Path(dir_okay=False, writable=True, path_type=Path)
#: Bytes that the read loop goes through.
_READ_BYTES = 1 << 30


def _threads_option(default: Optional[int], shown: Any) -> Any:
    return click.option(
        "--threads",
        type=click.IntRange(min=1),
        default=default,
        show_default=shown,
        help="Threads of every engine.",
    )


def _rounds_option(default: int) -> Any:
    rounds = click.IntRange(min=1)
    return click.option("--rounds", type=rounds, default=default, show_default=True, help="Rounds to time.")


_json_option = click.option("--json", "json_path", type=_JSON, help="Write the figures here, too.")


@click.group()
def bench() -> None:
    """Compare Raddle's speed with other engines, and with what it promises.

    The tensors are torch's: pip install "raddle[bench]".
    """


bench.add_command(gpu)


@bench.command()
@click.option(
    "--against",
    type=click.Choice(["torch"]),
    multiple=True,
    help="Engine to compare with; torch: scaled_dot_product_attention, at its best.",
)
@click.option(
    "--workloads",
    "patterns",
    multiple=True,
    metavar="WORDS",
    help='Only workloads that hold all these words, such as "decode bf16"; may be given again.',
)
@click.option("--list", "list_only", is_flag=True, help="List the workloads and stop.")
@_rounds_option(21)
@_threads_option(None, "all CPUs of this process")
@_json_option
def cpu(
    against: tuple[str, ...],
    patterns: tuple[str, ...],
    list_only: bool,
    rounds: int,
    threads: Optional[int],
    json_path: Optional[Path],
) -> None:
    """Decode and prefill on the CPU, KV cold, beside the memory's read bandwidth.

    Engines take turns, each call on the next of many pools (2 GB an engine), and their outputs are
    compared before anything is timed. Needs 8 GB of memory.
    """
    if list_only:
        for workload in ALL:
            click.echo(f"{workload.name}{'' if workload.usual else '  (only if named)'}")
        return
    try:
        workloads = chosen(patterns)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    threads, torch_version = _prepare(threads, json_path)
    from raddle import _library
    from raddle._progress import Progress
    from raddle.bench import compare, report

    out = report.console()
    out.print(report.header(threads, torch=torch_version))
    read_bandwidth = _library.function("raddle.read_bandwidth_gbps")
    results = []
    with Progress() as progress:
        progress.say("memory read")
        read_gbps = read_bandwidth(_READ_BYTES, threads)
        try:
            for workload in workloads:
                results.append(compare.measure(workload, against, rounds, progress))
        except compare.WrongOutput as error:
            raise click.ClickException(str(error)) from None
        # Once more: on a machine with other users the better one is nearer to the limit.
        progress.say("memory read")
        read_gbps = max(read_gbps, read_bandwidth(_READ_BYTES, threads))
    if json_path:
        report.write_json(json_path, report.rows(results, read_gbps, _READ_BYTES))
    out.print(report.comparison(results, read_gbps, rounds))


@bench.command()
@_rounds_option(2000)
@_json_option
def plan(rounds: int, json_path: Optional[Path]) -> None:
    """Host time of `plan` with its layout, and what Python adds to `run`."""
    threads, torch_version = _prepare(None, json_path)
    from raddle._progress import Progress
    from raddle.bench import plan_cost, report

    out = report.console()
    out.print(report.header(threads, torch=torch_version))
    with Progress() as progress:
        progress.say("planning")
        found = [plan_cost.plan_cost(16, 15.0, rounds), plan_cost.plan_cost(256, 60.0, rounds)]
        progress.say("running")
        found += plan_cost.run_overhead(10.0, max(21, rounds // 20))
    _print_bars("Host time of a serving step, from Python", found, json_path)


@bench.command()
@_rounds_option(21)
@_threads_option(2, True)
@_json_option
def balance(rounds: int, threads: int, json_path: Optional[Path]) -> None:
    """Planned and measured balance of decodes with skewed lengths."""
    threads, torch_version = _prepare(threads, json_path)
    from raddle._progress import Progress
    from raddle.bench import balance as spread
    from raddle.bench import report

    out = report.console()
    out.print(report.header(threads, torch=torch_version))
    found = []
    with Progress() as progress:
        for name in ("decode bf16 B16 skewed1024", "decode bf16 B16 skewed8192"):
            (workload,) = chosen((name,))
            found += spread.measure(workload, rounds, progress)
    _print_bars("Balance: busiest worker over the mean, contraction included", found, json_path)


@bench.command("flex-cpu")
@click.option("--against", type=click.Choice(["torch"]), multiple=True, help="torch: its compiled FlexAttention.")
@click.option("--dtype", "dtypes", type=click.Choice(["fp32", "bf16"]), multiple=True, help="Default: both.")
@_rounds_option(7)
@_threads_option(None, "all CPUs of this process")
@_json_option
def flex_cpu(
    against: tuple[str, ...], dtypes: tuple[str, ...], rounds: int, threads: Optional[int], json_path: Optional[Path]
) -> None:
    """Prefill with masks and scores written in Python, traced and as shipped."""
    threads, torch_version = _prepare(threads, json_path)
    from raddle.bench import compare, flex, report
    from raddle._progress import Progress

    out = report.console()
    out.print(report.header(threads, torch=torch_version))
    with Progress() as progress:
        try:
            found = flex.measure(against, rounds, dtypes or ("fp32", "bf16"), progress)
        except compare.WrongOutput as error:
            raise click.ClickException(str(error)) from None
        found += flex.kept_tiles(rounds, progress)
    _print_bars(f"Prefill of {flex.LENGTH} tokens with functions of Python; rates count kept pairs", found, json_path)


@bench.command("first-use")
@_rounds_option(5)
@click.option("--seed", type=int, default=lambda: int.from_bytes(os.urandom(3), "little"), help="Of the expressions.")
@_json_option
def first_use(rounds: int, seed: int, json_path: Optional[Path]) -> None:
    """Compiling a new variant, starting warm, and preparing masks over a million tokens."""
    threads, torch_version = _prepare(None, json_path)
    from raddle.bench import first_use as first
    from raddle.bench import report
    from raddle._progress import Progress

    out = report.console()
    out.print(report.header(threads, torch=torch_version, seed=str(seed)))
    with Progress() as progress:
        found = first.compiles(rounds, seed, progress) + first.masks(progress)
    _print_bars("First use, each in a process of its own", found, json_path)


@bench.command()
@click.option("--seed", type=int, default=0, show_default=True, help="Of the prompts.")
@_json_option
def kv(seed: int, json_path: Optional[Path]) -> None:
    """The page pool and the radix cache, on one core: match, insert, evict, memory."""
    threads, torch_version = _prepare(None, json_path)
    from raddle._progress import Progress
    from raddle.bench import kv as cache
    from raddle.bench import report

    out = report.console()
    out.print(report.header(threads, torch=torch_version, seed=str(seed)))
    with Progress() as progress:
        found = cache.measure(seed, progress.say)
    _print_bars("Page pool and radix cache, pages of 16, one core, called from Python", found, json_path)


def _print_bars(title: str, found: Any, json_path: Optional[Path]) -> None:
    from raddle.bench import report

    if json_path:
        report.write_json(json_path, report.bar_rows(found))
    report.console().print(report.bars(title, found))


def _prepare(threads: Optional[int], json_path: Optional[Path]) -> tuple[int, str]:
    """Gives Raddle and torch the same number of threads; returns it, and torch's version."""
    if json_path and not json_path.parent.is_dir():
        raise click.UsageError(f"--json: there is no folder {json_path.parent}")
    if threads is not None:
        # The worker pool asks when it is first used, which is later than now.
        os.environ["RADDLE_NUM_THREADS"] = str(threads)
    try:
        import torch
    except ImportError:
        raise click.ClickException('benchmarks need torch: pip install "raddle[bench]"') from None
    import raddle

    found = raddle.cpu_threads()
    if threads is not None and found != threads:
        raise click.ClickException(f"Raddle has {found} threads, not {threads}")
    torch.set_num_threads(found)
    return found, torch.__version__
