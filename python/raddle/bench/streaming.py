"""A rolling cache: RoPE fused into attention over turning, writing and attending; the layout over a page table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import raddle
from raddle._progress import Progress
from raddle.bench import timing
from raddle.bench.bars import Measured
from raddle.bench.workloads import HKV, HQ, D

PAGE, SINKS = 16, 4
#: (tokens kept, requests)
CASES = ((1024, 1), (2048, 1), (2048, 8))
#: Runs of a GPU that are timed as one.
_REPEATS = 20


def rolling(device: str, dtype: str, rounds: int, progress: Progress) -> list[Measured]:
    """A layer of a decoding step in the middle of a text, whose positions change with the step."""
    found = []
    for kept, requests in CASES:
        name = f"streaming, {kept} kept x {requests} {dtype}"
        progress.say(name, total=3 * (rounds + 1))
        times = timing.interleaved(_calls(device, dtype, kept, requests), rounds, tick=progress.advance)
        each = 1 if device == "cpu" else _REPEATS
        fused = timing.median(times["fused"]) / each
        gain = timing.speedup(times["fused"], times["turned"])
        found.append(Measured(f"{name}: fused RoPE, gain on turning and writing K", fused, gain, "x"))
        over = 1 / timing.speedup(times["fused"], times["page table"])
        found.append(Measured(f"{name}: over a page table of as many keys", fused, over, "x"))
    return found


def _calls(device: str, dtype: str, kept: int, requests: int) -> dict[str, Callable[[int], None]]:
    pool = raddle.PagePool(requests * kept // PAGE, PAGE)
    cache = raddle.RollingCache(pool)
    texts = [cache.add(SINKS, kept - SINKS) for _ in range(requests)]
    for _ in range(10):
        layout = cache.append(texts, kept // 4).layout
    layout = cache.append(texts).layout

    kind = getattr(torch, dtype)
    k, v = (torch.randn(pool.num_pages, PAGE, HKV, D, device=device, dtype=kind) for _ in range(2))
    q = torch.randn(requests, HQ, D, device=device, dtype=kind)
    out = torch.empty_like(q)
    rope, causal = raddle.Rope(D), raddle.Causal()
    fused, plain = (
        raddle.Attention(raddle.AttentionSpec(HQ, HKV, D, dtype=dtype, variant=variant), device=device)
        for variant in ([rope, causal], [causal])
    )
    lists = np.arange(pool.num_pages, dtype=np.int32)
    table = raddle.PagedKV(np.arange(requests + 1), None, lists.reshape(requests, -1), [kept] * requests, PAGE)

    # What an engine without fused RoPE does in every layer and step: all keys, at their new positions, into a buffer.
    # Their order costs the same whatever it is; V is not moved, and stands in with the smallest head.
    positions = np.tile(np.arange(kept, dtype=np.int32), requests)
    slots = raddle.PagedKV([0, requests * kept], None, lists[None], [requests * kept], PAGE, qo_pos=positions)
    turned_k = torch.empty_like(k)
    small_v, new_v = (torch.zeros(*k.shape[:3], 8, device=device, dtype=kind) for _ in range(2))

    def turned(plan: Any) -> None:
        raddle.append_kv(slots, (turned_k, small_v), k.view(-1, HKV, D), new_v.view(-1, HKV, 8), rope=rope)
        plain.run(plan, q, (turned_k, v), out=out)

    def repeated(run: Callable[[Any], object], plan: Any) -> Callable[[int], None]:
        def call(_: int) -> None:
            for _ in range(1 if device == "cpu" else _REPEATS):
                run(plan)
            if device != "cpu":
                torch.cuda.synchronize()

        return call

    def attend(plan: Any) -> None:
        fused.run(plan, q, (k, v), out=out)

    return {
        "fused": repeated(attend, fused.plan(layout)),
        "turned": repeated(turned, plain.plan(layout)),
        "page table": repeated(attend, fused.plan(table)),
    }
