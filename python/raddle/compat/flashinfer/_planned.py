"""What all wrappers have in common: the terms of a plan, and running it."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any, Callable, Iterator, NamedTuple

import numpy as np
import torch

from raddle._tensors import dtype_name
from raddle.attention import Attention
from raddle.compat.flashinfer._refusals import check_pos_encoding_mode, refuse
from raddle.layouts import Layout
from raddle.packed_mask import PackedMask
from raddle.plans import Maxima, Reservation
from raddle.rotary import LinearScaling, Rope
from raddle.spec import AttentionSpec
from raddle.variants import Alibi, Causal, Sinks, SlidingWindow, SoftCap, Variant, alibi_slopes


class Kind(NamedTuple):
    """What decides which kernel computes: equal kinds share an `Attention`."""

    heads: tuple[int, int, int, int]  #: Hq, Hkv, D of Q and K, D of V
    q_dtype: str
    kv_dtype: str
    device: str
    causal: bool
    has_window: bool
    has_cap: bool
    has_mask: bool
    has_sinks: bool
    pos_encoding_mode: str
    rope: tuple[float, float]  #: scale, theta
    batch_invariant: bool
    k_extends_v: bool

    def variant(self) -> list[Variant]:
        """The variant, with values that every plan or run replaces."""
        parts: list[Variant] = []
        if self.pos_encoding_mode == "ROPE_LLAMA":
            scale, theta = self.rope
            parts.append(Rope(self.heads[2], theta, LinearScaling(scale) if scale != 1.0 else None))
        if self.pos_encoding_mode == "ALIBI":
            parts.append(Alibi(alibi_slopes(self.heads[0])))
        if self.has_cap:
            parts.append(SoftCap(1.0))
        if self.has_mask:
            parts.append(PackedMask([], [0]))
        elif self.causal:
            parts.append(Causal())
        if self.has_window:
            parts.append(SlidingWindow(0))
        if self.has_sinks:
            parts.append(Sinks(np.zeros(self.heads[0], np.float32)))
        return parts


_attentions: dict[Kind, Attention] = {}


def attention_of(kind: Kind) -> Attention:
    """The attention of a kind, made once."""
    found = _attentions.get(kind)
    if found is None:
        kv_dtype = None if kind.kv_dtype == kind.q_dtype else kind.kv_dtype
        options = dict(batch_invariant=kind.batch_invariant, kv_dtype=kv_dtype, k_extends_v=kind.k_extends_v)
        spec = AttentionSpec(*kind.heads, kind.q_dtype, kind.variant(), **options)
        found = _attentions[kind] = Attention(spec, kind.device)
    return found


class Planned:
    """A wrapper after its plan. The attributes are FlashInfer's, which engines read and set between plan and run."""

    _k_extends_v = False  #: MLA's two caches
    _causal = False
    _window_left = -1
    _logits_soft_cap: float | None = 0.0
    _sm_scale: float | None = None
    _pos_encoding_mode = "NONE"
    _rope_scale: float | None = None
    _rope_theta: float | None = None
    _use_cuda_graph = False
    _maxima: Maxima | None = None
    _reservation: Reservation | None = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def end_forward(self) -> None:
        """Does nothing, as in FlashInfer."""

    def _set_terms(
        self,
        heads: tuple[int, int, int, int],
        q_data_type: Any,
        kv_data_type: Any,
        o_data_type: Any,
        *,
        deterministic: bool = False,
        mask: tuple[np.ndarray, np.ndarray] | None = None,
        **terms: Any,
    ) -> None:
        """Keeps what a plan was told; ``terms`` are attributes without their underscore."""
        check_pos_encoding_mode(terms.get("pos_encoding_mode", "NONE"))
        self._heads = heads
        self._cached_q_data_type = q = dtype_name(q_data_type)
        self._cached_kv_data_type = q if kv_data_type is None else dtype_name(kv_data_type)
        self._cached_o_data_type = q if o_data_type is None else dtype_name(o_data_type)
        if q.startswith(("float8", "int8")):
            refuse(q_data_type=q)
        self._deterministic, self._mask = deterministic, mask
        for name, value in terms.items():
            setattr(self, f"_{name}", value)
        if not self._logits_soft_cap:
            self._logits_soft_cap = 0.0

    def _override(self, **terms: Any) -> None:
        """Terms of a single call, by attributes without their underscore; they stay, as in FlashInfer."""
        for name, value in terms.items():
            setattr(self, f"_{name}", value)
        self._logits_soft_cap = self._logits_soft_cap or 0.0
        check_pos_encoding_mode(self._pos_encoding_mode)

    @contextlib.contextmanager
    def _window(self, window_left: int | None) -> Iterator[None]:
        """Another window for one run."""
        kept = self._window_left
        self._window_left = kept if window_left is None else window_left
        try:
            yield
        finally:
            self._window_left = kept

    def _plan_layout(self, layout: Callable[..., Layout], first_rows: np.ndarray) -> None:
        """Plans, so that what is wrong shows now. ``layout(qo_pos)`` makes the layout; None: its own positions."""
        self._make_layout, self._first_rows = layout, first_rows
        self._plans: dict[Any, Any] = {}
        self._plan_for(self._kind(False))

    def _kind(self, has_sinks: bool) -> Kind:
        alibi = self._pos_encoding_mode == "ALIBI"
        if alibi and (self._window_left >= 0 or self._logits_soft_cap):
            other = "window_left" if self._window_left >= 0 else "logits_soft_cap"
            raise NotImplementedError(f"{other} is given beside pos_encoding_mode='ALIBI'; expected one of the two")
        turns = self._pos_encoding_mode == "ROPE_LLAMA"
        rope = (self._rope_scale or 1.0, self._rope_theta or 1e4) if turns else (1.0, 1e4)
        return Kind(
            heads=self._heads,
            q_dtype=self._cached_q_data_type,
            kv_dtype=self._cached_kv_data_type,
            device=str(self.device),
            causal=bool(self._causal) and self._mask is None,
            has_window=self._window_left >= 0,
            has_cap=bool(self._logits_soft_cap),
            has_mask=self._mask is not None,
            has_sinks=has_sinks,
            pos_encoding_mode=self._pos_encoding_mode,
            rope=rope,
            batch_invariant=self._deterministic,
            k_extends_v=self._k_extends_v,
        )

    def _plan_for(self, kind: Kind) -> tuple[Attention, Any]:
        """The attention and plan of what the attributes say now, which `forward` and engines change."""
        key = (kind, self._window_left)
        found = self._plans.get(key)
        if found is None:
            attention = attention_of(kind)
            params = {"window.left": int(self._window_left)} if kind.has_window else {}
            mask: dict[str, Any] = {}
            if self._mask is not None:
                mask["packed_mask.bits"], mask["packed_mask.indptr"] = self._mask
            layout = self._make_layout(self._first_rows if kind.pos_encoding_mode == "ALIBI" else None)
            if self._use_cuda_graph:
                plan = self._reserved(attention, key, layout, params, mask)
            else:
                plan = attention.plan(layout, params={**params, **mask} or None)
            found = self._plans[key] = attention, plan
        return found

    def _reserved(
        self, attention: Attention, key: Any, layout: Layout, params: dict[str, Any], mask: dict[str, Any]
    ) -> Reservation:
        """A graph's plan: at addresses that stay, for what the first plan asked. The mask is each plan's own."""
        if self._reservation is None:
            self._reservation, self._reserved_key = attention.reserve(self._maxima, params=params or None), key
        elif self._reserved_key != key:
            raise ValueError("use_cuda_graph, and planned for other terms; expected those of the first plan")
        self._reservation.update(layout, params=mask or None)
        return self._reservation

    def _run(
        self,
        q: torch.Tensor,
        kv: Any,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        sinks: Any = None,
    ) -> Any:
        """Runs the plan. Scales of caches of 16 and 32 bits are numbers, as in FlashInfer."""
        attention, plan = self._plan_for(self._kind(sinks is not None))
        scale = self._sm_scale if self._sm_scale is not None else 1.0 / math.sqrt(self._heads[2])
        scale = float(scale) * (1.0 if q_scale is None else float(q_scale))
        quantised = attention.spec.kv_dtype is not None
        of = functools.partial(_per_head, num_kv_heads=self._heads[1]) if quantised else _number
        params: dict[str, Any] = {}
        if self._logits_soft_cap:
            params["softcap.cap"] = float(self._logits_soft_cap)
        if sinks is not None:
            params["sinks.logit"] = sinks
        wants = dict(scale=scale, params=params or None, lse_base_2=return_lse, k_scale=of(k_scale), v_scale=of(v_scale))
        found = self._computed(attention, plan, q, kv, out, lse, return_lse, wants)
        return found if return_lse else found[0]

    def _computed(
        self,
        attention: Attention,
        plan: Any,
        q: torch.Tensor,
        kv: Any,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        wants: dict[str, Any],
    ) -> Any:
        """(out, lse) or (out,), in the output's dtype."""
        dtype = getattr(torch, self._cached_o_data_type)
        if out is not None and out.dtype != dtype:
            raise ValueError(f"out has dtype {out.dtype}; expected {dtype}, the o_data_type of plan")
        if self._cached_o_data_type == self._cached_q_data_type:
            found = attention.run(plan, q, kv, out=out, lse=lse, return_lse=return_lse, **wants)
            return found if return_lse else (found,)
        if wants["params"] and "sinks.logit" in wants["params"]:
            refuse(**{"o_data_type with sinks": self._cached_o_data_type})
        exact, exact_lse = attention.run(plan, q, kv, lse=lse, return_state=True, **wants)
        out = exact.to(dtype) if out is None else out.copy_(exact)
        return out, exact_lse


def _per_head(scale: Any, num_kv_heads: int) -> Any:
    """A scale of a quantised cache: a number, or float32 [Hkv]; a tensor of one element counts for all heads."""
    if isinstance(scale, torch.Tensor):
        return scale.float().reshape(-1).expand(num_kv_heads).contiguous()
    return _number(scale)


def _number(scale: Any) -> float | None:
    return None if scale is None else float(scale)


def rows_from_0(qo_indptr: np.ndarray) -> np.ndarray:
    """[rows] each row's number in its request: ALiBi's positions of queries in FlashInfer."""
    lengths = np.diff(qo_indptr)
    return (np.arange(qo_indptr[-1]) - np.repeat(qo_indptr[:-1], lengths)).astype(np.int32)
