"""Multi-head latent attention (MLA, DeepSeek): what turns a layer's weights and queries into attention over its cache.

The cache holds one row a token for all heads: the latent ``c_kv`` [kv_lora_rank], from which every head's K and V would
be made, and the key ``k_pe`` [rope], which RoPE has turned, of all heads. With ``W_UK`` applied to the queries and
``W_UV`` applied after attention ("absorbed"), attention reads these rows alone: as K with all of their columns, as V
with the first kv_lora_rank::

    attn = raddle.Attention(mla.spec(heads, variant=raddle.Causal()))
    mla.append(layout, cache, c_kv, k_pe, rope=rope)
    out = attn.run(attn.plan(layout), mla.latent_q(q_nope, q_pe, w_uk), mla.kv(cache))
    values = mla.value_heads(out, w_uv)  # [rows, heads, v_dim], what unabsorbed attention gives

Where latents and keys are two tensors, ``mla.spec(heads, k_extends_v=True)`` reads both in place; `append` and `kv` take
them as a pair ``(c_kv, k_pe)``.

Tensors are of numpy or torch. Products are accumulated in fp32, in fp64 where they are of it, and rounded once to the
dtype of the first argument. Source: DeepSeek-V2, arXiv 2405.04434, section 2.1, equations 9 to 19 and appendix C.

DeepSeek's checkpoints hold W_UQ as ``q_b_proj`` [heads · (nope + rope), q_lora], W_UK and W_UV as ``kv_b_proj``
[heads · (nope + v_dim), kv_lora_rank], W_O as ``o_proj`` [hidden, heads · v_dim]. As they are meant here::

    w_uk, w_uv = kv_b_proj.T.reshape(kv_lora_rank, heads, nope + v_dim)[..., :nope], …[..., nope:]
    w_uq, w_o = q_b_proj.T.reshape(q_lora, heads, nope + rope)[..., :nope], o_proj.T.reshape(heads, v_dim, hidden)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from raddle._tensors import TorchTensor, kind_of, lend, lend_integer
from raddle.kv import append_kv
from raddle.layouts import PagedKV
from raddle.spec import AttentionSpec
from raddle.variants import Variant

#: DeepSeek-V2's and V3's.
KV_LORA_RANK, NOPE, ROPE = 512, 128, 64


def spec(
    num_heads: int, *, kv_lora_rank: int = KV_LORA_RANK, nope: int = NOPE, rope: int = ROPE, **others: Any
) -> AttentionSpec:
    """The attention over the cache: one KV head of kv_lora_rank + rope, V of kv_lora_rank.

    Args:
        num_heads: query heads of this device.
        kv_lora_rank: columns of the latent.
        nope, rope: a head's columns of unabsorbed Q and K without and with RoPE: the softmax scale stays
            ``1 / sqrt(nope + rope)``, unless ``scale`` is given.
        others: further fields of `AttentionSpec`; with ``k_extends_v=True`` latents and rotary keys are two tensors.

    Returns:
        An `AttentionSpec`.

    Raises:
        ValueError: columns that cannot be.
        TypeError: a field that `AttentionSpec` does not have, or refuses.

    Example:
        >>> spec = mla.spec(16, variant=raddle.Causal())
        >>> spec.head_dim, spec.head_dim_vo, spec.num_kv_heads
        (576, 512, 1)
    """
    kv_lora_rank, nope, rope = (
        lend_integer(x, name) for name, x in (("kv_lora_rank", kv_lora_rank), ("nope", nope), ("rope", rope))
    )
    for name, x, least in (("kv_lora_rank", kv_lora_rank, 1), ("nope", nope, 0), ("rope", rope, 1)):
        if not least <= x < 2**31:
            raise ValueError(f"{name} is {x}; expected at least {least}, and less than 2**31")
    others = {"scale": (nope + rope) ** -0.5, **others}
    return AttentionSpec(num_heads, 1, kv_lora_rank + rope, kv_lora_rank, **others)


def kv(cache: Any, kv_lora_rank: int | None = None) -> tuple[Any, Any]:
    """K and V as `Attention.run` takes them: V is a view of K's first columns, or, of two caches, the latents.

    Args:
        cache: [pages, page_size, 1, kv_lora_rank + rope] (NHD), or any other shape of a pool of K; or a tuple of two
            such pools, of kv_lora_rank columns and of rope, for a spec with ``k_extends_v=True``.
        kv_lora_rank: columns of V. None: 512, or of two caches those of the first.

    Returns:
        (k, v), all of it the cache's memory.

    Raises:
        TypeError: what is no tensor.
        ValueError: a tensor with less than 2 dimensions, or a kv_lora_rank that it does not have.

    Example:
        >>> k, v = mla.kv(np.zeros((4, 16, 1, 576), np.float32))
        >>> k.shape, v.shape
        ((4, 16, 1, 576), (4, 16, 1, 512))
        >>> k, v = mla.kv((np.zeros((4, 16, 1, 512), np.float32), np.zeros((4, 16, 1, 64), np.float32)))
        >>> k.shape, v.shape
        ((4, 16, 1, 64), (4, 16, 1, 512))
    """
    caches = _caches(cache)
    for name, x in caches.items():
        if len(x.shape) < 2:
            raise ValueError(f"{name} has {len(x.shape)} dimensions; expected a pool of K, of 2 to 4")
    first, columns = next((name, x.shape[-1]) for name, x in caches.items())
    if kv_lora_rank is None:
        rank = columns if len(caches) == 2 else KV_LORA_RANK
    else:
        rank = lend_integer(kv_lora_rank, "kv_lora_rank")
    if not 1 <= rank <= columns or len(caches) == 2 and rank != columns:
        expected = f"{columns}, the columns of {first}" if len(caches) == 2 else f"1 to {columns}, the columns of {first}"
        raise ValueError(f"kv_lora_rank is {rank}; expected {expected}")
    if len(caches) == 2:
        c_kv, k_pe = caches.values()
        return k_pe, c_kv
    return cache, cache[..., :rank]


def _caches(cache: Any) -> dict[str, Any]:
    """The tensors of the argument ``cache`` by their names: one, or two of a pair."""
    if not isinstance(cache, (tuple, list)):
        lend(cache, "cache")
        return {"cache": cache}
    if len(cache) != 2:
        raise TypeError(f"cache is {kind_of(cache)} of {len(cache)}; expected a tensor, or two: (c_kv, k_pe)")
    names = "cache[0]", "cache[1]"
    for name, x in zip(names, cache):
        lend(x, name)
    return dict(zip(names, cache))


def append(layout: PagedKV, cache: Any, c_kv: Any, k_pe: Any, rope: Variant | None = None) -> None:
    """Writes the new tokens' rows into their pages: `append_kv` for a cache of latents.

    Args:
        layout: same as in `append_kv`.
        cache: [pages, page_size, 1, kv_lora_rank + rope], written; or a tuple of two, [pages, page_size, 1,
            kv_lora_rank] and [pages, page_size, 1, rope].
        c_kv: [rows, kv_lora_rank] in the cache's dtype, normalised as the model does.
        k_pe: [rows, rope] in the cache's dtype.
        rope: turns k_pe on the way, at the rows' positions; None: it is turned already.

    Raises:
        ValueError: what `append_kv` refuses.
        TypeError: what is no tensor, or of another dtype than the cache.

    Example:
        >>> cache = np.zeros((4, 16, 1, 576), np.float32)
        >>> layout = raddle.PagedKV([0, 3], None, [[2, 0]], [20], page_size=16)
        >>> c_kv, k_pe = np.ones((3, 512), np.float32), np.ones((3, 64), np.float32)
        >>> mla.append(layout, cache, c_kv, k_pe, rope=raddle.Rope(64, interleaved=True))
        >>> int(np.count_nonzero(cache.any(axis=-1)))
        3
    """
    caches = _caches(cache)
    lend(c_kv, "c_kv"), lend(k_pe, "k_pe")
    for name, x, axes in (*((name, x, 4) for name, x in caches.items()), ("c_kv", c_kv, 2), ("k_pe", k_pe, 2)):
        if x.ndim != axes:
            raise ValueError(f"{name} has {x.ndim} dimensions; expected {axes}")
    rank = c_kv.shape[-1]
    latents, keys = caches.values() if len(caches) == 2 else (cache[..., :rank], cache[..., rank:])
    append_kv(layout, (keys, latents), k_pe[:, None], c_kv[:, None], rope=rope)


def absorb_q(w_uq: Any, w_uk: Any) -> Any:
    """W_UQ·W_UKᵀ of each head: what makes the latent part of queries out of the compressed ones.

    Args:
        w_uq: [q_lora, heads, nope]; of a model that doesn't compress its queries [hidden, heads, nope].
        w_uk: [kv_lora_rank, heads, nope].

    Returns:
        [q_lora, heads, kv_lora_rank]. It is larger than both; to absorb W_UK in every step instead, see `latent_q`.

    Raises:
        ValueError: a w_uk whose shape does not fit.

    Example:
        >>> mla.absorb_q(np.ones((96, 16, 128), np.float32), np.ones((512, 16, 128), np.float32)).shape
        (96, 16, 512)
    """
    _check_alike(w_uq=w_uq, w_uk=w_uk)
    return _absorbed(w_uq, w_uk)


def _absorbed(w_uq: Any, w_uk: Any) -> Any:
    _check("w_uk", w_uk, "[kv_lora_rank, heads, nope]", w_uk.shape[:1] + w_uq.shape[1:])
    return _of_heads(w_uq, w_uk.swapaxes(0, 1).swapaxes(1, 2))


def absorb_out(w_uv: Any, w_o: Any) -> Any:
    """W_UV·W_O of each head: what makes the layer's output out of the attention's, summed over heads.

    Args:
        w_uv: [kv_lora_rank, heads, v_dim].
        w_o: [heads, v_dim, hidden].

    Returns:
        [heads, kv_lora_rank, hidden]: with it ``out.reshape(rows, -1) @ w.reshape(-1, hidden)`` is the layer's output.
        It is larger than both: to apply W_UV in every step instead, see `value_heads`.

    Raises:
        ValueError: a w_o whose shape does not fit.

    Example:
        >>> mla.absorb_out(np.ones((512, 4, 128), np.float32), np.ones((4, 128, 256), np.float32)).shape
        (4, 512, 256)
    """
    _check_alike(w_uv=w_uv, w_o=w_o)
    _check("w_o", w_o, "[heads, v_dim, hidden]", w_uv.shape[1:] + w_o.shape[-1:])
    return _as(w_uv, _wide(w_uv.swapaxes(0, 1)) @ _wide(w_o))


def latent_q(q_nope: Any, q_pe: Any, w_uk: Any) -> Any:
    """Queries as the attention over the cache takes them.

    Args:
        q_nope: [rows, heads, nope].
        q_pe: [rows, heads, rope], turned already.
        w_uk: [kv_lora_rank, heads, nope].

    Returns:
        [rows, heads, kv_lora_rank + rope], in q_nope's dtype.

    Raises:
        ValueError: shapes that do not fit together.

    Example:
        >>> q_nope, q_pe = np.ones((3, 16, 128), np.float32), np.ones((3, 16, 64), np.float32)
        >>> mla.latent_q(q_nope, q_pe, np.ones((512, 16, 128), np.float32)).shape
        (3, 16, 576)
    """
    _check_alike(q_nope=q_nope, q_pe=q_pe, w_uk=w_uk)
    latent = _absorbed(q_nope, w_uk)
    _check("q_pe", q_pe, "[rows, heads, rope]", q_nope.shape[:2] + q_pe.shape[-1:])
    if isinstance(latent, np.ndarray):
        return np.concatenate([latent, q_pe], -1)
    import torch

    return torch.cat([latent, q_pe], -1)


def value_heads(out: Any, w_uv: Any) -> Any:
    """What unabsorbed attention would have returned: W_UV applied to the attention's output.

    Args:
        out: [rows, heads, kv_lora_rank].
        w_uv: [kv_lora_rank, heads, v_dim].

    Returns:
        [rows, heads, v_dim], in out's dtype.

    Raises:
        ValueError: a w_uv whose shape does not fit.

    Example:
        >>> mla.value_heads(np.ones((3, 16, 512), np.float32), np.ones((512, 16, 128), np.float32)).shape
        (3, 16, 128)
    """
    _check_alike(out=out, w_uv=w_uv)
    _check("w_uv", w_uv, "[kv_lora_rank, heads, v_dim]", out.shape[:0:-1] + w_uv.shape[-1:])
    return _of_heads(out, w_uv.swapaxes(0, 1))


def _of_heads(x: Any, w: Any) -> Any:
    """x [rows, heads, n] times w [heads, n, m]: [rows, heads, m]."""
    return _as(x, (_wide(x.swapaxes(0, 1)) @ _wide(w)).swapaxes(0, 1))


def _wide(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return x.astype(np.float32) if x.dtype.itemsize < 4 else x
    return x.float() if x.element_size() < 4 else x


def _as(like: Any, x: Any) -> Any:
    """Contiguous, in the dtype of ``like``."""
    return np.ascontiguousarray(x, like.dtype) if isinstance(x, np.ndarray) else x.to(like.dtype).contiguous()


def _check_alike(**arrays: Any) -> None:
    """Raises TypeError unless all are of numpy or all of torch, of numbers that multiply; ValueError but for 3 dimensions."""
    first, like = next(iter(arrays.items()))
    for name, x in arrays.items():
        if not isinstance(x, (np.ndarray, TorchTensor)):
            raise TypeError(f"{name} is {kind_of(x)}; expected an array of numpy or a tensor of torch")
        if isinstance(x, np.ndarray) != isinstance(like, np.ndarray):
            raise TypeError(f"{name} is {kind_of(x)} and {first} {kind_of(like)}; expected the same kind")
        if x.ndim != 3:
            raise ValueError(f"{name} has {x.ndim} dimensions; expected 3")
        if isinstance(x, np.ndarray):
            if not np.can_cast(x.dtype, np.float64):
                raise TypeError(f"{name} has dtype {x.dtype}; expected floating-point numbers")
        elif not x.is_floating_point() or x.is_sparse or x.device != like.device or _wide(x).dtype != _wide(like).dtype:
            raise TypeError(
                f"{name} is a tensor of {x.dtype} on '{x.device}'; expected dense floating-point numbers, as {first} has "
                f"({like.dtype} on '{like.device}')"
            )


def _check(name: str, x: Any, axes: str, shape: Any) -> None:
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {list(x.shape)}; expected {axes}, here {list(shape)}")
