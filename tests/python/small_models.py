"""Small random models of transformers, made of configurations: nothing is downloaded."""

import copy

import torch
import transformers

HEADS = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
SIZES = dict(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=4, max_position_embeddings=256, **HEADS
)
TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=None)
WINDOWS = dict(layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=7)
EXPERTS = dict(
    num_local_experts=4,
    num_experts_per_tok=2,
    experts_implementation="eager",  # the others take no float64
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)
MODELS = {
    "llama": ("Llama", SIZES),
    "qwen3": ("Qwen3", SIZES),
    "gemma2": ("Gemma2", {**SIZES, **WINDOWS, "query_pre_attn_scalar": 24, "tie_word_embeddings": False, "attn_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3", {**SIZES, **WINDOWS, "query_pre_attn_scalar": 24, "tie_word_embeddings": False}),
    "gpt_oss": ("GptOss", {**SIZES, **WINDOWS, **EXPERTS}),
}


def config_of(name, **changes):
    kind, sizes = MODELS[name]
    config = f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config"
    return getattr(transformers, config)(**{**sizes, **TOKENS, **changes})


def model_of(name, rng, attn_implementation="raddle", **changes):
    """A model whose weights are large enough for attention to matter, and for greedy tokens to have no near ties."""
    torch.manual_seed(int(rng.integers(2**31)))
    config = config_of(name, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation).eval()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if path.endswith(("q_proj.weight", "k_proj.weight", "embed_tokens.weight")):
                weight.normal_(0, 0.5)
            if path.endswith("sinks"):
                weight.normal_(0, 2.0)
    return model


def _exact(module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, **_):
    """Attention in float64; transformers' eager attention takes its softmax in float32, whatever the model's dtype."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    logits = query @ key.mT * scaling
    logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
    logits = logits.masked_fill(~attention_mask, -torch.inf)
    if s_aux is not None:
        sinks = s_aux.to(logits)[None, :, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sinks], -1)
    weights = logits.softmax(-1)[..., : key.shape[2]].nan_to_num()
    return (weights @ value).transpose(1, 2).contiguous(), None


def _dense(allow_is_causal_skip=None, **how):
    return transformers.masking_utils.sdpa_mask(**how, allow_is_causal_skip=False)


transformers.AttentionInterface.register("exact", _exact)
transformers.AttentionMaskInterface.register("exact", _dense)


def like(model, attn_implementation, dtype=torch.float32):
    """The same weights with another attention."""
    other = copy.deepcopy(model)
    other.set_attn_implementation(attn_implementation)
    return other.to(dtype)


NEAR_TIE = 1e-4  # between logits that are about 1 and differ by roundings of 1e-6


def greedy(model, ids, attention_mask=None, **how):
    """New tokens of eager attention [batch, steps], and the logits that they were chosen by [batch, steps, vocabulary]."""
    mask = torch.ones_like(ids) if attention_mask is None else attention_mask
    kept = dict(return_dict_in_generate=True, output_logits=True, do_sample=False)
    found = like(model, "eager").generate(ids, attention_mask=mask, **kept, **how)
    return found.sequences[:, ids.shape[1] :], torch.stack(found.logits, 1)


def assert_same_tokens(found, expected, logits):
    """Equal tokens of one sequence, up to the first step whose two tokens are a near tie."""
    assert len(found) == len(expected)
    for step, (token, other) in enumerate(zip(map(int, found), map(int, expected))):
        if token != other:
            gap = float(logits[step, other] - logits[step, token])
            assert gap < NEAR_TIE, f"step {step} has token {token}; expected {other}, whose logit is {gap} above"
            return
