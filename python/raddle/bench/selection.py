"""Important pages (Quest) on a CPU: choosing them, and attention over them alone, beside attention over all pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import raddle
from raddle._progress import Progress
from raddle.bench import timing
from raddle.bench.results import Measured
from raddle.bench.formats import PAGE, Bed

#: Tokens of the one request that is decoded.
CONTEXTS = (8192, 16384, 32768, 65536)
#: The context whose gain has a bar.
BARRED = 32768
#: Pages that are kept, of `formats.PAGE` tokens.
KEPT = 64
#: Beds of each context, a layer each: a short call is timed in a step of them, as `timing.HostClock` says.
LAYERS = 4
_KINDS = ("all", "choose", "attend", "step")


def quest(dtype: str, rounds: int, progress: Progress) -> list[Measured]:
    """Of each context, the gain of a step over its important pages, and what choosing them takes.

    A step chooses pages, plans them and attends to them; K and V were summarised before, and times are a layer's. On
    32k tokens its gain on attention over all pages is at least 6. Attention alone, once pages are chosen, is set beside
    that on the shortest context (bar 1.05), and choosing is told a page. All contexts take turns in the same rounds.
    """
    times = _times(dtype, rounds, progress)
    found = []
    for context in CONTEXTS:
        name = f"{KEPT} pages of {context} {dtype}"
        every, choose, attend, step = (times[f"{kind} {context}"] for kind in _KINDS)
        us, gain = timing.median(step), timing.speedup(step, every)
        bar = 6.0 if context == BARRED else None
        found.append(Measured(f"{name}: choose, plan, attend, gain on all", us, gain, "x", bar, at_least=True))
        us, over = timing.median(attend), 1 / timing.speedup(attend, times[f"attend {CONTEXTS[0]}"])
        found.append(Measured(f"{name}: attend, over that of {CONTEXTS[0]}", us, over, "x", 1.05))
        us = timing.median(choose)
        found.append(Measured(f"{name}: choose", us, 1e3 * us / (context // PAGE), "ns a page"))
    return found


def _times(dtype: str, rounds: int, progress: Progress) -> dict[str, list[float]]:
    """Microseconds a layer of each kind of call on each context; the contexts of a kind stand side by side."""
    progress.say(f"{KEPT} pages {dtype}: filling pools")
    beds = {context: [_calls(Bed("cpu", dtype, 0, context, 1)) for _ in range(LAYERS)] for context in CONTEXTS}
    calls = {
        f"{kind} {context}": lambda step, kind=kind, context=context: beds[context][step % LAYERS][kind]()
        for kind in _KINDS
        for context in CONTEXTS
    }
    progress.say(f"{KEPT} pages {dtype}: timing", total=len(calls) * (rounds + 1))
    return timing.HostClock(LAYERS).rounds(calls, rounds, progress.advance)


def _calls(bed: Bed) -> dict[str, Callable[[], Any]]:
    """Attention over all pages, choosing some, attention over these, and a step of both with its plan."""
    table = raddle.PagedKV(*bed.table)
    summary = raddle.summarize_pages(table, bed.kv)
    chosen = raddle.select_pages(table, bed.q, summary, KEPT)
    plans = [bed.attention.plan(table), bed.attention.plan(chosen.layout(table))]

    def choose() -> raddle.SelectedPages:
        return raddle.select_pages(table, bed.q, summary, KEPT, out=chosen)

    return {
        "all": lambda: bed.run(plans[0]),
        "choose": choose,
        "attend": lambda: bed.run(plans[1]),
        "step": lambda: bed.run(bed.attention.plan(choose().layout(table))),
    }
