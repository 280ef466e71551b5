"""How evenly a decode of skewed lengths is spread over workers: as planned, and as measured on threads."""

from __future__ import annotations

from collections.abc import Sequence

import raddle
from raddle._progress import Progress
from raddle.bench import timing
from raddle.bench.batch import Batch
from raddle.bench.engines import RADDLE
from raddle.bench.paged import PagedBatch
from raddle.bench.results import Measured
from raddle.bench.workloads import Workload

WORKERS = (2, 16, 132)
#: Heaviest worker over the mean.
BAR = 1.15
_UNIT = "heaviest / mean"


def heaviest_over_mean(busy_us: Sequence[float]) -> float:
    return max(busy_us) * len(busy_us) / sum(busy_us)


def measure(workload: Workload, rounds: int, progress: Progress) -> list[Measured]:
    """Planned balance for each of `WORKERS`, and the measured one of ``rounds`` runs on all threads."""
    progress.say(f"{workload.name}: filling pools")
    paged = PagedBatch(Batch.random(workload))
    found = []
    for workers in WORKERS:
        planned = paged.plan(0, num_workers=workers).balance
        found.append(Measured(f"{workload.name}, planned, {workers} workers", None, planned, _UNIT, BAR))
    progress.say(f"{workload.name}: running", total=rounds + 1)
    balances: list[float] = []

    def run(step: int) -> None:
        paged.run(step)
        balances.append(heaviest_over_mean(paged.attention.last_busy_us))

    times = timing.HostClock().rounds({RADDLE: run}, rounds, progress.advance)[RADDLE]
    name = f"{workload.name}, measured, {raddle.cpu_threads()} threads"
    measured = timing.median(balances[1:])
    return [*found, Measured(name, timing.median(times), measured, _UNIT, BAR)]
