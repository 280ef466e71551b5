"""Markdown as its readers run it: code blocks in order, what they print, the cells of tables.

A comment before a block or a table says what is special about it:

    <!-- test: alone -->             a Python block with names of its own, as a reader would paste it
    <!-- test: raises ValueError --> the block ends with that error
    <!-- test: graphs pretended -->  captures CUDA graphs: runs on the CPU, with stand-ins for torch's graphs
    <!-- test: syntax, a reason -->  only compiled
    <!-- test: cells -->             every code span in the table's column "Raddle" runs

A block ```output right after a Python block is what that prints.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
GUIDE = [
    ROOT / "README.md",
    *sorted(
        path
        for path in (ROOT / "docs").rglob("*.md")
        if not {"design", "lab", "_drawn"} & set(path.relative_to(ROOT / "docs").parts)
        # Written by `raddle gallery` and `raddle support`; run by test_mistakes.py.
        and path.name not in ("gallery.md", "support.md", "mistakes.md")
    ),
]

_FENCE = re.compile(r"^```([a-z]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- test: (.+?) -->\n+\Z")
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")


class Block(NamedTuple):
    """A fenced block of code."""

    line: int  # lines before its first one
    language: str
    code: str
    mark: str  # what its comment says, or ""


def blocks(document: Path, language: str = "python") -> list[Block]:
    """The blocks of one language, in order."""
    return [block for block in _all_blocks(document) if block.language == language]


def run(document: Path, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """Runs the Python blocks of a document, and the marked tables between them; returns the names that they leave."""
    shared = {"__name__": document.stem} if names is None else names
    alone = document.name == "README.md"  # each of its blocks is to be pasted by itself
    pieces: list[tuple[int, Any]] = [(block.line, block) for block in _all_blocks(document)]
    pieces = sorted(pieces + _marked_tables(document), key=lambda piece: piece[0])
    printed = ""
    for line, piece in pieces:
        if not isinstance(piece, Block):
            for number, code in piece:
                exec(compile("\n" * number + code, str(document), "exec"), shared)
        elif piece.language == "python":
            names_of_block = {"__name__": document.stem} if alone or piece.mark == "alone" else shared
            printed = _run_block(document, piece, names_of_block)
        elif piece.language == "output":
            expected = piece.code.strip()
            assert printed.strip() == expected, f"{document.name}:{line}: printed {printed.strip()!r}"
    return shared


def _run_block(document: Path, block: Block, names: dict[str, Any]) -> str:
    # Blank lines in front, so that a failure names the document's own line.
    code = compile("\n" * block.line + block.code, str(document), "exec")
    if block.mark.startswith("syntax, "):
        return ""
    written = io.StringIO()
    pretended = _pretended_graphs() if block.mark == "graphs pretended" else contextlib.nullcontext()
    with contextlib.redirect_stdout(written), pretended:
        if not block.mark.startswith("raises "):
            exec(code, names)
            return written.getvalue()
        try:
            exec(code, names)
        except Exception as error:
            assert type(error).__name__ == block.mark.split()[1], f"{document.name}:{block.line}: {error!r}"
            return f"{type(error).__name__}: {error}"
    raise AssertionError(f"{document.name}:{block.line}: expected {block.mark}")


@contextlib.contextmanager
def _pretended_graphs():
    """torch.cuda's graphs where there is no GPU: what is captured runs once, at once; a replay does nothing."""
    import torch

    class Graph:
        def replay(self) -> None:
            pass

    kept = torch.cuda.CUDAGraph, torch.cuda.graph
    torch.cuda.CUDAGraph, torch.cuda.graph = Graph, lambda graph: contextlib.nullcontext()
    try:
        yield
    finally:
        torch.cuda.CUDAGraph, torch.cuda.graph = kept


def _all_blocks(document: Path) -> list[Block]:
    text = document.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        mark = _MARK.search(text[: match.start()])
        found.append(Block(text.count("\n", 0, match.start(2)), match[1], match[2], mark[1] if mark else ""))
    return found


def _marked_tables(document: Path) -> list[tuple[int, list[tuple[int, str]]]]:
    """(line, [(line, code)]) of each table marked "cells": the code spans of its column "Raddle"."""
    text = document.read_text(encoding="utf-8")
    found = []
    for mark in re.finditer(r"<!-- test: cells -->\n+((?:\|.*\n)+)", text):
        first = text.count("\n", 0, mark.start(1))
        header, _, *rows = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in mark[1].splitlines())
        column = [cell.strip(" |") for cell in header].index("Raddle")
        codes = [(first + 2 + n, code) for n, row in enumerate(rows) for code in _SPAN.findall(row[column])]
        assert codes, f"{document.name}:{first}: the table has no code in its column Raddle"
        found.append((first, codes))
    return found
