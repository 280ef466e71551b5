"""What `plan` pays for looking whether arrays that a Python mask captured are long enough for the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import raddle
from raddle.bench import plan_cost, timing
from raddle.bench.results import Measured
from raddle.flex.trace import trace_mask

#: The longest request of a batch.
_LONGEST = 2048


def array_check_cost(requests: int, bars_us: tuple[float, float], rounds: int) -> list[Measured]:
    """What the check adds to `plan` of a decode batch: for an array [requests], and for one that packs all documents.

    The first is decided at once for all requests. Of the second each request has a part of its own, so each is looked at.
    The mask is planned as it was traced, and as the same C++ without the expression that is checked: one kernel.
    """
    lengths = np.full(requests, 100, np.int32)
    begin = np.arange(requests, dtype=np.int32) * _LONGEST
    packed = np.zeros(begin[-1] + _LONGEST // 2, np.int32)

    def prefix(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx < lengths[b]) | (kv_idx <= q_idx)

    def same_document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return packed[begin[b] + q_idx] == packed[begin[b] + kv_idx]

    masks = {"an array with an entry a request": prefix, "packed documents": same_document}
    return [
        _measured(f"plan, {requests} requests, check of {name}", mask, requests, bar_us, rounds)
        for (name, mask), bar_us in zip(masks.items(), bars_us)
    ]


def _measured(name: str, mask: Callable[..., Any], requests: int, bar_us: float, rounds: int) -> Measured:
    traced = trace_mask(mask)
    unchecked = raddle.Variant(traced.name, traced.source, traced.params)(**traced.values)
    calls = {"checked": _planning(traced.variant(), requests), "unchecked": _planning(unchecked, requests)}
    times: dict[str, list[float]] = {which: [] for which in calls}
    for _ in range(rounds):
        for which, call in calls.items():
            times[which] += timing.repeated(call, 1)
    extra = timing.median([a - b for a, b in zip(times["checked"], times["unchecked"])])
    return Measured(name, timing.median(times["checked"]), extra, "us", bar_us)


def _planning(variant: raddle.Variant, requests: int) -> Callable[[], None]:
    """Plans batches of `plan_cost`, whose last request here is as long as the end of the packed documents."""
    spec = raddle.AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128, variant=[variant])
    batches = plan_cost.batches(requests)
    for _, _, _, kv_len in batches:
        kv_len[-1] = _LONGEST // 2
    return plan_cost.planning(raddle.Attention(spec), batches, num_workers=plan_cost.WORKERS)
