"""Draws the charts of docs/performance.md from bench/results, and the README's. Run by docs/conf.py.

A chart names its file in its title. A file of later measurements replaces an earlier one here, in SOURCES.

    python docs/charts.py    # refreshes docs/decode-h200.svg, the README's
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE.parent / "bench" / "results"
README_CHART = HERE / "decode-h200.svg"

#: Chart by name: file of results, title, section (GPU files), unit, workloads' prefix.
SOURCES = {
    "gpu_prefill": ("gpu-h200-2026-11-23-reservations", "Prefill, causal, bf16, H200", "prefill", "TFLOP/s", "causal"),
    "gpu_decode": ("gpu-h200-2026-11-23-reservations", "Decode, bf16, page 16, H200", "decode", "GB/s", ""),
    "gpu_mixed": ("gpu-h200-2026-11-23-reservations", "Prefill and decode in one batch, H200", "mixed", "GB/s", ""),
    "gpu_prefix": ("gpu-h200-2026-11-23-reservations", "Decode with a shared prefix, H200", "prefix", "us", ""),
    "gpu_quest": ("gpu-h200-2026-11-23-reservations", "Selected pages (Quest), H200", "quest", "us", ""),
    "gpu_rope": ("gpu-h200-2026-11-23-reservations", "Decode with RoPE fused, H200", "rope", "us", ""),
    "gpu_ragged": ("gpu-h200-2026-11-22-prefill", "Prefill of ragged batches, H200", "prefill-ragged", "TFLOP/s", ""),
    "gpu_prefill_others": ("gpu-h200-2026-11-21", "Prefill beside cuDNN and FlashAttention-2, H200, earlier kernels", "prefill", "TFLOP/s", "causal"),
    "gpu_decode_others": ("gpu-h200-2026-11-21", "Decode beside cuDNN and FlashAttention-2, H200, earlier kernels", "decode", "GB/s", ""),
    "cpu_decode": ("cpu-xeon-amx-2c-2026-11-23-fifth-decode", "Decode, two cores with AMX", None, "GB/s", "decode"),
    "cpu_prefill": ("cpu-xeon-amx-2c-2026-11-23-fifth-prefill", "Prefill, two cores with AMX", None, "GFLOP/s", "prefill"),
    "cpu_flex": ("flex-cpu-xeon-amx-2c-2026-11-23-second", "FlexAttention, two cores with AMX", None, "GFLOP/s", ""),
    "cpu_zen4": ("cpu-epyc-avx512bf16-2c-2026-11-23", "Prefill, two cores of Zen 4", None, "GFLOP/s", "prefill"),
}

# Raddle first, then peers by name; the floor is what reading the bytes alone takes.
_COLOURS = ("#c2532f", "#4f7fb5", "#6aa57c", "#9a73a8", "#b59a3c", "#6f8f9f")
_FLOOR = "#8a8f98"


def _rows(chart: str) -> list[dict[str, Any]]:
    """The measured rows of a chart, of all engines."""
    file, _, section, unit, prefix = SOURCES[chart]
    read = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))
    rows = read if isinstance(read, list) else read["rows"]
    rows = _of_flex(rows) if file.startswith("flex-cpu") else rows
    return [
        row
        for row in rows
        if row.get("section") == section and row["workload"].startswith(prefix) and row.get("us")
        if (unit == "us" or row["unit"] == unit) and row.get("kind") != "error"
        if not row["engine"].startswith("raddle bf16")  # set against another page size, not against a peer
    ]


def _of_flex(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of `raddle bench flex-cpu`, which name the engine behind the workload, as those of the other commands."""
    values = {row["workload"]: row["value"] for row in rows}
    found = []
    for row in rows:
        workload, _, engine = row["workload"].rpartition(", ")
        if engine in ("raddle traced", "torch flex"):
            ratio = {"ratio": values[f"{workload}, traced × PyTorch"]} if engine != "torch flex" else {}
            found.append({**row, "workload": workload, "engine": engine.replace(" traced", ""), "us": 1, **ratio})
    return found


def rows_of(chart: str) -> dict[str, dict[str, float]]:
    """{workload: {engine: value}} of a chart, in the order of its file; workloads without a peer are left out."""
    found: dict[str, dict[str, float]] = {}
    for row in _rows(chart):
        value = row["us"] if SOURCES[chart][3] == "us" else row["value"]
        found.setdefault(row["workload"], {})[row["engine"]] = value
    return {name: values for name, values in found.items() if "raddle" in values and set(values) - {"raddle", "floor"}}


def against_best(chart: str) -> dict[str, tuple[str, float]]:
    """{workload: (the fastest engine beside Raddle, how many times faster Raddle is)}.

    The ratio is the file's: the median of the rounds' own ratios, which two medians' quotient may differ from.
    """
    own = {row["workload"]: row for row in _rows(chart) if row["engine"] == "raddle"}
    found = {}
    for workload, values in rows_of(chart).items():
        peers = {name: value for name, value in values.items() if name not in ("raddle", "floor")}
        best = (min if SOURCES[chart][3] == "us" else max)(peers, key=peers.__getitem__)
        ratios = own[workload].get("ratios") or {best: own[workload]["ratio"]}
        found[workload] = best, ratios[best]
    return found


def against(chart: str, peer: str) -> dict[str, float]:
    """{workload: how many times faster than one peer Raddle is}, of a GPU's chart."""
    own = {row["workload"]: row for row in _rows(chart) if row["engine"] == "raddle"}
    return {workload: row["ratios"][peer] for workload, row in own.items() if peer in row.get("ratios", {})}


def summary() -> str:
    """Markdown: the range of Raddle's ratios to the best peer in every chart, the worst first."""
    lines = ["| what, in the order of its worst result | against the best of | Raddle is … times as fast |", "| --- | --- | --- |"]
    ranges = []
    for chart, (_, title, *_) in SOURCES.items():
        found = against_best(chart).values()
        engines = ", ".join(sorted({name for name in _engines(rows_of(chart)) if name not in ("raddle", "floor")}))
        ranges.append((min(times for _, times in found), max(times for _, times in found), title, engines))
    for least, most, title, engines in sorted(ranges):
        lines.append(f"| {title} | {engines} | **{least:.2f}**{f' to {most:.2f}' if most - least > 0.005 else ''} |")
    return "\n".join(lines) + "\n"


def table(chart: str) -> str:
    """Markdown: every workload with every engine, and Raddle against the best of the others."""
    found, unit = rows_of(chart), SOURCES[chart][3]
    engines, best = _engines(found), against_best(chart)
    shown = "µs" if unit == "us" else unit
    lines = [f"| {shown} | {' | '.join(engines)} | Raddle against the best |", "|" + " --- |" * (2 + len(engines))]
    for workload, values in found.items():
        name, times = best[workload]
        cells = [f"{values[engine]:,.0f}" if engine in values else "–" for engine in engines]
        lines.append(f"| {workload} | {' | '.join(cells)} | **{times:.2f}×** {name} |")
    return "\n".join(lines) + "\n"


def draw(chart: str, background: str | None = None) -> str:
    """The chart as SVG. Without a background, text and axes take the colour of the page."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib.figure import Figure

    file, title, _, unit, _ = SOURCES[chart]
    found = rows_of(chart)
    engines = _engines(found)
    peers = [name for name in engines if name not in ("raddle", "floor")]
    colour = {"raddle": _COLOURS[0], "floor": _FLOOR, **dict(zip(peers, _COLOURS[1:]))}
    height = 0.9 + sum(0.24 * len(values) + 0.22 for values in found.values())
    with matplotlib.rc_context({"svg.hashsalt": "raddle", "svg.fonttype": "none", "font.size": 10}):
        figure = Figure(figsize=(9, height), layout="constrained", facecolor=background or "none")
        axes = figure.subplots()
        axes.set_facecolor("none")
        y, ticks, longest = 0.0, [], max(max(values.values()) for values in found.values())
        for workload, values in found.items():
            here = [engine for engine in engines if engine in values]
            ticks.append((y + 0.5 * (len(here) - 1), workload))
            for engine in here:
                label = None if engine in axes.get_legend_handles_labels()[1] else engine
                axes.barh(y, values[engine], height=0.86, color=colour[engine], label=label)
                axes.text(values[engine] + longest * 0.008, y, f"{values[engine]:,.0f}", va="center", fontsize=8)
                y += 1
            y += 0.9
        axes.set_yticks([place for place, _ in ticks], [name for _, name in ticks])
        axes.invert_yaxis()
        axes.set_xlim(0, longest * 1.12)
        axes.set_xlabel("microseconds, less is better" if unit == "us" else f"{unit}, more is better")
        axes.set_title(f"{title}\nbench/results/{file}.json", fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        handles = dict(zip(*reversed(axes.get_legend_handles_labels())))
        names = [engine for engine in engines if engine in handles]
        figure.legend([handles[name] for name in names], names, loc="outside lower center", ncols=4, frameon=False)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    svg = written.getvalue()
    svg = svg[svg.index("<svg") :]
    if background is None:
        svg = svg.replace("#000000", "currentColor")
        svg = re.sub(r"<text ", '<text fill="currentColor" ', svg)
    return svg


def _engines(found: dict[str, dict[str, Any]]) -> list[str]:
    names = {name: None for values in found.values() for name in values}
    peers = sorted(name for name in names if name not in ("raddle", "floor"))
    return [name for name in ("raddle", *peers, "floor") if name in names]


def draw_all(folder: Path) -> None:
    """Writes every chart to ``folder`` as a piece of HTML, and its table as Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, chart in enumerate(SOURCES):
        # Several on one page: what a chart names inside of itself is its own.
        svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{chart}-", draw(chart))
        svg = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'role="img"', svg, count=1)
        label = f"<title>{SOURCES[chart][1]}</title>"
        svg = re.sub(r"(<svg[^>]*>)", rf"\1{label}", svg, count=1)
        (folder / f"{chart}.html").write_text(f'<div class="picture chart">{svg}</div>\n', encoding="utf-8")
        (folder / f"{chart}.md").write_text(table(chart), encoding="utf-8")
    (folder / "summary.md").write_text(summary(), encoding="utf-8")


if __name__ == "__main__":
    README_CHART.write_text(draw("gpu_decode", background="white"), encoding="utf-8")
