"""The progress bar of a replay. It draws between steps only: a thread of its own would take time from them."""

from __future__ import annotations

from time import perf_counter
from types import TracebackType

import rich.progress
from rich.console import Console

from .serving import History

_REDRAW_SECONDS = 0.2


class Progress:
    """Requests done of all, steps, and what the clock says."""

    def __init__(self, num_requests: int) -> None:
        self.bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            auto_refresh=False,
        )
        self.task = self.bar.add_task("serving", total=num_requests)
        self.drawn = 0.0

    def __enter__(self) -> Progress:
        self.bar.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.bar.__exit__(kind, error, where)

    def on_step(self, history: History) -> None:
        now = perf_counter()
        if now - self.drawn < _REDRAW_SECONDS:
            return
        self.drawn = now
        batch = len(history.steps[-1].spans)
        self.say(
            f"step {len(history.steps):,}, {batch} running, clock {history.seconds:.1f} s, requests",
            done=len(history.finished),
        )

    def say(self, text: str, done: int | None = None) -> None:
        self.bar.update(self.task, description=text, completed=done)
        self.bar.refresh()
