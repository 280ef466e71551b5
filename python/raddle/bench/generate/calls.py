"""Calls of `generate` and `generate_batch` with one attention implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers

import raddle.integrations.transformers  # noqa: F401: registers "raddle"
from raddle.bench.serve.loads import Load, Prompt

#: New tokens of each prompt.
Tokens = list[list[int]]
_PAD = 0


def make_model(name: str, dummy_weights: bool, device: str, dtype: str, seed: int) -> Any:
    """A model on a device; with random weights where they are dummies."""
    kind = transformers.AutoModelForCausalLM
    if not dummy_weights:
        return kind.from_pretrained(name, dtype=getattr(torch, dtype)).to(device).eval()
    torch.manual_seed(seed)
    config = transformers.AutoConfig.from_pretrained(name)
    with torch.device(device):
        return kind.from_config(config, dtype=getattr(torch, dtype)).eval()


def caller(model: Any, implementation: str, load: Load, seed: int) -> Callable[[int], Tokens]:
    """A call for each round, which has prompts of its own."""
    how = _generate_batch if load.name == "batch" else _generate

    def call(number: int) -> Tokens:
        model.set_attn_implementation(implementation)
        return how(model, load.prompts(seed + number)[1], load.new)

    return call


# No token ends a request, so that all have as many.
def _generate(model: Any, prompts: Sequence[Prompt], new: int) -> Tokens:
    longest = max(map(len, prompts))
    pads = [longest - len(prompt) for prompt in prompts]
    ids = torch.tensor([[_PAD] * pad + prompt for pad, prompt in zip(pads, prompts)], device=model.device)
    mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads], device=model.device)
    config = transformers.GenerationConfig(max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=_PAD)
    found: Tokens = model.generate(ids, attention_mask=mask, generation_config=config)[:, longest:].tolist()
    return found


def _generate_batch(model: Any, prompts: Sequence[Prompt], new: int) -> Tokens:
    """With transformers' page size, and as many pages as the prompts need."""
    paged = transformers.ContinuousBatchingConfig()
    page = getattr(paged, "page_size", None) or paged.block_size
    pages = sum(-(-(len(prompt) + new) // page) for prompt in prompts)
    paged.num_blocks, paged.max_batch_tokens = pages, max(map(len, prompts))
    config = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=_PAD)
    found = model.generate_batch(
        list(prompts), generation_config=config, continuous_batching_config=paged, progress_bar=False
    )
    if len(found) != len(prompts):
        raise RuntimeError(f"{len(found)} of {len(prompts)} requests were answered")
    return [list(each.generated_tokens) for each in found.values()]
