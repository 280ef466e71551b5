"""Important pages (Quest): choosing them, and attention over them alone, beside attention over all pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import raddle
from raddle._progress import Progress
from raddle.bench import timing
from raddle.bench.bars import Measured
from raddle.bench.formats import Bed

#: Tokens of the one request that is decoded.
CONTEXTS = (8192, 16384, 32768, 65536)
#: The context whose gain has a bar.
BARRED = 32768
#: Pages that are kept, of `formats.PAGE` tokens.
KEPT = 64
#: Runs of a GPU that are timed as one.
_REPEATS = 20


def quest(device: str, dtype: str, rounds: int, progress: Progress) -> list[Measured]:
    """Of each context, the gain of a step over its important pages, and what choosing them takes.

    A step chooses pages, plans them and attends to them; K and V are one layer's, summarised before. On 32k tokens its
    gain on attention over all pages is at least 6. Attention alone, once pages are chosen, is set beside that on the
    shortest context (bars 0.95 and 1.05), and choosing is told a page.
    """
    found, shortest = [], 0.0
    for context in CONTEXTS:
        name = f"{KEPT} pages of {context} {dtype}"
        bed = Bed(device, dtype, 0, context, 1)
        calls = _calls(bed)
        progress.say(name, total=len(calls) * (rounds + 1))
        times = timing.interleaved(calls, rounds, tick=progress.advance)
        us = {each: timing.median(taken) / _repeats(bed) for each, taken in times.items()}
        shortest = shortest or us["attend"]
        gain = timing.speedup(times["step"], times["all"])
        bar = 6.0 if context == BARRED else None
        found.append(Measured(f"{name}: choose, plan, attend, gain on all", us["step"], gain, "x", bar, at_least=True))
        over = us["attend"] / shortest
        found.append(Measured(f"{name}: attend, over that of {CONTEXTS[0]}", us["attend"], over, "x", 1.05))
        a_page = 1e3 * us["choose"] / (context // bed.kv[0].shape[1])
        found.append(Measured(f"{name}: choose", us["choose"], a_page, "ns a page"))
    return found


def _repeats(bed: Bed) -> int:
    return 1 if bed.device == "cpu" else _REPEATS


def _calls(bed: Bed) -> dict[str, Callable[[int], None]]:
    """Attention over all pages, choosing some, attention over these, and a step of both with its plan."""
    table = raddle.PagedKV(*bed.table)
    summary = raddle.summarize_pages(table, bed.kv)
    chosen = raddle.select_pages(table, bed.q, summary, KEPT)
    plans = [bed.attention.plan(table), bed.attention.plan(chosen.layout(table))]

    def choose() -> Any:
        return raddle.select_pages(table, bed.q, summary, KEPT, out=chosen)

    def attend(plan: Any) -> None:
        bed.attention.run(plan, bed.q, bed.kv, out=bed.out)

    def repeated(call: Callable[[], Any]) -> Callable[[int], None]:
        def timed(_: int) -> None:
            for _ in range(_repeats(bed)):
                call()
            if bed.device != "cpu":
                torch.cuda.synchronize()

        return timed

    return {
        "all": repeated(lambda: attend(plans[0])),
        "choose": repeated(choose),
        "attend": repeated(lambda: attend(plans[1])),
        "step": repeated(lambda: attend(bed.attention.plan(choose().layout(table)))),
    }
