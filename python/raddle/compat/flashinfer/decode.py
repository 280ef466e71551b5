"""FlashInfer's batch decoding over paged caches."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from raddle.compat.flashinfer._paged import Paged
from raddle.compat.flashinfer._refusals import check_backend, check_kv_layout, refuse
from raddle.compat.flashinfer._tensors import pools


class BatchDecodeWithPagedKVCacheWrapper(Paged):
    """Decoding of a batch over a paged cache: FlashInfer's class of that name, with its arguments.

    Args:
        float_workspace_buffer: says by its device where to compute; Raddle's own workspace is smaller.
        kv_layout: "NHD" or "HND".
        use_cuda_graph: `plan` replans into memory that stays, for at most the batch and pages of the buffers, so that `run`
            may be captured.
        use_tensor_cores: has no effect; Raddle chooses.
        paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer: of graph mode; `plan` writes them.
        backend: "auto", "fa2" or "fa3", which have no effect.
        jit_args: refused.

    Raises:
        NotImplementedError: an argument that Raddle does not have.
        ValueError: a missing buffer in graph mode.

    Example:
        >>> import torch
        >>> from raddle.compat import flashinfer
        >>> wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0, dtype=torch.uint8), "NHD")
        >>> table = torch.tensor([0, 3, 5]), torch.tensor([7, 2, 5, 0, 1]), torch.tensor([3, 4])
        >>> wrapper.plan(*table, 8, 2, 64, 16, q_data_type="float32")
        >>> out, lse = wrapper.run(torch.ones(2, 8, 64), torch.ones(8, 2, 16, 2, 64), return_lse=True)
        >>> out.shape, round(float(lse[0, 0]), 3)                                   # to base 2: 8 log2(e) + log2(35)
        (torch.Size([2, 8, 64]), 16.671)
    """

    _max_qo_len = 1

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        check_kv_layout(kv_layout)
        check_backend(backend)
        refuse(jit_args=jit_args)
        self._backend, self._use_tensor_cores = backend, use_tensor_cores
        buffers = dict(
            paged_kv_indptr_buffer=paged_kv_indptr_buffer,
            paged_kv_indices_buffer=paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer=paged_kv_last_page_len_buffer,
        )
        self._init_paged(float_workspace_buffer, kv_layout, use_cuda_graph, **buffers)

    @property
    def use_tensor_cores(self) -> bool:
        """What the constructor was told."""
        return self._use_tensor_cores

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Plans a batch, as in FlashInfer.

        Args:
            indptr, indices, last_page_len: the page table; arrays on a GPU are copied to the host.
            num_qo_heads, num_kv_heads, head_dim, page_size, window_left, logits_soft_cap, sm_scale: as in FlashInfer.
            pos_encoding_mode: "NONE", "ROPE_LLAMA" or "ALIBI"; ALiBi not beside a window or soft cap.
            q_data_type, kv_data_type, o_data_type: of queries, cache (float8 and int8, too) and output; data_type is
                that of the cache, or of both where q_data_type is not given.
            rope_scale, rope_theta: of "ROPE_LLAMA".
            non_blocking, block_tables, seq_lens: have no effect; the page table says it all.
            fixed_split_size, disable_split_kv: ask for batch-invariant bits (``AttentionSpec(batch_invariant=True)``).

        Raises:
            NotImplementedError: what Raddle does not have.
            ValueError: a page table that cannot be, or in graph mode does not fit.
        """
        if data_type is not None:
            q_data_type = data_type if q_data_type is None or q_data_type == "float16" else q_data_type
            kv_data_type = data_type if kv_data_type is None else kv_data_type
        self._set_terms(
            (num_qo_heads, num_kv_heads, head_dim, head_dim),
            q_data_type,
            kv_data_type,
            o_data_type,
            deterministic=bool(disable_split_kv) or (fixed_split_size or -1) > 0,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        rows = np.arange(len(indptr), dtype=np.int32)
        self._batch_size = len(rows) - 1
        self._plan_table(rows, indptr, indices, last_page_len, page_size)

    begin_forward = plan

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: Any,
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
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
        self._override(**terms, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta)
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)

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
        q_len_per_req: int | None = 1,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """Computes a layer, as in FlashInfer.

        Args:
            q: [batch, Hq, D].
            paged_kv_cache: one tensor [pages, 2, …], a pair, or a pair of [slots, Hkv, D] for pages of one token.
            q_scale, k_scale, v_scale: numbers; of float8 and int8 caches tensors, too.
            out, lse: to write; None: new ones.
            return_lse: return (out, lse); lse [batch, Hq] float32 to base 2.
            enable_pdl: has no effect.
            window_left: another window than the plan's.
            sinks: [Hq] logits, natural.
            q_len_per_req: 1; more, and the other arguments, are refused.

        Returns:
            out, or (out, lse).

        Raises:
            NotImplementedError: what Raddle does not have.
            ValueError: shapes that do not fit, before anything is written.
        """
        refuse(args=args or None, kv_cache_sf=kv_cache_sf)
        refuse(skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
        if q_len_per_req not in (None, 1):
            refuse(q_len_per_req=q_len_per_req)
        given = dict(out=out, lse=lse, return_lse=return_lse, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        with self._window(window_left):
            return self._run(q, pools(paged_kv_cache, self._kv_layout), **given, sinks=sinks)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward_return_lse(
        self,
        q: torch.Tensor,
        paged_kv_cache: Any,
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
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
        self._override(**terms, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta)
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=True)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """`BatchDecodeWithPagedKVCacheWrapper` in graph mode.

    Args:
        workspace_buffer, indptr_buffer, indices_buffer, last_page_len_buffer, kv_layout, use_tensor_cores: as there.

    Raises:
        ValueError: a missing buffer.

    Example:
        >>> import torch
        >>> from raddle.compat import flashinfer
        >>> indptr, indices, last_page_len = (torch.zeros(n, dtype=torch.int32) for n in (3, 64, 2))
        >>> workspace = torch.empty(0, dtype=torch.uint8)
        >>> wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace, indptr, indices, last_page_len)
        >>> wrapper.is_cuda_graph_enabled
        True
    """

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        buffers = indptr_buffer, indices_buffer, last_page_len_buffer
        super().__init__(workspace_buffer, kv_layout, True, use_tensor_cores, *buffers)


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: Any = None,
    kv_data_type: Any = None,
    data_type: Any = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    global_override_indptr_cpu: torch.Tensor | None = None,
) -> None:
    """`BatchDecodeWithPagedKVCacheWrapper.plan`; a table that was copied to the host already saves copying it again.

    Args:
        self: the wrapper.
        global_override_indptr_cpu: indptr on the host.
        indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size: same as in `plan`.
        pos_encoding_mode, window_left, logits_soft_cap, q_data_type, kv_data_type, data_type: same as in `plan`.
        sm_scale, rope_scale, rope_theta, non_blocking, fixed_split_size, disable_split_kv: same as in `plan`.

    Raises:
        ValueError: what `plan` refuses.

    Example:
        >>> import torch
        >>> from raddle.compat import flashinfer
        >>> wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0, dtype=torch.uint8))
        >>> table = torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([4])
        >>> flashinfer.fast_decode_plan(wrapper, *table, 8, 2, 64, 16, q_data_type="float32")
        >>> wrapper.run(torch.ones(1, 8, 64), torch.ones(1, 2, 16, 2, 64)).shape
        torch.Size([1, 8, 64])
    """
    indptr = indptr if global_override_indptr_cpu is None else global_override_indptr_cpu
    dtypes = dict(q_data_type="float16" if q_data_type is None else q_data_type, kv_data_type=kv_data_type)
    terms = dict(pos_encoding_mode=pos_encoding_mode, window_left=window_left, logits_soft_cap=logits_soft_cap)
    scales = dict(sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta, data_type=data_type)
    splits = dict(fixed_split_size=fixed_split_size, disable_split_kv=disable_split_kv, non_blocking=non_blocking)
    heads = num_qo_heads, num_kv_heads, head_dim, page_size
    BatchDecodeWithPagedKVCacheWrapper.plan(
        self, indptr, indices, last_page_len, *heads, **dtypes, **terms, **scales, **splits
    )
