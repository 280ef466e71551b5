"""FlashInfer's attention of a single request, without a plan."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from raddle.compat.flashinfer._planned import Planned, rows_from_0
from raddle.compat.flashinfer._refusals import check_backend, check_kv_layout, refuse
from raddle.compat.flashinfer._tensors import packed
from raddle.layouts import RaggedKV


def single_decode_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of one row.

    Args:
        q: [Hq, D].
        k, v: [keys, Hkv, D], or [Hkv, keys, D] for kv_layout="HND".
        return_lse: return (out, lse); lse [Hq] is to base 2.
        use_tensor_cores: has no effect.
        pos_encoding_mode, rope_scale, rope_theta, window_left: same as in `BatchDecodeWithPagedKVCacheWrapper`.
        logits_soft_cap, sm_scale, q_scale, k_scale, v_scale: as there.

    Returns:
        out [Hq, D], or (out, lse).

    Raises:
        ValueError: shapes that do not fit.

    Example:
        >>> import torch
        >>> from raddle.compat import flashinfer
        >>> k = torch.ones(30, 2, 64)
        >>> flashinfer.single_decode_with_kv_cache(torch.ones(8, 64), k, k).shape
        torch.Size([8, 64])
    """
    terms = dict(window_left=window_left, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale)
    rope = dict(pos_encoding_mode=pos_encoding_mode, rope_scale=rope_scale, rope_theta=rope_theta)
    found = _Single(q[None], k, v, kv_layout, None, None, **terms, **rope).run(return_lse, q_scale, k_scale, v_scale)
    return (found[0][0], found[1][0]) if return_lse else found[0]


def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale_q: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> Any:
    """Attention of some rows of one request.

    Args:
        q: [rows, Hq, D].
        k, v: [keys, Hkv, D], or [Hkv, keys, D] for kv_layout="HND".
        custom_mask: [rows, keys] bool; packed_custom_mask: its bits. causal has no effect then.
        o_dtype: of the output; None: q's.
        scale_q, scale_k, scale_v, kv_cache_sf: refused.
        return_lse: return (out, lse); lse [rows, Hq] is to base 2.
        causal, use_fp16_qk_reduction, sm_scale, window_left, logits_soft_cap: same as in
            `BatchPrefillWithPagedKVCacheWrapper`.
        pos_encoding_mode, rope_scale, rope_theta, backend, k_scale, v_scale: as there.

    Returns:
        out [rows, Hq, D], or (out, lse).

    Raises:
        NotImplementedError: what Raddle does not have.
        ValueError: shapes that do not fit.

    Example:
        >>> import torch
        >>> from raddle.compat import flashinfer
        >>> q, k = torch.ones(9, 8, 64), torch.ones(30, 2, 64)
        >>> flashinfer.single_prefill_with_kv_cache(q, k, k, causal=True).shape
        torch.Size([9, 8, 64])
    """
    check_backend(backend)
    refuse(scale_q=scale_q, scale_k=scale_k, scale_v=scale_v, kv_cache_sf=kv_cache_sf)
    mask = None
    if custom_mask is not None or packed_custom_mask is not None:
        keys = k.shape[0 if kv_layout == "NHD" else 1]
        mask = packed(custom_mask, packed_custom_mask, np.array([q.shape[0] * keys], np.int64))
    terms = dict(causal=causal, window_left=window_left, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale)
    rope = dict(pos_encoding_mode=pos_encoding_mode, rope_scale=rope_scale, rope_theta=rope_theta)
    return _Single(q, k, v, kv_layout, o_dtype, mask, **terms, **rope).run(return_lse, None, k_scale, v_scale)


single_prefill_with_kv_cache_return_lse = functools.partial(single_prefill_with_kv_cache, return_lse=True)


class _Single(Planned):
    """A plan for one request."""

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: str, o_dtype: Any, mask: Any, **terms: Any
    ) -> None:
        check_kv_layout(kv_layout)
        if kv_layout == "HND":
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        self.device, self._q, self._kv = q.device, q, (k, v)
        heads = q.shape[1], k.shape[1], q.shape[2], v.shape[2]
        self._set_terms(heads, q.dtype, k.dtype, o_dtype, mask=mask, **terms)
        rows, keys = np.array([0, q.shape[0]]), np.array([0, k.shape[0]])
        self._plan_layout(lambda qo_pos: RaggedKV(rows, keys, qo_pos), rows_from_0(rows))

    def run(self, return_lse: bool, q_scale: Any, k_scale: Any, v_scale: Any) -> Any:
        scales = dict(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        return self._run(self._q, self._kv, return_lse=return_lse, **scales)
