"""What was measured: single figures with their bars, and rows of JSON files, plain values that pass between processes
and into tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from raddle.bench import timing
from raddle.bench.engines import RADDLE, family, first_line
from raddle.bench.gpu.cases import Case

FLOOR = "floor"
Row = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """``value`` in ``unit``; ``us`` is the time behind it, if there is one."""

    name: str
    us: Optional[float]
    value: float
    unit: str
    bar: Optional[float] = None  #: the most that the value may be
    at_least: bool = False  #: or, if this is set, the least
    engine: str = RADDLE
    ratios: Mapping[str, float] = field(default_factory=dict)  #: to other engines

    @property
    def met(self) -> Optional[bool]:
        """Whether the value keeps its bar; None where there is none."""
        if self.bar is None:
            return None
        return self.value >= self.bar if self.at_least else self.value <= self.bar

    @classmethod
    def of(cls, row: Row) -> Measured:
        """A row of `figure`, or of an engine on a workload without its bars."""
        bar, ratios = row.get("bar"), row.get("ratios", {})
        return cls(row["workload"], row.get("us"), row["value"], row["unit"], bar, engine=row["engine"], ratios=ratios)


def measured(section: str, case: Case, engine: str, rounds: Sequence[float], error: float | None) -> Row:
    """An engine's microseconds in each round; ``error``: RMS against fp64, of the sampled rows."""
    us = timing.median(rounds)
    value = case.bytes_read / us / 1e3 if engine == FLOOR else case.rate(us)
    unit = "GB/s" if engine == FLOOR else case.unit
    row = {"section": section, "workload": case.name, "engine": engine, "us": us, "value": value, "unit": unit}
    return {**row, "error": error, "rounds": [round(each, 3) for each in rounds]}


def failed(section: str, workload: str, engine: str, reason: str) -> Row:
    """An engine, or all of them, that could not be measured."""
    return {"section": section, "workload": workload, "engine": engine, "failed": reason}


def figure(section: str, workload: str, value: float, unit: str, bar: float | None = None, **more: Any) -> Row:
    """A single figure of Raddle's; ``bar``: the most that it may be."""
    row = {"section": section, "workload": workload, "engine": RADDLE, "value": value, "unit": unit, **more}
    return row if bar is None else {**row, "bar": bar, "met": value <= bar}


def of_parts(section: str, parts: Mapping[str, Callable[[], list[Row]]]) -> list[Row]:
    """Rows of all parts; a part that fails is a row that says so."""
    rows: list[Row] = []
    for name, part in parts.items():
        try:
            rows += part()
        except Exception as error:  # noqa: BLE001
            rows.append(failed(section, name, RADDLE, first_line(error)))
    return rows


def compared(cases: Sequence[Case], rows: Sequence[Row]) -> list[Row]:
    """The rows, those of Raddle with ``ratios``: how many times faster than each engine of the same workload, the
    share of the floor's rate, and ("versus") of the rate of the case that it is set against. ``met``: which
    of the case's targets are."""
    times = {(row["workload"], row["engine"]): row["rounds"] for row in rows if "rounds" in row}
    by_name = {case.name: case for case in cases}
    found = []
    for row in rows:
        case = by_name.get(row["workload"])
        if row["engine"] == RADDLE and "rounds" in row and case is not None:
            ratios = _ratios(case, by_name, times)
            row = {**row, "ratios": ratios, "met": met(case.at_least, ratios)}
        found.append(row)
    return found


def _ratios(
    case: Case, cases: Mapping[str, Case], times: Mapping[tuple[str, str], Sequence[float]]
) -> dict[str, float]:
    ours = times[case.name, RADDLE]
    ratios = {
        engine: timing.speedup(ours, theirs)
        for (workload, engine), theirs in times.items()
        if workload == case.name and engine != RADDLE
    }
    base = times.get((case.versus, RADDLE))
    if base is not None:
        # Decodes are set against one that reads the same keys, whatever its format: time counts. Masks keep
        # different numbers of pairs: the rate counts.
        work = 1.0 if case.unit == "GB/s" else case.flops / cases[case.versus].flops
        ratios["versus"] = work * timing.speedup(ours, base)
    return ratios


def best(ratios: Mapping[str, float], name: str) -> float | None:
    """The ratio to an engine, or the least one to the engines of a family; None where none was measured."""
    fitting = [ratio for engine, ratio in ratios.items() if engine == name or family(engine) == name]
    return min(fitting) if fitting else None


def met(at_least: Mapping[str, float], ratios: Mapping[str, float]) -> dict[str, bool]:
    """Which targets are met; those whose engine was not measured are left out."""
    found = {name: best(ratios, name) for name in at_least}
    return {name: ratio >= at_least[name] for name, ratio in found.items() if ratio is not None}


def raddle_failed(rows: Sequence[Row]) -> bool:
    """Whether Raddle itself failed somewhere; missed targets are no failure."""
    return any("failed" in row and row["engine"] in (RADDLE, "all") for row in rows)
