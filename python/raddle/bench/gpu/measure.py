"""A section from tensors to rows: prepare every engine, compare their outputs, time them in turns."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from raddle._progress import Progress
from raddle.bench import engines, results
from raddle.bench.engines import RADDLE, first_line
from raddle.bench.gpu import check
from raddle.bench.gpu.cases import Case, Section
from raddle.bench.gpu.problem import Problem
from raddle.bench.timing import Call, GpuClock, Turn, interleaved

Key = tuple[str, str]  # (workload, engine)


class DeviceLost(RuntimeError):
    """The GPU's context is broken: nothing more can be measured in this process."""


class SectionRun:
    """One section on one device.

    Args:
        families: the engines to compare with; those that are absent are left out by the caller.
        rounds: rounds to time; 0: only prepare and compare.
        clock: times the calls; None: a new `GpuClock`.
        makers: what `engines.makers` is; tests give their own.
        timelines: folder to which one of Raddle's runs of each case is written, as marks of all workers; None: nowhere.
    """

    def __init__(
        self,
        section: Section,
        families: tuple[str, ...],
        rounds: int,
        progress: Progress,
        device: str = "cuda",
        clock: Any = None,
        makers: Callable[..., engines.Makers] = engines.makers,
        timelines: Path | None = None,
    ) -> None:
        self.section, self.families, self.rounds = section, families, rounds
        self.device, self.rows = device, []
        self._progress, self._makers = progress, makers
        self._clock = clock or GpuClock(device)
        self._errors: dict[Key, float] = {}
        self._timelines = timelines
        self._watched: dict[str, Callable[..., Any]] = {}

    def run(self) -> list[results.Row]:
        """All rows. Raises DeviceLost; what was found until then is in ``rows``."""
        calls: dict[Key, Turn] = {}
        problems: dict[Any, Problem] = {}
        for case in self.section.cases:
            self._progress.say(f"{self.section.name}: {case.name}: comparing outputs")
            try:
                if Problem.key(case) not in problems:
                    problems[Problem.key(case)] = Problem(case, self.device)
                calls.update(self._prepare(case, problems[Problem.key(case)]))
            except Exception as error:  # noqa: BLE001: of tensors, or of the exact rows
                self._fail((case.name, "all"), error)
        if self.rounds:
            calls.update(self._floors())
            self._progress.say(f"{self.section.name}: timing", total=self.rounds * len(calls))
            times: dict[Key, list[float]] = {}
            try:
                interleaved(calls, self.rounds, 0, self._progress.advance, self._fail, times)
            finally:
                self._keep(times)
            if self._timelines:
                self._write_timelines(self._timelines)
        return self.rows

    def _write_timelines(self, folder: Path) -> None:
        """What the workers did in one more run of each case, out of a cold L2: JSON, and a summary as text."""
        us = {row["workload"]: row["us"] for row in self.rows if row["engine"] == RADDLE and "us" in row}
        for name, watched in self._watched.items():
            try:
                watched(self._clock.flush)  # the first one finds code and plan in no cache
                marks = watched(self._clock.flush)
            except Exception as error:  # noqa: BLE001: what was timed stands
                self._fail((name, "timeline"), error)
                continue
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / re.sub(r"[^\w.]+", "-", f"{self.section.name} {name}")
            title = f"{self.section.name}: {name}, {us[name]:.1f} us without a timeline\n" if name in us else ""
            path.with_name(path.name + ".txt").write_text(title + marks.summary() + "\n")
            path.with_name(path.name + ".json").write_text(marks.json() + "\n")

    def _keep(self, times: dict[Key, list[float]]) -> None:
        """Rows of the rounds in which everybody took part: all of them, unless the device was lost."""
        whole = min(map(len, times.values()), default=0)
        by_name = {case.name: case for case in self.section.cases}
        self.rows += [
            results.measured(self.section.name, by_name[key[0]], key[1], rounds[:whole], self._errors.get(key))
            for key, rounds in times.items()
            if whole
        ]
        self.rows = results.compared(self.section.cases, self.rows)

    def _prepare(self, case: Case, problem: Problem) -> dict[Key, Turn]:
        """How to time each engine whose output is right."""
        sample = check.sampled_rows(case)
        reference = check.exact(problem, case, sample)
        calls: dict[Key, Turn] = {}
        first = None
        for name, make in self._makers(case, problem, self.families):
            key = case.name, name
            try:
                contestant = make()
                out = contestant.outcome()
                self._errors[key] = check.verify(name, out, problem, sample, reference)
                if first is None:
                    first = out.clone()
                else:
                    check.agree(name, out, first)
                calls[key] = self._timed(contestant.call)
                if contestant.watched:
                    self._watched[case.name] = contestant.watched
            except Exception as error:  # noqa: BLE001: an engine's failure is a result
                self._fail(key, error)
        return calls

    def _timed(self, call: Call) -> Turn:
        return self._clock.turn(call) if self.rounds else lambda number: 0.0

    def _floors(self) -> dict[Key, Turn]:
        """The fastest read of as many bytes as each case reads that asks for it."""
        cases = [case for case in self.section.cases if case.floor]
        calls: dict[Key, Turn] = {}
        if not cases:
            return calls
        try:
            from raddle.bench.gpu.floor import Floor

            floor = Floor(self.device, max(case.bytes_read for case in cases))
            nothing = self._timed(floor.nothing)(0)
            empty = results.figure(self.section.name, "empty kernel", nothing, "us")
            self.rows.append({**empty, "engine": results.FLOOR})
            for case in cases:
                self._progress.say(f"{self.section.name}: {case.name}: floor")
                reads = floor.reads(case.bytes_read)
                timed = {name: self._timed(call) for name, call in reads.items()}
                fastest = min(timed, key=lambda name: timed[name](0))
                calls[case.name, results.FLOOR] = timed[fastest]
        except Exception as error:  # noqa: BLE001: without CuPy, there are ratios to peers alone
            self._fail(("all", results.FLOOR), error)
        return calls

    def _fail(self, key: Key, error: Exception) -> None:
        self.rows.append(results.failed(self.section.name, *key, first_line(error)))
        if isinstance(error, torch.cuda.OutOfMemoryError):
            gc.collect()
            torch.cuda.empty_cache()
        elif torch.cuda.is_available():
            try:
                torch.cuda.synchronize()
            except RuntimeError as lost:
                raise DeviceLost(f"after {key[1]} on {key[0]}: {first_line(lost)}") from error


def errors_of_small(
    section: Section, families: tuple[str, ...], device: str, makers: Callable[..., engines.Makers] = engines.makers
) -> list[results.Row]:
    """RMS errors against fp64 over ten draws of the section's small case: Raddle's, the peers', and SDPA's."""
    from raddle.bench.peers.sdpa import exact_enough

    case = section.small
    if case is None:
        return []
    found: dict[str, list[float]] = {}
    failures: dict[str, str] = {}
    for seed in range(10):
        problem = Problem(case, device, seed)
        reference = check.exact(problem, case, check.all_rows(case))
        outputs = {"torch sdpa": lambda problem=problem: exact_enough(problem, case)}
        for name, make in makers(case, problem, families):
            outputs[name] = lambda make=make: make().outcome()
        for name, compute in outputs.items():
            try:
                error_of_draw = check.error(compute(), reference)
                found.setdefault(name, []).append(error_of_draw)
            except Exception as error:  # noqa: BLE001
                failures[name] = first_line(error)
    rows = [results.failed(section.name, case.name, name, why) for name, why in failures.items()]
    for name, values in found.items():
        squares = sum(value * value for value in values) / len(values)
        row = {"section": section.name, "workload": case.name, "engine": name, "value": squares**0.5}
        rows.append({**row, "unit": "RMS error / RMS", "kind": "error"})
    ours = next((row for row in rows if row["engine"] == RADDLE and "value" in row), None)
    if ours is not None and "torch sdpa" in found:
        theirs = next(row["value"] for row in rows if row["engine"] == "torch sdpa")
        ours["ratios"] = {"torch sdpa": ours["value"] / theirs}
    return rows
