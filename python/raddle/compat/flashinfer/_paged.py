"""What wrappers over page tables have in common: the table, and the buffers of graph mode."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from raddle.compat.flashinfer._planned import Planned, rows_from_0
from raddle.compat.flashinfer._tensors import host, kv_lengths
from raddle.layouts import PagedKV
from raddle.plans import Maxima


class Paged(Planned):
    """A wrapper over a paged cache."""

    _max_qo_len = 0  # no bound

    def _init_paged(self, workspace: torch.Tensor, kv_layout: str, use_cuda_graph: bool, **buffers: Any) -> None:
        """Keeps the caller's buffers, by FlashInfer's attributes; in graph mode the page table's must be there."""
        self.device = workspace.device
        self._float_workspace_buffer = workspace
        self._kv_layout, self._use_cuda_graph = kv_layout, use_cuda_graph
        for name, buffer in buffers.items():
            if use_cuda_graph and buffer is None and "mask" not in name:
                raise ValueError(f"{name} is None; expected a tensor: use_cuda_graph is True")
            attribute = name if name.startswith("_") else f"_{name}"
            setattr(self, attribute.removesuffix("fer") if attribute.endswith("buffer") else attribute, buffer)
        self._fixed_batch_size = len(self._paged_kv_last_page_len_buf) if use_cuda_graph else 0

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Keeps the buffers, which Raddle does not use."""
        self._float_workspace_buffer, self._int_workspace_buffer = float_workspace_buffer, int_workspace_buffer

    def _plan_table(
        self, qo_indptr: Any, indptr: Any, indices: Any, last_page_len: Any, page_size: int, kv_len: Any = None
    ) -> None:
        """Plans a page table, and copies it into the buffers in graph mode."""
        rows, table, pages = host(qo_indptr), host(indptr), host(indices)
        lengths = kv_lengths(table, host(last_page_len), page_size) if kv_len is None else host(kv_len).ravel()
        self._batch_size = len(lengths)
        if self._use_cuda_graph:
            self._check_fits(rows, pages, page_size)
        pages = pages[: table[-1]]

        def layout(qo_pos: Any) -> PagedKV:
            return PagedKV(rows, table, pages, lengths, page_size, self._kv_layout, qo_pos=qo_pos)

        self._plan_layout(layout, rows_from_0(rows))
        given = {"qo_indptr": qo_indptr, "paged_kv_indptr": indptr, "paged_kv_indices": indices}
        if self._use_cuda_graph and self._mask is not None:
            given["custom_mask"], given["mask_indptr"] = map(torch.from_numpy, self._mask)
        self._keep(**given, paged_kv_last_page_len=last_page_len)

    def _check_fits(self, rows: np.ndarray, pages: np.ndarray, page_size: int) -> None:
        if self._batch_size != self._fixed_batch_size:
            expected = f"expected {self._fixed_batch_size}, as the buffers have"
            raise ValueError(f"the batch has {self._batch_size} requests; {expected}")
        room = len(self._paged_kv_indices_buf)
        if len(pages) > room:
            raise ValueError(f"indices has {len(pages)} entries; expected at most {room}, the buffer's")
        bits = self._check_mask_fits()
        if self._maxima is None:
            most = dict(max_qo_len=self._max_qo_len, max_mask_bytes=bits)
            self._maxima = Maxima(self._batch_size, int(rows[-1]), room * page_size, **most)
        elif rows[-1] > self._maxima.max_qo_tokens:
            most = self._maxima.max_qo_tokens
            raise ValueError(f"qo_indptr ends at {rows[-1]}; expected at most {most}, as in the first plan")

    def _check_mask_fits(self) -> int:
        """Bytes that a graph's mask may have: those of its buffer; 0 without a mask."""
        if self._mask is None:
            return 0
        for name, array in zip(("custom_mask", "mask_indptr"), self._mask):
            buffer = getattr(self, f"_{name}_buf", None)
            if buffer is None:
                raise ValueError(f"{name}_buf is None; expected a tensor: use_cuda_graph is True, and there is a mask")
            if len(array) > len(buffer):
                raise ValueError(f"{name}_buf has {len(buffer)} entries; expected at least {len(array)}, of this mask")
        return len(self._custom_mask_buf)

    def _keep(self, **arrays: Any) -> None:
        """In graph mode copies into the caller's buffers; else the arrays are the buffers."""
        for name, array in arrays.items():
            buffer = getattr(self, f"_{name}_buf", None)
            if self._use_cuda_graph and buffer is not None and isinstance(array, torch.Tensor):
                buffer[: len(array)].copy_(array, non_blocking=True)
            elif not self._use_cuda_graph:
                setattr(self, f"_{name}_buf", array)
