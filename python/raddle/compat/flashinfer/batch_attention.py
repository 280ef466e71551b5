"""FlashInfer's BatchAttention: prefill and decoding in one batch."""

from __future__ import annotations

from typing import Any

import torch

from raddle.compat.flashinfer._planned import Planned, rows_from_0
from raddle.compat.flashinfer._refusals import check_kv_layout, refuse
from raddle.compat.flashinfer._tensors import host, pools
from raddle.layouts import PagedKV


class BatchAttention(Planned):
    """Attention of a batch of prompts and of decoding over a paged cache: FlashInfer's class of that name.

    Args:
        kv_layout: "NHD" or "HND".
        device: where to compute. FlashInfer's default is "cuda".

    Raises:
        KeyError: another kv_layout.

    Example:
        >>> import torch
        >>> from raddle.compat import flashinfer
        >>> attention = flashinfer.BatchAttention(device="cpu")
        >>> table = torch.tensor([0, 3, 5]), torch.tensor([7, 2, 5, 0, 1]), torch.tensor([35, 20])
        >>> attention.plan(torch.tensor([0, 1, 9]), *table, 8, 2, 64, 64, 16, causal=True, q_data_type=torch.float32,
        ...                kv_data_type=torch.float32)
        >>> out, lse = attention.run(torch.ones(9, 8, 64), torch.ones(8, 2, 16, 2, 64))
        >>> out.shape, lse.shape
        (torch.Size([9, 8, 64]), torch.Size([9, 8]))
    """

    def __init__(self, kv_layout: str = "NHD", device: str = "cuda") -> None:
        check_kv_layout(kv_layout)
        self._kv_layout, self.device = kv_layout, torch.device(device)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        use_profiler: bool = False,
    ) -> None:
        """Plans a batch, as in FlashInfer.

        Args:
            kv_len_arr: keys of each request.
            use_profiler: refused.

        Raises:
            NotImplementedError: a profiler.
            ValueError: a page table that cannot be.
        """
        refuse(use_profiler=use_profiler)
        heads = num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo
        terms = dict(causal=causal, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap)
        self._set_terms(heads, q_data_type, kv_data_type, None, **terms)
        rows, table, pages, lengths = (host(x) for x in (qo_indptr, kv_indptr, kv_indices, kv_len_arr))
        pages = pages[: table[-1]]

        def layout(qo_pos: Any) -> PagedKV:
            return PagedKV(rows, table, pages, lengths, page_size, self._kv_layout, qo_pos=qo_pos)

        self._plan_layout(layout, rows_from_0(rows))

    def run(
        self,
        q: torch.Tensor,
        kv_cache: Any,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: torch.Tensor | None = None,
        kv_cache_sf: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes a layer, as in FlashInfer.

        Args:
            logits_soft_cap: this layer's, where the plan had one; 0: the plan's.
            profiler_buffer, kv_cache_sf: refused.

        Returns:
            (out, lse); lse is to base 2.

        Raises:
            NotImplementedError: what Raddle does not have.
            ValueError: a soft cap that the plan had not, or shapes that do not fit, before anything is written.
        """
        refuse(profiler_buffer=profiler_buffer, kv_cache_sf=kv_cache_sf)
        if logits_soft_cap > 0.0 and not self._logits_soft_cap:
            raise ValueError(f"logits_soft_cap is {logits_soft_cap}; expected it in plan, too")
        planned = self._logits_soft_cap
        self._logits_soft_cap = logits_soft_cap or planned
        try:
            scales = dict(k_scale=k_scale, v_scale=v_scale)
            return self._run(q, pools(kv_cache, self._kv_layout), out=out, lse=lse, return_lse=True, **scales)
        finally:
            self._logits_soft_cap = planned
