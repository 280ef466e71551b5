"""FlashAttention-3's functions, computed by Raddle: code written for `flash_attn_interface` runs on CPUs, too.

::

    import raddle.compat.flash_attn_interface as flash_attn_interface

Names, signatures and tensors are FlashAttention-3's; LSE is a natural logarithm, [batch, Hq, rows] or [Hq, rows]. Hints
(max_seqlen_q, max_seqlen_k, num_splits, pack_gqa, sm_margin, scheduler_metadata, deterministic) have no effect. Lengths and
tables that lie on a GPU are copied to the host. Caches are read and written where they lie. Forward only.
"""

from __future__ import annotations

import functools
from typing import Any, Union

import numpy as np
import torch

from raddle.attention import Attention
from raddle.kv import append_kv
from raddle.layouts import Layout, PagedKV, RaggedKV
from raddle.rotary import RopeTables
from raddle.spec import AttentionSpec
from raddle.variants import SlidingWindow, SoftCap

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: Any = None,
    causal: Any = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: Any = (-1, -1),
    attention_chunk: Any = 0,
    softcap: Any = 0.0,
    num_splits: Any = 1,
    pack_gqa: Any = None,
    deterministic: Any = False,
    sm_margin: Any = 0,
    return_attn_probs: Any = False,
) -> Any:
    """Attention of a batch of equally long sequences.

    Args:
        q: [B, S, Hq, D]; k, v: [B, Skv, Hkv, D], read where they lie; the head dimension of v may differ.
        softmax_scale: None: ``1 / sqrt(D)``, of q and qv together.
        causal: the last row sees all keys, each row before it one key less.
        window_size: (left, right): keys that a row sees to either side of its own place; -1: no bound.
        softcap: of the logits; 0: none.
        k_descale, v_descale: what K and V are multiplied by: numbers, or tensors whose elements are equal, which are copied
            to the host; with qv refused.
        qv: [B, S, Hq, Dv]: the part of a query that meets v, so that logits are ``q · k + qv · v``: MLA, whose latents are
            v and whose rotary keys are k. None: there is no such part.
        q_descale, attention_chunk: refused.
        return_attn_probs: return (out, lse), lse [B, Hq, S] float32, a natural logarithm.

    Returns:
        out [B, S, Hq, D], or (out, lse). A row without keys is 0, its lse -inf.

    Raises:
        NotImplementedError: what Raddle does not have.
        ValueError: shapes that do not fit together, inputs that require a gradient.

    Example:
        >>> import torch
        >>> from raddle.compat.flash_attn_interface import flash_attn_func
        >>> q, k = torch.ones(2, 9, 8, 64), torch.ones(2, 30, 2, 64)
        >>> flash_attn_func(q, k, k, causal=True).shape
        torch.Size([2, 9, 8, 64])
    """
    _refuse(q_descale=q_descale, attention_chunk=attention_chunk)
    (batch, rows), keys = q.shape[:2], k.shape[1]
    layout, scales = _even_layout(batch, rows, keys), _scales(qv, k_descale, v_descale)
    terms = softmax_scale, causal, window_size, softcap
    out, lse = _attend(_packed(q), _packed(qv), (k, v), layout, scales, *terms, return_attn_probs)
    return _batched(out, lse, batch, rows)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    seqused_q: Any = None,
    seqused_k: Any = None,
    softmax_scale: Any = None,
    causal: Any = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: Any = (-1, -1),
    attention_chunk: Any = 0,
    softcap: Any = 0.0,
    num_splits: Any = 1,
    pack_gqa: Any = None,
    deterministic: Any = False,
    sm_margin: Any = 0,
    return_attn_probs: Any = False,
) -> Any:
    """Attention of sequences of any lengths, one after another.

    Args:
        q: [rows, Hq, D]; k, v: [keys, Hkv, D].
        cu_seqlens_q, cu_seqlens_k: [B + 1] int32, first row and first key of each sequence.
        seqused_k: [B] keys of each sequence that count; None: all.
        qv: [rows, Hq, Dv], as in `flash_attn_func`.
        seqused_q: refused, as are q_descale and attention_chunk.
        softmax_scale, causal, window_size, softcap, k_descale, v_descale: same as in `flash_attn_func`.
        return_attn_probs: return (out, lse), lse [Hq, rows].

    Returns:
        out [rows, Hq, D], or (out, lse).

    Raises:
        NotImplementedError: what Raddle does not have.
        ValueError: offsets or shapes that do not fit together, inputs that require a gradient.

    Example:
        >>> import torch
        >>> from raddle.compat.flash_attn_interface import flash_attn_varlen_func
        >>> q, k, rows, keys = torch.ones(9, 8, 64), torch.ones(30, 2, 64), torch.tensor([0, 4, 9]), torch.tensor([0, 10, 30])
        >>> flash_attn_varlen_func(q, k, k, rows, keys, 5, 20, causal=True).shape
        torch.Size([9, 8, 64])
    """
    _refuse(q_descale=q_descale, attention_chunk=attention_chunk)
    _refuse(seqused_q=seqused_q)
    rows, keys = _host(cu_seqlens_q), _host(cu_seqlens_k)
    kv = k, v
    if seqused_k is None:
        layout: Layout = RaggedKV(rows, keys)
    else:  # pages of one token, of which a sequence's last ones are left out
        layout = PagedKV(rows, keys, np.arange(keys[-1], dtype=np.int32), _host(seqused_k), page_size=1)
        kv = k[:, None], v[:, None]
    scales = _scales(qv, k_descale, v_descale)
    out, lse = _attend(q, qv, kv, layout, scales, softmax_scale, causal, window_size, softcap, return_attn_probs)
    return out if lse is None else (out, lse.transpose(0, 1))


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    qv: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Union[int, torch.Tensor, None] = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: Any = None,
    causal: Any = False,
    window_size: Any = (-1, -1),
    attention_chunk: Any = 0,
    softcap: Any = 0.0,
    rotary_interleaved: Any = True,
    scheduler_metadata: Any = None,
    num_splits: Any = 0,
    pack_gqa: Any = None,
    sm_margin: Any = 0,
    return_softmax_lse: Any = False,
) -> Any:
    """Attention over a cache, after writing new keys and values into it.

    Args:
        q: [B, S, Hq, D]; with cu_seqlens_q [rows, Hq, D].
        k_cache, v_cache: [sequences, tokens, Hkv, D], or with page_table [pages, page_size, Hkv, D]; written where k is given.
        k, v: [B, new, Hkv, D], or with cu_seqlens_k_new [rows, Hkv, D]: they follow the first cache_seqlens keys.
        cache_seqlens: keys of each sequence before the new ones: an int, or [B]; None: all that the cache has room for.
        cache_batch_idx: [B] which sequence of the cache is whose; not with page_table.
        page_table: [B, pages] of each sequence.
        rotary_cos, rotary_sin: [positions, rotary_dim / 2]: turn k, and q as FlashAttention does: at its rows' places where
            causal or a window, else all at cache_seqlens. Only with k.
        rotary_interleaved: turn neighbouring elements, else halves.
        qv: [B, S, Hq, Dv], or [rows, Hq, Dv], as in `flash_attn_func`.
        cache_leftpad, rotary_seqlens: refused, as are q_descale and attention_chunk.
        softmax_scale, causal, window_size, softcap, k_descale, v_descale: same as in `flash_attn_func`.
        return_softmax_lse: return (out, lse), lse [B, Hq, S], or [Hq, rows] with cu_seqlens_q.

    Returns:
        out like q, or (out, lse).

    Raises:
        NotImplementedError: what Raddle does not have.
        ValueError: shapes, lengths or pages that do not fit, before anything is written.

    Example:
        >>> import torch
        >>> from raddle.compat.flash_attn_interface import flash_attn_with_kvcache
        >>> q, cache, new = torch.ones(2, 1, 8, 64), torch.zeros(2, 40, 2, 64), torch.ones(2, 1, 2, 64)
        >>> flash_attn_with_kvcache(q, cache, cache.clone(), new, new, cache_seqlens=30, causal=True).shape
        torch.Size([2, 1, 8, 64])
        >>> cache[:, 29:32, 0, 0].tolist()
        [[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]
    """
    _refuse(q_descale=q_descale, attention_chunk=attention_chunk)
    _refuse(cache_leftpad=cache_leftpad, rotary_seqlens=rotary_seqlens)
    rows = _indptr(q, cu_seqlens_q)
    batch = len(rows) - 1
    if page_table is not None:
        pages = _host(page_table)
    else:
        pages = (np.arange(batch, dtype=np.int32) if cache_batch_idx is None else _host(cache_batch_idx))[:, None]
    room = pages.shape[1] * k_cache.shape[1]
    before = np.broadcast_to(_host(room if cache_seqlens is None else cache_seqlens), batch).astype(np.int32)
    new_rows = None if k is None else _indptr(k, cu_seqlens_k_new)
    kv_len = before if new_rows is None else before + np.diff(new_rows).astype(np.int32)
    layout = PagedKV(rows, None, pages, kv_len, k_cache.shape[1])
    if q.shape[-1] != k_cache.shape[-1]:  # seen before new keys are written
        raise ValueError(f"q has head dimension {q.shape[-1]}; expected {k_cache.shape[-1]}, as k_cache has")
    packed_q = _packed(q)
    kv, terms = (k_cache, v_cache), (softmax_scale, causal, window_size, softcap)
    run = _planned(packed_q, _packed(qv), kv, layout, _scales(qv, k_descale, v_descale), *terms, return_softmax_lse)
    if new_rows is not None:
        rope = None
        if rotary_cos is not None:
            rope = RopeTables(rotary_cos, rotary_sin, bool(rotary_interleaved))
            in_order = causal or tuple(window_size) != (-1, -1)
            packed_q = _turned(packed_q, _places(rows, before, in_order), rotary_cos, rotary_sin, rotary_interleaved)
        packed = (x if cu_seqlens_k_new is not None else x.flatten(0, 1) for x in (k, v))
        append_kv(PagedKV(new_rows, None, pages, kv_len, k_cache.shape[1]), (k_cache, v_cache), *packed, rope=rope)
    elif rotary_cos is not None:
        raise ValueError("rotary_cos is given without k; expected both: it turns the new keys")
    found = run(packed_q)
    out, lse = found if return_softmax_lse else (found, None)
    if cu_seqlens_q is not None:
        return out if lse is None else (out, lse.transpose(0, 1))
    return _batched(out, lse, batch, q.shape[1])


def _refuse(**arguments: Any) -> None:
    """Raises NotImplementedError for the first argument that is given."""
    for name, value in arguments.items():
        if value is not None and not (isinstance(value, int) and value == 0):
            raise NotImplementedError(f"{name} is given; raddle.compat.flash_attn_interface does not have it: leave it out")


def _scales(qv: Any, k_descale: Any, v_descale: Any) -> dict[str, float | None]:
    """One number each, as `Attention.run` takes them of K and V of 16 bits."""
    found: dict[str, float | None] = {}
    for name, given in (("k", k_descale), ("v", v_descale)):
        if qv is not None:
            _refuse(**{f"{name}_descale with qv": given})
        numbers = None if given is None else _host(given).ravel()
        if numbers is not None and (numbers.size == 0 or np.ptp(numbers) > 0):
            raise NotImplementedError(
                f"{name}_descale has several numbers; raddle.compat.flash_attn_interface takes one for all sequences and heads"
            )
        if numbers is not None and not np.isfinite(numbers[0]):
            raise ValueError(f"{name}_descale is {numbers[0]}; expected a finite number")
        found[f"{name}_scale"] = None if numbers is None else float(numbers[0])
    return found


def _packed(x: Any) -> Any:
    """[B, S, H, D] as [rows, H, D]; anything else as it is."""
    return x.flatten(0, 1) if isinstance(x, torch.Tensor) and x.ndim == 4 else x


def _attend(q: torch.Tensor, *problem: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out [rows, Hq, D], lse [rows, Hq] or None)."""
    found = _planned(q, *problem)(q)
    return found if problem[-1] else (found, None)


def _planned(
    q: torch.Tensor,
    qv: Any,
    kv: Any,
    layout: Layout,
    scales: dict[str, float | None],
    scale: Any,
    causal: Any,
    window: Any,
    cap: Any,
    return_lse: Any,
) -> Any:
    """What computes rows like q; with qv, a query is its row of qv and then that of q, as a key is V's and then K's."""
    dim_vo = kv[1].shape[-1]
    if qv is not None and (*q.shape[:-1], dim_vo) != tuple(qv.shape):
        raise ValueError(f"qv has shape {list(qv.shape)} in rows; expected {[*q.shape[:-1], dim_vo]}: q's rows, v's columns")
    heads = q.shape[-2], kv[0].shape[-2], q.shape[-1] + (0 if qv is None else dim_vo), dim_vo
    attention = _attention_of(heads, q.dtype, str(q.device), cap > 0.0, qv is not None)
    left, right = (int(bound) for bound in window)
    params = {"window.left": left, "window.right": 0 if causal else right}
    plan = attention.plan(layout, params=params)
    cap_params = {"softcap.cap": float(cap)} if cap > 0.0 else None
    how = dict(scale=scale, return_lse=bool(return_lse), params=cap_params, **scales)
    return lambda rows: attention.run(plan, rows if qv is None else torch.cat([qv, rows], -1), kv, **how)


@functools.lru_cache(maxsize=64)
def _attention_of(
    heads: tuple[int, int, int, int], dtype: torch.dtype, device: str, has_cap: bool, k_extends_v: bool
) -> Attention:
    variant = [SoftCap(1.0), SlidingWindow(-1)] if has_cap else [SlidingWindow(-1)]
    return Attention(AttentionSpec(*heads, dtype, variant, k_extends_v=k_extends_v), device)


@functools.lru_cache(maxsize=64)
def _even_layout(batch: int, rows: int, keys: int) -> Layout:
    """K and V [B, Skv, Hkv, D] are a pool of B pages, one a sequence."""
    pages = np.arange(batch, dtype=np.int32)[:, None]
    qo_indptr = np.arange(batch + 1, dtype=np.int64) * rows
    return PagedKV(qo_indptr, None, pages, np.full(batch, keys, np.int32), keys)


def _indptr(x: torch.Tensor, cu_seqlens: Any) -> np.ndarray:
    """First row of each sequence: as given, or of [B, S, H, D]."""
    if cu_seqlens is not None:
        return _host(cu_seqlens)
    return np.arange(x.shape[0] + 1, dtype=np.int32) * np.int32(x.shape[1])


def _places(rows: np.ndarray, before: np.ndarray, in_order: Any) -> np.ndarray:
    """[rows] where each row of q is turned to."""
    lengths = np.diff(rows)
    first = np.repeat(before, lengths)
    return first + (np.arange(rows[-1]) - np.repeat(rows[:-1], lengths)) if in_order else first


def _turned(x: torch.Tensor, places: np.ndarray, cos: Any, sin: Any, interleaved: Any) -> torch.Tensor:
    """Rows of q, turned in fp32 and rounded once."""
    where = torch.from_numpy(places).to(cos.device)
    cos, sin = (table.float()[where][:, None] for table in (cos, sin))
    half = cos.shape[-1]
    turning, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    a, b = (turning[..., ::2], turning[..., 1::2]) if interleaved else turning.split(half, -1)
    turned = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


def _batched(out: torch.Tensor, lse: torch.Tensor | None, batch: int, rows: int) -> Any:
    """[B, S, Hq, D], and [B, Hq, S]."""
    out = out.view(batch, rows, *out.shape[1:])
    return out if lse is None else (out, lse.view(batch, rows, -1).transpose(1, 2))


def _host(x: Any) -> np.ndarray:
    return x.cpu().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)
