"""A block mask inside of a compiled function: made there, sliced there, or PyTorch's own.

Its blocks, where they were given or sliced, are a tensor of the graph, and with the mask function one function that
captures it.
"""

from __future__ import annotations

from typing import Any, Callable

import torch

from raddle._torch_op import object_of
from raddle.flex.blocks import block_function
from raddle.flex.errors import SlicedMaskError
from raddle.flex.picture import FULL, PARTIAL


class _MaskMod:
    """The attribute ``mask_mod``, of which torch 2.11 would store what is set without running a property's setter."""

    def __get__(self, mask: TracedMask, _: type) -> Any:
        return mask._mask_mod

    def __set__(self, mask: TracedMask, mask_mod: Callable[..., Any]) -> None:
        if mask._kinds is None:
            mask._kinds = mask.find_kinds(mask)
        mask._mask_mod = mask_mod


class TracedMask:
    """What `BlockMask` is outside. ``kinds``: of blocks, [B, H, rows, columns]; None: as the mask function says."""

    def __init__(self, mask_mod: Any, shape: tuple[Any, ...], size: tuple[Any, Any], kinds: Any = None) -> None:
        self._mask_mod, self.BLOCK_SIZE, self._kinds = mask_mod, size, kinds
        self._batch, self.seq_lengths = shape[:2], shape[2:]
        self.find_kinds: Callable[[TracedMask], Any] | None = None  #: where ``kinds`` are not known yet

    @property
    def shape(self) -> tuple[Any, ...]:
        return (*self._batch, *self.seq_lengths)

    mask_mod = _MaskMod()

    def whole(self) -> Callable[..., Any]:
        """Blocks and mask function as one function."""
        if self._kinds is None:
            return self._mask_mod
        if self._mask_mod is None:
            found = "block_mask is a slice, whose rows are packed"
            raise SlicedMaskError(f"{found}; expected mask_mod to be set to one for these rows")
        requests = int(self._kinds.shape[0] > 1)
        table = self._kinds.permute(0, 2, 3, 1).int()
        table = torch.nn.functional.pad(table, (0, 0, 0, 1, 0, 1, 0, requests))
        return block_function(table, self.BLOCK_SIZE, self._mask_mod, shifts=False)


def sliced(block_mask: Any, index: Any) -> TracedMask:
    """``block_mask[index]`` of a mask that was made outside."""
    index = index if isinstance(index, tuple) else (index,)
    b, h, rows = (*index, slice(None), slice(None))[:3]
    batch, heads, q_len, kv_len = block_mask.shape
    height, width = block_mask.BLOCK_SIZE
    if isinstance(rows, slice):
        rows = torch.arange(-(-q_len // height))[rows]
    elif isinstance(rows, int):
        rows = torch.full((1,), rows)
    rows = rows.reshape(-1)
    kinds = torch.ops.raddle.rows_of_blocks(block_mask.number, rows, batch, heads, -(-kv_len // width))
    kinds = kinds[_kept(b)][:, _kept(h)]
    return TracedMask(None, (*kinds.shape[:2], rows.shape[0] * height, kv_len), block_mask.BLOCK_SIZE, kinds)


def _kept(index: Any) -> Any:
    """An index that keeps its dimension."""
    return index if isinstance(index, (slice, torch.Tensor)) else slice(index, index + 1 if index != -1 else None)


def of_torch(block_mask: Any) -> TracedMask:
    """PyTorch's `BlockMask`."""
    height, width = block_mask.BLOCK_SIZE
    columns = -(-block_mask.seq_lengths[1] // width)
    partial = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, columns)
    kinds = partial * PARTIAL
    if block_mask.full_kv_indices is not None:
        full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, columns)
        kinds = torch.where(full, FULL, kinds)
    shape = (*kinds.shape[:2], *block_mask.seq_lengths)
    return TracedMask(block_mask.mask_mod, shape, (height, width), kinds)


def _listed(num_blocks: Any, indices: Any, columns: Any) -> torch.Tensor:
    """Which blocks are listed: bool [B, H, rows, columns]."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < num_blocks[..., None]
    at = torch.where(listed, indices, columns).long()
    found = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    return found.scatter(-1, at, True)[..., :-1]


def _rows_of_blocks(number: int, rows: torch.Tensor, batch: int, heads: int, columns: int) -> torch.Tensor:
    return object_of(number, "the block mask")._rows_of_blocks(rows)


torch.library.define(
    "raddle::rows_of_blocks", "(SymInt block_mask, Tensor rows, SymInt batch, SymInt heads, SymInt columns) -> Tensor"
)
torch.library.impl("raddle::rows_of_blocks", "CompositeExplicitAutograd", _rows_of_blocks)
torch.library.register_fake(
    "raddle::rows_of_blocks",
    lambda number, rows, batch, heads, columns: torch.empty(
        (batch, heads, rows.shape[0], columns), dtype=torch.uint8, device="cpu"
    ),
)
