"""The page of `raddle replay --report`: the table and pictures of a run, in one file that asks for no other."""

from __future__ import annotations

import html
import io
from pathlib import Path
from string import Template
from typing import Any

from rich.console import Console

from . import pictures, report
from .queues import Queues
from .serving import History

_COLUMNS = 110  # of the tables, in letters
_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>$title</title>
<style>
body { font-family: sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em; }
pre { overflow-x: auto; line-height: 1.25; }
svg { width: 100%; height: auto; }
</style>
</head>
<body>
<h1>$title</h1>
$sections
</body>
</html>
""")
_SECTION = Template("<h2>$heading</h2>\n<p>$text</p>\n$content")


def write(path: Path, result: dict[str, Any], history: History, queues: Queues | None) -> None:
    """Writes what `cli.replay` reports of a run, and its pictures.

    Args:
        path: of the page; UTF-8.
        result: the report.
        history: what the replay did.
        queues: of the step to show; None: no step was watched.
    """
    title = f"raddle replay: {result['trace']}, {result['config']['model']} on {result['config']['device']}"
    sections = [_section("Summary", "", _tables(result))]
    if history.steps:
        pool, has_prefixes = result["pool"], result["config"]["prefix_cache"]
        sections += [
            _section(
                "Distributions", "How often each value came, on a logarithmic scale.", pictures.distributions(history)
            ),
            _section(
                "Cache",
                "The pool over the clock.",
                pictures.cache(history, pool["pages"], pool["page_size"], has_prefixes),
            ),
        ]
    if queues:
        explained = "\n".join(dict.fromkeys(run.explained for run in queues.runs))
        sections.append(
            _section("Work queues", _said_of(queues, result), f"{pictures.gantt(queues)}\n{_text(explained)}")
        )
    path.write_text(_PAGE.substitute(title=html.escape(title), sections="\n".join(sections)), encoding="utf-8")


def _said_of(queues: Queues, result: dict[str, Any]) -> str:
    has_items = result["config"]["device"] != "cpu"
    watched = "the steps with a timeline" if has_items else "all steps"
    bar = "A bar is a work item" if has_items else "A bar is all that a worker did in a layer's run"
    return (
        f"Step {queues.step:,}, whose runs took longest of {watched}: {queues.run_us:,.0f} µs for all its layers. "
        f"{bar}, as measured; white to a run's end is time lost. Below, what the plans say of themselves."
    )


def _section(heading: str, text: str, content: str) -> str:
    return _SECTION.substitute(heading=html.escape(heading), text=html.escape(text), content=content)


def _text(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"


def _tables(result: dict[str, Any]) -> str:
    """As on the terminal."""
    console = Console(record=True, file=io.StringIO(), width=_COLUMNS, force_terminal=True)
    console.print(*report.tables(result), sep="\n")
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
