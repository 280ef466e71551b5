"""One workload on Raddle and on the engines it is held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from raddle._progress import Progress
from raddle.bench import engines, timing
from raddle.bench.workloads import Workload

RADDLE = "raddle"


class WrongOutput(RuntimeError):
    """An engine computed something else than the others: its speed means nothing."""


@dataclass
class Result:
    """What was measured of one workload: microseconds of each engine in each round."""

    workload: Workload
    times: dict[str, list[float]]

    def us(self, engine: str) -> float:
        return timing.median(self.times[engine])

    @property
    def best_peer(self) -> Optional[str]:
        """The fastest engine but Raddle; None where Raddle was measured alone."""
        peers = {name: times for name, times in self.times.items() if name != RADDLE}
        return timing.best(peers) if peers else None

    @property
    def speedup(self) -> Optional[float]:
        """How many times faster Raddle is than the best peer, the median over rounds."""
        peer = self.best_peer
        return None if peer is None else timing.speedup(self.times[RADDLE], self.times[peer])


def measure(
    workload: Workload,
    peers: Sequence[str],
    rounds: int,
    progress: Progress,
    pool_bytes: Optional[int] = None,
) -> Result:
    """Prepares, verifies and times one workload.

    Raises ``WrongOutput`` if an output differs from SDPA in fp32 by more than rounding.
    """
    progress.say(f"{workload.name}: filling pools")
    batch = engines.Batch.random(workload)
    contestants = [engines.raddle_engine(batch, pool_bytes)]
    if "torch" in peers:
        contestants += engines.torch_engines(batch, pool_bytes)
    progress.say(f"{workload.name}: comparing outputs")
    _verify(batch, contestants)
    progress.say(f"{workload.name}: timing", total=(rounds + 1) * len(contestants))
    calls = {each.name: each.call for each in contestants}
    return Result(workload, timing.interleaved(calls, rounds, tick=progress.advance))


def _verify(batch: engines.Batch, contestants: Sequence[engines.Engine]) -> None:
    reference = batch.reference()
    tolerance = engines.TOLERANCE[batch.workload.dtype]
    for engine in contestants:
        error = max(engine.error(reference, step) for step in (0, 1))
        if not error <= tolerance:
            raise WrongOutput(
                f"{engine.name} on {batch.workload.name}: relative RMS error {error:.1e}; "
                f"expected at most {tolerance:.0e}"
            )
