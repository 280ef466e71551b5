"""Draws the pictures of the formats: docs/guide/formats.md shows them. Run by docs/conf.py.

Each is an SVG that becomes part of the page, so that its text and lines take the colour of the reader's theme.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

COLOURS = ("#5b8fc7", "#d98a4e", "#63a875", "#b07ab0")
SHARED = "#c9a23a"


class Canvas:
    """An SVG under construction: pixels of its view box, y downwards."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size, self._title, self._parts = (width, height), title, []

    def box(self, x: float, y: float, width: float, height: float, colour: str | None = None, text: str = "") -> None:
        fill = f'fill="{colour}"' if colour else 'fill="none"'
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="2" {fill} stroke="currentColor" '
            'stroke-opacity="0.45"/>'
        )
        if text:
            self.text(x + width / 2, y + height / 2 + 4, text, anchor="middle", colour="#14181d" if colour else None)

    def text(self, x: float, y: float, text: str, anchor: str = "start", colour: str | None = None, code: bool = False):
        family = ' font-family="monospace"' if code else ""
        self._parts.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour or "currentColor"}"{family}>{escape(text)}</text>'
        )

    def arrow(self, x0: float, y0: float, x1: float, y1: float, colour: str = "currentColor") -> None:
        bend = (y0 + y1) / 2
        self._parts.append(
            f'<path d="M{x0},{y0} C{x0},{bend} {x1},{bend} {x1},{y1}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
            f'<circle cx="{x1}" cy="{y1}" r="3" fill="{colour}"/>'
        )

    def svg(self) -> str:
        width, height = self._size
        return (
            f'<div class="picture"><svg viewBox="0 0 {width} {height}" role="img" font-size="13" '
            f'font-family="sans-serif"><title>{escape(self._title)}</title>{"".join(self._parts)}</svg></div>\n'
        )


def ragged() -> Canvas:
    canvas = Canvas(640, 200, "Ragged: each request's rows of Q and of K and V lie one request after another")
    for label, y, lengths in (("Q, out", 30, (3, 1, 5)), ("K, V", 120, (6, 4, 9))):
        canvas.text(10, y + 20, label)
        canvas.text(10, y - 8, "request")
        x, first = 90, [0]
        for request, length in enumerate(lengths):
            for _ in range(length):
                canvas.box(x, y, 26, 28, COLOURS[request])
                x += 26
            first.append(first[-1] + length)
            canvas.text(x - length * 13, y - 8, str(request), anchor="middle")
        name = "qo_indptr" if y == 30 else "kv_indptr"
        canvas.text(90, y + 50, f"{name} = {first}", code=True)
    return canvas


def paged() -> Canvas:
    canvas = Canvas(680, 300, "Paged: a list of pages for each request, in any order, over one pool")
    pages = {0: (7, 2, 5), 1: (0, 1)}
    kv_len, page_size, places = (10, 5), 4, {}
    for page in range(8):
        x = 20 + 81 * page
        owner = next((request for request, mine in pages.items() if page in mine), None)
        keys = 0
        if owner is not None:
            keys = min(page_size, kv_len[owner] - page_size * pages[owner].index(page))
        for row in range(page_size):
            canvas.box(x + 18 * row, 190, 18, 30, COLOURS[owner] if row < keys else None)
        canvas.text(x + 36, 240, f"page {page}", anchor="middle")
        places[page] = x + 36
    canvas.text(20, 268, "the pool: [pages, page_size, Hkv, D], here of 4 keys a page; empty rows may hold anything")
    for request, mine in pages.items():
        left = 20 + 360 * request
        canvas.text(left, 24, f"request {request}: kv_len = {kv_len[request]}")
        for place, page in enumerate(mine):
            canvas.box(left + 50 * place, 36, 46, 28, COLOURS[request], str(page))
            canvas.arrow(left + 50 * place + 23, 64, places[page], 186, COLOURS[request])
    canvas.text(20, 292, "its list: page_indices[page_indptr[i] : page_indptr[i + 1]]", code=True)
    return canvas


def block_sparse() -> Canvas:
    canvas = Canvas(640, 250, "Block-sparse: the blocks that each block of rows lists; partial blocks have bits")
    kept = [(0, 2), (0, 1, 4), (2, 3)]
    for row, columns in enumerate(kept):
        for column in range(6):
            x, y = 130 + 58 * column, 40 + 58 * row
            full = column in columns
            partial = full and (row, column) in {(1, 4), (2, 3)}
            canvas.box(x, y, 58, 58, COLOURS[row] if full and not partial else None)
            if partial:
                for bit in range(4):
                    canvas.box(x + 29 * (bit % 2), y + 29 * (bit // 2), 29, 29, COLOURS[row] if bit != 1 else None)
        canvas.text(120, 74 + 58 * row, f"rows {2 * row}, {2 * row + 1}", anchor="end")
        canvas.text(500, 74 + 58 * row, str(list(columns)), code=True)
    for column in range(6):
        canvas.text(159 + 58 * column, 30, str(column), anchor="middle")
    canvas.text(500, 30, "indices", code=True)
    canvas.text(130, 238, "indptr = [0, 2, 5, 7]     Br = Bc = 2: a block is 2 rows and 2 keys", code=True)
    return canvas


def cascade() -> Canvas:
    canvas = Canvas(680, 240, "Cascade: level 0 has the prefix of all rows, level 1 each request's own keys")
    canvas.text(110, 26, "level 0: the shared prefix, read once")
    canvas.text(420, 26, "level 1: each request's own keys")
    for request in range(4):
        y = 40 + 42 * request
        canvas.text(95, y + 25, f"request {request}", anchor="end")
        own = (3, 5, 2, 4)[request]
        for key in range(own):
            canvas.box(420 + 30 * key, y, 30, 36, COLOURS[request])
    canvas.box(110, 40, 280, 162, SHARED, "one group with the rows of all four requests")
    canvas.text(110, 228, "O, LSE of both levels are composed by ⊕: the result is that of one softmax over all keys")
    return canvas


def tree() -> Canvas:
    canvas = Canvas(680, 270, "A tree of drafted tokens, and what each node sees")
    parents = (-1, 0, 0, 1, 1, 2)
    places = {0: (150, 70), 1: (90, 140), 2: (220, 140), 3: (50, 215), 4: (135, 215), 5: (220, 215)}
    canvas.text(40, 26, "parents = [-1, 0, 0, 1, 1, 2]", code=True)
    for node, parent in enumerate(parents):
        if parent >= 0:
            canvas.arrow(places[node][0], places[node][1] - 14, places[parent][0], places[parent][1] + 15)
    for node, (x, y) in places.items():
        canvas.box(x - 20, y - 15, 40, 30, COLOURS[0], str(node))
    left, top, cell = 330, 50, 32
    canvas.box(left, top, 96, 6 * cell, SHARED, "the text")
    for row in range(6):
        seen, node = {row}, row
        while parents[node] >= 0:
            node = parents[node]
            seen.add(node)
        canvas.text(left - 10, top + cell * row + 21, str(row), anchor="end")
        for column in range(6):
            canvas.box(left + 96 + cell * column, top + cell * row, cell, cell, COLOURS[0] if column in seen else None)
    for column in range(6):
        canvas.text(left + 96 + cell * column + cell / 2, top - 8, str(column), anchor="middle")
    canvas.text(left, top + 6 * cell + 22, "a row sees the text, its ancestors and itself")
    return canvas


PICTURES = {"ragged": ragged, "paged": paged, "block_sparse": block_sparse, "cascade": cascade, "tree": tree}


def draw_all(folder: Path) -> None:
    """Writes every picture to ``folder`` as a piece of HTML."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (folder / f"{name}.html").write_text(draw().svg(), encoding="utf-8")
