"""What the attention layers of a model in SGLang compute, and what is refused when the engine starts.

Imports nothing of SGLang.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Iterator

from raddle.integrations.paged.layers import LayerAttention

#: What K and V may be stored as beside the model's dtype.
_STORED = ("float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True)
class FoundLayer:
    """A layer of the model, with the sinks that its model hands to each call; None: it has none.

    They are float32: the model's own tensor if it is, which may change later, else a copy beside it.
    """

    layer: Any
    sinks: Any


def find_layers(model: Any, layer_type: type) -> list[FoundLayer]:
    """The attention layers of a model, in the order of their numbers."""
    found = {each.layer.layer_id: each for each in _found(model, layer_type)}
    return [found[number] for number in sorted(found)]


def _found(model: Any, layer_type: type) -> Iterator[FoundLayer]:
    for module in model.modules():
        for child in module.children():
            if isinstance(child, layer_type):
                sinks = getattr(module, "sinks", None)  # a parameter beside the layer: gpt-oss
                yield FoundLayer(child, None if sinks is None else sinks.detach().float().contiguous())


def layer_attention(found: FoundLayer, dtype: Any, kv_dtype: Any) -> LayerAttention:
    """What a layer computes. Raises NotImplementedError, which names it, where Raddle's backend does not serve it."""
    layer = found.layer
    for refused, what in _refusals(layer):
        if refused:
            raise NotImplementedError(f"layer {layer.layer_id} has {what}; Raddle's backend for SGLang does not serve it")
    window = layer.sliding_window_size
    return LayerAttention(
        layer.tp_q_head_num,
        layer.tp_k_head_num,
        layer.qk_head_dim,
        float(layer.scaling),
        # SGLang does not count the row itself, LayerAttention does.
        window=None if window is None or window < 0 else window + 1,
        soft_cap=layer.logit_cap or None,
        sinks=found.sinks,
        kv_dtype=_stored(dtype, kv_dtype),
    )


def _refusals(layer: Any) -> Iterator[tuple[bool, str]]:
    kind = getattr(layer.attn_type, "value", layer.attn_type)
    cap = layer.logit_cap and getattr(layer, "logit_capping_method", "tanh") != "tanh"
    yield layer.is_cross_attention, "cross-attention"
    yield kind != "decoder", f"attn_type '{kind}'"
    yield layer.v_head_dim != layer.qk_head_dim, f"head dims {layer.qk_head_dim} and {layer.v_head_dim}"
    yield bool(cap), f"logit_capping_method '{getattr(layer, 'logit_capping_method', None)}'"
    yield getattr(layer, "pos_encoding_mode", "NONE") != "NONE", f"pos_encoding_mode '{layer.pos_encoding_mode}'"
    yield bool(getattr(layer, "use_irope", False)), "attention in chunks (use_irope)"
    yield getattr(layer, "xai_temperature_len", -1) > 0, "a temperature by length (xai_temperature_len)"


def _stored(dtype: Any, kv_dtype: Any) -> str | None:
    name = str(kv_dtype).rpartition(".")[2]
    if kv_dtype == dtype:
        return None
    if name not in _STORED:
        raise NotImplementedError(f"a KV cache of {name} beside {dtype}; Raddle's backend for SGLang takes {dtype} or fp8")
    return name


def refuse_model(runner: Any) -> None:
    """Raises NotImplementedError, with the reason, for what the backend does not serve in any layer."""
    arguments, config = runner.server_args, runner.model_config
    arch = getattr(config.attention_arch, "name", str(config.attention_arch))
    for refused, what in (
        (arch == "MLA", "latent attention (MLA)"),
        (bool(getattr(config, "is_encoder_decoder", False)), "a model with an encoder"),
        (bool(getattr(arguments, "enable_deterministic_inference", False)), "enable_deterministic_inference"),
    ):
        if refused:
            raise NotImplementedError(f"{what}: Raddle's backend for SGLang does not serve it")
