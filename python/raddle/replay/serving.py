"""The serving loop and its virtual clock.

Time stands still while data is made and outputs are checked; a step takes as long as its append, plan and
runs were measured to take, and requests arrive by the same clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable

from .engine import Batch, Engine, StepCost
from .sampling import Sampler
from .scheduler import Running, Scheduler
from .span import Span


@dataclass
class Step:
    """One step that was computed."""

    spans: list[Span]
    cost: StepCost
    pages_in_use: int
    idle_pages: int
    """Of these, cached and held by no request."""
    shared_pages: int
    """Pages that several of its requests read."""
    evicted_tokens: int
    """All that the prefix cache gave up until then."""
    accepted: list[int]
    """Of each tree of drafts, the tokens that it gave."""
    end: float
    """The clock when it was done."""


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
    """Serves all requests; calls `on_step` after each step."""
    history = History()
    now = 0.0
    while not scheduler.done:
        spans = scheduler.schedule(now)
        if not spans:
            now = scheduler.next_arrival
            continue
        engine.release(scheduler.take_freed())
        batch = Batch(spans, scheduler.tables(spans), scheduler.reused(spans), scheduler.copies, scheduler.trees)
        prefixes = scheduler.prefixes
        pages = scheduler.pool.used, prefixes.idle_pages, batch.shared_pages, prefixes.evicted_tokens
        accepted = [tree.kept for tree in scheduler.trees if tree]
        sampler.step = len(history.steps)
        cost = engine.step(batch, sampler.offer)
        now += cost.seconds
        history.finished += scheduler.complete(spans, now)
        history.steps.append(Step(spans, cost, *pages, accepted, now))
        history.seconds = now
        on_step(history)
    return history
