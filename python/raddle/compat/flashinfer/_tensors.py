"""FlashInfer's arrays and caches as Raddle takes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

LOG2_E = float(np.log2(np.e))
LN_2 = float(np.log(2.0))


def host(x: Any) -> np.ndarray:
    """An array of offsets or lengths on the host; of one on a GPU a copy."""
    return x.cpu().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)


def kv_lengths(indptr: np.ndarray, last_page_len: np.ndarray, page_size: int) -> np.ndarray:
    """Keys of each request of a page table; 0 of a request without pages."""
    pages = np.diff(indptr)
    return np.where(pages > 0, (pages - 1) * page_size + last_page_len, 0).astype(np.int32)


def pools(kv_cache: Any, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a paged cache: a pair, or one tensor [pages, 2, …]; [slots, H, D] are pages of one token."""
    if isinstance(kv_cache, (tuple, list)):
        k, v = kv_cache
    elif kv_cache.ndim in (4, 5):
        k, v = kv_cache[:, 0], kv_cache[:, 1]
    else:
        raise ValueError(f"paged_kv_cache has {kv_cache.ndim} dimensions; expected 5, or a pair of tensors of 4")
    token = 1 if kv_layout == "NHD" else 2
    return tuple(x.unsqueeze(token) if x.ndim == 3 else x for x in (k, v))


def packed(custom_mask: Any, packed_custom_mask: Any, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bits of custom masks and where each request's begin, in bytes; ``sizes`` are bits, one entry a request."""
    indptr = np.concatenate([[0], np.cumsum((sizes + 7) // 8)]).astype(np.int64)
    if packed_custom_mask is not None:
        bits = host(packed_custom_mask).view(np.uint8)
        if len(bits) < indptr[-1]:
            raise ValueError(f"packed_custom_mask has {len(bits)} bytes; expected {indptr[-1]}")
        return bits[: indptr[-1]], indptr
    flat = host(custom_mask).astype(bool).ravel()
    if len(flat) != sizes.sum():
        raise ValueError(f"custom_mask has {len(flat)} elements; expected {sizes.sum()}, a row and key each")
    parts = np.split(flat, np.cumsum(sizes)[:-1])
    rows = [np.packbits(part, bitorder="little") for part in parts]
    return np.concatenate([np.zeros(0, np.uint8), *rows]), indptr
