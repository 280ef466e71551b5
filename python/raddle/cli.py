"""The command `raddle`."""

from __future__ import annotations

import importlib
import json

import click


_MAX_LENGTH = 2**31 - 1
_MAX_PAGES = 2**28  # 2 GiB of page numbers


class _Lazy(click.Group):
    """Subcommands whose modules are imported when they run: `raddle doctor` must work without them."""

    _modules = {
        "replay": "raddle.replay.cli:replay",
        "bench": "raddle.bench.cli:bench",
        "gallery": "raddle.flex.gallery:gallery",
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *self._modules])

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self._modules:
            return super().get_command(ctx, name)
        module, command = self._modules[name].split(":")
        return getattr(importlib.import_module(module), command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # The help of a lazy command is not worth its imports.
        rows = [(name, command.get_short_help_str()) for name, command in sorted(self.commands.items())]
        rows += [("replay", "Serve a trace of requests and report."), ("bench", "Compare with other engines.")]
        rows += [("gallery", "Draw the masks of raddle.flex.masks.")]
        with formatter.section("Commands"):
            formatter.write_dl(sorted(rows))


@click.group(cls=_Lazy)
@click.version_option(package_name="raddle")
def main() -> None:
    """Raddle, an attention engine for LLM inference serving."""


@main.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")
def doctor(as_json: bool) -> None:
    """Show what this machine can do, and why something is off."""
    from raddle.doctor import facts, report

    click.echo(json.dumps(facts(), indent=2) if as_json else report())


@main.command()
def support() -> None:
    """Show what works on which backend, and what is refused for which reason.

    Where there is a GPU it is tried, too, which compiles for minutes the first time.
    """
    from raddle.doctor import has_gpu, support_page

    click.echo(support_page(("cpu", "cuda") if has_gpu() else ("cpu",)))


@main.command()
@click.argument("lengths", nargs=-1, required=True, metavar="QO:KV…")
@click.option("--heads", default="32:8", show_default=True, help="Query heads : KV heads.")
@click.option("--head-dim", default=128, show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--window", type=click.IntRange(min=0), help="Tokens a row sees, itself included; 0: all.")
@click.option("--causal/--no-causal", default=True, show_default=True)
@click.option("--page-size", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--shared", type=click.IntRange(min=0), default=0, help="Leading tokens whose pages all requests share.")
@click.option("--workers", type=click.IntRange(min=1), help="Work queues; default: the threads of the worker pool.")
@click.option("--schedule", default="auto", show_default=True)
def explain(
    lengths: tuple[str, ...],
    heads: str,
    head_dim: int,
    dtype: str,
    window: int | None,
    causal: bool,
    page_size: int,
    shared: int,
    workers: int | None,
    schedule: str,
) -> None:
    """Show how a batch would be computed, and why.

    Each QO:KV is a request with QO query rows and KV keys: `raddle explain 512:512 1:4096 1:90`. With --shared 2048
    prefixes are discovered.
    """
    import numpy as np

    import raddle

    try:
        num_qo_heads, num_kv_heads = _numbers(heads)
        qo_len, kv_len = np.array([_numbers(text) for text in lengths], np.int32).T.astype(np.int64)
        variant = [raddle.Causal()] if causal else []
        if window:
            variant.append(raddle.SlidingWindow(window - 1))
        spec = raddle.AttentionSpec(num_qo_heads, num_kv_heads, head_dim, dtype=dtype, variant=variant)
        pages = -(-kv_len // page_size)
        if pages.sum() > _MAX_PAGES:
            found = f"the requests have {pages.sum():,} pages"
            raise ValueError(f"{found}; expected at most {_MAX_PAGES:,}: a larger --page-size")
        page_indptr = np.concatenate([[0], np.cumsum(pages)])
        qo_indptr = np.concatenate([[0], np.cumsum(qo_len)])
        page_indices = np.arange(page_indptr[-1])
        if shared:
            in_list = page_indices - np.repeat(page_indptr[:-1], pages)
            page_indices = np.where(in_list < shared // page_size, in_list, page_indices)
        lists = qo_indptr, page_indptr, page_indices, np.ascontiguousarray(kv_len), page_size
        layout = raddle.PagedKV(*lists, discover_prefixes=shared > 0)
        plan = raddle.Attention(spec).plan(layout, num_workers=workers, schedule=schedule)
    except (TypeError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(plan.explain().rstrip())
    click.echo(f"balance: {plan.balance:.3f} (heaviest queue over the mean)")
    click.echo(f"workspace: {plan.workspace_bytes:,} bytes")


@main.group()
def cache() -> None:
    """What was compiled just in time on this machine."""


@cache.command("list")
def cache_list() -> None:
    """Show the entries: name, target, size and folder."""
    from raddle import cache as store

    for entry in store.entries():
        click.echo(f"{entry['name']:32} {entry['target']:10} {entry['bytes']:>10,} bytes  {entry['path']}")
    click.echo(f"{len(store.entries())} entries in {store.folder()}")


@cache.command("clear")
def cache_clear() -> None:
    """Remove all entries."""
    from raddle import cache as store

    click.echo(f"{store.clear()} entries removed from {store.folder()}")


@cache.command("warm")
@click.argument("specs", nargs=-1, required=True, metavar="MODULE:NAME…")
def cache_warm(specs: tuple[str, ...]) -> None:
    """Compile what attention specs need, before anybody waits for it.

    Each argument names a raddle.AttentionSpec, a list of them, or a function that returns one or the other:
    `raddle cache warm my_model.attention:SPECS` or `raddle cache warm specs.py:all_layers`.
    """
    from raddle import cache as store

    for target in specs:
        try:
            found = store.find_specs(target)
            compiled = store.warm(found)
        except (ValueError, TypeError, ImportError, RuntimeError) as error:
            raise click.ClickException(f"{target}: {error}") from None
        click.echo(f"{target}: {len(found)} specs, {compiled} compiled, the rest was there")


def _numbers(text: str) -> tuple[int, int]:
    first, colon, second = text.partition(":")
    if not (first.isdecimal() and second.isdecimal()):
        raise ValueError(f"'{text}' is no pair of numbers; expected two with a colon between, such as 1:4096")
    if max(int(first), int(second)) > _MAX_LENGTH:
        raise ValueError(f"'{text}' has a number above {_MAX_LENGTH}; expected 32-bit integers")
    return int(first), int(second)
