"""What calls of `flex_attention` with the same functions, heads and dims share: a compiled attention, plans of late."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any, Callable

import numpy as np

from raddle._tensors.kinds import TorchTensor, torch
from raddle.attention import Attention
from raddle.flex.inputs import Inputs
from raddle.flex.trace import Traced
from raddle.layouts import Layout, PagedKV, RaggedKV
from raddle.plans import Plan
from raddle.spec import AttentionSpec
from raddle.variants import Variant

_MOST_PROGRAMS, _MOST_PLANS = 128, 16
_MOST_BYTES = 64 << 20  # of captured arrays that a program's plans keep to compare with; the latest plan is kept anyway

_programs: dict[Any, Program] = {}
_lock = threading.Lock()


class Program:
    """A compiled attention, and the plans that its latest calls made."""

    def __init__(self, attention: Attention, in_spec: dict[str, Any] | None) -> None:
        """``in_spec``: the score's captured values that the attention has; None: it has not all of them."""
        self.attention = attention
        self._plans: list[tuple[Any, dict[str, Callable[[Any], bool]], Plan, int]] = []
        self._in_spec = in_spec

    def plan(self, batch: int, length: int, kv_length: int, shares_keys: bool, mask: Traced | None) -> Plan:
        """The plan for these lengths and what the mask captures now: one of late, or a new one."""
        lengths = batch, length, kv_length, shares_keys
        captured = {} if mask is None else mask.captured
        for known, unchanged, plan, _ in self._plans:
            if known == lengths and all(unchanged[name](x) for name, x in captured.items()):
                return plan
        unchanged = {name: _comparison(x) for name, x in captured.items()}  # before they may change
        plan = self.attention.plan(_layout(*lengths), params=_params(mask))
        if all(each is not None for each in unchanged.values()):
            kept = [(lengths, unchanged, plan, sum(map(_bytes_of, captured.values()))), *self._plans][:_MOST_PLANS]
            while len(kept) > 1 and sum(each[-1] for each in kept) > _MOST_BYTES:
                kept.pop()
            self._plans = kept
        return plan

    def params_of_run(self, score: Traced | None) -> dict[str, Any] | None:
        """Run members that differ from those with which the attention was compiled."""
        return None if score is None or score.captured == self._in_spec else _params(score)


def program_of(inputs: Inputs, score: Traced | None, mask: Traced | None) -> Program:
    query = inputs.query
    traces = None if score is None else score.trace, None if mask is None else mask.trace
    heads = inputs.num_qo_heads, inputs.num_kv_heads, inputs.dim, inputs.padded_dim_vo
    where = query.device if isinstance(query, TorchTensor) else inputs.device
    key = (*traces, *heads, query.dtype, where)
    found = _programs.get(key)
    if found is None:
        structures = tuple(None if mod is None else _Structure(mod) for mod in (score, mask))
        found = Program(*_attention_of(*heads, inputs.dtype, structures, inputs.device))
        with _lock:
            while len(_programs) >= _MOST_PROGRAMS:
                del _programs[next(iter(_programs))]  # the oldest
            _programs[key] = found
    return found


class _Structure:
    """A traced mod as a key: equal where the compiled code is, whatever values it captures. It holds no arrays."""

    def __init__(self, mod: Traced) -> None:
        self.trace = mod.trace
        self.numbers = {name: x for name, x in mod.captured.items() if isinstance(x, (int, float))}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Structure) and self.trace.source == other.trace.source

    def __hash__(self) -> int:
        return hash(self.trace.source)

    def variant(self) -> Variant:
        """With an array of one element in the place of each captured one, which plans and runs are given."""
        return self.trace.variant(**{
            name: self.numbers[name] if name in self.numbers else np.zeros((1,) * payload.ndim, payload.element)
            for name, payload in self.trace.payloads.items()
        })  # fmt: skip


@functools.lru_cache(maxsize=64)
def _attention_of(*spec: Any) -> tuple[Attention, dict[str, Any] | None]:
    """An attention for all mods of this structure, and the numbers that it has of the score, if these are all that the
    score captures. They are those of the score for which it was made: another's of the same source may differ."""
    num_qo_heads, num_kv_heads, dim, dim_vo, dtype, (score, mask), device = spec
    variant = [each.variant() for each in (score, mask) if each is not None]
    attention = Attention(AttentionSpec(num_qo_heads, num_kv_heads, dim, dim_vo, dtype, variant), device)
    has_all = score is not None and len(score.numbers) == len(score.trace.payloads)
    return attention, score.numbers if has_all else None


@functools.lru_cache(maxsize=64)
def _layout(batch: int, length: int, kv_length: int, shares_keys: bool) -> Layout:
    """Key and value [B, Hkv, S, E] are a pool of B pages, one a sequence; all sequences may read the first."""
    qo_indptr = np.arange(batch + 1, dtype=np.int64) * length
    qo_pos = np.tile(np.arange(length, dtype=np.int32), batch)
    if kv_length == 0:
        return RaggedKV(qo_indptr, np.zeros(batch + 1, np.int64), qo_pos=qo_pos)
    pages = np.zeros(batch, np.int32) if shares_keys else np.arange(batch, dtype=np.int32)
    kv_len = np.full(batch, kv_length, np.int32)
    return PagedKV(qo_indptr, None, pages[:, None], kv_len, kv_length, "HND", qo_pos=qo_pos)


def _params(mod: Traced | None) -> dict[str, Any] | None:
    """What a mod captures, by the names of members."""
    return None if mod is None else {f"{mod.name}.{member}": x for member, x in mod.lent().items()}


def _bytes_of(x: Any) -> int:
    """Of an array on the host, of which a copy is kept."""
    on_gpu = isinstance(x, TorchTensor) and not x.is_cpu
    return 0 if on_gpu else int(getattr(x, "nbytes", 0))


def _comparison(x: Any) -> Callable[[Any], bool] | None:
    """Whether another captured value is what this one is now; None: it would take too long to tell."""
    if isinstance(x, (int, float)):
        return lambda y: type(y) is type(x) and y == x
    if isinstance(x, TorchTensor):
        if not x.is_cpu:  # to compare contents, the host would wait for the GPU
            same, version = weakref.ref(x), None if x.is_inference() else x._version
            return None if version is None else lambda y: y is same() and y._version == version
        copy = x.detach().clone()
        return lambda y: isinstance(y, TorchTensor) and y.is_cpu and y.shape == copy.shape and torch.equal(y, copy)
    if isinstance(x, np.ndarray):
        kept = x.copy()
        return lambda y: isinstance(y, np.ndarray) and np.array_equal(y, kept)
    if type(x).__module__.startswith("jax"):  # immutable
        return lambda y: y is x
    return None
