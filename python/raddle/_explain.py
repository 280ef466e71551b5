"""The command `raddle explain`."""

from __future__ import annotations

import click

_MAX_LENGTH = 2**31 - 1
_MAX_PAGES = 2**28  # 2 GiB of page numbers
#: What an explanation of a plan speaks of.
WORDS = """
Words: a query tile is a block of query rows, with the query heads that share a KV head; a work item is one query tile
of one KV head over a span of its keys; a worker is a thread on a CPU, a thread block on a GPU. Each worker computes
its own queue of work items. Where a query tile is cut into several, the partial results of its rows are combined.
Estimates come from the planner's cost model, by which it compares schedules; they do not predict this machine's time.
"""


@click.command()
@click.argument("lengths", nargs=-1, required=True, metavar="QO:KV…")
@click.option("--heads", default="32:8", show_default=True, help="Query heads : KV heads.")
@click.option("--head-dim", default=128, show_default=True, help="Head dimension.")
@click.option("--dtype", default="bfloat16", show_default=True, help="Of Q, K, V and the output.")
@click.option("--window", type=click.IntRange(min=0), help="Tokens that a row sees, itself included. [default: all]")
@click.option("--causal/--no-causal", default=True, show_default=True, help="Whether rows see earlier keys only.")
@click.option("--page-size", type=click.IntRange(min=1), default=16, show_default=True, help="Tokens per page.")
@click.option(
    "--shared",
    type=click.IntRange(min=0),
    default=0,
    metavar="TOKENS",
    help="Leading tokens whose pages all requests share; Raddle then discovers the shared prefix.",
)
@click.option("--workers", type=click.IntRange(min=1), help="Work queues. [default: the threads of the worker pool]")
@click.option("--schedule", default="auto", show_default=True, help="auto, linear, algorithm1 or one-per-request.")
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
    """Show how Raddle would compute a batch on the CPU.

    Each QO:KV is a request with QO query rows and KV keys. For example, a prompt of 512 tokens beside two requests that
    generate one token each:

    \b
        raddle explain 512:512 1:4096 1:90
    """
    import numpy as np

    import raddle

    try:
        num_qo_heads, num_kv_heads = _numbers(heads, "--heads ")
        qo_len, kv_len = np.array([_numbers(text) for text in lengths], np.int32).T.astype(np.int64)
        variant = [raddle.Causal()] if causal else []
        if window:
            variant.append(raddle.SlidingWindow(window - 1))
        spec = raddle.AttentionSpec(num_qo_heads, num_kv_heads, head_dim, dtype=dtype, variant=variant)
        pages = -(-kv_len // page_size)
        if pages.sum() > _MAX_PAGES:
            found = f"the requests have {pages.sum():,} pages"
            raise ValueError(f"{found}; expected at most {_MAX_PAGES:,}: choose a larger --page-size")
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
    click.echo(f"batch: {len(lengths):,} requests with {qo_len.sum():,} query rows and {kv_len.sum():,} keys in all")
    click.echo(plan.explain().rstrip())
    click.echo(f"workspace: {plan.workspace_bytes:,} bytes for partial results")
    click.echo(WORDS.rstrip())


def _numbers(text: str, option: str = "") -> tuple[int, int]:
    first, colon, second = text.partition(":")
    if not (first.isdecimal() and second.isdecimal()):
        example = "32:8" if option else "1:4096"
        raise ValueError(f"found {option}'{text}'; expected two numbers with a colon between them, such as {example}")
    if max(int(first), int(second)) > _MAX_LENGTH:
        raise ValueError(f"'{text}' has a number above {_MAX_LENGTH}; expected 32-bit integers")
    return int(first), int(second)
