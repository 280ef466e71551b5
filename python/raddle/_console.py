"""Where tables are printed."""

from __future__ import annotations

from rich.console import Console

#: Columns of a table that goes into a file or a pipe; a terminal has its own width.
_FILE_WIDTH = 160


def table_console() -> Console:
    """Standard output, as wide as the terminal, or wide enough for every table where there is none."""
    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=_FILE_WIDTH)
