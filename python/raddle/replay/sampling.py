"""Which outputs of a replay are checked, and the check itself.

Outputs are drawn while the replay runs, by reservoir sampling in each layer from each kind of row that has
its own way to go wrong: rows of a prefill chunk, decode rows, rows that were split over workers and composed
again, rows at a page's edge, rows of requests whose first keys another one computed, rows that a cascade composes of
levels, and drafts that turn out wrong, which see the text, what they follow and nothing of their siblings.
"""

from __future__ import annotations

import itertools
import random
import sys
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, Sequence

import numpy as np

from . import native
from .engine import Batch, Planned
from .models import Model, reference

STRATA = ("chunk", "decode", "split", "page edge", "reused prefix", "cascade", "wrong draft")
# From one layer's output and stratum; a run of few steps still fills its quota.
_DRAWS_A_STEP = 4
_WORST_SHOWN = 3
_JUDGED_AT_ONCE = 8


@dataclass
class Sample:
    """One row and head of an output, as the engine gave it in each way that took turns."""

    step: int
    layer: int
    request: int
    position: int
    head: int
    stratum: str
    found: list[np.ndarray]
    departs: int
    """Of a wrong draft, the first position that is not the text's; -1: a row of the text."""


@dataclass
class Verified:
    """What the check found."""

    checked: int
    failed: int
    worst: float | None
    """Largest error over its budget; above 1 is wrong."""
    strata: dict[str, int]
    """Samples of each kind of row."""
    worst_samples: list[str]
    """The worst ones in words."""

    def report(self) -> dict[str, Any]:
        """For JSON, which has no infinity: an output that is NaN is wrong by the largest number there is."""
        worst = None if self.worst is None else min(self.worst, sys.float_info.max)
        return {
            "checked": self.checked,
            "failed": self.failed,
            "worst": worst,
            "strata": self.strata,
            "worst_samples": self.worst_samples,
        }


@dataclass
class _Reservoir:
    """A uniform choice of at most `size` of all that were offered."""

    size: int
    offered: int = 0
    kept: list[Sample] = field(default_factory=list)

    def place(self, draw: random.Random) -> int | None:
        """Where the next one offered goes; None: it isn't kept."""
        self.offered += 1
        if len(self.kept) < self.size:
            return len(self.kept)
        place = draw.randrange(self.offered)
        return place if place < self.size else None


class Sampler:
    """Draws outputs while a replay runs."""

    def __init__(
        self,
        model: Model,
        num_layers: int,
        page_size: int,
        count: int,
        seed: int,
        rounds_weights: bool = False,
        prompts: native.SharedPrompts = native.SharedPrompts(),
    ) -> None:
        self.model, self.page_size, self.count, self.seed = model, page_size, count, seed
        self.prompts = prompts
        self.rounds_weights = rounds_weights
        self.draw = random.Random(seed)
        self.step = 0
        self._drawn: dict[tuple[int, int], list[tuple[int, Sample]]] = {}
        """Of this step's layers, the rows and samples that were drawn: by (step, layer)."""
        self.reservoirs = {
            (stratum, layer): _Reservoir(count) for layer in range(num_layers) for stratum in STRATA
        }

    def offer(self, layer: int, batch: Batch, planned: Planned, out: np.ndarray) -> None:
        """Draws some rows and heads of a layer's output; where another way computed it before, the same ones."""
        if self.count == 0:
            return
        at = self.step, layer
        for row, sample in self._drawn.get(at, ()):
            sample.found.append(out[row, sample.head].astype(np.float32))
        if at in self._drawn:
            return
        drawn: list[tuple[int, Sample]] = []
        self._drawn = {key: kept for key, kept in self._drawn.items() if key[0] == self.step}
        self._drawn[at] = drawn
        group = self.model.num_qo_heads // self.model.num_kv_heads
        for stratum, member in self._strata(batch, planned).items():
            candidates = np.flatnonzero(member)
            reservoir = self.reservoirs[stratum, layer]
            for _ in range(min(_DRAWS_A_STEP, len(candidates))):
                place = reservoir.place(self.draw)
                if place is None:
                    continue
                choice = int(candidates[self.draw.randrange(len(candidates))])
                row, kv_head = divmod(choice, self.model.num_kv_heads)
                head = kv_head * group + self.draw.randrange(group)
                request, position = int(batch.request[row]), int(batch.position[row])
                found = [out[row, head].astype(np.float32)]
                departs = int(batch.departs[row])
                sample = Sample(self.step, layer, request, position, head, stratum, found, departs)
                reservoir.kept[place : place + 1] = [sample]
                drawn.append((row, sample))

    def verify(self, done: Callable[[int], None] = lambda outputs: None) -> Verified:
        """Compares `count` of the outputs drawn, as many of each stratum and layer as there are.

        Of several ways each is compared, and the worst one counts. `done` is told of outputs that were compared.
        """
        samples = sorted(self._chosen(), key=_judged_together)
        judged = []
        for (layer, departs, request), group in _groups(samples):
            rows = [np.array([getattr(s, name) for s in group], np.int32) for name in ("request", "position", "head")]
            prompts = self.prompts.departing(request, departs) if departs >= 0 else self.prompts
            spec = reference(self.model, layer, self.seed, self.rounds_weights)
            ways = [native.verify(spec, np.stack(found), *rows, prompts) for found in zip(*(s.found for s in group))]
            judged += zip((max(verdicts, key=lambda v: v["ratio"]) for verdicts in zip(*ways)), group)
            done(len(group))
        judged.sort(key=lambda pair: -pair[0]["ratio"])
        return Verified(
            checked=len(judged),
            failed=sum(not verdict["ratio"] <= 1.0 for verdict, _ in judged),
            worst=judged[0][0]["ratio"] if judged else None,
            strata={s: sum(sample.stratum == s for sample in samples) for s in STRATA},
            worst_samples=[_in_words(v, s) for v, s in judged[:_WORST_SHOWN]],
        )

    @property
    def num_drawn(self) -> int:
        """Outputs that `verify` compares."""
        return len(self._chosen())

    def _chosen(self) -> list[Sample]:
        # Reservoirs take turns, so that one with few candidates leaves its share to the others.
        turns = itertools.zip_longest(*(r.kept for r in self.reservoirs.values()))
        return [sample for turn in turns for sample in turn if sample is not None][: self.count]

    def _strata(self, batch: Batch, planned: Planned) -> dict[str, np.ndarray]:
        """Which rows and KV heads belong to a stratum: bool [rows, Hkv] each."""
        every_head = np.ones(self.model.num_kv_heads, np.bool_)
        no_head = np.zeros((batch.rows, self.model.num_kv_heads), np.bool_)
        lengths = np.diff(batch.qo_indptr)
        decode = np.outer(np.repeat(lengths == 1, lengths) | batch.is_tree, every_head)
        edge = (batch.position + 1) % self.page_size <= 1
        has_levels = planned.layout.num_levels > 1
        # A cascade's tiles hold rows of several requests, and all that share are composed; so are a tree's rows.
        split = no_head if has_levels else native.split_rows(planned.plan, batch.rows, self.model.num_kv_heads)
        return {
            "chunk": ~decode,
            "decode": decode,
            "split": split,
            "page edge": np.outer(edge, every_head),
            "reused prefix": np.outer(batch.follows_reused, every_head),
            "cascade": np.outer(batch.shares_pages & ~batch.is_tree.any(), every_head) if has_levels else no_head,
            "wrong draft": np.outer(batch.departs >= 0, every_head),
        }


def _groups(samples: Sequence[Sample]) -> Iterator[tuple[tuple[int, int, int], list[Sample]]]:
    """Samples that are judged together, few at a time, so that progress shows."""
    for key, same in itertools.groupby(samples, key=_judged_together):
        while group := list(itertools.islice(same, _JUDGED_AT_ONCE)):
            yield key, group


def _judged_together(s: Sample) -> tuple[int, int, int]:
    """Samples of a layer; a wrong draft's keys are its own from where it departs, so of those only one path's."""
    return s.layer, s.departs, s.request if s.departs >= 0 else -1


def _in_words(verdict: dict[str, float], s: Sample) -> str:
    return (
        f"step {s.step}, layer {s.layer}, request {s.request}, position {s.position}, head {s.head} "
        f"({s.stratum}), element {verdict['element']}: found {verdict['found']:.6g}, "
        f"expected {verdict['expected']:.6g} ± {verdict['budget']:.2g}, "
        f"{verdict['ratio']:.2f} of its budget"
    )
