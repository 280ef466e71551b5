"""How long a GPU takes for a call whose data lies in no cache, and rounds in which engines take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from raddle.bench.timing import median

_FASTEST_CLOCK = 2.0e3  #: cycles a microsecond that a GPU hardly exceeds


@dataclass
class Sampling:
    """How a call is timed in each round: ``samples`` times, of which each keeps the host busy ``host_us``."""

    samples: int
    host_us: float


class Timer:
    """Times calls on the current stream by events, each after a buffer of twice the L2 was overwritten.

    The GPU first waits for as long as the host takes to enqueue everything: no launch is late, and Python's
    own time is not measured.
    """

    def __init__(self, device: Any, least_samples: int = 3, most_samples: int = 20, sample_us: float = 4000.0) -> None:
        bytes_of_l2 = torch.cuda.get_device_properties(device).L2_cache_size
        self._flushed = torch.empty(2 * bytes_of_l2, dtype=torch.uint8, device=device)
        self._least, self._most, self._sample_us = least_samples, most_samples, sample_us

    def sampling(self, call: Callable[[], object]) -> Sampling:
        """How to time that call; warms it up, too."""
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        host_us = 1e6 * (time.perf_counter() - start)
        torch.cuda.synchronize()
        us = self._measure(call, Sampling(2, host_us))
        return Sampling(int(min(self._most, max(self._least, self._sample_us / us))), host_us)

    def flush(self) -> None:
        """Overwrites the L2, in stream order."""
        self._flushed.fill_(1)

    def us(self, call: Callable[[], object], how: Sampling) -> float:
        """Microseconds of a call, the median of its samples."""
        return self._measure(call, how)

    def _measure(self, call: Callable[[], object], how: Sampling) -> float:
        events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(how.samples)]
        # 30 us: what the flush and two events take the host.
        wait_us = min(50e3, 1.3 * how.samples * (how.host_us + 30.0))
        torch.cuda._sleep(int(wait_us * _FASTEST_CLOCK))
        for before, after in events:
            self.flush()
            before.record()
            call()
            after.record()
        torch.cuda.synchronize()
        return median([1e3 * before.elapsed_time(after) for before, after in events])


def host_us(call: Callable[[], object], rounds: int) -> float:
    """Median microseconds of a call on the host; the GPU is idle before each."""
    times = []
    for step in range(-5, rounds):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        call()
        us = (time.perf_counter_ns() - start) / 1e3
        if step >= 0:
            times.append(us)
    return median(times)


def interleaved(
    calls: Mapping[Any, Callable[[], float]],
    rounds: int,
    failed: Callable[[Any, Exception], None],
    times: dict[Any, list[float]],
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Fills ``times`` with the microseconds of each engine in each round: every call measures itself once a round.

    Who begins changes from round to round. A call that raises is handed to ``failed`` and takes no further part;
    its times are dropped. What ``failed`` raises ends the rounds.
    """
    times.update((name, []) for name in calls)
    for number in range(rounds):
        names = list(times)
        first = number % max(1, len(names))
        for name in names[first:] + names[:first]:
            try:
                times[name].append(calls[name]())
            except Exception as error:  # noqa: BLE001: an engine's failure is a result
                del times[name]
                failed(name, error)
            tick()
