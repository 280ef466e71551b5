"""What an engine is that takes part: Raddle's (`paged` on a CPU, `gpu.own` on a GPU), and those in `peers`.

On a CPU, a function of their modules makes the engines of a `raddle.bench.batch.Batch`. On a GPU, ``contestants(problem,
case)`` of a module yields (name, make) for every form in which its engine computes the case; ``make()`` prepares it,
which may plan, allocate and compile, and returns an `Engine`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional

if TYPE_CHECKING:
    from raddle.bench.timing import Call

RADDLE = "raddle"
#: Family on a GPU -> (module of `peers`, what must be importable).
FAMILIES = {
    "flashinfer": ("flashinfer", "flashinfer"),
    "cudnn": ("sdpa", "torch"),
    "fa2": ("sdpa", "torch"),
    "fa3": ("fa3", "vllm.vllm_flash_attn"),
    "fa4": ("fa4", "flash_attn.cute"),
    "flex": ("flex", "torch.nn.attention.flex_attention"),
}


class WrongOutput(RuntimeError):
    """An engine computed something else than the others: its speed means nothing."""


@dataclass
class Engine:
    """An engine that is ready to compute a batch.

    ``call`` computes it once, on the pool that its argument chooses where there are several, and returns what ``rows``
    turns into O [rows, Hq, D]; ``out`` is the tensor that it writes in every call, or None if each call returns a new
    one. ``score``: what it does to logits. ``watched(before)`` calls ``before``, computes once with a timeline and
    returns the `raddle.timeline.Marks`; None: it has no timelines.
    """

    name: str
    call: Call
    out: Any = None
    rows: Callable[[Any], Any] = lambda result: result
    score: Optional[str] = None
    watched: Optional[Callable[[Callable[[], Any]], Any]] = None

    def outcome(self, step: int = 0) -> Any:
        """O [rows, Hq, D] of one call; ``out`` was full of NaN before."""
        if self.out is not None:
            self.out.fill_(float("nan"))
        result = self.call(step)
        return self.rows(self.out if self.out is not None else result)


def error(out: Any, reference: Any) -> float:
    """RMS of the difference over the RMS of the reference, in its dtype; NaN where ``out`` holds one."""
    difference = out.to(reference.dtype) - reference
    return float(difference.square().mean().sqrt() / reference.square().mean().sqrt())


Makers = Iterator[tuple[str, Callable[[], Engine]]]


def family(engine: str) -> str:
    """Family of an engine: the first word of its name."""
    return engine.split()[0]


def versions(names: tuple[str, ...]) -> dict[str, str]:
    """The version of each family, or "absent: " and why."""
    found = {}
    for name in names:
        try:
            module = importlib.import_module(FAMILIES[name][1])
            importlib.import_module(f"raddle.bench.peers.{FAMILIES[name][0]}")
            found[name] = _version(name, module)
        except Exception as error:  # noqa: BLE001: a broken installation is absent, too
            found[name] = f"absent: {first_line(error)}"
    return found


def _version(name: str, module: Any) -> str:
    import torch

    if name == "cudnn":
        return str(torch.backends.cudnn.version())
    if name == "fa3":
        return f"of vLLM {importlib.import_module('vllm').__version__}"
    if name == "fa4":
        return importlib.metadata.version("flash-attn-4")
    return str(getattr(module, "__version__", torch.__version__))


def makers(case: Any, problem: Any, families: tuple[str, ...]) -> Makers:
    """On a GPU, those of Raddle, and of each of the families that joins in the case."""
    yield from importlib.import_module("raddle.bench.gpu.own").contestants(problem, case)
    for name in families:
        if name in case.peers:
            module = importlib.import_module(f"raddle.bench.peers.{FAMILIES[name][0]}")
            yield from module.contestants(problem, case, name)


def first_line(error: BaseException) -> str:
    """What a table shows of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]
