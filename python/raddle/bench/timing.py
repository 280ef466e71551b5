"""Timing on a noisy machine: engines take turns, and only what happened side by side is compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

#: Seconds between two turns. The idle threads of an OpenMP pool spin for some milliseconds after a
#: call; without the pause each engine would be timed against the spinning of the one before it.
SETTLE_S = 0.01


class Elapsed(float):
    """Microseconds, returned by a call that has a clock of its own: in another process, without the way there."""


#: Runs of a GPU that are timed as one.
_REPEATS = 20


def interleaved(
    calls: Mapping[str, Callable[[int], object]],
    rounds: int,
    settle_s: float = SETTLE_S,
    tick: Callable[[], None] = lambda: None,
    layers: int = 1,
) -> dict[str, list[float]]:
    """Microseconds a call of each engine in each round, one list an engine; a first round isn't counted.

    A turn of an engine is a step of a model of so many ``layers``: calls one after another, of which the mean counts.
    The pause before a turn lets threads fall asleep and cores grow cold, and waking them takes as long as a short call.
    A serving engine pays for that once a step and not once a layer.

    ``calls[name](step)`` gets a number that grows by one from call to call of that engine and
    chooses its pool, so that no call finds the keys of an earlier one in a cache. The engine that
    begins changes from round to round. ``tick`` is called after every turn. A call that returns `Elapsed` has
    timed itself.
    """
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            time.sleep(settle_s)
            us = _mean_us(calls[name], range(turn * layers, (turn + 1) * layers))
            if turn:
                times[name].append(us)
            tick()
    return times


def _mean_us(call: Callable[[int], object], steps: range) -> float:
    """Microseconds a call, of calls one after another: by their own clocks where they have any."""
    own = 0.0
    start = time.perf_counter_ns()
    for step in steps:
        found = call(step)
        if isinstance(found, Elapsed):
            own += found
    us = (time.perf_counter_ns() - start) / 1e3
    return (own or us) / len(steps)


def repeated(call: Callable[[], object], rounds: int) -> list[float]:
    """Microseconds of each of ``rounds`` short calls, after a tenth as many that aren't counted."""
    times = []
    for step in range(-max(1, rounds // 10), rounds):
        start = time.perf_counter_ns()
        call()
        us = (time.perf_counter_ns() - start) / 1e3
        if step >= 0:
            times.append(us)
    return times


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def best(times: Mapping[str, Sequence[float]]) -> str:
    """The engine with the least median."""
    return min(times, key=lambda name: median(times[name]))


def speedup(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """How many times faster ours is: the median over rounds of their time / our time in that round.

    A disturbance that lasts longer than a round slows both, and leaves this ratio alone.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} rounds of ours, {len(theirs)} of theirs; expected as many")
    return median([b / a for a, b in zip(ours, theirs)])


def on_device(
    device: str, calls: Mapping[str, Callable[[], object]], rounds: int, tick: Callable[[], None]
) -> dict[str, list[float]]:
    """`interleaved` for calls that choose no pool, on "cpu" or a GPU: there several are timed as one, until done."""
    repeats = _REPEATS if device != "cpu" else 1

    def repeated(call: Callable[[], object]) -> None:
        for _ in range(repeats):
            call()
        if device != "cpu":
            import torch

            torch.cuda.synchronize()

    found = interleaved({name: lambda _, call=call: repeated(call) for name, call in calls.items()}, rounds, tick=tick)
    return {name: [us / repeats for us in times] for name, times in found.items()}
