"""The serving loop and its virtual clock.

Time stands still while data is made and outputs are checked; a step takes as long as its append, plan and
runs were measured to take, and requests arrive by the same clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable

from .engine import Batch, Engine, StepCost
from .sampling import Sampler
from .scheduler import Running, Scheduler, Span


@dataclass
class Step:
    """One step that was computed."""

    spans: list[Span]
    cost: StepCost
    pages_in_use: int


@dataclass
class History:
    """All that a replay did."""

    steps: list[Step] = field(default_factory=list)
    finished: list[Running] = field(default_factory=list)
    seconds: float = 0.0
    """The clock at the end."""


def serve(
    scheduler: Scheduler,
    engine: Engine,
    sampler: Sampler,
    on_step: Callable[[History], None] = lambda history: None,
) -> History:
    """Serves all requests; `on_step` is told of each step."""
    history = History()
    now = 0.0
    while not scheduler.done:
        spans = scheduler.schedule(now)
        if not spans:
            now = scheduler.next_arrival
            continue
        tables = scheduler.tables(spans)
        pages_in_use = scheduler.pool.used
        sampler.step = len(history.steps)
        cost = engine.step(Batch(spans, tables), sampler.offer)
        now += cost.seconds
        for done in scheduler.complete(spans, now):
            history.finished.append(done)
            engine.release(done.freed)
        history.steps.append(Step(spans, cost, pages_in_use))
        history.seconds = now
        on_step(history)
    return history
