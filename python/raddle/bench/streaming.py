"""A rolling cache: RoPE fused into attention over turning, writing and attending; the layout over a page table."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

import raddle
from raddle._progress import Progress
from raddle.bench import timing
from raddle.bench.results import Measured
from raddle.bench.workloads import HKV, HQ, D

PAGE, SINKS = 16, 4
#: (tokens kept, requests)
CASES = ((1024, 1), (2048, 1), (2048, 8))
#: Tokens of a text, as multiples of those kept, behind which a step is timed.
EARLY, LATE = 2, 512


class Bed:
    """A layer of a decoding step after ``seen`` times the tokens that are kept; positions change with the step."""

    def __init__(self, device: str, dtype: str, kept: int, requests: int, seen: int = EARLY) -> None:
        self.device = device
        pool = raddle.PagePool(requests * kept // PAGE, PAGE)
        self.cache = cache = raddle.RollingCache(pool)
        self.texts = texts = [cache.add(SINKS, kept - SINKS) for _ in range(requests)]
        for _ in range(4 * seen):
            cache.append(texts, kept // 4)
        layout = cache.append(texts).layout
        pages = np.stack([cache.pages(text) for text in texts])

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device, dtype=getattr(torch, dtype))

        self.k, self.v = (draw(pool.num_pages, PAGE, HKV, D) for _ in range(2))
        self.q = draw(requests, HQ, D)
        self.out, self.turned_k, self.turned_q = (torch.empty_like(x) for x in (self.q, self.k, self.q))
        self.rope = raddle.Rope(D)
        self.fused, self.plain = (
            raddle.Attention(raddle.AttentionSpec(HQ, HKV, D, dtype=dtype, variant=variant), device=device)
            for variant in ([self.rope, raddle.Causal()], [raddle.Causal()])
        )
        qo_indptr, kv_len = np.arange(requests + 1), np.full(requests, kept)
        self.layout, self.table = layout, raddle.PagedKV(qo_indptr, None, pages, kv_len, PAGE)

        # All keys as new rows of their own slots, at the positions of this step. V is not moved: the smallest head
        # stands in for it.
        slot, num_tokens = np.arange(kept), cache.num_tokens(texts[0])
        positions = np.where(slot < SINKS, slot, SINKS + (slot - num_tokens) % (kept - SINKS))
        self.slots = raddle.PagedKV(kept * qo_indptr, None, pages, kv_len, PAGE, qo_pos=np.tile(positions, requests))
        self.rows = self.k[torch.as_tensor(pages.ravel(), dtype=torch.int64, device=device)].view(-1, HKV, D)
        self.small_v, self.small_rows = draw(pool.num_pages, PAGE, HKV, 8), draw(requests * kept, HKV, 8)
        # Q is turned once, before.
        last = raddle.PagedKV(qo_indptr, None, np.arange(requests)[:, None], kv_len // kept, 1, qo_pos=kv_len - 1)
        turned_q = self.turned_q.view(requests, 1, HQ, D), draw(requests, 1, HQ, 8)
        raddle.append_kv(last, turned_q, self.q, draw(requests, HQ, 8), rope=self.rope)

    def attend(self, plan: raddle.Plan) -> torch.Tensor:
        return self.fused.run(plan, self.q, (self.k, self.v), out=self.out)

    def turn_and_attend(self, plan: raddle.Plan) -> torch.Tensor:
        """What an engine without fused RoPE does in every layer and step: keys, at their new positions, into a buffer."""
        raddle.append_kv(self.slots, (self.turned_k, self.small_v), self.rows, self.small_rows, rope=self.rope)
        return self.plain.run(plan, self.turned_q, (self.turned_k, self.v), out=self.out)

    def step(self) -> torch.Tensor:
        """A token of each text, its plan, and its attention."""
        return self.attend(self.fused.plan(self.cache.append(self.texts).layout))

    def runs(self) -> dict[str, Callable[[], torch.Tensor]]:
        fused, turned, table = self.fused.plan(self.layout), self.plain.plan(self.layout), self.fused.plan(self.table)
        return {
            "fused": lambda: self.attend(fused),
            "turned": lambda: self.turn_and_attend(turned),
            "page table": lambda: self.attend(table),
        }

    def times(self, rounds: int, progress: Progress) -> dict[str, list[float]]:
        """Microseconds of a run of each, side by side."""
        return timing.on_device(self.device, self.runs(), rounds, progress.advance)


def rolling(device: str, dtype: str, rounds: int, progress: Progress) -> list[Measured]:
    """What fused RoPE gains where positions change with every step (bar 1.3), what the layout costs over whole pages,
    and a step late in a text over one early in it (bar 1.05)."""
    found = []
    for kept, requests in CASES:
        name = f"streaming, {kept} kept x {requests} {dtype}"
        progress.say(name, total=5 * (rounds + 1))
        bed = Bed(device, dtype, kept, requests)
        _check_equal(name, bed.runs())
        times = bed.times(rounds, progress)
        us = timing.median(times["fused"])
        gain = timing.speedup(times["fused"], times["turned"])
        found.append(Measured(f"{name}: fused RoPE, gain on turning and writing K", us, gain, "x", 1.3, at_least=True))
        over = 1 / timing.speedup(times["fused"], times["page table"])
        found.append(Measured(f"{name}: over a page table of as many keys", us, over, "x"))
        late = Bed(device, dtype, kept, requests, LATE)
        times = timing.on_device(device, {"early": bed.step, "late": late.step}, rounds, progress.advance)
        us, over = timing.median(times["late"]), 1 / timing.speedup(times["late"], times["early"])
        found.append(Measured(f"{name}: a step after {LATE * kept} tokens, over {EARLY * kept}", us, over, "x", 1.05))
    return found


def _check_equal(name: str, runs: dict[str, Callable[[], torch.Tensor]]) -> None:
    fused, turned = (runs[each]().float().clone() for each in ("fused", "turned"))
    off = float((fused - turned).abs().max())
    if off > 0.02:
        raise RuntimeError(f"{name}: keys turned inside of attention and before it differ by {off}")
