"""Functions that need no plan: attention in one call, states, sizes."""

from __future__ import annotations

import functools
from typing import Any, Callable, NoReturn, Sequence

import numpy as np

from raddle import _keywords, _library
from raddle._compiled import compiled, is_traced
from raddle._orders import checked_layout
from raddle._tensors import device_of, finished, lend, lend_index, lend_output, like
from raddle.attention import Attention
from raddle.layouts import Layout, PagedKV, RaggedKV
from raddle.plans import Maxima, fields_of_maxima
from raddle.spec import AttentionSpec, fields_of, parts
from raddle.variants import Causal, Variant

_merge_state = _library.function("raddle.merge_state")
_merge_states = _library.function("raddle.merge_states")
_merge_uneven_states = _library.function("raddle.merge_uneven_states")
_workspace_bytes = _library.function("raddle.workspace_bytes")
_support_matrix = _library.function("raddle.support_matrix")

_CAUSAL = Causal()


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    variant: Sequence[Variant | Callable[..., Any]] | Variant | Callable[..., Any] = (),
    scale: float | None = None,
    return_lse: bool = False,
    layout: str | None = None,
    **unknown: NoReturn,
) -> Any:
    """Attention of one sequence, or of a batch of equally long ones.

    Args:
        q: [tokens, Hq, D], [B, S, Hq, D] or [B, Hq, S, D], float32, float16 or bfloat16.
        k: [tokens, Hkv, D], [B, Skv, Hkv, D] or [B, Hkv, Skv, D]; Hkv divides Hq.
        v: like k, with a head dimension of its own.
        causal: the last query row sees all keys, each row before it one key less.
        variant: further parts (`raddle.variants`); pass the same objects again to have the compiled
            attention reused.
        scale: softmax scale; None: ``1 / sqrt(D)``.
        return_lse: return (out, lse) with lse as q without its last dimension, float32, a natural logarithm.
        layout: "THD" for 3 dimensions, which is the default there; of 4, "BSHD" is flash-attn's order, "BHSD" that of
            PyTorch's scaled_dot_product_attention. None in 4 dimensions: BSHD, where the shapes cannot be read as BHSD,
            as those of a decode step cannot; where they can, either may be meant, and the call is refused.

    Computed on q's device. K and V are read where they are, whatever their strides. q is copied if its batch and
    sequence cannot be seen as one dimension. torch.compile takes the call as one operator; there ``variant`` must be
    empty.

    Returns:
        out like q, but with v's head dimension; or (out, lse).

    Raises:
        ValueError: shapes that do not fit together, or that the device cannot compute.
        TypeError: a dtype, or what is no tensor.
        raddle.flex.TraceError: a function in ``variant`` that cannot be traced.
        CompileError: a variant of your own that does not compile.

    Example:
        >>> q, k = np.ones((100, 8, 64), np.float32), np.ones((100, 2, 64), np.float32)
        >>> raddle.attention(q, k, k, causal=True, variant=raddle.SlidingWindow(15)).shape
        (100, 8, 64)
    """
    if unknown:
        _keywords.refuse("attention", unknown, attention)
    if not isinstance(causal, (bool, np.bool_)):
        raise TypeError(f"causal is {causal!r:.40}; expected True or False")
    traced = is_traced()
    if not traced:
        lend(q, "q"), lend(k, "k"), lend(v, "v")
    heads_first = checked_layout(q, k, v, layout) == "BHSD"
    if heads_first:
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    if traced:
        result = compiled.attention(q, k, v, causal, variant, scale, return_lse)
    else:
        result = _attention(q, k, v, causal, variant, scale, return_lse)
    if not heads_first:
        return result
    return tuple(x.swapaxes(1, 2) for x in result) if return_lse else result.swapaxes(1, 2)


if compiled is not None:
    compiled.define_attention(attention)


def _attention(q: Any, k: Any, v: Any, causal: bool, variant: Any, scale: Any, return_lse: bool) -> Any:
    """`attention` of checked tensors, THD or BSHD."""
    composition = parts(variant, q.shape[-2]) + ((_CAUSAL,) if causal else ())
    attn = _attention_of(q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], str(q.dtype), composition, device_of(q))
    if q.ndim == 3:
        plan = attn.plan(RaggedKV(_indptr(1, q.shape[0]), _indptr(1, k.shape[0])))
        return attn.run(plan, q, (k, v), scale=scale, return_lse=return_lse)
    batch, length = q.shape[:2]
    rows = q.reshape(batch * length, *q.shape[2:])
    if k.shape[1] == 0:  # pages of no rows cannot be
        plan = attn.plan(RaggedKV(_indptr(batch, length), _indptr(batch, 0)))
        k, v = k.reshape(0, *k.shape[2:]), v.reshape(0, *v.shape[2:])
    else:
        plan = attn.plan(_one_page_each(batch, length, k.shape[1]))
    result = attn.run(plan, rows, (k, v), scale=scale, return_lse=return_lse)
    if not return_lse:
        return result.reshape(batch, length, *result.shape[1:])
    return tuple(each.reshape(batch, length, *each.shape[1:]) for each in result)


@functools.lru_cache(maxsize=64)
def _attention_of(*spec: Any) -> Attention:
    *heads_and_dims, dtype, variant, device = spec
    return Attention(AttentionSpec(*heads_and_dims, dtype, variant), device)


def _indptr(requests: int, length: int) -> np.ndarray:
    return np.arange(requests + 1, dtype=np.int64) * length


@functools.lru_cache(maxsize=64)
def _one_page_each(batch: int, length: int, kv_length: int) -> Layout:
    """K and V [B, Skv, Hkv, D] are a pool of B pages, one a sequence: any strides do."""
    pages = np.arange(batch, dtype=np.int32)[:, None]
    kv_len = np.full(batch, kv_length, np.int32)
    return PagedKV(_indptr(batch, length), None, pages, kv_len, page_size=kv_length)


def merge_state(
    o_a: Any, lse_a: Any, o_b: Any, lse_b: Any, out: tuple[Any, Any] | None = None
) -> tuple[Any, Any]:
    """The state of two disjoint sets of keys: ``a ⊕ b`` (FlashInfer paper, section 2.2).

    Args:
        o_a, o_b: [rows, H, D] float32, as `Attention.run` returns them with return_state.
        lse_a, lse_b: [rows, H] float32, of any strides.
        out: (o, lse) to write, which may be one of the states; None: new tensors of o_a's kind.

    Computed where the states lie. Two empty states (lse = -inf) compose to the empty state.

    Returns:
        (o, lse), float32.

    Raises:
        ValueError: shapes that differ, or states on different devices.
        TypeError: states that are not float32.

    Example:
        >>> o, lse = np.ones((3, 8, 64), np.float32), np.zeros((3, 8), np.float32)
        >>> both, both_lse = raddle.merge_state(o, lse, 3 * o, lse)
        >>> float(both[0, 0, 0]), round(float(both_lse[0, 0]), 4)
        (2.0, 0.6931)
    """
    given = {"o_a": o_a, "lse_a": lse_a, "o_b": o_b, "lse_b": lse_b}
    inputs = {name: lend(x, name) for name, x in given.items()}
    if out is None:
        o, lse = like(o_a, tuple(o_a.shape), "float32"), like(o_a, tuple(o_a.shape[:-1]), "float32")
    else:
        o, lse = out
    _merge_state(**inputs, out=lend_output(o, "out"), lse=lend_output(lse, "lse"))
    return (finished(o_a, o), finished(o_a, lse)) if out is None else out


def merge_states(
    o: Any,
    lse: Any,
    finish: AttentionSpec | None = None,
    out: tuple[Any, Any] | None = None,
    *,
    indptr: Any = None,
) -> tuple[Any, Any]:
    """The composition of n states, in order; or of as many as each row has.

    Args:
        o: [n, rows, H, D] float32; with ``indptr`` [states, H, D].
        lse: [n, rows, H] float32, of any strides; with ``indptr`` [states, H].
        finish: a spec whose sinks and output parts are applied to the result; None: the result is a
            state again.
        out: (o, lse) to write; None: new tensors of o's kind.
        indptr: [rows + 1] int32, or on the host int64, where the states lie: row r is composed of the states indptr[r]
            to indptr[r + 1], and is empty where there are none. A GPU reads it when the kernel runs, and takes bounds
            outside of the states for the nearest ones. None: every row has n states.

    Computed where the states lie.

    Returns:
        (o [rows, H, D], lse [rows, H]), float32.

    Raises:
        ValueError: shapes that do not fit together, states on different devices, or a ``finish`` of another number of
            heads.
        TypeError: states that are not float32, or a ``finish`` that is no spec.

    Example:
        >>> o, lse = np.ones((4, 3, 8, 64), np.float32), np.zeros((4, 3, 8), np.float32)
        >>> raddle.merge_states(o, lse)[0].shape
        (3, 8, 64)
    """
    inputs = {"o": lend(o, "o"), "lse": lend(lse, "lse")}
    fields = None if finish is None else fields_of(finish, "finish")
    if out is None:
        shape = tuple(o.shape[1:]) if indptr is None else (len(indptr) - 1, *o.shape[1:])
        merged, merged_lse = like(o, shape, "float32"), like(o, shape[:-1], "float32")
    else:
        merged, merged_lse = out
    outputs = {"out": lend_output(merged, "out"), "lse_out": lend_output(merged_lse, "lse_out")}
    if indptr is None:
        _merge_states(**inputs, **outputs, finish=fields)
    else:
        _merge_uneven_states(**inputs, indptr=lend_index(indptr, "indptr"), **outputs, finish=fields)
    return (finished(o, merged), finished(o, merged_lse)) if out is None else out


@_keywords.answered("workspace_bytes")
def workspace_bytes(
    spec: AttentionSpec, maxima: Maxima, num_workers: int | None = None, device: Any = "cpu"
) -> int:
    """Bytes of scratch that no plan within the maxima exceeds, whichever of the device's kernels runs it.

    Args:
        spec: what is computed.
        maxima: the largest batches.
        num_workers: work queues; None: the device's default, as in `Attention.plan`.
        device: same as in `Attention`.

    Returns:
        Bytes, before anything is allocated or compiled.

    Raises:
        ValueError: maxima below 0, or a spec that the device cannot compute.
        TypeError: ``maxima`` is not a `Maxima`, or ``spec`` is not an `AttentionSpec`.
        RuntimeError: a device that is not there.

    Example:
        >>> maxima = raddle.Maxima(max_requests=8, max_qo_tokens=8, max_kv_tokens=8192)
        >>> raddle.workspace_bytes(raddle.AttentionSpec(32, 8, 128), maxima, num_workers=2) > 0
        True
    """
    fields, limits = fields_of(spec, "spec"), fields_of_maxima(maxima)
    found: int = _workspace_bytes(spec=fields, num_workers=num_workers, maxima=limits, device=str(device))
    return found


def support_matrix(device: Any = "cpu") -> list[dict[str, Any]]:
    """What works on a device, found by trying.

    On a GPU kernels are compiled for it, minutes where the cache has none of them.

    Args:
        device: same as in `Attention`.

    Returns:
        A list of dicts with feature, backend ("cpu" or "cuda"), works (a bool) and reason (of a refusal, else empty).

    Raises:
        RuntimeError: a device that is not there.

    Example:
        >>> rows = raddle.support_matrix()
        >>> [row["works"] for row in rows if row["feature"] == "dtype: bfloat16"]
        [True]
    """
    return [dict(row.items()) for row in _support_matrix(str(device))]
