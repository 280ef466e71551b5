"""Draws the charts of docs/performance.md from bench/results, and the README's. Run by docs/conf.py.

A chart names its file in its title. A file of later measurements replaces an earlier one here, in SOURCES.

    python docs/charts.py    # refreshes docs/against-peers.svg, the README's
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE.parent / "bench" / "results"
README_CHART = HERE / "against-peers.svg"

#: Chart by name: file of results, title, section (GPU files), unit, workloads' prefix.
SOURCES = {
    "gpu_prefill": ("gpu-h200-2026-11-29-parts", "Prefill, causal, bf16, H200", "prefill", "TFLOP/s", "causal"),
    "gpu_dims": ("gpu-h200-2026-11-29-order", "Prefill, heads of other widths, H200", "prefill-dims", "TFLOP/s", "D"),
    "gpu_ragged": ("gpu-h200-2026-11-29-parts", "Prefill of ragged batches, H200", "prefill-ragged", "TFLOP/s", ""),
    "gpu_variants": ("gpu-h200-2026-11-29-parts", "Prefill with a window or a soft cap, H200", "prefill-variants", "TFLOP/s", ""),
    "gpu_flex": ("flex-h200-2026-11-27-ordered", "Masks and scores in Python, H200", "flex", "TFLOP/s", ""),
    "gpu_decode": ("gpu-h200-2026-11-28-clusters", "Decode, bf16, page 16, H200", "decode", "GB/s", ""),
    "gpu_prefix": ("gpu-h200-2026-11-28-clusters", "Decode with a shared prefix, H200", "prefix", "us", ""),
    "gpu_quest": ("gpu-h200-2026-11-28-clusters", "Selected pages (Quest), H200", "quest", "us", ""),
    "gpu_mixed": ("gpu-h200-2026-11-28-clusters", "Prefill and decode in one batch, H200, mma.sync", "mixed", "GB/s", ""),
    "gpu_rope": ("gpu-h200-2026-11-23-reservations", "Decode with RoPE fused, H200, mma.sync", "rope", "us", ""),
    "cpu_decode": ("cpu-xeon-amx-2c-2026-11-23-fifth-decode", "Decode, two cores with AMX", None, "GB/s", "decode"),
    "cpu_prefill": ("cpu-xeon-amx-2c-2026-11-23-fifth-prefill", "Prefill, two cores with AMX", None, "GFLOP/s", "prefill"),
    "cpu_flex": ("flex-cpu-xeon-amx-2c-2026-11-23-second", "FlexAttention, two cores with AMX", None, "GFLOP/s", ""),
    "cpu_zen4": ("cpu-epyc-avx512bf16-2c-2026-11-23", "Prefill, two cores of Zen 4", None, "GFLOP/s", "prefill"),
}

#: (chart, peer): the latest file with that peer, where the chart's own does not have it.
EARLIER = {("gpu_prefill", "flashinfer fa3"): "gpu-h200-2026-11-29-fa4"}

# Raddle first, then peers by name; the floor is what reading the bytes alone takes.
_COLOURS = ("#c2532f", "#4f7fb5", "#6aa57c", "#9a73a8", "#b59a3c", "#6f8f9f")
_FLOOR = "#8a8f98"

# Inches, of charts for narrow screens: text of 9 points then is about as large as that of the page.
_NARROW = 4.2


def _rows(chart: str, earlier: str = "") -> list[dict[str, Any]]:
    """The measured rows of a chart, of all engines; of an ``earlier`` file, if one is named."""
    file, _, section, unit, prefix = SOURCES[chart]
    file = earlier or file
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
    """{workload: how many times faster than one peer Raddle is}, of a GPU's chart, or of EARLIER's file."""
    rows = _rows(chart, EARLIER.get((chart, peer), ""))
    own = {row["workload"]: row for row in rows if row["engine"] == "raddle"}
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
    lines = [f"| {shown} | Raddle over the best | {' | '.join(engines)} |", "|" + " --- |" * (2 + len(engines))]
    for workload, values in found.items():
        name, times = best[workload]
        cells = [f"{values[engine]:,.0f}" if engine in values else "–" for engine in engines]
        lines.append(f"| {workload} | **{times:.2f}×** {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def ranges() -> dict[str, list[float]]:
    """{title: Raddle's ratios to the best peer} of all charts, the worst first."""
    found = {
        title: sorted(times for _, times in against_best(chart).values()) for chart, (_, title, *_) in SOURCES.items()
    }
    return dict(sorted(found.items(), key=lambda item: item[1][0]))


def range_text(ratios: list[float]) -> str:
    return f"{ratios[0]:.2f}" if ratios[-1] - ratios[0] < 0.005 else f"{ratios[0]:.2f} – {ratios[-1]:.2f}"


def draw_ranges(background: str | None = None, narrow: bool = False) -> str:
    """Every workload of every chart as a dot: how many times as fast as the best peer Raddle is.

    A narrow one, for telephones, has its labels above the dots.
    """
    found = ranges()
    figure, axes = _figure(_NARROW if narrow else 9, (0.5 if narrow else 0.29) * len(found) + 0.7, background)
    for y, (title, ratios) in enumerate(found.items()):
        colour = _COLOURS[2] if ratios[0] >= 1 else _COLOURS[0] if ratios[-1] < 1 else _COLOURS[4]
        axes.plot([ratios[0], ratios[-1]], [y, y], color=colour, linewidth=7, alpha=0.35, solid_capstyle="round")
        axes.plot(ratios, [y] * len(ratios), "o", color=colour, markersize=6)
        axes.text(3.6, y, range_text(ratios), va="center", fontsize=9)
        if narrow:
            axes.text(0.41, y - 0.22, title, va="bottom", fontsize=9)
    axes.axvline(1, color="#8a8f98", linewidth=1, zorder=0)
    axes.set_xscale("log")
    axes.set_xlim(0.4, 6.5 if narrow else 5.2)
    axes.set_xticks([0.5, 0.7, 1, 1.5, 2, 3], ["½×", "0.7×", "equal", "1.5×", "2×", "3×"])
    axes.minorticks_off()
    axes.set_yticks([] if narrow else range(len(found)), [] if narrow else list(found))
    axes.set_ylim(len(found) - 0.5, -0.8 if narrow else -0.5)
    says = "Raddle against the fastest other engine. A dot is a workload,\nfurther right is faster. "
    axes.set_title(says + "Red is always slower, green always faster.", fontsize=9 if narrow else 9.5, loc="left")
    return _svg(figure, background)


def draw(chart: str, background: str | None = None, narrow: bool = False) -> str:
    """The chart as SVG. Without a background, text and axes take the colour of the page; `narrow` as of the ranges."""
    file, title, _, unit, _ = SOURCES[chart]
    found = rows_of(chart)
    engines = _engines(found)
    peers = [name for name in engines if name not in ("raddle", "floor")]
    colour = {"raddle": _COLOURS[0], "floor": _FLOOR, **dict(zip(peers, _COLOURS[1:]))}
    above = 1.1 if narrow else 0.0  # bars' heights that a label above them takes
    height = 0.9 + 0.24 * ((len(engines) - 1) // 2 if narrow else 0)
    height += sum(0.24 * (len(values) + above) + 0.22 for values in found.values())
    figure, axes = _figure(_NARROW if narrow else 9, height, background)
    y, ticks, longest = 0.0, [], max(max(values.values()) for values in found.values())
    for workload, values in found.items():
        here = [engine for engine in engines if engine in values]
        y += above
        if narrow:
            axes.text(0, y - 0.6, workload, va="bottom", fontsize=9)
        ticks.append((y + 0.5 * (len(here) - 1), workload))
        for engine in here:
            label = None if engine in axes.get_legend_handles_labels()[1] else engine
            axes.barh(y, values[engine], height=0.86, color=colour[engine], label=label)
            axes.text(values[engine] + longest * 0.008, y, f"{values[engine]:,.0f}", va="center", fontsize=8)
            y += 1
        y += 0.9
    axes.set_yticks([] if narrow else [place for place, _ in ticks], [] if narrow else [name for _, name in ticks])
    axes.invert_yaxis()
    axes.set_xlim(0, longest * (1.2 if narrow else 1.12))
    axes.set_xlabel("microseconds, less is better" if unit == "us" else f"{unit}, more is better")
    axes.set_title(f"{title}\nbench/results/{file}.json", fontsize=9 if narrow else 10, loc="left")
    handles = dict(zip(*reversed(axes.get_legend_handles_labels())))
    names = [engine for engine in engines if engine in handles]
    columns = 2 if narrow else 4
    figure.legend([handles[name] for name in names], names, loc="outside lower center", ncols=columns, frameon=False)
    return _svg(figure, background)


def _figure(width: float, height: float, background: str | None) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor=background or "none")
    axes = figure.subplots()
    axes.set_facecolor("none")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _svg(figure: Any, background: str | None) -> str:
    """The figure as SVG, the same for the same rows. Without a background, text takes the colour of the page."""
    import matplotlib

    written = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "raddle", "svg.fonttype": "none"}):
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
    """Writes every chart to ``folder`` as a piece of HTML, wide and narrow, and its table as Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    for chart in SOURCES:
        pieces = draw(chart), draw(chart, narrow=True)
        (folder / f"{chart}.html").write_text(_html(*pieces, chart, SOURCES[chart][1]), encoding="utf-8")
        (folder / f"{chart}.md").write_text(table(chart), encoding="utf-8")
    pieces = draw_ranges(), draw_ranges(narrow=True)
    (folder / "ranges.html").write_text(_html(*pieces, "ranges", "Raddle against others"), encoding="utf-8")
    (folder / "summary.md").write_text(summary(), encoding="utf-8")


def _html(wide: str, narrow: str, name: str, title: str) -> str:
    """Both forms of a chart: the style sheet shows that which the screen has room for."""
    svgs = []
    for form, svg in (("wide", wide), ("narrow", narrow)):
        # Several are on one page: what a chart names inside of itself is its own.
        svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-{form}-", svg)
        svg = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', f'role="img" class="{form}"', svg, count=1)
        svgs.append(re.sub(r"(<svg[^>]*>)", rf"\1<title>{title}</title>", svg, count=1))
    return f'<div class="picture chart">{"".join(svgs)}</div>\n'


if __name__ == "__main__":
    README_CHART.write_text(draw_ranges(background="white"), encoding="utf-8")
