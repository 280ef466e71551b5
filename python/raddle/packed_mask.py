"""A mask given bit by bit."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from raddle import _library
from raddle._tensors import TorchTensor, host_array, lend, lend_index
from raddle.variants import Variant

_make_packed_mask = _library.function("raddle.variant.packed_mask")


class PackedMask(Variant):
    """Mask: one bit a pair of a query row and a key, for what no formula says (speculative trees, images).

    Args:
        bits: [bytes] uint8. Request i has a matrix [qo_len, kv_len] of bits, row-major, from byte ``indptr[i]``
            on, the lowest bit of a byte first: ``numpy.packbits(mask, bitorder="little")``, each request
            beginning at a whole byte. 1 keeps.
        indptr: [requests + 1] int32 or int64, in bytes.

    Columns are indices (``kv_index``): a request's keys over all levels of a layout, in order. The format is that
    of FlashInfer's packed custom masks. Both arrays are copied.

    Plan members: ``packed_mask.bits``, ``packed_mask.indptr``: a batch has its own, of any length, given by
    ``attn.plan(layout, params={...})`` or ``reservation.update(layout, params={...})``. Both raise
    ValueError unless there are bits for exactly ``qo_len * kv_len`` pairs of every request.

    Raises:
        ValueError: an indptr that does not ascend from 0 to the number of bytes.
        TypeError: bits that are not uint8.

    Example:
        >>> keep = np.tril(np.ones((3, 10), bool), 7)
        >>> attn = raddle.Attention(
        ...     raddle.AttentionSpec(4, 4, 64, dtype="float32", variant=raddle.PackedMask.from_masks([keep]))
        ... )
        >>> plan = attn.plan(raddle.RaggedKV([0, 3], [0, 10]))
    """

    def __init__(self, bits: Any, indptr: Any) -> None:
        bits = np.zeros(0, np.uint8) if isinstance(bits, (list, tuple)) and not bits else bits
        self.__move_handle_from__(_make_packed_mask(bits=lend(bits, "bits"), indptr=lend_index(indptr, "indptr")))

    @classmethod
    def from_masks(cls, masks: Sequence[Any]) -> PackedMask:
        """Packs one boolean matrix [qo_len, kv_len] a request.

        Args:
            masks: a list of them, True = keep.

        Returns:
            A `PackedMask`.

        Raises:
            ValueError: what is no matrix.
        """
        return cls(*pack_masks(masks))


def pack_masks(masks: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Packs boolean matrices as `PackedMask` and its params take them.

    Args:
        masks: one matrix [qo_len, kv_len] a request, True = keep.

    Returns:
        (bits, indptr): uint8 [bytes] and int64 [requests + 1].

    Raises:
        ValueError: what is no matrix.

    Example:
        >>> bits, indptr = raddle.pack_masks([np.ones((2, 5), bool), np.ones((1, 3), bool)])
        >>> bits.tolist(), indptr.tolist()
        ([255, 3, 7], [0, 2, 3])
    """
    if isinstance(masks, TorchTensor):
        masks = host_array(masks, "masks")
    rows = []
    for number, mask in enumerate(masks):
        mask = host_array(mask, f"masks[{number}]")
        if mask.ndim != 2:
            raise ValueError(f"masks[{number}] has {mask.ndim} dimensions; expected 2, [qo_len, kv_len]")
        rows.append(np.packbits(mask.astype(bool).ravel(), bitorder="little"))
    indptr = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    return np.concatenate([np.zeros(0, np.uint8), *rows]), indptr
