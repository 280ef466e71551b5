"""One workload on Raddle and on the engines it is held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Optional

from raddle._progress import Progress
from raddle.bench import timing
from raddle.bench.batch import TOLERANCE, Batch
from raddle.bench.engines import RADDLE, Engine, WrongOutput, error
from raddle.bench.paged import raddle_engines
from raddle.bench.peers.vllm_cpu import PeerError
from raddle.bench.workloads import Workload

#: Makes the engines of a peer for a batch, with pools of so many bytes.
Peer = Callable[[Batch, Optional[int]], "list[Engine]"]


@dataclass
class Result:
    """What was measured of one workload: microseconds a call of each engine in each round."""

    workload: Workload
    times: dict[str, list[float]]
    refused: list[str] = field(default_factory=list)  #: what peers could not compute, and why

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
    peers: Mapping[str, Peer],
    rounds: int,
    progress: Progress,
    pool_bytes: Optional[int] = None,
) -> Result:
    """Prepares, verifies and times one workload; peers compute the plain ones, and no latents.

    Raises ``WrongOutput`` if an output differs from attention in fp32 by more than rounding.
    """
    progress.say(f"{workload.name}: filling pools")
    batch = Batch.random(workload)
    contestants = raddle_engines(batch, pool_bytes)
    refused = []
    for peer in peers.values() if workload.is_plain and not workload.latent else ():
        try:
            contestants += peer(batch, pool_bytes)
        except PeerError as error:
            refused.append(str(error))
    progress.say(f"{workload.name}: comparing outputs")
    _verify(batch, contestants)
    progress.say(f"{workload.name}: timing", total=(rounds + 1) * len(contestants))
    calls = {each.name: each.call for each in contestants}
    times = timing.HostClock(workload.layers).rounds(calls, rounds, progress.advance)
    return Result(workload, times, refused)


def _verify(batch: Batch, contestants: Sequence[Engine]) -> None:
    references = {score: batch.reference(score) for score in {engine.score for engine in contestants}}
    tolerance = TOLERANCE[batch.workload.dtype]
    for engine in contestants:
        worst = max(error(engine.outcome(step), references[engine.score]) for step in (0, 1))
        if not worst <= tolerance:
            raise WrongOutput(
                f"{engine.name} on {batch.workload.name}: relative RMS error {worst:.1e}; "
                f"expected at most {tolerance:.0e}"
            )
