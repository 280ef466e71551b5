"""Where a replay runs: the engine of a device, and what a report says about it."""

from __future__ import annotations

from typing import Any

import raddle
from raddle import _cuda
from raddle._progress import Progress
from raddle.bench import limits

from . import native
from .cuda import CudaEngine, torch_has_gpu
from .engine import Engine
from .faults import planted
from .models import Model
from .steplog import StepLog


def engine_of(log: StepLog, model: Model, options: dict[str, Any]) -> Engine:
    """The engine on the device that the command's options name. Raises ``ValueError`` for what it cannot do."""
    given = {
        "seed": log.seed,
        "schedules": options["schedules"],
        "num_workers": options["num_workers"],
        "prompts": native.SharedPrompts.of(log.requests),
    }
    # A reservation's graphs know how many levels they read, so on a GPU each step has the single format.
    cascades = options["device"] == "cpu" and not log.speculate and (log.prefix_cache or log.samples > 1)
    if log.speculate:
        _check_trees(log, options)
    if options["compare"]:
        _check_compared(options, cascades)
    kind: type[Engine] = Engine
    if options["device"] == "cpu":
        given.update(cascades=cascades, compares_single=options["compare"] is not None)
    else:
        kind = CudaEngine
        # A step of a log has a row or more of each request, as one of the scheduler does.
        rows = max([log.token_budget, *(sum(s.length for s in step) for step in log.steps)])
        given.update(device=options["device"], max_rows=rows, max_requests=min(rows, log.samples * len(log.requests)))
    if options["inject"]:
        kind = planted(options["inject"], kind, log.prefix_cache)
    try:
        return kind(model, options["layers"], log.num_pages, log.page_size, **given)
    except RuntimeError as error:  # no such device, no memory there, no compiler for it
        raise ValueError(f"--device {options['device']}: {error}") from error


def _check_trees(log: StepLog, options: dict[str, Any]) -> None:
    if options["device"] != "cpu":
        raise ValueError(f"--speculate: steps on {options['device']} have no trees; expected --device cpu")
    if log.samples > 1:
        raise ValueError(f"--speculate can't be combined with --parallel {log.samples}: samples draft nothing")
    if options["compare"]:
        raise ValueError("--speculate can't be combined with --compare single: a tree is no cascade of shared pages")
    if options["inject"] == "merge":
        raise ValueError("--speculate can't be combined with --inject merge, which is planted in decodes of one row")


def _check_compared(options: dict[str, Any], cascades: bool) -> None:
    device, schedules = options["device"], options["schedules"]
    if device != "cpu":
        raise ValueError(f"--compare single: steps on {device} are never cascades; expected --device cpu")
    if not cascades:
        raise ValueError("--compare single: no requests share pages; expected --prefix-cache or --parallel 2 or more")
    if len(schedules) > 1:
        raise ValueError(f"--compare single: --schedule names {len(schedules)}; expected one")


def read_gbps(device: str, progress: Progress) -> float | None:
    """How fast this machine reads memory, in GB/s; on a GPU the floor of `raddle bench gpu`, with torch and CuPy.

    None where that cannot be measured, or where other work disturbed the measurement.
    """
    if device == "cpu":
        progress.say("measuring how fast this machine reads memory", total=limits.QUICK_LOOPS)
        return limits.read_gbps(progress.advance)
    if not torch_has_gpu():
        return None
    progress.say("measuring how fast this GPU reads memory")
    try:
        from raddle.bench.gpu import floor

        return floor.read_gbps(device)
    except ImportError:
        return None


def facts(engine: Engine) -> dict[str, Any]:
    """What a report says of the machine."""
    if not isinstance(engine, CudaEngine):
        return {"isa": raddle.cpu_isa(), "threads": raddle.cpu_threads()}
    gpu = _cuda.driver()["gpus"][int(engine.device.partition(":")[2])]
    return {"gpu": gpu["name"], "graphs": engine.uses_graphs}
