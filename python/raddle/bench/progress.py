"""Says what a benchmark is doing. It draws between calls only: a thread of its own would disturb them."""

from __future__ import annotations

from time import perf_counter
from types import TracebackType
from typing import Optional

import rich.progress
from rich.console import Console

_REDRAW_SECONDS = 0.25


class Progress:
    """A line on stderr: a bar on a terminal, else one line for each thing that is begun."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
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
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self._bar.stop()

    def say(self, text: str, total: Optional[int] = None) -> None:
        """Begins something, of ``total`` steps if their number is known."""
        self._bar.reset(self._task, description=text, total=total)
        self._bar.refresh()
        if not self._console.is_terminal:
            self._console.print(f"{text} …", highlight=False)

    def advance(self) -> None:
        """One step is done."""
        self._bar.advance(self._task)
        now = perf_counter()
        if now - self._drawn >= _REDRAW_SECONDS:
            self._drawn = now
            self._bar.refresh()
