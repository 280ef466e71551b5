"""FlashInfer's states, and attention over several levels of shared prefixes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from raddle.compat.flashinfer._planned import Planned
from raddle.compat.flashinfer._refusals import check_kv_layout, refuse
from raddle.compat.flashinfer._tensors import LN_2, LOG2_E, host, kv_lengths, pools
from raddle.functional import merge_states as _merge_states
from raddle.layouts import Cascade, Layout, PagedKV


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state of two disjoint sets of keys.

    Args:
        v_a, v_b: [rows, H, D].
        s_a, s_b: [rows, H] float32, to base 2.

    Returns:
        (v in v_a's dtype, s to base 2).

    Raises:
        ValueError: shapes that differ.

    Example:
        >>> import torch
        >>> from raddle.compat import flashinfer
        >>> state = torch.ones(3, 8, 64), torch.zeros(3, 8)
        >>> v, s = flashinfer.merge_state(*state, *state)
        >>> float(v[0, 0, 0]), float(s[0, 0])
        (1.0, 1.0)
    """
    return _merged(torch.stack([v_a, v_b]), torch.stack([s_a, s_b]), v_a.dtype)


def merge_state_in_place(
    v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor, mask: torch.Tensor | None = None
) -> None:
    """Merges another state into (v, s).

    Args:
        v, s: [rows, H, D] and [rows, H] float32 to base 2, written.
        v_other, s_other: likewise, read.
        mask: [rows] bool: rows that are merged; None: all.

    Raises:
        ValueError: shapes that differ.

    Example:
        >>> import torch
        >>> from raddle.compat import flashinfer
        >>> v, s = torch.ones(3, 8, 64), torch.zeros(3, 8)
        >>> flashinfer.merge_state_in_place(v, s, 3 * v, s.clone(), mask=torch.tensor([True, False, True]))
        >>> v[:2, 0, 0].tolist(), s[:2, 0].tolist()
        ([2.0, 1.0], [1.0, 0.0])
    """
    merged, merged_s = merge_state(v, s, v_other, s_other)
    if mask is not None:
        keep = mask.bool()
        merged, merged_s = torch.where(keep[:, None, None], merged, v), torch.where(keep[:, None], merged_s, s)
    v.copy_(merged)
    s.copy_(merged_s)


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The state of several disjoint sets of keys.

    Args:
        v: [rows, states, H, D].
        s: [rows, states, H] float32, to base 2.

    Returns:
        (v [rows, H, D] in v's dtype, s [rows, H] to base 2).

    Raises:
        ValueError: shapes that do not fit together.

    Example:
        >>> import torch
        >>> from raddle.compat import flashinfer
        >>> v, s = flashinfer.merge_states(torch.ones(3, 4, 8, 64), torch.zeros(3, 4, 8))
        >>> v.shape, float(s[0, 0])
        (torch.Size([3, 8, 64]), 2.0)
    """
    return _merged(v.transpose(0, 1), s.transpose(0, 1), v.dtype)


def _merged(v: torch.Tensor, s: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """States first."""
    merged, lse = _merge_states(v.float().contiguous(), (s.float() * LN_2).contiguous())
    return merged.to(dtype), lse.mul_(LOG2_E)


class MultiLevelCascadeAttentionWrapper(Planned):
    """Attention over levels of shared prefixes: FlashInfer's class of that name, planned and run as one problem.

    Args:
        num_levels: levels; the last one's groups are the requests.
        float_workspace_buffer, kv_layout: same as in `BatchDecodeWithPagedKVCacheWrapper`.
        use_cuda_graph: refused.
        qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr: of graph mode.
        paged_kv_last_page_len_buf_arr: of graph mode.

    Raises:
        NotImplementedError: graph mode.

    Example:
        >>> import torch
        >>> from raddle.compat import flashinfer
        >>> wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, torch.empty(0, dtype=torch.uint8))
        >>> rows = [torch.tensor([0, 2]), torch.tensor([0, 1, 2])]                         # one prefix of both requests
        >>> indptr, last = [torch.tensor([0, 2]), torch.tensor([0, 1, 2])], [torch.tensor([16]), torch.tensor([9, 4])]
        >>> indices = [torch.tensor([6, 7]), torch.tensor([0, 1])]
        >>> wrapper.plan(rows, indptr, indices, last, 8, 2, 64, 16, q_data_type="float32")
        >>> wrapper.run(torch.ones(2, 8, 64), torch.ones(8, 2, 16, 2, 64)).shape
        torch.Size([2, 8, 64])
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_indptr_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_indices_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: list[torch.Tensor] | None = None,
    ) -> None:
        check_kv_layout(kv_layout)
        refuse(use_cuda_graph=use_cuda_graph)
        self._num_levels, self._kv_layout, self.device = num_levels, kv_layout, float_workspace_buffer.device

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: list[torch.Tensor]
    ) -> None:
        """Does nothing, since Raddle does not use the buffers. Raises nothing."""

    def plan(
        self,
        qo_indptr_arr: list[torch.Tensor],
        paged_kv_indptr_arr: list[torch.Tensor],
        paged_kv_indices_arr: list[torch.Tensor],
        paged_kv_last_page_len: list[torch.Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
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
    ) -> None:
        """Plans a batch, as in FlashInfer.

        Args:
            qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len: a level each.
            causal: of the last level.
            pos_encoding_mode, window_left: refused, since FlashInfer counts positions from each level's beginning.

        Raises:
            NotImplementedError: what Raddle does not have.
            ValueError: levels that do not fit together.
        """
        if pos_encoding_mode != "NONE" or window_left >= 0:
            refuse(**{"pos_encoding_mode or window_left of a cascade": True})
        levels = [qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len]
        if any(len(each) != self._num_levels for each in levels):
            found = len(qo_indptr_arr)
            raise ValueError(f"qo_indptr_arr has {found} levels; expected {self._num_levels} of each array")
        heads = num_qo_heads, num_kv_heads, head_dim, head_dim
        terms = dict(causal=causal, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap)
        self._set_terms(heads, q_data_type, kv_data_type, None, **terms)
        layouts = [self._level(*map(host, arrays), page_size) for arrays in zip(*levels)]
        self._plan_layout(lambda _: layouts[0] if len(layouts) == 1 else Cascade(layouts), np.zeros(0, np.int32))

    def _level(
        self, rows: np.ndarray, indptr: np.ndarray, indices: np.ndarray, last_page_len: np.ndarray, page_size: int
    ) -> Layout:
        lengths = kv_lengths(indptr, last_page_len, page_size)
        return PagedKV(rows, indptr, indices[: indptr[-1]], lengths, page_size, self._kv_layout)

    begin_forward = plan

    def run(self, q: torch.Tensor, paged_kv_cache: Any) -> torch.Tensor:
        """Computes a layer, as in FlashInfer.

        Returns:
            out.

        Raises:
            ValueError: shapes that do not fit, before anything is written.
        """
        kv = pools(paged_kv_cache, self._kv_layout)
        return self._run(q, kv if self._num_levels == 1 else [kv] * self._num_levels)

    forward = run
