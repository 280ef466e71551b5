"""vLLM's three classes: backend, metadata builder, implementation (vllm.v1.attention.backend).

A layer's cache is one tensor. Until 0.24 the backend says how it lies: [blocks, 2, block_size, Hkv, D] here. By 0.33 vLLM
gives it as [blocks, Hkv, block_size, 2 D], a head's keys before its values, of any strides but in the last dimension.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, ClassVar

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention as AttentionLayer
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends import utils

from raddle.integrations.paged.layers import LayerAttention
from raddle.integrations.paged.plans import Batch, Limits, plans_of
from raddle.integrations.vllm.layers import STORED, own_parts
from raddle.kv import append_kv
from raddle.plans import Reservation

logger = init_logger("vllm.raddle")  # below vLLM's own logger, which has the handlers

#: Least number of shared leading tokens that are read once for all requests; 0: prefixes are not looked for.
MIN_PREFIX = "RADDLE_VLLM_MIN_PREFIX"

# From the logical order [blocks, 2, tokens, heads, head_dim] to that in memory; with a dimension of layers in front.
_ORDERS = {
    ("NHD", False): (0, 1, 2, 3, 4),
    ("HND", False): (0, 1, 3, 2, 4),
    ("NHD", True): (1, 0, 2, 3, 4, 5),
    ("HND", True): (1, 4, 0, 2, 3, 5),
}


class Backend(AttentionBackend):
    """What Raddle serves, and what it refuses when the engine starts."""

    supported_dtypes: ClassVar[list[Any]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, 2, block_size, num_kv_heads, head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return _ORDERS[utils.get_kv_cache_layout(), include_num_layers_dimension]  # 0.33 has none, and does not ask

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= 512

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return (capability.major, capability.minor) >= (7, 5)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: Any, kv_cache_dtype: str | None, *_: Any, **__: Any
    ) -> str | None:
        if not cls.supports_head_size(head_size):
            return f"head_size is {head_size}; Raddle takes multiples of 8, at most 512"
        stored = kv_cache_dtype or "auto"
        if stored in ("float16", "bfloat16") and stored != str(dtype).rpartition(".")[2]:
            return f"kv_cache_dtype is {stored}, dtype {dtype}; Raddle takes both alike, or fp8"
        if stored.startswith("fp8") and (head_size > 256 or head_size % 16):
            return f"head_size is {head_size}; Raddle takes multiples of 16, at most 256, with kv_cache_dtype={stored}"
        return None


@dataclasses.dataclass
class Metadata(AttentionMetadata):
    """A batch: a plan for each kind of layer that its builder has; and vLLM's arrays, for KV connectors."""

    plans: list[Reservation]
    num_actual_tokens: int
    query_start_loc: Any
    seq_lens: Any
    block_table: Any
    slot_mapping: Any


class Builder(AttentionMetadataBuilder):
    """Plans each batch on the GPU, for all layers of a KV cache group: from arrays that only the GPU knows."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        impls = get_layers_from_vllm_config(vllm_config, AttentionLayer, layer_names)
        layers = [impls[name].impl.layer.with_parts(own_parts(name)) for name in layer_names]
        limits = _limits(vllm_config, kv_cache_spec.block_size)
        self.plans, which = plans_of(layers, vllm_config.model_config.dtype, str(device), limits)
        for name, layer, nth in zip(layer_names, layers, which):
            impls[name].impl.serve(layer, self.plans[nth], nth)
        size = sum(plans.num_bytes for plans in self.plans) / 2**20
        logger.info("Raddle: %d layers, plans a step: %d, %.0f MiB, %s", len(layers), len(self.plans), size, limits)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Metadata:
        """One launch a plan; nothing is copied to the host or waited for. ``common_prefix_len`` is not needed."""
        batch = common_attn_metadata
        if batch.causal is not True:
            raise NotImplementedError("non-causal attention; Raddle's backend serves causal layers")
        requests = batch.num_reqs
        arrays = (
            _first(batch.query_start_loc, requests + 1),
            _first(batch.block_table_tensor, requests),
            _first(batch.seq_lens, requests),
        )
        rows, longest = batch.num_actual_tokens, batch.max_query_len
        planned = Batch(*arrays, num_rows=rows, longest=longest)
        reservations = [plans.plan(planned) for plans in self.plans]
        starts, table, lengths = arrays
        return Metadata(reservations, rows, starts, lengths, table, batch.slot_mapping)

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        """Shared prefixes are found on the GPU, by groups of requests, and not by vLLM."""
        return False


class Impl(AttentionImpl):
    """One attention layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Any = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise NotImplementedError(f"{', '.join(unknown)} of an attention layer; Raddle's backend does not serve them")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"attn_type {attn_type}; Raddle's backend serves decoders")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.sinks = sinks
        self.layer = LayerAttention(
            num_heads,
            self.num_kv_heads,
            head_size,
            self.scale,
            window=sliding_window,
            soft_cap=logits_soft_cap or None,  # models say 0 where there is none
            slopes=None if alibi_slopes is None else tuple(map(float, alibi_slopes)),
            sinks=sinks,
            kv_dtype=STORED.get(kv_cache_dtype),
        )
        self._pools: Any = (None, None, None)

    def process_weights_after_loading(self, act_dtype: Any) -> None:
        """Sinks are a parameter, whose values are known now; those of a later load take the place of the first ones."""
        if self.sinks is None:
            return
        if self.layer.sinks is self.sinks:
            values = self.sinks.detach().to(torch.float32, copy=True)
            self.layer = dataclasses.replace(self.layer, sinks=values)
        else:
            self.layer.sinks.copy_(self.sinks.detach())

    def serve(self, layer: LayerAttention, plans: Any, nth: int) -> None:
        """Has plan ``nth`` of each `Metadata` compute this layer."""
        self.attention, self.nth = plans.attention, nth
        self.params = plans.params_of(layer)

    def forward(
        self,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Metadata | None,
        output: Any,
        output_scale: Any = None,
        output_block_scale: Any = None,
    ) -> Any:
        """Writes ``output``: query, output [tokens, Hq, D]."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("a quantised output; Raddle's backend writes the model's dtype")
        if attn_metadata is None:  # vLLM measures the model's memory
            return output.fill_(0)
        options: dict[str, Any] = {"scale": self.scale, "params": self.params, "zero_unused_rows": True}
        plan = attn_metadata.plans[self.nth]
        kv = kv_cache if len(kv_cache.shape) == 5 else self._pools_of(kv_cache)
        self.attention.run(plan, query, kv, out=output, **options, **self._scales_of(layer))
        return output

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        """Writes new keys and values, as many as slot_mapping has; rows whose slot is -1 are skipped."""
        pools, stored = self._pools_of(kv_cache), self.layer.kv_dtype
        append_kv(slot_mapping, pools, key, value, kv_dtype=stored, **self._scales_of(layer))

    def _scales_of(self, layer: Any) -> dict[str, float]:
        """The scales of quantised keys and values; empty for others."""
        if self.layer.kv_dtype is None:
            return {}
        return {"k_scale": layer._k_scale_float, "v_scale": layer._v_scale_float}

    def _pools_of(self, kv_cache: Any) -> tuple[Any, Any]:
        """K and V [blocks, block_size, Hkv, D]. Views take microseconds: those of the cache are kept."""
        if self._pools[0] is not kv_cache:
            two = kv_cache.unbind(1) if kv_cache.ndim == 5 else kv_cache.transpose(1, 2).split(self.head_size, -1)
            self._pools = (kv_cache, *two)
        _, k, v = self._pools
        return k, v


def _first(array: Any, count: int) -> Any:
    """The first ``count`` entries: vLLM's arrays have room for more requests."""
    return array if array.shape[0] == count else array[:count]


def _limits(vllm_config: Any, page_size: int) -> Limits:
    """The largest batches, as vLLM's configuration has them."""
    scheduler, speculation = vllm_config.scheduler_config, vllm_config.speculative_config
    compilation = vllm_config.compilation_config
    captured = compilation.max_cudagraph_capture_size or 0
    drafted = (speculation.num_speculative_tokens or 0) if speculation is not None else 0
    if getattr(speculation, "parallel_drafting", False):  # whose requests have as many rows for what is drafted next
        drafted *= 2
    requests = scheduler.max_num_seqs
    decoded = requests * (1 + drafted)
    caches_prefixes = bool(vllm_config.cache_config.enable_prefix_caching)
    return Limits(
        max_requests=requests,
        max_qo_tokens=max(scheduler.max_num_batched_tokens, captured, decoded),
        max_kv_tokens=requests * vllm_config.model_config.max_model_len,
        page_size=page_size,
        graph_rows=max(captured, decoded),
        decode_len=1 + drafted,
        captures_mixed=compilation.cudagraph_mode.mixed_mode().name == "FULL",
        min_prefix=_min_prefix() if caches_prefixes else 0,
    )


def _min_prefix() -> int:
    text = os.environ.get(MIN_PREFIX, "512")
    if not text.isdecimal():
        raise ValueError(f"{MIN_PREFIX} is '{text}'; expected the least number of tokens, or 0 to look for no prefixes")
    return int(text)
