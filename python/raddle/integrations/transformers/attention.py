"""Attention of a layer of transformers, over its own cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from raddle.attention import Attention
from raddle.flex.trace import Traced
from raddle.integrations.transformers.masks import CAUSAL, EVERYTHING, Window, mask_of, members_of
from raddle.spec import AttentionSpec
from raddle.variants import Sinks, SlidingWindow, SoftCap, Variant


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention of ``attn_implementation="raddle"``, by the signature of AttentionInterface.

    Args:
        query: [B, Hq, Sq, D]; key, value: [B, Hkv, Skv, D], read where they lie.
        attention_mask: of `make_mask`; or the user's own, bools or floats [B or 1, Hq or 1, Sq, Skv]; None: causal if
            the module is, else every pair.
        sliding_window: counts only without a mask: masks have it.

    Returns:
        ([B, Sq, Hq, D], None).

    Raises:
        ValueError: dropout, a position bias, or shapes that do not fit.
    """
    refuse(dropout, position_bias)
    window = EVERYTHING
    if attention_mask is None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        window = CAUSAL if causal and query.shape[2] > 1 else EVERYTHING
        if sliding_window is not None and causal:
            window = window & Window(sliding_window - 1, -1)
    arguments = (query, key, value, attention_mask, s_aux, scaling, softcap, *window)
    if torch.compiler.is_compiling():
        return torch.ops.raddle.transformers_attention(*arguments), None
    return _attend(*arguments), None


def refuse(dropout: float, position_bias: Any) -> None:
    """Raises ValueError for what Raddle does not compute."""
    if dropout:
        raise ValueError(f"dropout is {dropout}; expected 0: Raddle is forward-only: call model.eval()")
    if position_bias is not None:
        raise ValueError("position_bias is given; attn_implementation='raddle' does not take it: use 'sdpa' or 'eager'")


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float | None,
    cap: float | None,
    left: int,
    right: int,
) -> torch.Tensor:
    batch, num_qo_heads, rows, head_dim = query.shape
    _, num_kv_heads, keys, head_dim_vo = value.shape
    mask = mask_of(attention_mask, (batch, rows, keys), num_qo_heads, Window(left, right))
    heads = (num_qo_heads, num_kv_heads, head_dim, head_dim_vo)
    kind = (heads, query.dtype, query.device, cap is not None, sinks is not None)
    pools, apart = mask.pools(key, value)
    planned = mask.planned.get((kind, apart))
    if planned is None:
        attention = attention_of(*kind, mask.mods)
        planned = mask.planned[kind, apart] = attention, mask.plan(attention, apart)
    attention, plan = planned
    params = run_members(cap, sinks, mask.mods)
    return attention.run(plan, query.transpose(1, 2), pools, scale=scale, params=params)


def _shape(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3]))


torch.library.define(
    "raddle::transformers_attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? attention_mask, Tensor? sinks, float? scale, float? cap, "
    "SymInt left, SymInt right) -> Tensor",
)
torch.library.impl("raddle::transformers_attention", "CompositeExplicitAutograd", _attend)
torch.library.register_fake("raddle::transformers_attention", _shape)

_attentions: dict[Any, Attention] = {}
_copies = WeakIdKeyDictionary()


def attention_of(
    heads: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    has_cap: bool,
    has_sinks: bool,
    mods: tuple[Traced, ...] = (),
) -> Attention:
    """The attention of all layers alike: (Hq, Hkv, D, Dv), what tensors are, and which parts there are."""
    key = (heads, dtype, device, has_cap, has_sinks, tuple(mod.source for mod in mods))
    found = _attentions.get(key)
    if found is None:
        variant: list[Variant] = [SlidingWindow(-1, -1), *(mod.variant() for mod in mods)]
        if has_cap:
            variant.insert(0, SoftCap(1.0))
        if has_sinks:
            variant.append(Sinks(np.zeros(heads[0], np.float32)))
        found = _attentions[key] = Attention(AttentionSpec(*heads, dtype, variant), device)
    return found


def run_members(cap: float | None, sinks: torch.Tensor | None, mods: tuple[Traced, ...] = ()) -> dict[str, Any] | None:
    """What a layer has of its own, as `Attention.run` takes it."""
    params = members_of(mod for mod in mods if not mod.is_mask) if mods else {}
    if cap is not None:
        params["softcap.cap"] = cap
    if sinks is not None:
        params["sinks.logit"] = _in_float32(sinks)
    return params or None


def _in_float32(sinks: torch.Tensor) -> torch.Tensor:
    """Sinks as kernels read them where they lie; of those in another dtype a copy, made again when they change."""
    if sinks.dtype == torch.float32 or sinks.device.type == "cpu":
        return sinks.detach()
    kept = _copies.get(sinks)
    if kept is None or kept[0] != sinks._version:
        kept = sinks._version, sinks.detach().float()
        if not torch.cuda.is_current_stream_capturing():  # a graph's memory holds nothing before its replays
            _copies[sinks] = kept
    return kept[1]
