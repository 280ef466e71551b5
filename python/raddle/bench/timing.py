"""Timing on a noisy machine: engines take turns, and only what happened side by side is compared."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

#: Seconds between two turns on a CPU. The idle threads of an OpenMP pool spin for some milliseconds after a
#: call; without the pause each engine would be timed against the spinning of the one before it.
SETTLE_S = 0.01
#: Cycles a microsecond that a GPU hardly exceeds.
_FASTEST_CLOCK = 2.0e3
#: Runs of a GPU that `on_device` times as one.
_REPEATS = 20

#: What is timed. Its argument grows from call to call and chooses the pools, where there are several.
Call = Callable[[int], object]
#: Measures one turn of an engine, whose number it is given: microseconds a call.
Turn = Callable[[int], float]
Times = dict[Any, list[float]]


class Elapsed(float):
    """Microseconds, returned by a call that has a clock of its own: in another process, without the way there."""


class Clock:
    """How the turn of an engine is measured."""

    warm_ups = 0  #: first rounds that are not counted

    def turn(self, call: Call) -> Turn:
        raise NotImplementedError

    def rounds(self, calls: Mapping[Any, Call], rounds: int, tick: Callable[[], None] = lambda: None) -> Times:
        """Microseconds a call of each engine in each round, in turns; what a call raises ends them."""
        return interleaved({name: self.turn(call) for name, call in calls.items()}, rounds, self.warm_ups, tick)


@dataclass
class HostClock(Clock):
    """The host's clock. A turn is a step of a model of so many ``layers``: calls one after another; the mean counts.

    The pause before a turn lets threads fall asleep and cores grow cold, and waking them takes as long as a short call.
    A serving engine pays for that once a step and not once a layer. No call of an engine gets the number of an earlier
    one, so that none finds its keys in a cache. A call that returns `Elapsed` has timed itself. ``done`` waits until
    the calls of a turn are done.
    """

    layers: int = 1
    settle_s: float = SETTLE_S
    done: Callable[[], object] = lambda: None
    warm_ups = 1

    def turn(self, call: Call) -> Turn:
        def timed(number: int) -> float:
            time.sleep(self.settle_s)
            own = 0.0
            start = time.perf_counter_ns()
            for step in range(number * self.layers, (number + 1) * self.layers):
                found = call(step)
                if isinstance(found, Elapsed):
                    own += found
            self.done()
            us = (time.perf_counter_ns() - start) / 1e3
            return (own or us) / self.layers

        return timed


@dataclass
class Sampling:
    """How a `GpuClock` times a call in each round: ``samples`` times, of which each keeps the host busy ``host_us``."""

    samples: int
    host_us: float


class GpuClock(Clock):
    """Events on torch's current stream, around calls of which each finds the L2 overwritten by twice its size.

    The GPU first waits for as long as the host takes to enqueue everything: no launch is late, and Python's
    own time is not measured. A turn is the median of some samples; calls are warmed up as `turn` is asked for it.
    """

    def __init__(self, device: Any, least_samples: int = 3, most_samples: int = 20, sample_us: float = 4000.0) -> None:
        import torch

        self._cuda = torch.cuda
        bytes_of_l2 = torch.cuda.get_device_properties(device).L2_cache_size
        self._flushed = torch.empty(2 * bytes_of_l2, dtype=torch.uint8, device=device)
        self._least, self._most, self._sample_us = least_samples, most_samples, sample_us

    def turn(self, call: Call) -> Turn:
        how = self.sampling(call)
        return lambda number: self._measure(lambda: call(number), how)

    def sampling(self, call: Call) -> Sampling:
        """How to time that call; warms it up, too."""
        for _ in range(2):
            call(0)
        self._cuda.synchronize()
        start = time.perf_counter()
        call(0)
        host_us = 1e6 * (time.perf_counter() - start)
        self._cuda.synchronize()
        us = self._measure(lambda: call(0), Sampling(2, host_us))
        return Sampling(int(min(self._most, max(self._least, self._sample_us / us))), host_us)

    def flush(self) -> None:
        """Overwrites the L2, in stream order."""
        self._flushed.fill_(1)

    def _measure(self, call: Callable[[], object], how: Sampling) -> float:
        events = [tuple(self._cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(how.samples)]
        # 30 us: what the flush and two events take the host.
        wait_us = min(50e3, 1.3 * how.samples * (how.host_us + 30.0))
        self._cuda._sleep(int(wait_us * _FASTEST_CLOCK))
        for before, after in events:
            self.flush()
            before.record()
            call()
            after.record()
        self._cuda.synchronize()
        return median([1e3 * before.elapsed_time(after) for before, after in events])


def interleaved(
    turns: Mapping[Any, Turn],
    rounds: int,
    warm_ups: int = 0,
    tick: Callable[[], None] = lambda: None,
    failed: Optional[Callable[[Any, Exception], None]] = None,
    times: Optional[Times] = None,
) -> Times:
    """Microseconds of each engine in each round, in which all take turns; ``warm_ups`` more rounds come before.

    Each round has an order of its own, drawn by a fixed seed: how warm a machine is, and how it is clocked, follows from
    what ran before. ``tick`` is called after every turn. A turn that raises is handed to
    ``failed`` and its engine takes no further part, without times; what ``failed`` raises ends the rounds, as every
    error does where there is none. ``times``, if given, is filled and holds what was measured until then.
    """
    times = {} if times is None else times
    times.update((name, []) for name in turns)
    draw = random.Random(0)
    for number in range(warm_ups + rounds):
        for name in draw.sample(list(times), len(times)):
            try:
                us = turns[name](number)
            except Exception as error:  # noqa: BLE001: an engine's failure is a result
                if failed is None:
                    raise
                del times[name]
                failed(name, error)
            else:
                if number >= warm_ups:
                    times[name].append(us)
            tick()
    return times


def on_device(
    device: str, calls: Mapping[str, Callable[[], object]], rounds: int, tick: Callable[[], None]
) -> dict[str, list[float]]:
    """Rounds of calls that choose no pool, by the host's clock: on a GPU, several are timed as one, until done."""
    clock = HostClock()
    if device != "cpu":
        import torch

        clock = HostClock(_REPEATS, done=torch.cuda.synchronize)
    return clock.rounds({name: lambda _, call=call: call() for name, call in calls.items()}, rounds, tick)


def repeated(
    call: Callable[[], object], rounds: int, before: Callable[[], object] = lambda: None
) -> list[float]:
    """The host's microseconds of each of ``rounds`` short calls, after a tenth as many that aren't counted.

    ``before`` is called before each, outside of the clock: on a GPU, it waits until that is idle.
    """
    times = []
    for step in range(-max(1, rounds // 10), rounds):
        before()
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
