"""What a replay's history amounts to, as plain numbers: the JSON report."""

from __future__ import annotations

from typing import Any, Iterable, Sequence

import numpy as np

from .engine import SINGLE, RunCost
from .models import LayerKind, Model
from .prefix_cache import allowed_tokens
from .scheduler import Scheduler
from .span import Span
from .serving import History, Step
from .traces import Request


def summary(
    history: History, scheduler: Scheduler, model: Model, num_layers: int, read_gbps: float | None
) -> dict[str, Any]:
    """The report without configuration and verification. A value that had nothing to measure is None."""
    requests = scheduler.requests
    steps = history.steps
    decode = [s for s in steps if all(_is_decode(span, requests) for span in s.spans)]
    prefill = [s for s in steps if not any(_is_decode(span, requests) for span in s.spans)]
    chunks = _chunks(steps, requests)
    tokens = sum(len(r.token_times) for r in history.finished)
    kinds = [model.kind(layer) for layer in range(num_layers)]
    # A cascade reads shared keys once: counted for each request, they would come faster than the memory gives them.
    alone = [s for s in decode if s.accepted or s.cost.clocked.levels == 1]
    decode_bytes = model.kv_bytes(sum(_keys(s.spans, kind) for s in alone for kind in kinds))
    decode_gbps = _ratio(decode_bytes * 1e-3, sum(s.cost.clocked.run_us for s in alone))
    prefill_flops = model.flops(sum(_pairs(s.spans, kind) for s in prefill for kind in kinds))
    return {
        "requests": len(requests),
        "samples": scheduler.samples,
        "tokens": tokens,
        "prompt_tokens": sum(r.input_tokens for r in requests),
        "seconds": history.seconds,
        "busy": _ratio(sum(s.cost.seconds for s in steps), history.seconds),
        "tokens_per_s": _ratio(tokens, history.seconds),
        "itl_us": _percentiles(np.diff(r.token_times) * 1e6 for r in history.finished),
        "ttft_us": _percentiles(
            [(r.token_times[0] - r.request.arrival) * 1e6] for r in history.finished
        ),
        "decode_gbps": decode_gbps,
        "read_gbps": read_gbps,
        "decode_share": _ratio(decode_gbps, read_gbps or 0.0) if decode_gbps is not None else None,
        "prefill_gflops": _ratio(prefill_flops * 1e-3, sum(s.cost.clocked.run_us for s in prefill)),
        "plan_us": _percentiles([s.cost.clocked.plan_us] for s in steps),
        "append_us": _percentiles([s.cost.append_us] for s in steps),
        "run_us": _percentiles([s.cost.clocked.run_us] for s in steps),
        **_balance(s.cost.clocked for s in steps),
        "schedules": {
            schedule: _of_schedule(schedule, steps, decode, prefill)
            for schedule in (steps[0].cost.ways if steps else ())
            if schedule != SINGLE
        },
        "steps": len(steps),
        "decode_steps": len(decode),
        "prefill_steps": len(prefill),
        "mean_batch": _ratio(sum(len(s.spans) for s in steps), len(steps)),
        "queued_requests": len(scheduler.queued),
        "chunked_prefills": sum(n > 1 for n in chunks.values()),
        "pool": {
            "pages": scheduler.pool.num_pages,
            "page_size": scheduler.pool.page_size,
            "peak": max((s.pages_in_use for s in steps), default=0) / scheduler.pool.num_pages,
            "mean": _ratio(
                sum(s.pages_in_use for s in steps), len(steps) * scheduler.pool.num_pages
            ),
            "idle": _ratio(sum(s.idle_pages for s in steps), len(steps) * scheduler.pool.num_pages),
        },
        "prefixes": _prefixes(history, scheduler),
        "cascades": _cascades(steps),
        "accepted": _ratio(sum(sum(s.accepted) for s in steps), sum(len(s.accepted) for s in steps)),
    }


def _prefixes(history: History, scheduler: Scheduler) -> dict[str, Any]:
    """What requests took over from others, and what they could have in a pool without end."""
    first = [r for r in history.finished if r.index < len(scheduler.requests)]  # of each request's samples
    prompt_tokens = sum(r.request.input_tokens for r in first)
    saved = sum(r.reused for r in first)
    allowed = allowed_tokens(scheduler.requests, scheduler.pool.page_size)
    shared = [s.shared_pages for s in history.steps]
    return {
        "hit_rate": _ratio(saved, prompt_tokens),
        "allowed_hit_rate": _ratio(allowed, sum(r.input_tokens for r in scheduler.requests)),
        "tokens_saved": saved,
        "evicted_tokens": scheduler.prefixes.evicted_tokens,
        "shared_pages": {"max": max(shared, default=0), "mean": _ratio(sum(shared), len(shared))},
    }


def _cascades(steps: Sequence[Step]) -> dict[str, Any]:
    """Steps that were computed as cascades, and where the single format took turns what attention took in both."""
    # A tree's levels are its text and its nodes.
    chosen = [s for s in steps if s.cost.clocked.levels > 1 and not s.accepted]
    found: dict[str, Any] = {"steps": len(chosen), "levels": max((s.cost.clocked.levels for s in chosen), default=1)}
    if not steps or SINGLE not in steps[0].cost.ways:
        return found
    for of, name in ((chosen, "cascade_steps"), (steps, "all_steps")):
        cascade = [s.cost.clocked.run_us for s in of]
        single = [s.cost.ways[SINGLE].run_us for s in of]
        found[name] = {
            "run_us": _percentiles([us] for us in cascade),
            "single_us": _percentiles([us] for us in single),
            "saved": 1.0 - sum(cascade) / sum(single) if of else None,
        }
    return found


def _is_decode(span: Span, requests: Sequence[Request]) -> bool:
    return span.begin >= requests[span.request % len(requests)].input_tokens


def _chunks(steps: Sequence[Step], requests: Sequence[Request]) -> dict[int, int]:
    """Steps that each request's prefill took."""
    chunks: dict[int, int] = {}
    for step in steps:
        for span in step.spans:
            if not _is_decode(span, requests):
                chunks[span.request] = chunks.get(span.request, 0) + 1
    return chunks


def _keys(spans: Iterable[Span], kind: LayerKind) -> int:
    """Keys that a run of decodes reads."""
    lengths = (span.begin + span.length for span in spans)
    return sum(lengths) if kind.window is None else sum(min(n, kind.window) for n in lengths)


def _pairs(spans: Iterable[Span], kind: LayerKind) -> int:
    """Pairs of a row and a key that it sees."""

    def up_to(row: int) -> int:  # rows 0 … row - 1 of a request
        full = row if kind.window is None else min(row, kind.window)
        return full * (full + 1) // 2 + (row - full) * full

    return sum(up_to(span.begin + span.length) - up_to(span.begin) for span in spans)


def _of_schedule(
    name: str, steps: Sequence[Step], decode: Sequence[Step], prefill: Sequence[Step]
) -> dict[str, Any]:
    """Attention of a step, all layers together, and planning, under one of the schedules that took turns."""

    def us(of: Sequence[Step]) -> dict[str, float] | None:
        return _percentiles([s.cost.ways[name].run_us] for s in of)

    return {
        "decode_us": us(decode),
        "prefill_us": us(prefill),
        "run_us": us(steps),
        "plan_us": _percentiles([s.cost.ways[name].plan_us] for s in steps),
        **_balance(s.cost.ways[name] for s in steps),
    }


def _balance(costs: Iterable[RunCost]) -> dict[str, float | None]:
    """Heaviest worker over mean, measured and planned, each run weighted with its busy time."""
    runs = [(*busy, plan) for cost in costs for busy, plan in zip(cost.busy_us, cost.planned)]
    work = sum(mean for _, mean, _ in runs)
    return {
        "balance": _ratio(sum(heaviest for heaviest, _, _ in runs), work),
        "planned_balance": _ratio(sum(plan * mean for _, mean, plan in runs), work),
    }


def _ratio(amount: float, of: float) -> float | None:
    return amount / of if of else None


def _percentiles(groups: Iterable[Sequence[float]]) -> dict[str, float] | None:
    values = np.concatenate([np.zeros(0), *(np.asarray(g, float) for g in groups)])
    if values.size == 0:
        return None
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": float(p50), "p99": float(p99), "mean": float(values.mean())}
