"""FlashInfer's MLA with absorbed weights over a paged cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from raddle.compat.flashinfer._planned import Planned
from raddle.compat.flashinfer._refusals import check_backend, refuse
from raddle.compat.flashinfer._tensors import LN_2, host
from raddle.layouts import PagedKV
from raddle.plans import Maxima


class BatchMLAPagedAttentionWrapper(Planned):
    """MLA over a paged cache of latents: FlashInfer's class of that name.

    The caches of the latent and of the rotary part are read where they lie: two tensors, or views of one.

    Args:
        float_workspace_buffer, backend: same as in `BatchDecodeWithPagedKVCacheWrapper`.
        use_cuda_graph: `plan` replans into memory that stays, for at most the batch and pages of the buffers and the
            rows of the first plan.
        qo_indptr, kv_indptr, kv_indices, kv_len_arr: in graph mode, written by `plan`.

    Raises:
        NotImplementedError: another backend.
        ValueError: a missing buffer in graph mode.

    Example:
        >>> import torch
        >>> from raddle.compat import flashinfer
        >>> wrapper = flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(0, dtype=torch.uint8))
        >>> table = torch.tensor([0, 2]), torch.tensor([2, 0]), torch.tensor([20])
        >>> dtypes = torch.float32, torch.float32
        >>> wrapper.plan(torch.tensor([0, 1]), *table, 16, 512, 64, 16, False, 0.07, *dtypes)
        >>> caches = torch.ones(4, 16, 512), torch.ones(4, 16, 64)
        >>> wrapper.run(torch.ones(1, 16, 512), torch.ones(1, 16, 64), *caches).shape
        torch.Size([1, 16, 512])
    """

    _k_extends_v = True

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        check_backend(backend)
        self.device, self._backend, self._use_cuda_graph = float_workspace_buffer.device, backend, use_cuda_graph
        self._buffers = dict(qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices, kv_len_arr=kv_len_arr)
        if use_cuda_graph:
            for name, buffer in self._buffers.items():
                if buffer is None:
                    raise ValueError(f"{name} is None; expected a tensor: use_cuda_graph is True")

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        """Plans a batch, as in FlashInfer.

        Args:
            kv_len_arr: keys of each request.
            use_profiler: refused.

        Raises:
            NotImplementedError: a profiler.
            ValueError: a page table that cannot be, or in graph mode does not fit.
        """
        refuse(use_profiler=use_profiler)
        heads = num_heads, 1, head_dim_ckv + head_dim_kpe, head_dim_ckv
        self._set_terms(heads, q_data_type, kv_data_type, None, causal=causal, sm_scale=sm_scale)
        arrays = dict(qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices, kv_len_arr=kv_len_arr)
        rows, table, pages, lengths = (host(x) for x in arrays.values())
        if self._use_cuda_graph and self._maxima is None:
            keys = len(self._buffers["kv_indices"]) * page_size
            self._maxima = Maxima(len(lengths), int(rows[-1]), keys)
        layout = PagedKV(rows, table, pages[: table[-1]], lengths, page_size)
        self._plan_layout(lambda _: layout, np.zeros(0, np.int32))
        if self._use_cuda_graph:
            for name, array in arrays.items():
                self._buffers[name][: len(array)].copy_(array, non_blocking=True)

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
    ) -> Any:
        """Computes a layer, as in FlashInfer.

        Args:
            q_nope, q_pe: [rows, heads, ckv], [rows, heads, kpe].
            ckv_cache, kpe_cache: [pages, page_size, ckv], [pages, page_size, kpe].
            return_lse_base_on_e: lse is a natural logarithm, instead of to base 2.
            profiler_buffer, kv_len, page_table, o_scale: refused.

        Returns:
            out [rows, heads, ckv], or (out, lse).

        Raises:
            NotImplementedError: what Raddle does not have.
            ValueError: shapes that do not fit, before anything is written.
        """
        refuse(profiler_buffer=profiler_buffer, kv_len=kv_len, page_table=page_table, o_scale=o_scale)
        q = torch.cat([q_nope, q_pe], -1)
        found = self._run(q, (kpe_cache.unsqueeze(-2), ckv_cache.unsqueeze(-2)), out=out, lse=lse, return_lse=return_lse)
        if return_lse and return_lse_base_on_e:
            found[1].mul_(LN_2)
        return found
