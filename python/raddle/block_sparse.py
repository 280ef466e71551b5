"""Block-sparse matrices of query rows and keys."""

from __future__ import annotations

from typing import Any

from raddle import _library
from raddle._layout import Layout

_block_sparse = _library.function_in_order(
    "raddle.block_sparse",
    "Br Bc indptr indices qo_indptr kv_len num_rows num_cols mask_bits block_pos block_first block_count kv_begin "
    "qo_pos",
)
_block_sparse_from_mask = _library.function_in_order("raddle.block_sparse_from_mask", "mask Br Bc qo_indptr")


class BlockSparse(Layout):
    """A block-sparse row matrix (BSR) over the rows of Q and the slots of K and V.

    Row block b holds query rows ``b * Br …`` and keeps block columns ``indices[indptr[b]: indptr[b + 1]]``.
    K and V are [slots, Hkv, D] or [blocks, Bc, Hkv, D]. The key in column c has index and position c.

    Args:
        Br, Bc: rows and columns of a block.
        indptr: [ceil(rows / Br) + 1] first entry of each row block.
        indices: [entries] block columns.
        qo_indptr: [requests + 1] first row of each request; None: one request of num_rows rows.
        kv_len: [requests] keys of each request; None: num_cols. Columns from there on are no keys.
        num_rows: rows of Q; needed without qo_indptr.
        num_cols: slots of K and V that count; a last block may be cut short by it. None: no bound.
        mask_bits: [entries, Br, Bc] bits packed into uint8, least significant first, without padding
            (``numpy.packbits(bits, bitorder="little")``); None: blocks are full.
        block_pos, block_first, block_count: [entries] explicit blocks, all three or none: the position
            of the block's first key, the row of the block where it lies, and how many keys there are. Keys then
            count in list order.
        kv_begin: [row blocks] as in `PagedKV`.
        qo_pos: [rows] as in `PagedKV`.

    Raises:
        ValueError: sizes, offsets or columns that do not fit together, or a part of the explicit blocks alone.
        TypeError: arrays of another dtype.

    Example:
        >>> layout = raddle.BlockSparse(2, 2, indptr=[0, 2, 3], indices=[0, 2, 1], num_rows=4, num_cols=6)
        >>> layout.num_rows, layout.num_levels
        (4, 1)
    """

    def __init__(
        self,
        Br: int,
        Bc: int,
        indptr: Any,
        indices: Any,
        qo_indptr: Any = None,
        kv_len: Any = None,
        num_rows: int | None = None,
        num_cols: int | None = None,
        mask_bits: Any = None,
        block_pos: Any = None,
        block_first: Any = None,
        block_count: Any = None,
        kv_begin: Any = None,
        qo_pos: Any = None,
    ) -> None:
        self._init(
            _block_sparse,
            Br=Br,
            Bc=Bc,
            indptr=indptr,
            indices=indices,
            qo_indptr=qo_indptr,
            kv_len=kv_len,
            num_rows=num_rows,
            num_cols=num_cols,
            mask_bits=mask_bits,
            block_pos=block_pos,
            block_first=block_first,
            block_count=block_count,
            kv_begin=kv_begin,
            qo_pos=qo_pos,
        )

    @classmethod
    def from_dense_mask(cls, mask: Any, Br: int, Bc: int, qo_indptr: Any = None) -> BlockSparse:
        """The blocks of a boolean mask that keep anything, with bits where partial.

        Args:
            mask: [rows, cols] bool, True = keep.
            Br, Bc: rows and columns of a block.
            qo_indptr: [requests + 1] first row of each request; None: all rows are one request's.

        Returns:
            A `BlockSparse`.

        Raises:
            ValueError: a mask that is no matrix, or qo_indptr that does not end at its rows.
            TypeError: a mask of another dtype.
        """
        layout = cls.__new__(cls)
        layout._init(_block_sparse_from_mask, mask=mask, Br=Br, Bc=Bc, qo_indptr=qo_indptr)
        return layout
