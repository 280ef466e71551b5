"""What the commands of `raddle bench` share: their options, and the way from options to printed figures."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import click

from raddle._progress import Progress
from raddle.bench import isa

if TYPE_CHECKING:
    from raddle.bench.results import Measured

FILE = click.Path(dir_okay=False, writable=True, path_type=Path)
_BARS = "raddle.bench.bars"  # where the context keeps the flag


def _split(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for text in value for name in text.split(",") if name))


def names_option(name: str, text: str) -> Any:
    """Names given with commas, or by repeating the option."""
    return click.option(name, multiple=True, callback=_split, metavar="NAMES", help=text)


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


def threads_option(default: Optional[int], shown: Any) -> Any:
    threads = click.IntRange(min=1)
    text = "Threads that every engine uses."
    return click.option("--threads", type=threads, default=default, show_default=shown, help=text)


def rounds_option(default: Optional[int], shown: Any = True) -> Any:
    rounds = click.IntRange(min=1)
    return click.option("--rounds", type=rounds, default=default, show_default=shown, help="How many rounds to time.")


json_option = click.option("--json", "json_path", type=FILE, help="Also write the figures to this file.")


def figures_options(command: Any) -> Any:
    """What all commands take on the figures: where else to write them, and whether to judge them."""
    return bars_option(json_option(command))


def model_options(stack: str) -> Any:
    """What commands that load a model take of it: its name, and whether its weights are made up."""
    named = click.option("--model", required=True, help=f"A model's name or folder, as {stack} takes it.")
    text = "Weights are made up: a folder with config.json will do."
    dummy = click.option("--dummy-weights", is_flag=True, help=text)
    return lambda command: named(dummy(command))


def check_folder(option: str, path: Optional[Path]) -> None:
    """Raises ``UsageError`` if the option's file cannot be written, before anything is measured."""
    if path and not path.parent.is_dir():
        raise click.UsageError(f"{option}: there is no folder {path.parent}")


def torch_module() -> Any:
    """PyTorch. Raises ``ClickException`` without it."""
    try:
        import torch
    except ImportError:
        raise click.ClickException('benchmarks need torch: pip install "/path/to/raddle[bench]"') from None
    return torch


def prepare(threads: Optional[int], json_path: Optional[Path]) -> tuple[int, str]:
    """Gives Raddle and torch the same number of threads; returns it, and torch's version with what it runs on."""
    check_folder("--json", json_path)
    if threads is not None:
        # The worker pool asks when it is first used, which is later than now.
        os.environ["RADDLE_NUM_THREADS"] = str(threads)
    # Huge pages for torch's tensors, here and in peers' processes: numpy's, as `PagePool.make_kv` makes, have them.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    torch = torch_module()
    import raddle

    found = raddle.cpu_threads()
    if threads is not None and found != threads:
        raise click.ClickException(f"Raddle has {found} threads, not {threads}")
    torch.set_num_threads(found)
    return found, f"{torch.__version__} {isa.torch_described()}"


def show_figures(
    title: str,
    measure: Callable[[Progress], Sequence[Measured]],
    json_path: Optional[Path],
    threads: Optional[int] = None,
    seed: Optional[int] = None,
) -> None:
    """What a command of single figures does: measures them, writes them and prints them."""
    found_threads, torch_version = prepare(threads, json_path)
    from raddle.bench import report
    from raddle.bench.engines import WrongOutput

    out = report.console()
    seeds = {} if seed is None else {"seed": str(seed)}
    out.print(report.header(found_threads, torch=torch_version, **seeds))
    with Progress() as progress:
        try:
            found = measure(progress)
        except WrongOutput as error:
            raise click.ClickException(str(error)) from None
    if json_path:
        report.write_json(json_path, report.bar_rows(found))
    out.print(report.figures(title, found, wants_bars()))
