"""The engines that are compared, a file a family; a module is imported only where its family takes part.

``contestants(problem, case)`` of a module yields (name, make) for every form in which its engine computes the case;
``make()`` prepares it, which may plan, allocate and compile, and returns a `Contestant`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

RADDLE = "raddle"
#: Family -> (module here, what must be importable).
FAMILIES = {
    "flashinfer": ("flashinfer", "flashinfer"),
    "cudnn": ("sdpa", "torch"),
    "fa2": ("sdpa", "torch"),
    "flex": ("flex", "torch.nn.attention.flex_attention"),
}


@dataclass
class Contestant:
    """An engine that is ready to compute a case.

    ``call`` launches it once and returns what `rows` turns into O [rows, Hq, D]; ``out`` is the tensor that it
    writes in every call, or None if each call returns a new one. ``watched(before)`` calls ``before``, launches it once
    with a timeline and returns the `raddle.timeline.Marks`; None: it has no timelines.
    """

    name: str
    call: Callable[[], Any]
    out: Any = None
    rows: Callable[[Any], Any] = lambda result: result
    watched: Callable[[Callable[[], Any]], Any] | None = None

    def outcome(self) -> Any:
        """O [rows, Hq, D] of one call; ``out`` was full of NaN before."""
        if self.out is not None:
            self.out.fill_(float("nan"))
        result = self.call()
        return self.rows(self.out if self.out is not None else result)


Makers = Iterator[tuple[str, Callable[[], Contestant]]]


def family(engine: str) -> str:
    """Family of an engine: the first word of its name."""
    return engine.split()[0]


def versions(names: tuple[str, ...]) -> dict[str, str]:
    """The version of each family, or "absent: " and why."""
    found = {}
    for name in names:
        try:
            module = importlib.import_module(FAMILIES[name][1])
            importlib.import_module(f"raddle.bench.gpu.engines.{FAMILIES[name][0]}")
            found[name] = _version(name, module)
        except Exception as error:  # noqa: BLE001: a broken installation is absent, too
            found[name] = f"absent: {first_line(error)}"
    return found


def _version(name: str, module: Any) -> str:
    import torch

    if name == "cudnn":
        return str(torch.backends.cudnn.version())
    return str(getattr(module, "__version__", torch.__version__))


def makers(case: Any, problem: Any, families: tuple[str, ...]) -> Makers:
    """Those of Raddle, and of each of the families that joins in the case."""
    yield from importlib.import_module("raddle.bench.gpu.engines.own").contestants(problem, case)
    for name in families:
        if name in case.peers:
            module = importlib.import_module(f"raddle.bench.gpu.engines.{FAMILIES[name][0]}")
            yield from module.contestants(problem, case, name)


def first_line(error: BaseException) -> str:
    """What a table shows of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]
