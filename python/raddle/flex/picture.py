"""Which tiles a mask keeps, and pictures of them: as text and as SVG."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np

EMPTY, PARTIAL, FULL = 0, 1, 2
"""Kinds of tiles: nothing, some pairs or all pairs are kept."""

_PAIRS_AT_ONCE = 1 << 22
_CHARACTERS = {EMPTY: "·", PARTIAL: "▒", FULL: "█"}
_COLOURS = {EMPTY: "#f3f1ec", PARTIAL: "#bcd3e6", FULL: "#2f6690"}


def tile_kinds(
    evaluate: Callable[..., Any], b: int, h: int, rows: np.ndarray, kv_len: int, tile: tuple[int, int]
) -> np.ndarray:
    """The kind of each tile of one request and head: uint8 [ceil(rows / tile[0]), ceil(kv_len / tile[1])].

    Args:
        evaluate: the mask on numpy arrays.
        rows: q_idx of each row; -1 for rows that do not exist.
        kv_len: keys.
        tile: rows and keys of a tile. A tile that reaches past the end is not full, as in PyTorch.
    """
    height, width = tile
    columns = -(-kv_len // width)
    result = np.zeros((-(-len(rows) // height), columns), np.uint8)
    step = max(1, _PAIRS_AT_ONCE // max(1, height * kv_len))
    for first in range(0, len(result), step):
        some = rows[first * height : (first + step) * height]
        keep = np.zeros((-(-len(some) // height) * height, columns * width), bool)
        keep[: len(some), :kv_len] = pairs(evaluate, b, h, np.maximum(some, 0), kv_len) & (some >= 0)[:, None]
        tiles = keep.reshape(-1, height, columns, width)
        result[first : first + step] = tiles.any((1, 3)).astype(np.uint8) + tiles.all((1, 3))
    return result


def pairs(evaluate: Callable[..., Any], b: int, h: int, rows: np.ndarray, kv_len: int) -> np.ndarray:
    """The mask of one request and head, element by element: bool [rows, kv_len]."""
    keys = np.arange(kv_len)
    return np.broadcast_to(evaluate(np.int64(b), np.int64(h), rows[:, None], keys[None]), (len(rows), kv_len))


def text(kinds: np.ndarray, most: tuple[int, int] = (20, 40)) -> str:
    """One character a tile, or a square of tiles where there are more than ``most`` rows and columns."""
    rows, columns = (max(1, -(-n // limit)) for n, limit in zip(kinds.shape, most))
    lines = []
    for first in range(0, kinds.shape[0], rows):
        band = kinds[first : first + rows]
        squares = (band[:, at : at + columns] for at in range(0, kinds.shape[1], columns))
        lines.append("".join(_CHARACTERS[_common(square)] for square in squares))
    return "\n".join(lines)


def svg(kinds: np.ndarray, keep: np.ndarray | None = None, tile: int = 8, label: str = "") -> str:
    """A picture: a coloured square a tile; with ``keep`` [rows, keys], the kept pairs of partial tiles in dark.

    ``tile`` is the side of a tile in pixels, and in tokens if ``keep`` is given.
    """
    height, width = (n * tile for n in kinds.shape)
    shapes = [f'<rect width="{width}" height="{height}" fill="{_COLOURS[EMPTY]}"/>']
    for kind in (PARTIAL, FULL):
        shapes.append(_path(kinds == kind, tile, _COLOURS[kind]))
    if keep is not None:
        partial = np.repeat(np.repeat(kinds == PARTIAL, tile, 0), tile, 1)[: keep.shape[0], : keep.shape[1]]
        shapes.append(_path(keep & partial, 1, _COLOURS[FULL]))
    lines = "".join(f"M0 {y}h{width}" for y in range(tile, height, tile))
    lines += "".join(f"M{x} 0v{height}" for x in range(tile, width, tile))
    shapes.append(f'<path d="{lines}" stroke="#fff" stroke-width="{tile / 16:g}"/>')
    zoom = 288 / max(width, height)
    size = f'width="{width * zoom:.0f}" height="{height * zoom:.0f}" viewBox="0 0 {width} {height}"'
    title = f"<title>{label}</title>" if label else ""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} shape-rendering="crispEdges">{title}'
    return f"{head}{''.join(shapes)}</svg>\n"


def _common(square: np.ndarray) -> int:
    lowest, highest = square.min(), square.max()
    return int(lowest) if lowest == highest else PARTIAL


def _path(cells: np.ndarray, side: int, colour: str) -> str:
    """Runs of cells in a row as one path."""
    edges = np.diff(np.pad(cells, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    (row, first), (_, last) = np.nonzero(edges == 1), np.nonzero(edges == -1)
    runs = (
        f"M{a * side} {y * side}h{(z - a) * side}v{side}h{(a - z) * side}z" for y, a, z in zip(row, first, last)
    )
    drawn = "".join(runs)
    return f'<path d="{drawn}" fill="{colour}"/>' if drawn else ""
