"""Given blocks of a mask: lists of them, their kinds, and the function that they are together with a mask."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np

from raddle._tensors import host_array, kind_of
from raddle.flex._arrays import integer, integers, pair
from raddle.flex.errors import BlockListError, IncompleteError
from raddle.flex.offset import noop_mask
from raddle.flex.ops import minimum
from raddle.flex.picture import FULL, PARTIAL


def block_table(kinds: np.ndarray) -> np.ndarray:
    """Kinds of blocks [B, H, rows, columns] as `block_function` looks them up.

    Heads come last: a tile's heads share its rows, so that what a tile reads is one run of the table, whose bounds say
    what the tile keeps. After the others come an empty row and an empty column of blocks, and an empty request.
    """
    table = kinds.transpose(0, 2, 3, 1).astype(np.int32)
    return np.pad(table, ((0, int(table.shape[0] > 1)), (0, 1), (0, 1), (0, 0)))


def block_function(kinds: Any, size: tuple[int, int], mask_mod: Any, shifts: bool = True) -> Callable[..., Any]:
    """Blocks and mask as one function that captures a `block_table`.

    Where B or H is 1, every index reads the only entry. Indices are clamped to what is empty: what lies outside.
    ``shifts``: where block sizes are powers of two, which vectorise where divisions do not.
    """
    last_request, last_head = kinds.shape[0] - 1, kinds.shape[3] - 1
    last_row, last_column = kinds.shape[1] - 1, kinds.shape[2] - 1
    height, width = size
    row_bits, key_bits = (height.bit_length() - 1, width.bit_length() - 1) if shifts else (0, 0)
    shifts = shifts and height == 1 << row_bits and width == 1 << key_bits

    def kind_at(b, h, row, column):
        row, column = minimum(row, last_row), minimum(column, last_column)
        return kinds[minimum(b, last_request), row, column, minimum(h, last_head)]

    def kind_by_shift(b, h, q_idx, kv_idx):
        return kind_at(b, h, q_idx >> row_bits, kv_idx >> key_bits)

    def kind_by_division(b, h, q_idx, kv_idx):
        return kind_at(b, h, q_idx // height, kv_idx // width)

    kind_of = kind_by_shift if shifts else kind_by_division

    def kept_blocks(b, h, q_idx, kv_idx):
        return kind_of(b, h, q_idx, kv_idx) > 0

    def kept_pairs(b, h, q_idx, kv_idx):
        # Numbers, not names, since those would be captured. Both are bounds, so that a tile with partial and full
        # blocks is full where the mask is.
        kind = kind_of(b, h, q_idx, kv_idx)
        return (kind > 1) | ((kind > 0) & mask_mod(b, h, q_idx, kv_idx))

    return kept_blocks if mask_mod is noop_mask else kept_pairs


def lengths_of(seq_lengths: Any) -> tuple[int, int]:
    if not isinstance(seq_lengths, (tuple, list)) or len(seq_lengths) != 2:
        raise TypeError(f"seq_lengths is {kind_of(seq_lengths)}; expected (Q_LEN, KV_LEN)")
    q_len, kv_len = (integer(n, f"seq_lengths[{i}]") for i, n in enumerate(seq_lengths))
    return q_len, kv_len


def given_blocks(
    kv_num_blocks: Any,
    kv_indices: Any,
    full_kv_num_blocks: Any,
    full_kv_indices: Any,
    block_size: Any,
    seq_lengths: Any,
) -> tuple[np.ndarray, tuple[int, ...], tuple[int, int]]:
    """Kinds of blocks, shape and size of blocks of what `BlockMask.from_kv_blocks` is given."""
    if (full_kv_num_blocks is None) != (full_kv_indices is None):
        raise IncompleteError("full_kv_num_blocks and full_kv_indices: one is given; expected both or none")
    size = pair(block_size, "BLOCK_SIZE")
    rows, columns = tuple(np.shape(kv_indices)[-2:]) if np.ndim(kv_indices) >= 2 else (0, 0)
    lengths = (rows * size[0], columns * size[1]) if seq_lengths is None else lengths_of(seq_lengths)
    expected = -(-lengths[0] // size[0])
    if expected != rows and np.ndim(kv_indices) >= 2:
        raise ValueError(f"kv_indices has {rows} rows of blocks; expected {expected}, as seq_lengths")
    columns = -(-lengths[1] // size[1])
    kinds = _listed(kv_num_blocks, kv_indices, columns, "kv_")
    kinds[kinds != 0] = PARTIAL
    if full_kv_indices is not None:
        full = _listed(full_kv_num_blocks, full_kv_indices, columns, "full_kv_")
        if full.shape != kinds.shape:
            raise ValueError(f"full_kv_indices is for blocks {full.shape}; expected {kinds.shape}, as kv_indices")
        kinds[full != 0] = FULL
    return kinds, (*kinds.shape[:2], *lengths), size


def _listed(num_blocks: Any, indices: Any, columns: int, prefix: str) -> np.ndarray:
    """1 where a block is listed, uint8 [B, H, rows, columns]."""
    dims = np.ndim(indices)
    if dims not in (2, 3, 4):
        expected = "[B, H, rows, columns], or without B or both"
        raise BlockListError(f"{prefix}indices has {dims} dimensions; expected {expected}")
    column, count = integers(indices, f"{prefix}indices", dims), integers(num_blocks, f"{prefix}num_blocks", dims - 1)
    if count.shape != column.shape[:-1]:
        raise ValueError(f"{prefix}num_blocks has shape {count.shape}; expected {column.shape[:-1]}")
    if count.size and not (0 <= count.min() and count.max() <= column.shape[-1]):
        raise ValueError(f"{prefix}num_blocks has an entry outside of 0 … {column.shape[-1]}")
    listed = np.arange(column.shape[-1]) < count[..., None]
    if ((column < 0) | (column >= columns))[listed].any():
        raise ValueError(f"{prefix}indices lists a block outside of 0 … {columns - 1}")
    kinds = np.zeros((*column.shape[:-1], columns + 1), np.uint8)  # one column more, for what is not listed
    np.put_along_axis(kinds, np.where(listed, column, columns), 1, -1)
    return kinds[..., :columns].reshape((1,) * (4 - dims) + (*column.shape[:-1], columns)).copy()


def selected(index: Any, size: int) -> np.ndarray:
    if isinstance(index, slice):
        return np.arange(size)[index]
    chosen = np.atleast_1d(host_array(index, "index"))
    chosen = np.flatnonzero(chosen) if chosen.dtype == bool else chosen.astype(np.int64)
    if ((chosen < -size) | (chosen >= size)).any():
        raise IndexError(f"index {index} is out of range for {size} entries")
    return np.where(chosen < 0, chosen + size, chosen)
