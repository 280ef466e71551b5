"""What `raddle replay` says: a table that explains itself."""

from __future__ import annotations

from typing import Any, Callable

from rich.table import Table

from raddle._progress import Progress

from .serving import History

#: Least share of the read bandwidth that decode steps on a CPU reach; verifying outputs is not on the clock.
DECODE_SHARE = 0.6


def tables(report: dict[str, Any]) -> list[Table]:
    """The report of `cli.replay` for people."""
    return [_table(report), *([_compared(report)] if len(report["schedules"]) > 1 else [])]


def _compared(report: dict[str, Any]) -> Table:
    """Schedules side by side, as in the FlashInfer paper's tables of attention time (section 4)."""
    first, *_ = report["schedules"]
    result = Table(
        title="attention of a step, all layers, under each schedule",
        caption=f"Medians over the same steps, in which schedules took turns; ratios to {first}. Balance: heaviest "
        "worker over mean.",
        caption_justify="left",
    )
    result.add_column("schedule", no_wrap=True)
    columns = (("decode", "decode_us"), ("prefill", "prefill_us"), ("all steps", "run_us"), ("plan", "plan_us"))
    for name, _ in columns:
        result.add_column(f"{name}, µs", justify="right")
    for name in ("balance", "as planned"):
        result.add_column(name, justify="right")
    for schedule, found in report["schedules"].items():
        cells = [_against(found[key], report["schedules"][first][key]) for _, key in columns]
        result.add_row(schedule, *cells, _number(found["balance"]), _number(found["planned_balance"]))
    return result


def _against(value: dict[str, float] | None, first: dict[str, float] | None) -> str:
    if value is None or first is None:
        return "–"
    ratio = "" if value is first or not first["p50"] else f" ({value['p50'] / first['p50']:.2f}×)"
    return f"{_number(value['p50'])}{ratio}"


def _table(report: dict[str, Any]) -> Table:
    config, verified = report["config"], report["verified"]
    samples = f" of {report['samples']} samples" if report["samples"] > 1 else ""
    result = Table(
        title=f"{report['trace']}: {report['requests']} requests{samples}, attention of {config['layers']} "
        f"layers of {config['model']}, {config['dtype']}",
        caption=_caption(report),
        caption_justify="left",
    )
    result.add_column("measured")
    result.add_column("value, p50", justify="right")
    result.add_column("p99", justify="right")
    result.add_column("unit")
    for name, key, unit, scale in (
        ("inter-token latency", "itl_us", "ms", 1e-3),
        ("time to first token, queue included", "ttft_us", "ms", 1e-3),
        ("runs of a step, all layers", "run_us", "ms", 1e-3),
        ("appends of a step, all layers", "append_us", "µs", 1.0),
        ("plan of a step", "plan_us", "µs", 1.0),
    ):
        value = report[key] or {"p50": None, "p99": None}
        result.add_row(name, _number(value["p50"], scale), _number(value["p99"], scale), unit)
    result.add_section()
    for name, number, unit in _single_numbers(report):
        result.add_row(name, number, "", unit)
    result.add_section()
    state = "[bold red]FAILED[/]" if verified["failed"] else "passed" if verified["checked"] else "off"
    result.add_row(f"verification {state}", _number(verified["worst"]), "", "worst error / budget")
    result.add_row("  outputs checked", f"{verified['checked']:,}", "", f"{verified['failed']} wrong")
    return result


def _single_numbers(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    pool = report["pool"]
    return [
        ("generated tokens", _number(report["tokens_per_s"]), "tokens/s"),
        ("KV read, decode steps", _number(report["decode_gbps"]), "GB/s"),
        ("  read bandwidth, same run", _number(report["read_gbps"]), "GB/s"),
        ("  share of it", _number(report["decode_share"], 100), _share_unit(report)),
        ("Q·K and P·V, prefill steps", _number(report["prefill_gflops"]), "GFLOP/s"),
        ("busiest worker over mean", _number(report["balance"]), ""),
        ("  as planned", _number(report["planned_balance"]), ""),
        ("running requests, mean", _number(report["mean_batch"]), "a step"),
        *_of_trees(report),
        ("pool in use, mean", _number(pool["mean"], 100), f"% of {pool['pages']} pages"),
        ("  peak", _number(pool["peak"], 100), "%"),
        *(_of_prefixes(report) if report["config"]["prefix_cache"] else []),
        *(_of_cascades(report) if report["config"]["cascades"] else []),
    ]


def _of_prefixes(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    found = report["prefixes"]
    shared = found["shared_pages"]
    return [
        ("  cached and idle, mean", _number(report["pool"]["idle"], 100), "%"),
        ("prefix cache, hit rate", _number(found["hit_rate"], 100), "% of prompt tokens"),
        ("  hashes of blocks allow", _number(found["allowed_hit_rate"], 100), "%, all prompts kept"),
        ("  tokens saved", f"{found['tokens_saved']:,}", ""),
        ("  tokens evicted", f"{found['evicted_tokens']:,}", ""),
        ("pages of several requests", _number(shared["mean"]), f"a step, at most {shared['max']:,}"),
    ]


def _of_trees(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    trees = report["config"]["speculate"]
    if trees is None:
        return []
    return [("accepted tokens, mean", _number(report["accepted"]), f"a tree of {trees}")]


def _of_cascades(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    found = report["cascades"]
    steps = f"of {report['steps']:,}, at most {found['levels']} levels"
    rows = [("steps with a cascade", f"{found['steps']:,}", steps)]
    for name, key in (("such steps", "cascade_steps"), ("all steps", "all_steps")):
        if key in found:
            of = found[key]
            chosen, single = (_number((of[us] or {"p50": None})["p50"], 1e-3) for us in ("run_us", "single_us"))
            rows.append((f"  attention of {name}", chosen, f"ms, single format {single}"))
            rows.append(("    cascades saved", _number(of["saved"], 100), "% of its time"))
    return rows


def _share_unit(report: dict[str, Any]) -> str:
    """Whether decode on a CPU is as near to the memory's limit as it promises to be."""
    share = report["decode_share"]
    if share is None or report["config"]["device"] != "cpu":
        return "%"
    verdict = "[green]met[/]" if share >= DECODE_SHARE else "[bold red]missed[/]"
    return f"% (≥ {100 * DECODE_SHARE:.0f} {verdict})"


def _caption(report: dict[str, Any]) -> str:
    config, counted = report["config"], report["verified"]["strata"]
    strata = ", ".join(f"{n} {name}" for name, n in counted.items())
    return (
        f"{report['steps']:,} steps ({report['decode_steps']:,} of decode alone, "
        f"{report['prefill_steps']:,} of prefill alone), {report['prompt_tokens']:,} prompt and "
        f"{report['tokens']:,} generated tokens; {report['queued_requests']} requests waited for pages, "
        f"{report['chunked_prefills']} prompts came in chunks. The clock counts append, plan and runs "
        f"({report['seconds']:.1f} s); arrivals are {config['rate']:g} times as fast as the trace's. "
        f"GB/s and GFLOP/s count what the masks keep, over the runs of such steps, GB/s without cascades. "
        f"Outputs checked against fp64: {strata}. "
        f"{_machine(config)}, schedule {config['schedule']}, seed {config['seed']}."
    )


def _machine(config: dict[str, Any]) -> str:
    if config["device"] == "cpu":
        return f"{config['isa']}, {config['threads']} threads"
    return f"{config['gpu']} ({config['device']}), {'CUDA graphs' if config['graphs'] else 'no CUDA graphs'}"


def shown_by(progress: Progress) -> Callable[[History], None]:
    """What `serve` calls after each step, so that ``progress`` shows how far it is."""

    def on_step(history: History) -> None:
        steps, running = len(history.steps), len(history.steps[-1].spans)
        progress.show(
            f"step {steps:,}, {running} running, clock {history.seconds:.1f} s, requests",
            done=len(history.finished),
        )

    return on_step


def _number(value: float | None, scale: float = 1.0) -> str:
    if value is None:
        return "–"
    value *= scale
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"
