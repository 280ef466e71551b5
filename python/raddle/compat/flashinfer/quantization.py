"""FlashInfer's packing of bits, where the tensors lie."""

from __future__ import annotations

import torch


def packbits(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    """Packs a flat array of bools into bits, as numpy.packbits.

    Args:
        x: [elements], not 0: a 1.
        bitorder: "big" or "little": which bit of a byte comes first.

    Returns:
        [ceil(elements / 8)] uint8.

    Raises:
        ValueError: another bitorder.

    Example:
        >>> import torch
        >>> from raddle.compat import flashinfer
        >>> flashinfer.packbits(torch.tensor([1, 0, 1, 1]), bitorder="little").tolist()
        [13]
    """
    return segment_packbits(x, torch.tensor([0, x.numel()], device=x.device), bitorder)[0]


def segment_packbits(x: torch.Tensor, indptr: torch.Tensor, bitorder: str = "big") -> tuple[torch.Tensor, torch.Tensor]:
    """Packs segments of bools into bits, each beginning at a whole byte.

    Args:
        x: [indptr[-1]], not 0: a 1.
        indptr: [segments + 1] first element of each segment.
        bitorder: "big" or "little": which bit of a byte comes first.

    Returns:
        (bits [bytes] uint8, indptr of the bytes, in indptr's dtype).

    Raises:
        ValueError: another bitorder.

    Example:
        >>> import torch
        >>> from raddle.compat import flashinfer
        >>> x, indptr = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1]), torch.tensor([0, 4, 7, 11])
        >>> bits, where = flashinfer.segment_packbits(x, indptr)
        >>> bits.tolist(), where.tolist()
        ([176, 32, 208], [0, 1, 2, 3])
    """
    if bitorder not in ("big", "little"):
        raise ValueError(f"bitorder is {bitorder!r}; expected 'big' or 'little'")
    x, ends = x.reshape(-1), indptr[1:].contiguous()
    num_bytes = torch.div(indptr[1:] - indptr[:-1] + 7, 8, rounding_mode="floor")
    where = torch.cat([indptr.new_zeros(1), num_bytes.cumsum(0).to(indptr.dtype)])
    element = torch.arange(x.numel(), device=x.device)
    segment = torch.searchsorted(ends, element.to(ends.dtype), right=True)
    bits = torch.zeros(int(where[-1]) * 8, dtype=torch.uint8, device=x.device)
    bits[8 * where[segment].long() + element - indptr[segment].long()] = (x != 0).to(torch.uint8)
    places = torch.arange(8, device=x.device, dtype=torch.uint8)
    weights = torch.bitwise_left_shift(torch.ones_like(places), places if bitorder == "little" else places.flip(0))
    return (bits.view(-1, 8) * weights).sum(1, dtype=torch.uint8), where
