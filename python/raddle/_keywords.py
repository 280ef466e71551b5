"""Keywords of other libraries: answered with what to write here.

FlashInfer, SDPA, flash-attn, FlexAttention, vLLM and SGLang name the same things differently. A call with one of their
keywords raises TypeError, as Python itself does, and the message says what to write instead.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from typing import Any, Callable, NoReturn, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_SCALE = {name: "scale=" for name in ("softmax_scale", "sm_scale", "scaling", "attn_scale")}
_CAP = "raddle.SoftCap(cap)"
_WINDOW = "raddle.SlidingWindow(left, right)"
_NO_DROPOUT = "nothing: attention for inference drops nothing"

#: What is a part of the variant here: in a list ``variant=[…]`` of a spec, or of `raddle.attention`.
_PARTS = {
    **{name: _WINDOW for name in ("window", "window_size", "window_left", "sliding_window", "sliding_window_size")},
    **{name: _CAP for name in ("softcap", "soft_cap", "logits_soft_cap", "logit_softcapping", "logit_cap")},
    **{name: "raddle.Alibi(slopes)" for name in ("alibi", "alibi_slopes", "use_alibi", "alibi_bias")},
    **{name: "raddle.Sinks(logits)" for name in ("sinks", "s_aux", "learnable_sink", "attention_sinks")},
    **{name: "raddle.Rope(rotary_dim, theta)" for name in ("rope_theta", "rope_scale", "pos_encoding_mode", "rope")},
    **{name: "the function itself" for name in ("score_mod", "mask_mod", "mask")},
    "block_mask": "the BlockMask itself",
    "causal": "raddle.Causal()",
    "is_causal": "raddle.Causal()",
    "attn_mask": "a function (b, h, q_idx, kv_idx) of raddle.flex, or raddle.PackedMask",
    "attn_bias": "a function (score, b, h, q_idx, kv_idx) of raddle.flex",
    "custom_mask": "raddle.PackedMask.from_masks(masks)",
    "packed_custom_mask": "raddle.PackedMask(bits, indptr)",
}
_IN_VARIANT = {name: f"variant=[{part}]" for name, part in _PARTS.items()}
_OF_SPEC = {name: f"variant=[{part}] of the AttentionSpec" for name, part in _PARTS.items()}

_ROWS = {name: "qo_indptr=" for name in ("cu_seqlens_q", "query_start_loc", "cu_seqlens", "q_indptr")}
_LENGTHS = {
    name: "kv_len="
    for name in ("seq_lens", "cache_seqlens", "seqused_k", "context_lens", "kv_lens", "seq_len")
}
_LAST_PAGE = "kv_len=, where kv_len = (pages of the request - 1) * page_size + last_page_len"
_TABLE = {
    **_ROWS,
    **_LENGTHS,
    **{name: "page_indptr=" for name in ("paged_kv_indptr", "kv_indptr", "kv_page_indptr")},
    **{name: "page_indices=" for name in ("paged_kv_indices", "kv_indices", "kv_page_indices")},
    **{name: _LAST_PAGE for name in ("last_page_len", "paged_kv_last_page_len", "kv_last_page_len")},
    **{name: "page_indices=, and page_indptr=None" for name in ("block_table", "block_tables", "page_table")},
    "block_size": "page_size=",
    **{
        name: "nothing: Raddle finds the longest request itself"
        for name in ("max_seqlen_q", "max_seqlen_k", "max_q_len", "max_kv_len", "max_seqlen")
    },
}
_LAYOUT = {name: f"raddle.PagedKV({write})" for name, write in _TABLE.items() if not write.startswith("nothing")}
_DESCALE = {f"{x}_descale": f"{x}_scale=" for x in "kv"}

_MAXIMA = {
    name: "maxima=raddle.Maxima(max_requests=…, max_qo_tokens=…, max_kv_tokens=…)"
    for name in ("max_requests", "max_qo_tokens", "max_kv_tokens", "max_levels", "max_runs", "max_qo_len")
    + ("max_mask_bytes", "max_batch_size", "max_num_seqs", "max_bs", "max_num_tokens", "max_seq_len")
}

#: What to write for a keyword, by the call that was given it.
HINTS: dict[str, dict[str, str]] = {
    "attention": {
        **{name: write for name, write in _IN_VARIANT.items() if name != "causal"},
        **_SCALE,
        **{name: "causal=" for name in ("is_causal", "causal_mask")},
        "dropout_p": _NO_DROPOUT,
        "enable_gqa": "nothing: k and v may have fewer heads than q",
        "tensor_layout": 'layout="BSHD" or "BHSD"',
        "qkv_layout": 'layout="THD"',
        "return_attn_probs": "return_lse=True: probabilities are never made",
        **{
            name: "an Attention with a plan of raddle.RaggedKV(qo_indptr, kv_indptr)"
            for name in ("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_k")
        },
        **{name: "an Attention with a plan of raddle.PagedKV" for name in ("block_table", "cache_seqlens")},
    },
    "AttentionSpec": {
        **_IN_VARIANT,
        **_SCALE,
        **{name: "num_qo_heads=" for name in ("num_heads", "num_q_heads", "num_attention_heads", "n_heads")},
        **{name: "num_kv_heads=" for name in ("num_key_value_heads", "num_heads_kv", "n_kv_heads")},
        **{name: "head_dim=" for name in ("head_dim_qk", "head_size", "head_dim_q")},
        **{name: "head_dim_vo=" for name in ("head_dim_v", "v_head_dim")},
        **{name: "dtype=" for name in ("q_data_type", "data_type", "o_data_type", "torch_dtype")},
        **{name: "kv_dtype=" for name in ("kv_data_type", "kv_cache_dtype")},
        "dropout_p": _NO_DROPOUT,
        "page_size": "page_size of a raddle.PagedKV",
        "device": "device of raddle.Attention(spec, device)",
    },
    "Attention": {
        **_OF_SPEC,
        **{
            name: "nothing: an Attention has scratch of its own (raddle.workspace_bytes says how much)"
            for name in ("workspace", "workspace_buffer", "float_workspace_buffer", "int_workspace_buffer")
        },
        "kv_layout": 'kv_layout="NHD" or "HND" of a raddle.PagedKV',
        "use_cuda_graph": "attn.reserve(raddle.Maxima(…)), and run with the reservation",
        "backend": "nothing: the device decides",
    },
    "Attention.plan": {
        **_OF_SPEC,
        **_LAYOUT,
        **{name: "scale= of run, or of the AttentionSpec" for name in _SCALE},
        "page_size": "page_size of a raddle.PagedKV",
    },
    "Attention.run": {
        **_OF_SPEC,
        **_SCALE,
        **_DESCALE,
        **{name: "kv=" for name in ("paged_kv_cache", "kv_cache", "ragged_kv")},
        **{name: "a layout: attn.plan(raddle.PagedKV(…))" for name in _TABLE},
        "softmax_lse": "lse=",
        "return_softmax_lse": "return_lse=True",
        "dropout_p": _NO_DROPOUT,
    },
    "Attention.reserve": _MAXIMA,
    "workspace_bytes": _MAXIMA,
    "PagedKV": {**_TABLE, **_OF_SPEC},
    "RaggedKV": {
        **_ROWS,
        **{name: "kv_indptr=" for name in ("cu_seqlens_k", "cu_seqlens_kv", "k_indptr")},
        **_OF_SPEC,
    },
    "SlidingWindow": {
        "window": "left=, which does not count the row itself: window - 1 of most models",
        "window_size": "left= and right=",
        "window_left": "left=",
        "sliding_window": "left=, which does not count the row itself: sliding_window - 1",
    },
    "SoftCap": {name: "cap=" for name in ("softcap", "logits_soft_cap", "soft_cap", "value")},
    "Rope": {
        **{name: "theta=" for name in ("base", "rope_theta", "rope_base")},
        **{name: "rotary_dim=" for name in ("dim", "head_dim", "head_size")},
        "rope_scale": "scaling=raddle.YarnScaling(…) or raddle.Llama31Scaling(…)",
        "rope_scaling": "scaling=raddle.YarnScaling(…) or raddle.Llama31Scaling(…)",
        "is_neox_style": "interleaved=, which is not is_neox_style",
    },
    "Sinks": {name: "logits=" for name in ("sinks", "s_aux", "sink")},
    "Alibi": {name: "slopes=" for name in ("alibi_slopes", "num_heads")},
    "flex_attention": {
        **_SCALE,
        **{name: "block_mask=create_block_mask(masks.causal, None, None, L, S)" for name in ("causal", "is_causal")},
        **{name: "block_mask=create_block_mask(a function, B, H, L, S)" for name in ("attn_mask", "mask_mod", "mask")},
        "dropout_p": _NO_DROPOUT,
    },
    "create_block_mask": {
        "mask": "mask_mod=",
        "S": "KV_LEN=",
        "L": "Q_LEN=",
        "q_len": "Q_LEN=",
        "kv_len": "KV_LEN=",
        "block_size": "BLOCK_SIZE=",
    },
    "sample": {
        **{f"{name}s": f"{name}=" for name in ("temperature", "top_k", "top_p", "min_p", "seed", "offset")},
        **{f"{name}_penalties": f"{name}_penalty=" for name in ("repetition", "presence", "frequency")},
        "generator": "seed=, and offset= for the step",
        "deterministic": "nothing: the same seed always draws the same tokens",
    },
    "append_kv": {
        "slot_mapping": "a raddle.PagedKV whose last keys are the new ones",
        "paged_kv_cache": "kv_pool=",
        "kv_cache": "kv_pool=",
        "append_key": "k_new=",
        "append_value": "v_new=",
        **{name: f"raddle.PagedKV({write}) as layout" for name, write in _TABLE.items() if "=" in write},
    },
}


def refuse(call: str, unknown: dict[str, Any], function: Callable[..., Any]) -> NoReturn:
    """Raises TypeError for keywords that ``call`` does not have: what to write, a near name, or all names."""
    names = [each for each in inspect.signature(function).parameters if each not in ("self", "cls", "unknown")]
    hints = HINTS.get(call, {})
    found = []
    for name in unknown:
        near = difflib.get_close_matches(name, names, 1)
        expected = f"expected {near[0] + '=' if near else ', '.join(names)}"
        found.append(f"'{name}'; {f'write {hints[name]}' if name in hints else expected}")
    raise TypeError(f"{call} has no argument {'; nor '.join(found)}")


def answered(call: str) -> Callable[[F], F]:
    """A decorator for a function that is called as ``call`` and whose time does not matter.

    It also answers where an argument is missing because it was given by another name. What is called for every batch
    or layer takes ``**unknown`` instead and calls `refuse` if there are any.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                if error.__traceback__.tb_next is not None:  # raised inside: the arguments had their names
                    raise
                known = inspect.signature(function).parameters
                unknown = {name: value for name, value in kwargs.items() if name not in known}
            if unknown:
                refuse(call, unknown, function)
            return function(*args, **kwargs)  # raises again: too many or too few arguments

        return checked  # type: ignore[return-value]

    return decorate
