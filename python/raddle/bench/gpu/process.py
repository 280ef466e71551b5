"""Sections in processes of their own: what breaks the GPU's context, or hangs, costs one section and no more."""

from __future__ import annotations

import dataclasses
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from raddle.bench import results

_MACHINE = "machine"
_POLL_S = 0.1


@dataclasses.dataclass
class Options:
    """What a process is told; see the command."""

    families: tuple[str, ...] = ()
    rounds: int = 5
    device: str = "cuda"
    prepare: bool = False  #: tiny batches, only prepared and compared
    timelines: str = ""  #: folder for timelines; empty: none
    timelines_of: tuple[str, ...] = ()  #: the sections that have them, by name or pattern; empty: all
    section_s: float = 240.0  #: seconds after which a section is given up
    bars: bool = False  #: whether tables show Raddle's own targets


Command = Callable[[Options, Path, Sequence[str]], list[str]]


def _command(options: Options, folder: Path, names: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", __name__, json.dumps(dataclasses.asdict(options)), str(folder), *names]


#: Exit code of a process whose context is lost: it has kept what it found, and asks for another to go on.
_CONTINUE = 3


def run_all(
    names: Sequence[str],
    options: Options,
    keep: Callable[[dict[str, Any], list[dict[str, Any]]], None],
    command: Command = _command,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Machine and finished sections, each {name, seconds, rows}; ``keep`` gets both after every section.

    One process measures all sections if nothing goes wrong; else the next one goes on with the rest.
    """
    machine: dict[str, Any] = {}
    finished: list[dict[str, Any]] = []
    remaining = list(names)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)

        def collect() -> bool:
            """Takes what the process has published; whether that was anything."""
            parts = _parts(folder, remaining)
            for part in parts:
                remaining.remove(part["name"])
            if parts:
                finished.extend(parts)
                machine.update(json.loads((folder / f"{_MACHINE}.json").read_text()))
                keep(machine, finished)
            return bool(parts)

        while remaining:
            before = len(remaining)
            reason = _wait(subprocess.Popen(command(options, folder, remaining)), options.section_s, collect)
            if remaining and (reason or len(remaining) == before):
                lost = remaining.pop(0)
                rows = [results.failed(lost, "all", "all", reason or "the process measured nothing")]
                finished.append({"name": lost, "seconds": 0.0, "rows": rows})
                keep(machine, finished)
    return machine, finished


def _wait(child: Any, section_s: float, collect: Callable[[], bool]) -> str:
    """Waits for the process; returns why the section that it was at is lost, or nothing."""
    begun = time.monotonic()
    while True:
        code = child.poll()
        if collect():
            begun = time.monotonic()
        if code is not None:
            return "" if code in (0, _CONTINUE) else f"the process ended with {code} during this section"
        if time.monotonic() - begun > section_s:
            child.kill()
            child.wait()
            return f"not finished after {section_s:g} s"
        time.sleep(_POLL_S)


def _parts(folder: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    paths = [folder / f"{name}.json" for name in names]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def _write(folder: Path, name: str, value: Any) -> None:
    """Publishes a file at once, so that no reader finds half of it."""
    path = folder / f"{name}.json"
    path.with_suffix(".part").write_text(json.dumps(value))
    path.with_suffix(".part").rename(path)


def main(arguments: Sequence[str]) -> int:
    """In the process: measures the named sections one after another."""
    given = json.loads(arguments[0])
    options = Options(**{name: tuple(x) if isinstance(x, list) else x for name, x in given.items()})
    folder, names = Path(arguments[1]), arguments[2:]
    import torch

    from raddle._progress import Progress
    from raddle.bench import engines, report
    from raddle.bench.gpu import sections
    from raddle.bench.gpu.measure import DeviceLost

    torch.cuda.set_device(options.device if ":" in options.device else 0)
    versions = engines.versions(options.families)
    machine = {**_machine(options.device), "rounds": options.rounds}
    machine["versions"] = {**machine["versions"], **versions}
    present = tuple(name for name in options.families if not versions[name].startswith("absent"))
    _write(folder, _MACHINE, machine)
    out = report.console()
    out.print(report.gpu_header(machine))
    for section in (s for name in names for s in sections.SECTIONS if s.name == name):
        start = time.monotonic()
        with Progress() as progress:
            rows, lost = _section(section, present, options, progress, DeviceLost)
        seconds = round(time.monotonic() - start, 1)
        out.print(*report.tables(section, rows, options.bars), f"{section.name}: {seconds:.0f} s\n", sep="\n")
        _write(folder, section.name, {"name": section.name, "seconds": seconds, "rows": rows})
        if lost:
            return _CONTINUE
        gc.collect()
        torch.cuda.empty_cache()
    return 0


def _section(
    section: Any, families: tuple[str, ...], options: Options, progress: Any, lost: Any
) -> tuple[list[results.Row], bool]:
    """Rows of one section, and whether the device is lost."""
    from raddle.bench import first_use
    from raddle.bench.gpu import host, measure, planner

    if section.name == host.SECTION:
        if options.prepare:
            return [], False
        rows = host.measure(families, options.rounds, options.device)
        return rows + planner.measure(section.name, options.rounds, options.device), False
    if section.name == first_use.GPU_SECTION:
        rounds = max(1, options.rounds // 3)  # each is two new processes a variant
        return ([] if options.prepare else first_use.on_gpu(rounds, progress, options.device)), False
    if options.prepare:
        section = dataclasses.replace(section, cases=tuple(case.shrunk() for case in section.cases))
    rounds = 0 if options.prepare else options.rounds
    watched = not options.timelines_of or any(fnmatchcase(section.name, name) for name in options.timelines_of)
    folder = Path(options.timelines) if options.timelines and watched else None
    run = measure.SectionRun(section, families, rounds, progress, options.device, timelines=folder)
    try:
        rows = run.run()
        if not options.prepare:
            rows = rows + measure.errors_of_small(section, families, options.device)
        return rows, False
    except lost as error:
        return [*run.rows, results.failed(section.name, "all", "all", str(error))], True
    except Exception as error:  # noqa: BLE001: the other sections go on
        from raddle.bench.engines import first_line

        return [*run.rows, results.failed(section.name, "all", "all", first_line(error))], False


def _machine(device: str) -> dict[str, Any]:
    import torch

    import raddle
    from raddle.bench import report

    properties = torch.cuda.get_device_properties(device)
    smi = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(smi, capture_output=True, text=True, timeout=20).stdout.split()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        driver = None
    return {
        "gpu": properties.name,
        "arch": f"sm_{properties.major}{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "driver": driver,
        "commit": report.commit(),
        "versions": {"raddle": raddle.__version__, "torch": torch.__version__, "cuda": torch.version.cuda},
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
