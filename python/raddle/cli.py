"""The command `raddle`."""

from __future__ import annotations

import json
import sys
from datetime import datetime

import click

from raddle import _explain
from raddle.bench.cli import bench
from raddle.flex.gallery import gallery
from raddle.replay.cli import replay


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="raddle")
def main() -> None:
    """Raddle, an attention engine for LLM inference serving.

    Start with `raddle doctor`: what this machine can do. Then `raddle replay` serves a trace of real requests.
    """


for command in (bench, gallery, replay, _explain.explain):
    main.add_command(command)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for programs.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Show what this machine can do, and what is wrong with its setup.

    Exits with 1 if something is wrong. What is merely not installed, such as a GPU's driver, is not.
    """
    from raddle.doctor import facts, report

    found = facts()
    click.echo(json.dumps(found, indent=2) if as_json else report(found))
    ctx.exit(1 if found["problems"] else 0)


@main.command()
def support() -> None:
    """Show which features work on which device.

    Tries each of them on a small problem, and prints the message if it is refused. On a machine with a GPU this
    compiles kernels, for minutes the first time.
    """
    from raddle.doctor import has_gpu, support_page

    click.echo(support_page(("cpu", "cuda") if has_gpu() else ("cpu",)))


@main.group()
def cache() -> None:
    """List, remove or prepare compiled code."""


@cache.command("list")
def cache_list() -> None:
    """Show what is in the cache."""
    from rich.table import Table

    from raddle import cache as store
    from raddle._console import table_console

    entries = store.entries()
    if entries:
        table = Table(
            caption="A variant for CPUs serves every dtype, head dimension and number of heads; a GPU kernel serves "
            "one dtype and head dimension, which its name begins with. Entry: how the name of its folder begins.",
            caption_justify="left",
        )
        for name, justify in (("name", "left"), ("kind", "left"), ("compiled for", "left"), ("date", "left")):
            table.add_column(name, justify=justify)
        table.add_column("size", justify="right")
        table.add_column("entry")
        for entry in entries:
            date = datetime.fromtimestamp(entry["time"]).strftime("%Y-%m-%d %H:%M")
            size = f"{entry['bytes'] / 1e3:,.0f} kB"
            table.add_row(entry["name"], entry["kind"], entry["target"], date, size, entry["key"][:8])
        table_console().print(table)
    total = sum(entry["bytes"] for entry in entries)
    click.echo(f"{_counted(len(entries), 'entry', 'entries')} in {store.folder()}, {total / 1e6:.1f} MB")


@cache.command("clear")
def cache_clear() -> None:
    """Remove everything from the cache. It is compiled again when it is needed."""
    from raddle import cache as store

    click.echo(f"removed {_counted(store.clear(), 'entry', 'entries')} from {store.folder()}")


@cache.command("warm")
@click.argument("specs", nargs=-1, required=True, metavar="MODULE:NAME…")
@click.option("--arch", metavar="NAME", help="For GPUs of this architecture, such as sm_90a, in place of the CPU.")
@click.option("--all", "all_kernels", is_flag=True, help="With --arch: every kernel that plans may need, not two.")
def cache_warm(specs: tuple[str, ...], arch: str | None, all_kernels: bool) -> None:
    """Compile what attention specs need, before the first request has to wait for it.

    Each argument names a raddle.AttentionSpec, a list of them, or a function that returns one or the other:
    `raddle cache warm my_model.attention:SPECS` or `raddle cache warm specs.py:all_layers`. Modules are found in the
    current folder, too. Kernels for GPUs need NVRTC, and no GPU: an image of a container can have them.
    """
    from raddle import cache as store
    from raddle._progress import Progress

    if all_kernels and not arch:
        raise click.UsageError("--all is given without --arch")

    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: this script's own folder stands there else
    for target in specs:
        try:
            found = store.find_specs(target)
            with Progress() as progress:
                compiled = store.warm(found, arch, all_kernels, lambda kernel: progress.say(f"{kernel}, {arch}"))
        except (ValueError, TypeError, ImportError, RuntimeError) as error:
            raise click.ClickException(f"{target}: {error}") from None
        counted = _counted(compiled, "kernel", "kernels") if arch else _counted(compiled, "variant", "variants")
        variants = f"compiled {counted}" if compiled else "nothing left to compile"
        click.echo(f"{target}: {_counted(len(found), 'spec', 'specs')}; {variants}")


def _counted(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"
