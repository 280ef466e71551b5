"""A table of a report before it is a table of the terminal or of a page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

from rich.markup import escape
from rich.table import Table


@dataclass
class Sheet:
    """Plain text in rows of cells."""

    title: str
    columns: Sequence[str]
    """Their names; the first column is aligned to the left, those named in `numbers` to the right."""
    sections: Sequence[Sequence[Sequence[str]]]
    """Rows that belong together; between sections is a line."""
    numbers: int = 0
    """How many columns after the first one hold numbers."""
    note: str = ""
    """What the figures mean."""

    def rich(self) -> Table:
        """For the terminal."""
        # What a trace is called may look like markup.
        table = Table(title=escape(self.title), caption=escape(self.note), title_justify="left", caption_justify="left")
        for number, name in enumerate(self.columns):
            table.add_column(name, justify="right" if 0 < number <= self.numbers else "left")
        for section in self.sections:
            for row in section:
                table.add_row(*map(escape, row))
            table.add_section()
        return table
