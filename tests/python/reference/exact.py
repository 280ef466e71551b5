"""Attention in float64:  O = scan( mask( logits( q(Q) · k(K)ᵀ · scale ) ) ) · V,  LSE = log Σ exp."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import budgets
from .layouts import Keys, keys_of_rows
from .variants import Flex, Mask, Rotation, Sigmoid, Sinks, logits_parts, one, parts


@dataclass
class Problem:
    """What a call is asked: q [rows, Hq, Dqk], and K and V for each level (or one pair for all).

    Quantised K and V are multiplied by their scales: a number, [Hkv], or one a token and head beside the pool
    (its shape without the last dimension); a list has one of these a level.
    """

    q: np.ndarray
    kv: list
    layout: object
    variant: list
    scale: float | None = None
    k_scale: object = None  # 1
    v_scale: object = None
    k_extends_v: bool = False  # a key is its row of V followed by its row of K

    @property
    def softmax_scale(self) -> float:
        return self.scale if self.scale is not None else 1.0 / np.sqrt(self.q.shape[2])


@dataclass
class Exact:
    """The answer, and the error that a kernel of the problem's dtype may show."""

    out: np.ndarray  # [rows, Hq, Dvo]
    lse: np.ndarray  # [rows, Hq]
    out_budget: np.ndarray
    lse_budget: np.ndarray


@dataclass
class Work:
    """Intermediate results of the rows that share their keys; heads are [Hkv, G], rows R, keys N."""

    q: np.ndarray  # [Hkv, G, R, Dqk] transformed
    k: np.ndarray  # [Hkv, N, Dqk] transformed
    v: np.ndarray  # [Hkv, N, Dvo]
    raw: np.ndarray  # [Hkv, G, R, N] scaled logits
    s: np.ndarray  # [Hkv, G, R, N] after the logits parts; -inf where masked
    sink: np.ndarray | None  # [Hkv, G, 1]


def fetch(pool: np.ndarray, slot: np.ndarray, kv_layout: str) -> np.ndarray:
    """Rows `slot` of K or V in float64 [N, Hkv, D]: [slots, Hkv, D], or pages of NHD or HND."""
    if pool.ndim == 3:
        return pool[slot].astype(np.float64)
    pages = pool.swapaxes(1, 2) if kv_layout == "HND" else pool
    return pages[slot // pages.shape[1], slot % pages.shape[1]].astype(np.float64)


def gather(problem: Problem, keys: Keys, which: int) -> np.ndarray:
    """All keys' K (0) or V (1) rows, each from its own level, in float64."""
    levels = getattr(problem.layout, "levels", [problem.layout])
    pools = problem.kv if len(problem.kv) == len(levels) else problem.kv * len(levels)
    order = [getattr(level, "kv_layout", "NHD") for level in levels]
    empty = fetch(pools[0][which], keys.slot[:0], order[0])
    result = np.zeros((len(keys.slot), *empty.shape[1:]))
    scale = (problem.k_scale, problem.v_scale)[which]
    for n, pool in enumerate(pools):
        here = (keys.level == n) & (keys.slot >= 0)
        stored = fetch(pool[which], keys.slot[here], order[n])
        result[here] = stored * scales(scale[n] if isinstance(scale, list) else scale, keys.slot[here], order[n])
    return result


def scales(scale, slot: np.ndarray, kv_layout: str) -> np.ndarray:
    """Of rows `slot`, as a factor of [N, Hkv, D]."""
    scale = np.asarray(1.0 if scale is None else scale)
    if scale.ndim > 1:
        return fetch(scale[..., None], slot, kv_layout)
    return scale.astype(np.float64)[..., None]


def kept_pairs(variant, keys: Keys, heads: tuple[int, int]) -> np.ndarray:
    """[R, N], or [Hkv, G, R, N] where a mask mod tells heads apart."""
    keep = keys.keep.copy()
    for mask in parts(variant, Mask):
        keep &= mask.pairs(keys)
    for mod in parts(variant, Flex):
        keep = keep & mod.keep(keys, heads) if mod.is_mask else keep
    assert not keep[..., keys.slot < 0].any(), "the table has no page for a key that a row keeps"
    return keep


def evaluate(problem: Problem, keys: Keys) -> Work:
    q = problem.q[keys.rows].astype(np.float64)
    k, v = gather(problem, keys, 0), gather(problem, keys, 1)
    if problem.k_extends_v:
        k = np.concatenate([v, k], axis=-1)
    for rotation in parts(problem.variant, Rotation):
        q = rotation.rotate(q, keys.q_pos, keys.request)
        k = rotation.rotate(k, keys.kv_pos, keys.request)
    (num_rows, num_qo_heads, dim), num_kv_heads = q.shape, k.shape[1]
    group = num_qo_heads // num_kv_heads
    q = q.reshape(num_rows, num_kv_heads, group, dim).transpose(1, 2, 0, 3)
    k, v = k.transpose(1, 0, 2), v.transpose(1, 0, 2)

    raw = pairs(q, k) * problem.softmax_scale
    s = raw
    for part in logits_parts(problem.variant):
        s = part.logits(s, keys)
    s = np.where(kept_pairs(problem.variant, keys, s.shape[:2]), s, -np.inf)
    sinks = one(problem.variant, Sinks)
    sink = None if sinks is None else np.asarray(sinks.logits, np.float64).reshape(num_kv_heads, group, 1)
    return Work(q, k, v, raw, s, sink)


def pairs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Σ_d a[h, g, r, d] · b[h, n, d] as one matrix product a KV head."""
    h, g, r, d = a.shape
    return (a.reshape(h, g * r, d) @ b.transpose(0, 2, 1)).reshape(h, g, r, -1)


def weighted(p: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Σ_n p[h, g, r, n] · v[h, n, d]."""
    h, g, r, n = p.shape
    return (p.reshape(h, g * r, n) @ v).reshape(h, g, r, -1)


def softmax(s: np.ndarray, sink: np.ndarray | None):
    """Weights, LSE, and the sink's weight. A row without keys has weights 0 and LSE -inf (with a sink: the sink)."""
    lse = log_sum_exp(s, axis=-1)
    if sink is not None:
        lse = np.logaddexp(lse, sink)
    finite = np.where(np.isneginf(lse), 0.0, lse)
    p = np.exp(s - finite[..., None])
    p_sink = np.exp(sink - finite) if sink is not None else np.zeros(lse.shape)
    return p, lse, p_sink


def rounds_weights(problem: Problem) -> bool:
    """Whether the engine under test rounds weights to the matrix dtype; tests replace it for what they run on."""
    return False


def log_sum_exp(s: np.ndarray, axis: int) -> np.ndarray:
    top = np.max(s, axis=axis, keepdims=True, initial=-np.inf)
    top = np.where(np.isneginf(top), 0.0, top)
    with np.errstate(divide="ignore"):
        return np.squeeze(top, axis) + np.log(np.exp(s - top).sum(axis=axis))


def attention(problem: Problem, state: bool = False, rounded_weights: bool | None = None) -> Exact:
    """The exact answer; with `state`, (O, LSE) before sinks, as `return_state=True` gives it.

    With `rounded_weights` the budget lets a kernel round its weights to the problem's dtype, as matrix instructions do;
    None: as `rounds_weights` says.
    """
    rounded_weights = rounds_weights(problem) if rounded_weights is None else rounded_weights
    num_rows, num_heads, _ = problem.q.shape
    dim = problem.kv[0][1].shape[-1]
    exact = Exact(
        np.zeros((num_rows, num_heads, dim)),
        np.full((num_rows, num_heads), -np.inf),
        np.zeros((num_rows, num_heads, dim)),
        np.zeros((num_rows, num_heads)),
    )
    dtype = "float32" if state else str(problem.q.dtype)
    weights = weight_dtype(problem) if rounded_weights else None
    sigmoid = one(problem.variant, Sigmoid)
    for keys in keys_of_rows(problem.layout):
        work = evaluate(problem, keys)
        delta = budgets.logit_error(problem, keys, work)
        if sigmoid is not None:
            w = sigmoid.weight(work.s)
            out, lse = weighted(w, work.v), np.full(work.s.shape[:-1], -np.inf)
            budget = budgets.of_sum(w, work.v, delta, out, dtype, weights), np.zeros(lse.shape)
        else:
            p, lse, p_sink = softmax(work.s, None if state else work.sink)
            out = weighted(p, work.v)
            budget = budgets.of_softmax(p, p_sink, work.v, delta, out, lse, dtype, weights=weights)
        rows = keys.rows
        exact.out[rows], exact.lse[rows] = by_row(out), by_row(lse)
        exact.out_budget[rows], exact.lse_budget[rows] = map(by_row, budget)
    return exact


def weight_dtype(problem: Problem) -> str:
    """What matrix instructions take weights in: V's of 8 bits are widened to float16, whatever the dtype of Q.

    Weights of a sum have no largest, so they keep the range of bfloat16 (docs/design/quantisation.md).
    """
    stored = problem.kv[0][1].dtype.itemsize
    return "float16" if stored == 1 and one(problem.variant, Sigmoid) is None else str(problem.q.dtype)


def by_row(x: np.ndarray) -> np.ndarray:
    """[Hkv, G, R, …] -> [R, Hq, …]."""
    x = np.moveaxis(x, 2, 0)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def merge_states(o: np.ndarray, lse: np.ndarray, sinks=None, dtype: str = "float32") -> Exact:
    """⊕ over the first axis of O [n, rows, H, D] and LSE [n, rows, H]; with `sinks` [H], finished by them."""
    lse = np.asarray(lse, np.float64).transpose(1, 2, 0)[:, :, None]  # [rows, H, 1, n]: states are keys
    v = np.asarray(o, np.float64).transpose(1, 2, 0, 3)  # [rows, H, n, D]
    sink = None if sinks is None else np.broadcast_to(np.asarray(sinks, np.float64)[:, None], lse.shape[1:3])
    p, total, p_sink = softmax(lse, sink)
    out = p @ v
    delta = budgets.exp_error(lse)
    budget = budgets.of_softmax(p, p_sink, v, delta, out, total, dtype, product=np.matmul)
    return Exact(*(x[:, :, 0] for x in (out, total, *budget)))
