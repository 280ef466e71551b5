"""The page of `raddle replay --report`: tables and pictures of a run, in one file that loads nothing else.

Everything that comes from outside (names of traces above all) is escaped where it becomes HTML.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from string import Template
from typing import Any, Sequence

from raddle._explain import WORDS

from . import pictures, report
from .queues import Queues
from .serving import History
from .sheet import Sheet

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 70rem; margin: 1.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ccc; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0 0.3rem; }
th, td { text-align: left; vertical-align: top; padding: 0.25rem 0.9rem 0.25rem 0; }
th { border-bottom: 2px solid #888; }
tbody + tbody tr:first-child td { border-top: 1px solid #ccc; }
td.number, th.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.detail { padding-left: 1.2rem; }
.note { color: #555; font-size: 0.9rem; max-width: 46rem; }
figure { margin: 1rem 0; }
figcaption { font-weight: 600; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); gap: 0 1.5rem; }
svg { display: block; width: 100%; height: auto; }
.wide > svg { min-width: 22rem; max-width: 54rem; }
</style>
</head>
<body>
<h1>$title</h1>
$sections
</body>
</html>
""")


def write(path: Path, result: dict[str, Any], history: History, queues: Queues | None) -> None:
    """Writes what `cli.replay` reports of a run, and its pictures.

    Args:
        path: of the page; UTF-8.
        result: the report.
        history: what the replay did.
        queues: of the step to show; None: no step was watched.
    """
    # The first one's title is the page's.
    tables = [_table(sheet, has_title=number > 0) for number, sheet in enumerate(report.sheets(result))]
    sections = [_section("Summary", *tables, *map(_note, report.conditions(result)))]
    if history.steps:
        sections += [_distributions(history), _cache(history, result)]
    if queues:
        sections.append(_queues(queues, result))
    title = f"raddle replay: {report.headline(result)}"
    path.write_text(_PAGE.substitute(title=escape(title), sections="\n".join(sections)), encoding="utf-8")


def _distributions(history: History) -> str:
    drawn = pictures.distributions(history)
    figures = (f"<figure><figcaption>{escape(name)}</figcaption>{svg}</figure>" for name, svg in drawn)
    text = "How many steps, or requests in steps, had each value. The scale of counts is logarithmic: rare values show."
    return _section("Distributions", _note(text), f'<div class="grid">{"".join(figures)}</div>')


def _cache(history: History, result: dict[str, Any]) -> str:
    pool, has_prefixes = result["pool"], result["config"]["prefix_cache"]
    svg = pictures.cache(history, pool["pages"], pool["page_size"], has_prefixes)
    text = f"Pages of the KV pool over the replay's clock; a page holds {pool['page_size']} tokens."
    return _section("KV cache", _note(text), _wide(svg))


def _queues(queues: Queues, result: dict[str, Any]) -> str:
    has_items = result["config"]["device"] != "cpu"
    watched = "the steps that a timeline watched" if has_items else "all steps"
    bar = "A bar is one work item" if has_items else "A bar is all the work of a worker in one layer"
    text = (
        f"Step {queues.step:,}: of {watched} the one whose attention took longest. {bar}, as measured. White space "
        "between a bar and the end of its layer is time that the worker waited for the others."
    )
    lines = dict.fromkeys(line for run in queues.runs for line in run.explained.splitlines() if line)
    rows = [list(line.partition(": ")[::2]) if ": " in line else ["", line] for line in lines]
    plan = Sheet("How this step was planned", ("", ""), [rows])
    return _section("Workers", _note(text), _wide(pictures.gantt(queues)), _table(plan), _note(WORDS))


def _section(heading: str, *contents: str) -> str:
    return "\n".join([f"<h2>{escape(heading)}</h2>", *contents])


def _note(text: str) -> str:
    return f'<p class="note">{escape(text.strip())}</p>'


def _wide(content: str) -> str:
    """What a narrow screen scrolls sideways."""
    return f'<div class="wide">{content}</div>'


def _table(sheet: Sheet, has_title: bool = True) -> str:
    numbers = range(1, 1 + sheet.numbers)
    head = "".join(_cell("th", name, "number" if i in numbers else "") for i, name in enumerate(sheet.columns))
    body = "".join(f"<tbody>{''.join(_row(row, numbers) for row in section)}</tbody>" for section in sheet.sections)
    shown_head = f"<thead><tr>{head}</tr></thead>" if any(sheet.columns) else ""
    title = f"<p><strong>{escape(sheet.title)}</strong></p>" if sheet.title and has_title else ""
    return title + _wide(f"<table>{shown_head}{body}</table>") + (_note(sheet.note) if sheet.note else "")


def _row(row: Sequence[str], numbers: range) -> str:
    first = "detail" if row[0].startswith(" ") else ""
    kinds = ("number" if i in numbers else "" if i else first for i in range(len(row)))
    return f"<tr>{''.join(_cell('td', text, kind) for text, kind in zip(row, kinds))}</tr>"


def _cell(tag: str, text: str, kind: str) -> str:
    return f'<{tag} class="{kind}">{escape(text.strip())}</{tag}>' if kind else f"<{tag}>{escape(text.strip())}</{tag}>"
