"""Shows what a long command is doing. It draws between calls only: a thread for it would disturb what is timed."""

from __future__ import annotations

from time import perf_counter
from types import TracebackType

import rich.progress
from rich.console import Console

_REDRAW_SECONDS = 0.25


class Progress:
    """A line on stderr: a bar on a terminal, else one line for each phase that begins.

    Args:
        counts: show how many steps of all are done.
    """

    def __init__(self, counts: bool = False) -> None:
        self._console = Console(stderr=True)
        columns = [rich.progress.TextColumn("{task.description}"), rich.progress.BarColumn()]
        if counts:
            columns.append(rich.progress.MofNCompleteColumn())
        self._bar = rich.progress.Progress(
            *columns,
            rich.progress.TimeElapsedColumn(),
            console=self._console,
            transient=True,
            auto_refresh=False,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)
        self._drawn = 0.0

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def say(self, text: str, total: int | None = None) -> None:
        """Begins a phase, of ``total`` steps if their number is known."""
        self._bar.reset(self._task, description=text, total=total)
        self._bar.refresh()
        if not self._console.is_terminal:
            self._console.print(f"{text} …", highlight=False)

    def advance(self, steps: int = 1) -> None:
        """So many steps more are done."""
        self._bar.advance(self._task, steps)
        if self._due():
            self._bar.refresh()

    def show(self, text: str, done: int) -> None:
        """Shows how many steps of the phase are done, for callers that count themselves."""
        if self._due():
            self._bar.update(self._task, description=text, completed=done)
            self._bar.refresh()

    def _due(self) -> bool:
        now = perf_counter()
        if now - self._drawn < _REDRAW_SECONDS:
            return False
        self._drawn = now
        return True
