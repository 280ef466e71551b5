"""What Raddle's backend uses of vLLM's interfaces, 0.24's and 0.33's, on its own: no vLLM is needed. Names and arguments
are vLLM's."""

from __future__ import annotations

import abc
import dataclasses
import enum
import logging
import types
from typing import Any

import fake_modules
import torch

LAYOUT = "NHD"


class AttentionType:
    DECODER, ENCODER_ONLY = "decoder", "encoder_only"


class AttentionCGSupport(enum.Enum):
    ALWAYS, NEVER = 3, 0


class MultipleOf:
    def __init__(self, base):
        self.base = base


class AttentionMetadata:
    pass


class AttentionBackend(abc.ABC):
    @staticmethod
    @abc.abstractmethod
    def get_name(): ...

    @staticmethod
    @abc.abstractmethod
    def get_impl_cls(): ...

    @staticmethod
    @abc.abstractmethod
    def get_builder_cls(): ...

    @staticmethod
    @abc.abstractmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"): ...


class AttentionMetadataBuilder(abc.ABC):
    @abc.abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.layer_names, self.device = layer_names, device

    @abc.abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...


class AttentionImpl(abc.ABC):
    @abc.abstractmethod
    def __init__(self, num_heads, head_size, scale, *args): ...

    @abc.abstractmethod
    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args): ...


@dataclasses.dataclass
class CommonAttentionMetadata:
    query_start_loc: Any
    seq_lens: Any
    block_table_tensor: Any
    slot_mapping: Any
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    causal: Any = True


@dataclasses.dataclass
class Layer:
    """vLLM's layer `Attention`."""

    impl: Any
    _k_scale_float: float = 1.0
    _v_scale_float: float = 1.0

    def __post_init__(self):
        self._k_scale, self._v_scale = torch.tensor(self._k_scale_float), torch.tensor(self._v_scale_float)


def layers_of(vllm_config, layer_type, names):
    assert layer_type is Layer
    return {name: vllm_config.layers[name] for name in names}


def config(layers, **changes):
    """A VllmConfig of what the backend reads."""
    given = {
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
        "max_model_len": 200,
        "captured": 8,
        "mixed": "PIECEWISE",
        "drafted": None,
        "prefix_caching": True,
        "dtype": torch.bfloat16,
        **changes,
    }
    space = types.SimpleNamespace
    drafts = given["drafted"]
    return space(
        layers=layers,
        scheduler_config=space(
            max_num_seqs=given["max_num_seqs"], max_num_batched_tokens=given["max_num_batched_tokens"]
        ),
        model_config=space(max_model_len=given["max_model_len"], dtype=given["dtype"]),
        compilation_config=space(
            max_cudagraph_capture_size=given["captured"],
            cudagraph_mode=space(mixed_mode=lambda: space(name=given["mixed"])),
        ),
        speculative_config=None if drafts is None else space(num_speculative_tokens=drafts),
        cache_config=space(enable_prefix_caching=given["prefix_caching"]),
    )


registered: dict[Any, str] = {}


def register_backend(backend, class_path=None):
    registered[backend] = class_path


class AttentionBackendEnum(enum.Enum):
    CUSTOM = None


MODULES = {
    "vllm": {"__version__": "0.24.0"},
    "vllm.config": {"get_layers_from_vllm_config": layers_of},
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.model_executor": {},
    "vllm.model_executor.layers": {},
    "vllm.model_executor.layers.attention": {"Attention": Layer},
    "vllm.v1": {},
    "vllm.v1.attention": {},
    "vllm.v1.attention.backend": {
        each.__name__: each
        for each in (
            AttentionBackend,
            AttentionCGSupport,
            AttentionImpl,
            AttentionMetadata,
            AttentionMetadataBuilder,
            AttentionType,
            CommonAttentionMetadata,
            MultipleOf,
        )
    },
    "vllm.v1.attention.backends": {},
    "vllm.v1.attention.backends.registry": {
        "AttentionBackendEnum": AttentionBackendEnum,
        "register_backend": register_backend,
    },
    "vllm.v1.attention.backends.utils": {"get_kv_cache_layout": lambda: LAYOUT},
}


def modules():
    """The modules by name, for sys.modules."""
    return fake_modules.modules(MODULES)


def backend():
    """`raddle.integrations.vllm.backend`, which finds these modules."""
    return fake_modules.imported("raddle.integrations.vllm.backend", MODULES)
