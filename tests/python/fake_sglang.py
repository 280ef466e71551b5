"""What Raddle's backend uses of SGLang's interfaces, on its own: no SGLang is needed. Names and arguments are SGLang's."""

from __future__ import annotations

import abc
import dataclasses
import enum
import types
from typing import Any

import fake_modules
import torch


class ForwardMode(enum.Enum):
    EXTEND, DECODE, MIXED, IDLE, TARGET_VERIFY = 1, 2, 3, 4, 5

    def is_idle(self):
        return self is ForwardMode.IDLE

    def is_decode(self):
        return self is ForwardMode.DECODE


class AttentionType(enum.Enum):
    DECODER, ENCODER_ONLY = "decoder", "encoder_only"


class AttentionBackend(abc.ABC):
    @abc.abstractmethod
    def init_forward_metadata(self, forward_batch): ...

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        call = self.forward_decode if mode.is_decode() else self.forward_extend
        return call(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)


class RadixAttention(torch.nn.Module):
    def __init__(self, num_heads, head_dim, scaling, num_kv_heads, layer_id, logit_cap=0.0, **given):
        super().__init__()
        self.tp_q_head_num, self.tp_k_head_num = num_heads, num_kv_heads
        self.qk_head_dim, self.v_head_dim = head_dim, given.pop("v_head_dim", head_dim)
        self.scaling, self.layer_id, self.logit_cap = scaling, layer_id, logit_cap
        usual = {
            "sliding_window_size": -1,
            "is_cross_attention": False,
            "pos_encoding_mode": "NONE",
            "logit_capping_method": "tanh",
            "attn_type": AttentionType.DECODER,
            "use_irope": False,
            "xai_temperature_len": -1,
            "k_scale": None,
            "v_scale": None,
            "k_scale_float": None,
            "v_scale_float": None,
        }
        assert not set(given) - set(usual), given
        self.__dict__.update({**usual, **given})


class Pool:
    """MHATokenToKVPool: K and V of each layer [slots, Hkv, D]."""

    def __init__(self, buffers):
        self.buffers = buffers  # by layer number

    def get_kv_buffer(self, layer_id):
        return self.buffers[layer_id]

    def place_of(self, layer, loc):
        return loc

    def set_kv_buffer(self, layer, loc, cache_k, cache_v, k_scale=None, v_scale=None):
        loc = self.place_of(layer, loc)
        for buffer, rows, scale in zip(self.buffers[layer.layer_id], (cache_k, cache_v), (k_scale, v_scale)):
            if scale is not None:
                rows.div_(scale)
            buffer[loc] = rows[: len(loc)].to(buffer.dtype)


class WindowPool(Pool):
    """SWAKVPool: layers with a window have slots of their own."""

    def __init__(self, buffers, to_window):
        super().__init__(buffers)
        self.to_window = to_window  # [slots] int64

    def translate_loc_from_full_to_swa(self, loc):
        return self.to_window[loc.long()]

    def place_of(self, layer, loc):
        return loc if layer.sliding_window_size < 0 else self.translate_loc_from_full_to_swa(loc)


@dataclasses.dataclass
class ForwardBatch:
    forward_mode: ForwardMode
    batch_size: int
    req_pool_indices: Any
    seq_lens: Any
    out_cache_loc: Any
    seq_lens_cpu: Any = None
    extend_seq_lens: Any = None
    extend_seq_lens_cpu: Any = None
    spec_info: Any = None


class TreeMaskMode(enum.IntEnum):
    FULL_MASK, QLEN_ONLY = 0, 1


@dataclasses.dataclass(frozen=True)
class VerifyMask:
    buffer: Any
    mode: TreeMaskMode
    max_bs: int
    is_read: bool = True

    def fits(self, bs):
        return bs <= self.max_bs


@dataclasses.dataclass
class EagleVerifyInput:
    custom_mask: Any
    draft_token_num: int


def runner(model, pool, req_to_token, **changes):
    """A ModelRunner of what the backend reads."""
    given = {
        "dtype": torch.bfloat16,
        "kv_cache_dtype": torch.bfloat16,
        "attention_arch": "MHA",
        "is_encoder_decoder": False,
        "is_draft_worker": False,
        "speculative_algorithm": None,
        "speculative_num_draft_tokens": None,
        "speculative_eagle_topk": None,
        "enable_deterministic_inference": False,
        "chunked_prefill_size": 64,
        "max_prefill_tokens": 128,
        "disable_radix_cache": False,
        **changes,
    }
    space = types.SimpleNamespace
    arguments = ("speculative_algorithm", "speculative_num_draft_tokens", "speculative_eagle_topk")
    arguments += ("enable_deterministic_inference", "chunked_prefill_size", "max_prefill_tokens")
    return space(
        model=model,
        token_to_kv_pool=pool,
        req_to_token_pool=space(req_to_token=req_to_token, size=len(req_to_token)),
        device="cpu",
        is_draft_worker=given["is_draft_worker"],
        dtype=given["dtype"],
        kv_cache_dtype=given["kv_cache_dtype"],
        model_config=space(
            attention_arch=space(name=given["attention_arch"]),
            is_encoder_decoder=given["is_encoder_decoder"],
            context_len=req_to_token.shape[1],
        ),
        server_args=space(
            **{name: given[name] for name in arguments}, disable_radix_cache=given["disable_radix_cache"]
        ),
    )


registered: dict[str, Any] = {}
choices: list[str] = []


def register_attention_backend(name):
    return lambda make: registered.setdefault(name, make)


MODULES = {
    "sglang": {"__version__": "0.5.23"},
    "sglang.srt": {},
    "sglang.srt.server_args": {"add_attention_backend_choices": choices.extend},
    "sglang.srt.layers": {},
    "sglang.srt.layers.attention": {},
    "sglang.srt.layers.attention.attention_registry": {"register_attention_backend": register_attention_backend},
    "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": AttentionBackend},
    "sglang.srt.layers.attention.verify_mask": {"VerifyMask": VerifyMask},
    "sglang.srt.speculative": {},
    "sglang.srt.speculative.eagle_utils": {"TreeMaskMode": TreeMaskMode},
    "sglang.srt.layers.radix_attention": {"RadixAttention": RadixAttention},
}


def modules():
    """The modules by name, for sys.modules."""
    return fake_modules.modules(MODULES)


def backend():
    """`raddle.integrations.sglang.backend`, which finds these modules."""
    return fake_modules.imported("raddle.integrations.sglang.backend", MODULES)
