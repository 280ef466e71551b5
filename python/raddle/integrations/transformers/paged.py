"""Continuous batching (`generate_batch`): attention over transformers' paged cache, where it lies."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from raddle.attention import Attention
from raddle.integrations.transformers.attention import attention_of, refuse, run_members
from raddle.layouts import Cascade, Layout, PagedKV, RaggedKV
from raddle.plans import Plan


class Layer(NamedTuple):
    """A layer's part of the cache."""

    k_cache: torch.Tensor  #: [slots, Hkv, D]
    v_cache: torch.Tensor
    group: int  #: of layers that share slots
    window: int | None  #: tokens that a row sees, itself included; None: all
    sentinel: int  #: what stands in a read index for a new token, where the window's old ones are read first


class Step:
    """A batch for one group of layers: which slots its requests read, and the plans made of it."""

    def __init__(self, layer: Layer, qo_indptr: np.ndarray, kv_indptr: np.ndarray, read: np.ndarray, write: np.ndarray):
        self.window = -1 if layer.window is None else layer.window - 1
        self._plans: dict[int, Plan] = {}
        new = read == layer.sentinel if layer.window is not None else np.zeros(len(read), bool)
        #: Keys lie in the new rows alone, in the cache alone, or in both: a window's old ones, which new ones overwrite.
        self.reads_new = len(read) == 0 or bool(new.any() and (np.diff(qo_indptr) > 1).any())
        self.reads_cache = len(read) > 0
        own = RaggedKV(qo_indptr, qo_indptr)
        if not self.reads_cache:
            self.layout: Layout = own
        elif not self.reads_new:  # one row a request overwrites no key that it sees
            slots = read.copy()
            slots[new] = write[: new.sum()]
            self.layout = PagedKV(qo_indptr, kv_indptr, slots, np.diff(kv_indptr), page_size=1)
        else:
            old_indptr = np.concatenate([[0], np.cumsum(~new)])[kv_indptr]
            old = PagedKV(qo_indptr, old_indptr, read[~new], np.diff(old_indptr), page_size=1)
            self.layout = Cascade([old, own])

    def plan(self, attention: Attention) -> Plan:
        """The plan of this batch, made when a layer first asks."""
        plan = self._plans.get(attention.number)
        if plan is None:
            params = {"window.left": self.window, "window.right": 0}
            plan = self._plans[attention.number] = attention.plan(self.layout, params=params)
        return plan


_steps = WeakIdKeyDictionary()  # by the read index of a batch


@torch.compiler.disable
def attend_paged(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    cache: Any = None,
    block_table: torch.Tensor | None = None,
    **batch: Any,
) -> tuple[torch.Tensor, None]:
    """The attention of ``attn_implementation="paged|raddle"``, by the signature of AttentionInterface.

    Args:
        query: [1, Hq, rows, D]; key, value: [1, Hkv, rows, D], new rows, which are written into the cache.
        cache: transformers' PagedAttentionCache.
        batch: of it cu_seq_lens_q, cu_seq_lens_k, read_index and write_index. On a GPU they are copied to the host once
            a step and group of layers.

    Returns:
        ([1, rows, Hq, D], None).

    Raises:
        ValueError: no paged cache, a block table, a CUDA graph that is captured, or what `attend` refuses.
    """
    refuse(dropout, position_bias)
    if cache is None:
        raise ValueError("cache is None; expected a paged one: 'paged|raddle' is generate_batch's, 'raddle' all other's")
    if block_table is not None:
        raise ValueError("block_table is given; expected None: set max_blocks_per_request=0")
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError("use_cuda_graph is True; expected False: 'paged|raddle' plans on the host")
    layer = _layer_of(cache, module.layer_idx)
    read, write = batch["read_index"][layer.group], batch["write_index"][layer.group]
    step = _step_of(layer, read, write, batch)
    rows, k_new, v_new = (x[0].transpose(0, 1) for x in (query, key, value))
    heads = (rows.shape[1], k_new.shape[1], rows.shape[2], v_new.shape[2])
    attention = attention_of(heads, query.dtype, query.device, softcap is not None, s_aux is not None)
    plan = step.plan(attention)
    pools = [(k_new, v_new)] if step.reads_new else []
    if step.reads_cache:
        pools.insert(0, (layer.k_cache[:, None], layer.v_cache[:, None]))
        if not step.reads_new:
            _write(layer, write, k_new, v_new)
    kv = pools[0] if len(pools) == 1 else pools
    out = attention.run(plan, rows.contiguous(), kv, scale=scaling, params=run_members(softcap, s_aux))
    if step.reads_new:
        _write(layer, write, k_new, v_new)
    return out[None], None


def _write(layer: Layer, write: torch.Tensor, k_new: torch.Tensor, v_new: torch.Tensor) -> None:
    layer.k_cache.index_copy_(0, write, k_new)
    layer.v_cache.index_copy_(0, write, v_new)


def _layer_of(cache: Any, index: int) -> Layer:
    """5.18 has an allocator for each group of layers; 5.17 has lists."""
    if hasattr(cache, "layer_to_allocator"):
        group = cache.layer_to_allocator[index]
        k_cache, v_cache = group._kv_token_views[index]
        return Layer(k_cache, v_cache, group.index, getattr(group, "sliding_window", None), group.sentinel_index)
    group, place = cache.layer_index_to_group_indices[index]
    window = cache.sliding_windows[index]
    pools = cache.key_cache[place], cache.value_cache[place]
    return Layer(*pools, group, None if window == 1 else window, cache.sentinel_index)


def _step_of(layer: Layer, read: torch.Tensor, write: torch.Tensor, batch: dict[str, Any]) -> Step:
    """The batch as the group's first layer prepared it: layers of a group are given the same tensors."""
    step = _steps.get(read)
    if step is None:
        kv_indptr = batch["cu_seq_lens_k"]
        if isinstance(kv_indptr, dict):
            kv_indptr = kv_indptr["full_attention" if layer.window is None else "sliding_attention"]
        arrays = (x.cpu().numpy() for x in (batch["cu_seq_lens_q"], kv_indptr, read, write))
        step = _steps[read] = Step(layer, *arrays)
    return step
