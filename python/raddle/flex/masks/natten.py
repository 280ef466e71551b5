"""Neighbourhood attention on a canvas of tokens (NATTEN), in any order of the tokens."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np

from raddle.flex._arrays import integers, pair


def natten(canvas: Any, kernel: Any, order: Any = None) -> Callable[..., Any]:
    """Mask: a token sees the ``kernel`` of tokens around it; at the border, the nearest kernel that fits.

    Args:
        canvas: (height, width) in tokens, or an int for both.
        kernel: (height, width) of the neighbourhood, odd, at most the canvas; or an int for both.
        order: [height * width]: which token of the canvas, counted row by row, each place of the sequence holds;
            None: row by row. `tiled_order` and `morton_order` keep neighbours together, so that fewer tiles are
            kept; Q, K and V must be permuted accordingly (``q[:, order]``).

    Each token's coordinates and the centre of its neighbourhood are captured, 16 bytes a token: the coordinates of
    a span of tokens lie in a rectangle, which says what a tile keeps. Hassani et al. 2022 (arXiv 2204.07143).

    Returns:
        A mask mod.

    Raises:
        ValueError: a kernel that is even or larger than the canvas, or an order that is no permutation.
        TypeError: sizes that are no ints.

    Example:
        >>> mask = flex.masks.natten(canvas=(8, 8), kernel=3)
        >>> bool(mask(0, 0, 27, 18)), bool(mask(0, 0, 27, 17))          # (3, 3) sees (2, 2), not (2, 1)
        (True, False)
    """
    height, width = pair(canvas, "canvas")
    for size, extent in zip(pair(kernel, "kernel"), (height, width)):
        if size % 2 == 0 or size > extent:
            raise ValueError(f"kernel has an extent of {size}; expected an odd one, at most the canvas's {extent}")
    half_height, half_width = (size // 2 for size in pair(kernel, "kernel"))
    token = np.arange(height * width) if order is None else integers(order, "order")
    if len(token) != height * width or (np.sort(token) != np.arange(len(token))).any():
        raise ValueError(f"order is no permutation of the canvas's {height * width} tokens")
    row, column = (x.astype(np.int32) for x in np.divmod(token, width))
    row_centre = np.clip(row, half_height, height - 1 - half_height)
    column_centre = np.clip(column, half_width, width - 1 - half_width)

    def natten(b, h, q_idx, kv_idx):
        down, right = row[kv_idx] - row_centre[q_idx], column[kv_idx] - column_centre[q_idx]
        in_rows = (down <= half_height) & (down >= -half_height)
        return in_rows & (right <= half_width) & (right >= -half_width)

    return natten


def tiled_order(canvas: Any, tile: Any) -> np.ndarray:
    """The order of a canvas's tokens tile by tile (row by row within a tile), for `natten`: int32 [height * width].

    Args:
        canvas: (height, width), or an int for both.
        tile: (height, width) of a tile, or an int for both; tiles at the border are cut.

    Hassani et al. 2024 ("Faster Neighborhood Attention", arXiv 2403.04690): multi-dimensional tiles.

    Returns:
        int32 [height * width].

    Raises:
        ValueError: sizes below 1.
        TypeError: sizes that are no ints.

    Example:
        >>> flex.masks.tiled_order((2, 4), 2).tolist()
        [0, 1, 4, 5, 2, 3, 6, 7]
    """
    (height, width), (tile_height, tile_width) = pair(canvas, "canvas"), pair(tile, "tile")
    row, column = np.divmod(np.arange(height * width), width)
    keys = (column % tile_width, row % tile_height, column // tile_width, row // tile_height)
    return np.lexsort(keys).astype(np.int32)


def morton_order(canvas: Any) -> np.ndarray:
    """The order of a canvas's tokens along Morton's Z curve, for `natten`: int32 [height * width].

    The place of a token interleaves the bits of its row and its column (Morton 1966).

    Args:
        canvas: (height, width), or an int for both.

    Returns:
        int32 [height * width].

    Raises:
        ValueError: sizes below 1.
        TypeError: sizes that are no ints.

    Example:
        >>> flex.masks.morton_order(2).tolist()
        [0, 1, 2, 3]
    """
    height, width = pair(canvas, "canvas")
    row, column = np.divmod(np.arange(height * width), width)
    code = np.zeros(height * width, np.int64)
    for bit in range(max(height, width).bit_length()):
        code |= (column >> bit & 1) << 2 * bit | (row >> bit & 1) << 2 * bit + 1
    return np.argsort(code, kind="stable").astype(np.int32)
