"""Pictures of a replay as SVG, drawn by matplotlib, which only these need."""

from __future__ import annotations

import io
from typing import Any, Iterator, Sequence

import numpy as np

from .queues import Queues
from .serving import History

_BINS = 30
_WIDTH = 6.4  # inches: text stays legible where a telephone shows it
_SMALL = (4.2, 2.6)
_COLOURS = ("tab:blue", "tab:orange")


def require() -> None:
    """Raises ``ValueError`` where matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ValueError('--report needs matplotlib: pip install "/path/to/raddle[pictures]"') from None


def distributions(history: History) -> Iterator[tuple[str, str]]:
    """Names and pictures: requests, rows and times of steps, and the keys of each request in each step."""
    steps = history.steps
    clocked = [step.cost.clocked for step in steps]
    keys = [span.begin + span.length for step in steps for span in step.spans]
    for name, unit, counted, values in (
        ("Requests in a step", "requests", "steps", [len(step.spans) for step in steps]),
        ("Query rows in a step", "rows", "steps", [sum(span.length for span in step.spans) for step in steps]),
        ("Keys of a request in a step", "keys", "requests in steps", keys),
        ("Attention of a step, all layers", "", "steps", [cost.run_us for cost in clocked]),
        ("New keys and values of a step", "", "steps", [step.cost.append_us for step in steps]),
        ("Planning of a step", "", "steps", [cost.plan_us for cost in clocked]),
    ):
        if not unit:
            scale, unit = _time_unit(max(values))
            values = [us / scale for us in values]
        figure = _figure(*_SMALL)
        axes = _axes(figure)
        axes.hist(values, bins=_bins(values), log=True)
        axes.set(xlabel=unit, ylabel=counted)
        axes.set_ylim(bottom=0.7)  # so that a count of 1 shows
        axes.xaxis.get_major_locator().set_params(integer=all(isinstance(value, int) for value in values), min_n_ticks=1)
        axes.yaxis.set_minor_formatter("")
        axes.margins(x=0.02)
        yield name, _svg(figure)


def cache(history: History, num_pages: int, page_size: int, has_prefixes: bool) -> str:
    """Pages of the pool over the clock, at each step's end; with a prefix cache what it keeps and evicts."""
    steps = history.steps
    clock = [step.end for step in steps]
    figure = _figure(_WIDTH, 3.0)
    axes = _axes(figure)

    def draw(values: Sequence[int], label: str, **how: Any) -> None:
        # What a step left stays as it is until the next one's end.
        axes.step(clock, values, where="post", label=label, **how)

    draw([step.pages_in_use for step in steps], "in use")
    if has_prefixes:
        draw([step.idle_pages for step in steps], "of these: cached, and no request uses them")
        draw([step.shared_pages for step in steps], "read by several requests of a step")
        draw([step.evicted_tokens // page_size for step in steps], "evicted so far", color="tab:red", ls="--")
    axes.axhline(num_pages, color="grey", ls=":", label=f"size of the pool: {num_pages:,}")
    axes.set(xlabel="replay's clock, s", ylabel="pages", ylim=(0, None))
    tokens = axes.secondary_yaxis("right", functions=(lambda p: p * page_size, lambda t: t / page_size))
    tokens.set_ylabel("tokens that fit into them")
    _legend(figure, axes)
    return _svg(figure)


def gantt(queues: Queues) -> str:
    """A line a worker, and the step's runs one after another."""
    workers = 1 + max((bar.worker for run in queues.runs for bar in run.bars), default=0)
    scale, unit = _time_unit(sum(run.us for run in queues.runs))
    figure = _figure(_WIDTH, min(30.0, 1.6 + 0.16 * workers))
    axes = _axes(figure)
    begin = 0.0
    for number, run in enumerate(queues.runs):
        if run.bars:
            worker, left, us = (np.array(values) for values in zip(*run.bars))
            place = {"left": (begin + left) / scale, "height": 0.8, "color": _COLOURS[number % len(_COLOURS)]}
            axes.barh(worker, us / scale, edgecolor="white", linewidth=0.3, label=_layers(queues, number), **place)
        begin += run.us
    axes.set(xlabel=f"time since the step's attention began, {unit}", ylabel="worker")
    axes.set(xlim=(0, None), ylim=(workers - 0.5, -0.5))
    axes.yaxis.get_major_locator().set_params(integer=True)
    _legend(figure, axes)
    return _svg(figure)


def _layers(queues: Queues, number: int) -> str | None:
    """What the legend says of a run's colour, which every other run has; None: it was said."""
    layers = [run.layer for run in queues.runs[number :: len(_COLOURS)]]
    if number >= len(_COLOURS):
        return None
    shown = ", ".join(map(str, layers[:3])) + (" …" if len(layers) > 3 else "")
    return f"layer {shown}" if len(layers) == 1 else f"layers {shown}"


def _time_unit(us: float) -> tuple[float, str]:
    """Microseconds to the unit, and its name, in which numbers stay short."""
    return (1e6, "s") if us >= 2e6 else (1e3, "ms") if us >= 2e3 else (1.0, "µs")


def _bins(values: Sequence[float]) -> Any:
    """Equal ones; of few whole numbers one for each."""
    if all(isinstance(value, int) for value in values) and values and max(values) - min(values) < _BINS:
        return np.arange(min(values), max(values) + 2) - 0.5
    return _BINS


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _axes(figure: Any) -> Any:
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(alpha=0.3)
    return axes


def _legend(figure: Any, axes: Any) -> None:
    """Above the axes, where it hides nothing."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=2, frameon=False)


def _svg(figure: Any) -> str:
    """The element alone: without a declaration and metadata, which have no place inside a page."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text: smaller, and found by a search
        none = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", metadata=none)
    return text.getvalue()[text.getvalue().index("<svg") :]
