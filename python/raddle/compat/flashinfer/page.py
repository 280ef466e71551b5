"""FlashInfer's functions that write paged caches."""

from __future__ import annotations

from typing import Any

import torch

from raddle.compat.flashinfer._refusals import check_kv_layout
from raddle.compat.flashinfer._tensors import pools


def get_batch_indices_positions(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each appended row its request, and its position among the request's keys.

    Args:
        append_indptr: [batch + 1] first row of each request.
        seq_lens: [batch] keys of each request, the rows included.
        nnz: rows.
        batch_indices, positions: [nnz] to write; None: new int32 ones.

    Returns:
        (batch_indices, positions).

    Raises:
        RuntimeError: tensors to write of another size.

    Example:
        >>> import torch
        >>> from raddle.compat import flashinfer
        >>> batch, positions = flashinfer.get_batch_indices_positions(torch.tensor([0, 1, 3]), torch.tensor([5, 5]), 3)
        >>> batch.tolist(), positions.tolist()
        ([0, 1, 1], [4, 3, 4])
    """
    rows = torch.arange(nnz, device=append_indptr.device)
    ends = append_indptr[1:].contiguous()
    batch = torch.searchsorted(ends, rows.to(ends.dtype), right=True).clamp(max=len(seq_lens) - 1)
    position = seq_lens.to(rows.device)[batch] - (ends[batch] - rows)
    found = []
    for given, made in ((batch_indices, batch), (positions, position)):
        found.append(made.to(torch.int32) if given is None else given.copy_(made))
    return found[0], found[1]


def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Keys of each request of a page table.

    Args:
        kv_indptr: [batch + 1] first page of each request.
        kv_last_page_len: [batch] keys of its last page.
        page_size: keys of a page.

    Returns:
        [batch].

    Raises:
        RuntimeError: arrays of different sizes.

    Example:
        >>> import torch
        >>> from raddle.compat import flashinfer
        >>> flashinfer.get_seq_lens(torch.tensor([0, 3, 5]), torch.tensor([3, 4]), 16).tolist()
        [35, 20]
    """
    return (kv_indptr[1:] - kv_indptr[:-1] - 1).clamp(min=0) * page_size + kv_last_page_len


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: Any,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Writes rows of K and V into their pages.

    Args:
        append_key, append_value: [rows, Hkv, D], in the cache's dtype.
        batch_indices, positions: [rows] each row's request and its position among the request's keys.
        paged_kv_cache: same as in `BatchDecodeWithPagedKVCacheWrapper.run`, written.
        kv_indices, kv_indptr, kv_last_page_len: the page table.
        kv_layout: "NHD" or "HND".

    Raises:
        TypeError: rows of another dtype than the cache.

    Example:
        >>> import torch
        >>> from raddle.compat import flashinfer
        >>> cache, table = torch.zeros(4, 2, 16, 2, 64), (torch.tensor([2, 0]), torch.tensor([0, 2]), torch.tensor([4]))
        >>> rows = torch.ones(3, 2, 64)
        >>> where = torch.tensor([0, 0, 0]), torch.tensor([17, 18, 19])
        >>> flashinfer.append_paged_kv_cache(rows, rows, *where, cache, *table)
        >>> cache[0, 0, :5, 0, 0].tolist()
        [0.0, 1.0, 1.0, 1.0, 0.0]
    """
    check_kv_layout(kv_layout)
    k_cache, v_cache = pools(paged_kv_cache, kv_layout)
    page_size = k_cache.shape[1 if kv_layout == "NHD" else 2]
    pages, slots = _slots(batch_indices, positions, kv_indices, kv_indptr, page_size)
    for name, rows, cache in (("append_key", append_key, k_cache), ("append_value", append_value, v_cache)):
        _check_dtype(name, rows, cache)
    for rows, cache in ((append_key, k_cache), (append_value, v_cache)):
        cache = cache if kv_layout == "NHD" else cache.transpose(1, 2)
        cache[pages, slots] = rows


def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    """Writes rows of latents and of rotary keys into their pages.

    Args:
        append_ckv, append_kpe: [rows, ckv], [rows, kpe], in the caches' dtypes.
        ckv_cache, kpe_cache: [pages, page_size, ckv], [pages, page_size, kpe], written.
        batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len: same as in `append_paged_kv_cache`.

    Raises:
        TypeError: rows of another dtype than their cache.

    Example:
        >>> import torch
        >>> from raddle.compat import flashinfer
        >>> ckv, kpe = torch.zeros(4, 16, 512), torch.zeros(4, 16, 64)
        >>> table = torch.tensor([2, 0]), torch.tensor([0, 2]), torch.tensor([2])
        >>> rows = torch.ones(1, 512), torch.ones(1, 64)
        >>> flashinfer.append_paged_mla_kv_cache(*rows, torch.tensor([0]), torch.tensor([17]), ckv, kpe, *table)
        >>> ckv[0, :3, 0].tolist()
        [0.0, 1.0, 0.0]
    """
    pages, slots = _slots(batch_indices, positions, kv_indices, kv_indptr, ckv_cache.shape[1])
    _check_dtype("append_ckv", append_ckv, ckv_cache)
    _check_dtype("append_kpe", append_kpe, kpe_cache)
    ckv_cache[pages, slots] = append_ckv
    kpe_cache[pages, slots] = append_kpe


def _slots(
    batch_indices: torch.Tensor, positions: torch.Tensor, indices: torch.Tensor, indptr: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, positions = batch_indices.long(), positions.long()
    pages = indices[indptr[batch].long() + torch.div(positions, page_size, rounding_mode="floor")]
    return pages.long(), positions % page_size


def _check_dtype(name: str, rows: torch.Tensor, cache: torch.Tensor) -> None:
    if rows.dtype != cache.dtype:
        raise TypeError(f"{name} has dtype {rows.dtype}; expected {cache.dtype}, as the cache has")
