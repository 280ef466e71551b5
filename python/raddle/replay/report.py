"""What `raddle replay` says about a run: tables in plain words, for the terminal and for the page."""

from __future__ import annotations

from typing import Any, Callable

from raddle._progress import Progress

from .scheduler import Scheduler
from .serving import History
from .sheet import Sheet

#: A service that computes for more of its time than this, and takes more microseconds than that to its first tokens,
#: was offered more than it can serve.
_SATURATED, _LATE_US = 0.98, 1e6
_TIMES = ((1e6, "s"), (1e3, "ms"), (1.0, "µs"))


def sheets(report: dict[str, Any]) -> list[Sheet]:
    """The report of `cli.replay` for people."""
    compared = [_schedules(report)] if len(report["schedules"]) > 1 else []
    return [_latency(report), _use(report), *compared]


def headline(report: dict[str, Any]) -> str:
    """What was replayed."""
    config = report["config"]
    samples = f" of {report['samples']} samples" if report["samples"] > 1 else ""
    return (
        f"{report['trace']}: {report['requests']:,} requests{samples}, "
        f"attention of {_counted(config['layers'], 'layer')} of {config['model']} in {config['dtype']}"
    )


def conditions(report: dict[str, Any]) -> list[str]:
    """Under which conditions the figures were measured: a sentence or two each."""
    config, found = report["config"], report
    pace = f"{config['rate']:g} times as fast as in the trace (--rate)"
    lines = [
        f"{machine(config)}; schedule {config['schedule']}, seed {config['seed']}.",
        f"{found['steps']:,} steps for {found['prompt_tokens']:,} prompt tokens and {found['tokens']:,} generated "
        f"ones: {found['decode_steps']:,} only decoded, {found['prefill_steps']:,} only prefilled, the others did both. "
        f"{_counted(found['chunked_prefills'], 'prompt')} took several steps; "
        f"{_counted(found['queued_requests'], 'request')} had to wait for free pages.",
        f"Requests arrived {pace}. Attention computed for {_percent(found['busy'])} of {found['seconds']:.1f} s on the "
        "replay's clock, which counts appending, planning and running, and no other part of a model.",
    ]
    if (found["busy"] or 0.0) > _SATURATED and found["ttft_us"] and found["ttft_us"]["p50"] > _LATE_US:
        lines.append(
            "Requests arrived faster than this machine serves them, so most of the time to the first token is waiting: "
            "a lower --rate shows the service without a queue."
        )
    return lines


def machine(config: dict[str, Any]) -> str:
    if config["device"] == "cpu":
        return f"{config['isa']} on {_counted(config['threads'], 'thread')}"
    return f"{config['gpu']} ({config['device']}), {'with' if config['graphs'] else 'without'} CUDA graphs"


def shown_by(progress: Progress, scheduler: Scheduler) -> Callable[[History], None]:
    """What `serve` calls after each step, so that ``progress`` shows how far it is."""

    def on_step(history: History) -> None:
        steps, running = len(history.steps), len(history.steps[-1].spans)
        text = f"serving: step {steps:,}, {_counted(running, 'request')}; tokens"
        progress.show(text, done=scheduler.tokens_done)

    return on_step


def _latency(report: dict[str, Any]) -> Sheet:
    def row(name: str, key: str) -> list[str]:
        return [name, *_times(report[key])]

    return Sheet(
        title=headline(report),
        columns=("how long it took", "median", "99th percentile"),
        numbers=2,
        sections=[
            [
                row("time to the first token, waiting included", "ttft_us"),
                row("time between two tokens of a request", "itl_us"),
            ],
            [
                row("a step's attention, all layers", "run_us"),
                row("a step's new keys and values, all layers", "append_us"),
                row("a step's planning", "plan_us"),
            ],
        ],
        note="Attention alone: a whole model has more layers, and also computes projections and feed-forward networks.",
    )


def _use(report: dict[str, Any]) -> Sheet:
    pool, verified, planned = report["pool"], report["verified"], f"planned {_number(report['planned_balance'])}"
    if report["balance"] is None and report["config"]["device"] != "cpu":
        planned = "these kernels mark no timelines; RADDLE_BACKEND=mma's do"
    without = ", without cascades" if report["config"]["cascades"] else ""
    speed = [
        ["generated tokens", _number(report["tokens_per_s"]), "per second"],
        ["keys and values read, steps that only decode", _number(report["decode_gbps"]), "GB/s"],
        ["  this machine reads memory at", _number(report["read_gbps"]), "GB/s, measured in this run"],
        ["  so attention reaches", _number(report["decode_share"], 100), "% of that"],
        ["computing, steps that only prefill", _number(report["prefill_gflops"]), "GFLOP/s"],
        ["busiest worker, times the average", _number(report["balance"]), planned],
    ]
    batch = [
        ["requests in a step, on average", _number(report["mean_batch"]), ""],
        *_of_trees(report),
        ["KV pool in use, on average", _number(pool["mean"], 100), f"% of {pool['pages']:,} pages"],
        ["  at most", _number(pool["peak"], 100), "%"],
        *(_of_prefixes(report) if report["config"]["prefix_cache"] else []),
        *(_of_cascades(report) if report["config"]["cascades"] else []),
    ]
    state = "FAILED" if verified["failed"] else "passed" if verified["checked"] else "off"
    checked = [
        [f"verification {state}: outputs checked", f"{verified['checked']:,}", f"{verified['failed']:,} wrong"],
        ["  largest error", _number(verified["worst"], 100), "% of what rounding allows"],
    ]
    kinds = ", ".join(f"{name} {n}" for name, n in verified["strata"].items() if n)
    return Sheet(
        title="",
        columns=("how well the machine was used", "value", ""),
        numbers=1,
        sections=[speed, batch, checked],
        note=f"GB/s and GFLOP/s count what the masks keep{without}."
        + (f" Outputs checked against fp64, by kind: {kinds}." if kinds else ""),
    )


def _of_prefixes(report: dict[str, Any]) -> list[list[str]]:
    found = report["prefixes"]
    shared = found["shared_pages"]
    return [
        ["  cached without a request, on average", _number(report["pool"]["idle"], 100), "%"],
        ["prompt tokens found in the prefix cache", _number(found["hit_rate"], 100), "%"],
        ["  possible with an endless pool", _number(found["allowed_hit_rate"], 100), "%"],
        ["  tokens not computed again", f"{found['tokens_saved']:,}", ""],
        ["  tokens evicted", f"{found['evicted_tokens']:,}", ""],
        ["pages that several requests read", _number(shared["mean"]), f"per step, at most {shared['max']:,}"],
    ]


def _of_trees(report: dict[str, Any]) -> list[list[str]]:
    trees = report["config"]["speculate"]
    return [["tokens accepted, on average", _number(report["accepted"]), f"per tree of {trees}"]] if trees else []


def _of_cascades(report: dict[str, Any]) -> list[list[str]]:
    found = report["cascades"]
    steps = f"of {report['steps']:,}" + (f", at most {found['levels']} levels" if found["steps"] else "")
    rows = [["steps with a cascade", f"{found['steps']:,}", steps]]
    for name, key in (("such steps", "cascade_steps"), ("all steps", "all_steps")):
        if key in found:
            chosen, single = (_times(found[key][us])[0] for us in ("run_us", "single_us"))
            rows.append([f"  attention of {name}, median", chosen, f"without cascades {single}"])
            rows.append(["    cascades saved", _number(found[key]["saved"], 100), "% of its time"])
    return rows


def _schedules(report: dict[str, Any]) -> Sheet:
    """Schedules side by side, as in the FlashInfer paper's tables of attention time (section 4)."""
    first = next(iter(report["schedules"]))
    columns = (("decode", "decode_us"), ("prefill", "prefill_us"), ("all steps", "run_us"), ("planning", "plan_us"))
    rows = []
    for schedule, found in report["schedules"].items():
        cells = [_against(found[key], report["schedules"][first][key]) for _, key in columns]
        rows.append([schedule, *cells, _number(found["balance"]), _number(found["planned_balance"])])
    return Sheet(
        title="Attention of a step, all layers, under each schedule",
        columns=("schedule", *(name for name, _ in columns), "busiest / average", "as planned"),
        numbers=6,
        sections=[rows],
        note=f"Medians over the same steps, in which the schedules took turns. In brackets: how many times as long as "
        f"{first}. Busiest / average: time of the busiest worker over that of the average one.",
    )


def _against(value: dict[str, float] | None, first: dict[str, float] | None) -> str:
    if value is None or first is None:
        return "–"
    ratio = "" if value is first or not first["p50"] else f" ({value['p50'] / first['p50']:.2f}×)"
    return f"{_times(value)[0]}{ratio}"


def _times(us: dict[str, float] | None) -> tuple[str, str]:
    """Median and 99th percentile."""
    return ("–", "–") if us is None else (_time(us["p50"]), _time(us["p99"]))


def _time(us: float) -> str:
    scale, unit = next(((scale, unit) for scale, unit in _TIMES if us >= scale), _TIMES[-1])
    return f"{_number(us / scale)} {unit}"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def _number(value: float | None, scale: float = 1.0) -> str:
    if value is None:
        return "–"
    value *= scale
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")
