"""FlashInfer's batch prefill over paged caches."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from raddle.compat.flashinfer._paged import Paged
from raddle.compat.flashinfer._refusals import check_backend, check_kv_layout, refuse
from raddle.compat.flashinfer._tensors import host, kv_lengths, packed, pools


class BatchPrefillWithPagedKVCacheWrapper(Paged):
    """Prefill and append of a batch over a paged cache: FlashInfer's class of that name, with its arguments.

    Args:
        float_workspace_buffer, kv_layout, use_cuda_graph, backend: same as in `BatchDecodeWithPagedKVCacheWrapper`.
        qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf: in graph mode, written by
            `plan`; the rows of the first plan are the most that later ones may have.
        custom_mask_buf, mask_indptr_buf: in graph mode with a custom mask, uint8 and [requests + 1], written by `plan`;
            no mask may have more bytes than the first has room for. Graphs read a copy that Raddle keeps.
        jit_args, jit_kwargs: refused.

    Raises:
        NotImplementedError: an argument that Raddle does not have.
        ValueError: a missing buffer in graph mode.

    Example:
        >>> import torch
        >>> from raddle.compat import flashinfer
        >>> wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(0, dtype=torch.uint8), "NHD")
        >>> table = torch.tensor([0, 3, 5]), torch.tensor([7, 2, 5, 0, 1]), torch.tensor([3, 4])
        >>> wrapper.plan(torch.tensor([0, 9, 20]), *table, 8, 2, 64, 16, causal=True, q_data_type=torch.float32)
        >>> wrapper.run(torch.ones(20, 8, 64), torch.ones(8, 2, 16, 2, 64)).shape
        torch.Size([20, 8, 64])
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        check_kv_layout(kv_layout)
        check_backend(backend)
        refuse(jit_args=jit_args, jit_kwargs=jit_kwargs)
        self._backend = backend
        buffers = dict(
            qo_indptr_buf=qo_indptr_buf,
            paged_kv_indptr_buf=paged_kv_indptr_buf,
            paged_kv_indices_buf=paged_kv_indices_buf,
            paged_kv_last_page_len_buf=paged_kv_last_page_len_buf,
            custom_mask_buf=custom_mask_buf,
            mask_indptr_buf=mask_indptr_buf,
        )
        self._init_paged(float_workspace_buffer, kv_layout, use_cuda_graph, **buffers)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Plans a batch, as in FlashInfer.

        Args:
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len: rows and the page table.
            custom_mask, packed_custom_mask: bools of all rows and keys, flat; or their bits, each request's beginning
                at a whole byte. causal has no effect then.
            prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr: refused.
            num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size: as in FlashInfer.
            causal, sm_scale, window_left: as in FlashInfer.
            use_fp16_qk_reduction, non_blocking, seq_lens, seq_lens_q, block_tables: have no effect.
            max_token_per_sequence, max_sequence_kv: have no effect.
            pos_encoding_mode, logits_soft_cap, rope_scale, rope_theta: same as in
                `BatchDecodeWithPagedKVCacheWrapper.plan`.
            q_data_type, kv_data_type, o_data_type, fixed_split_size, disable_split_kv: as there.

        Raises:
            NotImplementedError: what Raddle does not have.
            ValueError: a page table or mask that cannot be, or in graph mode does not fit.
        """
        refuse(prefix_len_ptr=prefix_len_ptr, token_pos_in_items_ptr=token_pos_in_items_ptr)
        refuse(token_pos_in_items_len=token_pos_in_items_len, max_item_len_ptr=max_item_len_ptr)
        mask = None
        if custom_mask is not None or packed_custom_mask is not None:
            lengths = kv_lengths(host(paged_kv_indptr), host(paged_kv_last_page_len), page_size)
            mask = packed(custom_mask, packed_custom_mask, np.diff(host(qo_indptr)).astype(np.int64) * lengths)
        self._set_terms(
            (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo or head_dim_qk),
            q_data_type,
            kv_data_type,
            o_data_type,
            deterministic=bool(disable_split_kv) or (fixed_split_size or -1) > 0,
            mask=mask,
            causal=causal,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        self._batch_size = len(qo_indptr) - 1
        table = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        self._plan_table(qo_indptr, *table, page_size)

    begin_forward = plan

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: Any,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Any:
        """`run` with other terms than the plan's, which are planned when they are new.

        Returns:
            out.

        Raises:
            ValueError: what `run` refuses; other terms in graph mode.
        """
        terms = dict(pos_encoding_mode=pos_encoding_mode, window_left=window_left, logits_soft_cap=logits_soft_cap)
        self._override(causal=causal, **terms, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
    ) -> Any:
        """Computes a layer, as in FlashInfer and as `BatchDecodeWithPagedKVCacheWrapper.run`, with q [rows, Hq, D].

        Returns:
            out, or (out, lse).

        Raises:
            NotImplementedError: what Raddle does not have.
            ValueError: shapes that do not fit, before anything is written.
        """
        refuse(args=args or None, kv_cache_sf=kv_cache_sf)
        refuse(skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
        given = dict(out=out, lse=lse, return_lse=return_lse, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        with self._window(window_left):
            return self._run(q, pools(paged_kv_cache, self._kv_layout), **given, sinks=sinks)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward_return_lse(
        self,
        q: torch.Tensor,
        paged_kv_cache: Any,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Any:
        """`forward` that returns (out, lse).

        Returns:
            (out, lse).

        Raises:
            ValueError: what `forward` refuses.
        """
        terms = dict(pos_encoding_mode=pos_encoding_mode, window_left=window_left, logits_soft_cap=logits_soft_cap)
        self._override(causal=causal, **terms, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta)
        return self.run_return_lse(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale)
