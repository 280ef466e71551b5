"""FlashInfer's batch prefill over ragged tensors."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from raddle.compat.flashinfer._planned import Planned, rows_from_0
from raddle.compat.flashinfer._refusals import check_backend, check_kv_layout, refuse
from raddle.compat.flashinfer._tensors import host, packed
from raddle.layouts import RaggedKV


class BatchPrefillWithRaggedKVCacheWrapper(Planned):
    """Prefill of a batch whose K and V are ragged tensors: FlashInfer's class of that name, with its arguments.

    Args:
        float_workspace_buffer, backend: same as in `BatchDecodeWithPagedKVCacheWrapper`.
        kv_layout: "NHD" for [tokens, Hkv, D], "HND" for [Hkv, tokens, D].
        use_cuda_graph: refused, with the buffers.
        qo_indptr_buf, kv_indptr_buf, custom_mask_buf, mask_indptr_buf, jit_args, jit_kwargs: refused.

    Raises:
        NotImplementedError: an argument that Raddle does not have.

    Example:
        >>> import torch
        >>> from raddle.compat import flashinfer
        >>> wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(0, dtype=torch.uint8))
        >>> wrapper.plan(torch.tensor([0, 9]), torch.tensor([0, 30]), 8, 2, 64, causal=True, q_data_type="float32")
        >>> wrapper.run(torch.ones(9, 8, 64), torch.ones(30, 2, 64), torch.ones(30, 2, 64)).shape
        torch.Size([9, 8, 64])
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        check_kv_layout(kv_layout)
        check_backend(backend)
        refuse(use_cuda_graph=use_cuda_graph, jit_args=jit_args, jit_kwargs=jit_kwargs)
        self.device, self._kv_layout, self._backend = float_workspace_buffer.device, kv_layout, backend

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Does nothing, since Raddle does not use the buffers. Raises nothing."""

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
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
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: torch.Tensor | None = None,
        o_indptr: torch.Tensor | None = None,
    ) -> None:
        """Plans a batch, as in FlashInfer and as `BatchPrefillWithPagedKVCacheWrapper.plan`.

        Args:
            qo_indptr, kv_indptr: first row of each request in q, and in k and v.
            v_indptr, o_indptr: refused.

        Raises:
            NotImplementedError: what Raddle does not have.
            ValueError: offsets or a mask that cannot be.
        """
        refuse(prefix_len_ptr=prefix_len_ptr, token_pos_in_items_ptr=token_pos_in_items_ptr, v_indptr=v_indptr)
        refuse(token_pos_in_items_len=token_pos_in_items_len, max_item_len_ptr=max_item_len_ptr, o_indptr=o_indptr)
        rows, keys = host(qo_indptr), host(kv_indptr)
        mask = None
        if custom_mask is not None or packed_custom_mask is not None:
            mask = packed(custom_mask, packed_custom_mask, np.diff(rows).astype(np.int64) * np.diff(keys))
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
        self._plan_layout(lambda qo_pos: RaggedKV(rows, keys, qo_pos), rows_from_0(rows))

    begin_forward = plan

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
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
            ValueError: what `run` refuses.
        """
        terms = dict(pos_encoding_mode=pos_encoding_mode, window_left=window_left, logits_soft_cap=logits_soft_cap)
        self._override(causal=causal, **terms, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta)
        return self.run(q, k, v)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        o_scale: Any = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """Computes a layer, as in FlashInfer.

        Args:
            q: [rows, Hq, D]; k, v: [tokens, Hkv, D], or [Hkv, tokens, D] for "HND".
            o_scale, kv_cache_sf: refused.
            q_scale, k_scale, v_scale, out, lse, return_lse: same as in `BatchDecodeWithPagedKVCacheWrapper.run`.

        Returns:
            out, or (out, lse).

        Raises:
            NotImplementedError: what Raddle does not have.
            ValueError: shapes that do not fit, before anything is written.
        """
        refuse(args=args or None, kv_cache_sf=kv_cache_sf, o_scale=o_scale)
        if self._kv_layout == "HND":
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        given = dict(out=out, lse=lse, return_lse=return_lse)
        return self._run(q, (k, v), **given, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward_return_lse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
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
        return self.run_return_lse(q, k, v)
