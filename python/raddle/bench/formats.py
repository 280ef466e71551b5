"""Composable formats: levels that were chosen beside the single format and levels made by hand, token trees, and
batch invariance."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import raddle
from raddle._progress import Progress
from raddle.bench import timing
from raddle.bench.results import Measured
from raddle.bench.workloads import HKV, HQ, D

PAGE = 16
#: (name, shared tokens, own tokens, requests), one row each.
SHARED = (
    *((f"decode, {n} share 8192 + 64", 8192, 64, n) for n in (16, 64)),
    *((f"decode, {n} share 1024 + 128", 1024, 128, n) for n in (16, 64)),
    *((f"{n} parallel samples, 2048 + 64", 2048, 64, n) for n in (1, 4, 16, 64)),
)
#: What TARGETS of a GPU speak of.
SHARED_GPU = tuple(
    (f"decode, {n} share {shared} + 256", shared, 256, n) for shared, n in ((8192, 16), (32768, 16), (8192, 64))
)
#: (nodes, tokens before them, requests)
TREES = ((64, 8192, 1), (16, 8192, 1), (64, 8192, 8))


class Bed:
    """Random pools and queries for requests over shared and own tokens, on one device."""

    def __init__(self, device: str, dtype: str, shared: int, own: int, requests: int, rows: int = 1) -> None:
        self.device = device
        prefix, alone = shared // PAGE, -(-own // PAGE)
        rng = np.random.default_rng(0)
        pages = rng.permutation(prefix + requests * alone).astype(np.int32)
        self.prefix, self.own = pages[:prefix], pages[prefix:].reshape(requests, alone)
        self.shared_tokens, self.own_tokens = shared, own
        self.requests, self.rows = requests, rows
        kind = getattr(torch, dtype)
        self.kv = tuple(torch.randn(len(pages), PAGE, HKV, D, device=device, dtype=kind) for _ in range(2))
        self.q = torch.randn(requests * rows, HQ, D, device=device, dtype=kind)
        self.out = torch.empty_like(self.q)
        spec = raddle.AttentionSpec(HQ, HKV, D, dtype=dtype, variant=[raddle.Causal()])
        self.attention = raddle.Attention(spec, device=device)

    @property
    def qo_indptr(self) -> np.ndarray:
        return np.arange(self.requests + 1, dtype=np.int32) * self.rows

    @property
    def table(self) -> tuple[Any, ...]:
        """The whole page table, as arguments of `raddle.PagedKV`."""
        lists = np.concatenate([np.tile(self.prefix, (self.requests, 1)), self.own], axis=1)
        kv_len = np.full(self.requests, self.shared_tokens + self.own_tokens, np.int32)
        return self.qo_indptr, None, lists, kv_len, PAGE

    def by_hand(self) -> raddle.Cascade:
        prefix = raddle.PagedKV(
            self.qo_indptr[[0, -1]],
            None,
            self.prefix[None],
            [self.shared_tokens],
            PAGE,
            qo_rows=np.arange(self.requests * self.rows, dtype=np.int32),
        )
        begin = np.full(self.requests, self.shared_tokens, np.int32)
        kv_len = np.full(self.requests, self.own_tokens, np.int32)
        return raddle.Cascade([prefix, raddle.PagedKV(self.qo_indptr, None, self.own, kv_len, PAGE, kv_begin=begin)])

    def results(self, layouts: dict[str, Any]) -> dict[str, torch.Tensor]:
        plans = {name: self.attention.plan(layout) for name, layout in layouts.items()}
        return {name: self.attention.run(plan, self.q, self.kv).float() for name, plan in plans.items()}

    def run(self, plan: Any) -> None:
        self.attention.run(plan, self.q, self.kv, out=self.out)

    def times(self, layouts: dict[str, Any], rounds: int, progress: Progress) -> dict[str, list[float]]:
        """Microseconds of a run of each layout, side by side."""
        plans = {name: self.attention.plan(layout) for name, layout in layouts.items()}
        calls = {name: lambda plan=plan: self.run(plan) for name, plan in plans.items()}
        return timing.on_device(self.device, calls, rounds, progress.advance)


def shared(device: str, dtype: str, rounds: int, progress: Progress) -> list[Measured]:
    """Chosen levels over the better of both others (bar 1.03), and what they gain on the single format."""
    found = []
    for name, prefix, own, requests in SHARED if device == "cpu" else SHARED_GPU + SHARED:
        progress.say(f"{name} {dtype}", total=3 * (rounds + 1))
        bed = Bed(device, dtype, prefix, own, requests)
        chosen = raddle.Cascade.from_page_tables(bed.attention, *bed.table)
        layouts = {"single": raddle.PagedKV(*bed.table), "by hand": bed.by_hand(), "chosen": chosen}
        _check_equal(name, bed.results(layouts))
        # Equal plans run alike: only what differs is timed.
        planned = {each: bed.attention.plan(layout).explain() for each, layout in layouts.items()}
        alike = next((each for each in ("single", "by hand") if planned[each] == planned["chosen"]), None)
        times = bed.times({k: v for k, v in layouts.items() if k != "chosen" or not alike}, rounds, progress)
        taken = times[alike or "chosen"]
        better = min(("single", "by hand"), key=lambda each: timing.median(times[each]))
        us = timing.median(taken)
        levels = f"{chosen.num_levels} levels" if chosen.num_levels > 1 else "single"
        over = 1 / timing.speedup(taken, times[better])
        found.append(Measured(f"{name} {dtype}: {levels}, over {better}", us, over, "x", 1.03))
        gain = timing.speedup(times["by hand"], times["single"])
        found.append(Measured(f"{name} {dtype}: levels by hand, gain on single", us, gain, "x"))
    return found


def trees(device: str, dtype: str, rounds: int, progress: Progress) -> list[Measured]:
    """Trees of drafts over the same rows under plain causal attention (bar 1.2)."""
    found = []
    for nodes, context, requests in TREES:
        name = f"tree of {nodes} on {context} x {requests} {dtype}"
        progress.say(name, total=2 * (rounds + 1))
        bed = Bed(device, dtype, 0, context + nodes, requests, nodes)
        parents = np.tile([(n - 1) // 4 if n else -1 for n in range(nodes)], requests)
        layouts = {"tree": raddle.TokenTree(*bed.table, parents=parents), "causal": raddle.PagedKV(*bed.table)}
        times = bed.times(layouts, rounds, progress)
        over = 1 / timing.speedup(times["tree"], times["causal"])
        found.append(Measured(f"{name}, over plain causal", timing.median(times["tree"]), over, "x", 1.2))
    return found


def invariance(device: str, dtype: str, rounds: int, progress: Progress, keys: int = 8192) -> list[Measured]:
    """One decode whose bits depend on nothing but itself (``batch_invariant=True``) over the default (bar 1.25)."""
    name = f"batch-invariant decode over {keys} keys {dtype}"
    progress.say(name, total=2 * (rounds + 1))
    bed = Bed(device, dtype, 0, keys, 1)
    spec = raddle.AttentionSpec(HQ, HKV, D, dtype=dtype, variant=[raddle.Causal()], batch_invariant=True)
    attentions = {"default": bed.attention, "invariant": raddle.Attention(spec, device=device)}
    calls = {}
    for which, attention in attentions.items():
        plan = attention.plan(raddle.PagedKV(*bed.table))
        calls[which] = lambda attention=attention, plan=plan: attention.run(plan, bed.q, bed.kv, out=bed.out)
    times = timing.on_device(device, calls, rounds, progress.advance)
    over = 1 / timing.speedup(times["invariant"], times["default"])
    return [Measured(f"{name}, over default", timing.median(times["invariant"]), over, "x", 1.25)]


def _check_equal(name: str, results: dict[str, torch.Tensor]) -> None:
    exact = results["single"]
    for other, result in results.items():
        off = float((result - exact).abs().max())
        if off > 0.02:
            raise RuntimeError(f"{name}: {other} and the single format differ by {off}")
