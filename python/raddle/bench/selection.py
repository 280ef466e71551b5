"""Important pages (Quest): choosing them, and attention over them alone, beside attention over all pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import raddle
from raddle._progress import Progress
from raddle.bench import timing
from raddle.bench.bars import Measured
from raddle.bench.formats import PAGE, Bed

#: Tokens of the one request that is decoded.
CONTEXTS = (8192, 16384, 32768, 65536)
#: The context whose gain has a bar.
BARRED = 32768
#: Pages that are kept, of `formats.PAGE` tokens.
KEPT = 64


def quest(device: str, dtype: str, rounds: int, progress: Progress) -> list[Measured]:
    """Of each context, the gain of a step over its important pages, and what choosing them takes.

    A step chooses pages, plans them and attends to them; K and V are one layer's, summarised before. On 32k tokens its
    gain on attention over all pages is at least 6. Attention alone, once pages are chosen, is set beside that on the
    shortest context (bar 1.05), and choosing is told a page.
    """
    found, shortest = [], 0.0
    for context in CONTEXTS:
        name = f"{KEPT} pages of {context} {dtype}"
        bed = Bed(device, dtype, 0, context, 1)
        calls = _calls(bed)
        progress.say(name, total=len(calls) * (rounds + 1))
        times = timing.on_device(device, calls, rounds, progress.advance)
        us = {each: timing.median(taken) for each, taken in times.items()}
        shortest = shortest or us["attend"]
        gain = timing.speedup(times["step"], times["all"])
        bar = 6.0 if context == BARRED else None
        found.append(Measured(f"{name}: choose, plan, attend, gain on all", us["step"], gain, "x", bar, at_least=True))
        over = us["attend"] / shortest
        found.append(Measured(f"{name}: attend, over that of {CONTEXTS[0]}", us["attend"], over, "x", 1.05))
        a_page = 1e3 * us["choose"] / (context // PAGE)
        found.append(Measured(f"{name}: choose", us["choose"], a_page, "ns a page"))
    return found


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
