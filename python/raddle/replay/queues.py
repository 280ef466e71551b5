"""What the workers of one step did: kept of the step whose runs took longest, for the page of `--report`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Sequence

from raddle.timeline import STAGES, Marks


class Bar(NamedTuple):
    """A stretch in which a worker was busy, in microseconds since its run began."""

    worker: int
    begin_us: float
    us: float


@dataclass
class Run:
    """One run of a layer: a bar an item where a timeline tells them apart, else one for each worker's whole queue."""

    layer: int
    bars: list[Bar]
    explained: str
    """What its plan says of itself."""

    @property
    def us(self) -> float:
        return max((bar.begin_us + bar.us for bar in self.bars), default=0.0)


@dataclass
class Queues:
    """The runs of a step."""

    step: int
    run_us: float
    """All runs of the step, those that were not watched as well."""
    runs: list[Run]


def whole_queues(busy_us: Sequence[float]) -> list[Bar]:
    """Of a CPU's run, where each worker says only how long it was busy (`Attention.last_busy_us`)."""
    return [Bar(worker, 0.0, us) for worker, us in enumerate(busy_us)]


def items(marks: Marks) -> list[Bar]:
    """Of a GPU's run: an item lasts from the worker's start or its last item's end to its own."""
    ends = STAGES.index("started"), STAGES.index("finished")
    bars = []
    for worker, row in enumerate(marks.workers):
        at = [float(mark["us"]) for mark in row if mark["stage"] in ends]
        bars += [Bar(worker, begin, end - begin) for begin, end in zip(at, at[1:])]
    return bars
