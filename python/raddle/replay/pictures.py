"""Pictures of a replay as SVG, drawn by matplotlib, which only these need."""

from __future__ import annotations

import io
from typing import Any, Sequence

import numpy as np

from .queues import Queues
from .serving import History

_BINS = 40
_WIDTH = 11.0  # inches
_COLOURS = ("tab:blue", "tab:orange")


def require() -> None:
    """Raises ``ValueError`` where matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ValueError('--report needs matplotlib: pip install "raddle[pictures]"') from None


def distributions(history: History) -> str:
    """Of steps: their requests, rows, and times; and of each request in each step the keys that it has."""
    steps = history.steps
    clocked = [step.cost.clocked for step in steps]
    shown = (
        ("requests a step", [len(step.spans) for step in steps]),
        ("tokens a step", [sum(span.length for span in step.spans) for step in steps]),
        ("keys of a request in a step", [span.begin + span.length for step in steps for span in step.spans]),
        ("plan of a step, µs", [cost.plan_us for cost in clocked]),
        ("appends of a step, µs", [step.cost.append_us for step in steps]),
        ("attention of a step, ms", [1e-3 * cost.run_us for cost in clocked]),
    )
    figure = _figure(5.5)
    for axes, (name, values) in zip(figure.subplots(2, 3).flat, shown):
        axes.hist(values, bins=_bins(values), log=True)
        axes.set(xlabel=name)
        axes.margins(x=0.02)
    return _svg(figure)


def cache(history: History, num_pages: int, page_size: int, has_prefixes: bool) -> str:
    """Pages of the pool over the clock, at each step's end; with a prefix cache what it keeps and evicts."""
    steps = history.steps
    clock = [step.end for step in steps]
    figure = _figure(3.5)
    axes = figure.subplots()

    def draw(values: Sequence[int], label: str, **how: Any) -> None:
        # What a step left stays as it is until the next one's end.
        axes.step(clock, values, where="post", label=label, **how)

    draw([step.pages_in_use for step in steps], "in use")
    if has_prefixes:
        draw([step.idle_pages for step in steps], "of these, cached and held by no request")
        draw([step.shared_pages for step in steps], "read by several requests of a step")
        draw([step.evicted_tokens // page_size for step in steps], "evicted so far", color="tab:red", ls="--")
    axes.axhline(num_pages, color="grey", ls=":", label=f"the pool's {num_pages:,}")
    axes.set(xlabel="clock, s", ylabel="pages", ylim=(0, None))
    tokens = axes.secondary_yaxis("right", functions=(lambda p: p * page_size, lambda t: t / page_size))
    tokens.set_ylabel("tokens that these hold")
    axes.legend(loc="best")
    return _svg(figure)


def gantt(queues: Queues) -> str:
    """A line a worker, and the step's runs one after another."""
    workers = 1 + max((bar.worker for run in queues.runs for bar in run.bars), default=0)
    figure = _figure(min(30.0, 1.5 + 0.16 * workers))
    axes = figure.subplots()
    begin = 0.0
    for number, run in enumerate(queues.runs):
        if run.bars:
            worker, left, us = (np.array(values) for values in zip(*run.bars))
            colour = _COLOURS[number % len(_COLOURS)]
            axes.barh(worker, us, left=begin + left, height=0.8, color=colour, edgecolor="white", linewidth=0.3)
            axes.annotate(f"layer {run.layer}", (begin, -0.6), fontsize="small", color=colour, annotation_clip=False)
        begin += run.us
    axes.set(xlabel="µs", ylabel="worker", xlim=(0, None), ylim=(workers - 0.5, -0.5))
    axes.yaxis.get_major_locator().set_params(integer=True)
    return _svg(figure)


def _bins(values: Sequence[float]) -> Any:
    """Equal ones; of few whole numbers one for each."""
    if all(isinstance(value, int) for value in values) and values and max(values) - min(values) < _BINS:
        return np.arange(min(values), max(values) + 2) - 0.5
    return _BINS


def _figure(height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(_WIDTH, height), layout="constrained")


def _svg(figure: Any) -> str:
    """The element alone: without a declaration and metadata, which have no place inside a page."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text: smaller, and found by a search
        none = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", metadata=none)
    return text.getvalue()[text.getvalue().index("<svg") :]
