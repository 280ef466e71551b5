"""Prefill with masks and scores written in Python: Raddle's, traced and as shipped, beside PyTorch's FlexAttention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import torch

import raddle
from raddle import flex
from raddle._progress import Progress
from raddle.bench import timing
from raddle.bench.batch import DTYPES, TOLERANCE
from raddle.bench.engines import WrongOutput, error
from raddle.bench.results import Measured
from raddle.bench.workloads import DOCUMENTS, HKV, HQ, D, document_offsets

LENGTH = 4096
#: Least accepted rate relative to PyTorch's compiled FlexAttention; of bf16 relative to own fp32; time of
#: a traced function relative to the shipped one; time a kept tile relative to causal's.
BAR_TORCH, BAR_BF16, BAR_TRACED, BAR_TILES = 2.0, 0.9, 1.05, 1.25


@dataclass
class Case:
    """A mask and a score, as Python functions and as shipped variants (None where there is no such)."""

    name: str
    mask: Callable[..., Any]
    score: Optional[Callable[..., Any]] = None
    shipped: Optional[list[Any]] = None

    def kept(self, length: int) -> int:
        """Kept pairs of one head."""
        kv = np.arange(length)[None]
        spans = (np.arange(at, min(at + 1024, length))[:, None] for at in range(0, length, 1024))
        return sum(int(np.count_nonzero(np.broadcast_to(self.mask(0, 0, q, kv), (q.shape[0], length)))) for q in spans)


def cases(length: int = LENGTH) -> list[Case]:
    causal = flex.masks.causal()
    return [
        Case("causal", causal, shipped=[raddle.Causal()]),
        Case("window 1024", flex.masks.sliding_window(1023, 0), shipped=[raddle.SlidingWindow(1023, 0)]),
        Case("soft cap", causal, flex.mods.softcap(30.0), [raddle.SoftCap(30.0), raddle.Causal()]),
        Case(f"{DOCUMENTS} documents", flex.and_masks(flex.masks.document(document_offsets(length)), causal)),
    ]


class Problem:
    """One sequence [1, H, S, D] in several copies, so that no call finds its keys in a cache."""

    def __init__(self, dtype: str, length: int, copies: int = 8):
        torch.manual_seed(0)
        kind, self.length = DTYPES[dtype], length
        self.q = torch.randn(1, HQ, length, D, dtype=kind)
        self.kv = [tuple(torch.randn(1, HKV, length, D, dtype=kind) for _ in "kv") for _ in range(copies)]
        self.rows = self.q[0].transpose(0, 1).contiguous()
        self.ragged = [tuple(x[0].transpose(0, 1).contiguous() for x in pair) for pair in self.kv]
        self.out = torch.empty_like(self.rows)
        self.dtype = dtype

    def raddle_call(self, variant: list[Any]) -> Callable[[int], torch.Tensor]:
        spec = raddle.AttentionSpec(HQ, HKV, D, dtype=str(self.q.dtype), variant=variant)
        attention = raddle.Attention(spec)
        plan = attention.plan(raddle.RaggedKV([0, self.length], [0, self.length]))
        return lambda step: attention.run(plan, self.rows, self.ragged[step % len(self.ragged)], out=self.out)

    def torch_call(self, case: Case) -> Callable[[int], torch.Tensor]:
        from raddle.bench.peers import flex as peer

        score = None if case.score is None else peer.softcap(30.0)
        return peer.compiled(self.q, self.kv, _torch_mask(case, self.length, peer), score)


def _torch_mask(case: Case, length: int, peer: Any) -> Callable[..., Any]:
    """The same masks as PyTorch's users write them."""
    if "documents" in case.name:
        lengths = np.diff(document_offsets(length))
        document = torch.from_numpy(np.repeat(np.arange(DOCUMENTS), lengths))
        return lambda b, h, q, kv: (document[q] == document[kv]) & (q >= kv)
    return peer.window(1023) if "window" in case.name else peer.causal


def measure(against: Sequence[str], rounds: int, dtypes: Sequence[str], progress: Progress) -> list[Measured]:
    """Rates of every case; ratios are medians of the rounds' own."""
    found, rates = [], {}
    for dtype in dtypes:
        for case in cases(LENGTH):
            progress.say(f"{dtype} {case.name}: compiling")
            problem = Problem(dtype, LENGTH)
            traced = [case.mask] if case.score is None else [case.score, case.mask]
            calls = {"raddle traced": problem.raddle_call(traced)}
            if case.shipped:
                calls["raddle shipped"] = problem.raddle_call(case.shipped)
            if "torch" in against:
                calls["torch flex"] = problem.torch_call(case)
            _verify(calls, problem, f"{dtype} {case.name}")
            progress.say(f"{dtype} {case.name}: timing", total=(rounds + 1) * len(calls))
            times = timing.HostClock().rounds(calls, rounds, progress.advance)
            work = 4.0 * HQ * D * case.kept(LENGTH)
            for engine, each in times.items():
                us = timing.median(each)
                found.append(Measured(f"{dtype} {case.name}, {engine}", us, work / us / 1e3, "GFLOP/s"))
            rates[dtype, case.name] = work / timing.median(times["raddle traced"])
            found += _ratios(dtype, case, times, rates)
    return found


def _ratios(dtype: str, case: Case, times: dict[str, list[float]], rates: dict[Any, float]) -> list[Measured]:
    found, name = [], f"{dtype} {case.name}"
    if "raddle shipped" in times:
        ratio = 1 / timing.speedup(times["raddle traced"], times["raddle shipped"])
        found.append(Measured(f"{name}, traced / shipped", None, ratio, "of its time", BAR_TRACED))
    if "torch flex" in times:
        ratio = timing.speedup(times["raddle traced"], times["torch flex"])
        found.append(Measured(f"{name}, traced × PyTorch", None, ratio, "of its rate", BAR_TORCH, at_least=True))
    if dtype == "bf16" and ("fp32", case.name) in rates:
        ratio = rates[dtype, case.name] / rates["fp32", case.name]
        found.append(Measured(f"{name}, × own fp32", None, ratio, "of its rate", BAR_BF16, at_least=True))
    return found


def _verify(calls: dict[str, Callable[[int], torch.Tensor]], problem: Problem, name: str) -> None:
    """All engines compute the same, or their speed means nothing."""
    first: Optional[torch.Tensor] = None
    for engine, call in calls.items():
        out = call(0).float()
        out = out[0].transpose(0, 1) if out.ndim == 4 else out
        first = out.clone() if first is None else first
        off = error(out, first)
        if not off <= 2 * TOLERANCE[problem.dtype]:
            raise WrongOutput(f"{engine} on {name} differs by {off:.1e} of the RMS from the others")


def kept_tiles(rounds: int, progress: Progress, length: int = 16384) -> list[Measured]:
    """Time of a document mask against causal's, each by the tiles that it keeps."""
    problem = Problem("fp32", length, copies=2)
    chosen = [case for case in cases(length) if case.shipped is None or case.name == "causal"]
    progress.say(f"documents at {length}", total=(rounds + 1) * len(chosen))
    calls = {case.name: problem.raddle_call([case.mask]) for case in chosen}
    times = timing.HostClock().rounds(calls, rounds, progress.advance)
    found, per_tile = [], {}
    for case in chosen:
        tiles = _tiles(case, length)
        us = timing.median(times[case.name])
        per_tile[case.name] = us / tiles
        found.append(Measured(f"fp32 {case.name} at {length}: {tiles} kept tiles a head", us, us / tiles, "µs a tile"))
    ratio = per_tile[chosen[-1].name] / per_tile["causal"]
    ratio = max(ratio, 1 / ratio)
    return [*found, Measured("time a kept tile, documents to causal", None, ratio, "of its time", BAR_TILES)]


def _tiles(case: Case, length: int, size: tuple[int, int] = (32, 128)) -> int:
    """Tiles of 32 tokens (128 fused rows) by 128 keys of which some pair is kept."""
    kv = np.arange(length)
    total = 0
    for at in range(0, length, size[0]):
        kept = np.broadcast_to(case.mask(0, 0, np.arange(at, at + size[0])[:, None], kv[None]), (size[0], length))
        total += int(np.count_nonzero(kept.any(0).reshape(-1, size[1]).any(1)))
    return total
