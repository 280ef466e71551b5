"""Calls of `generate` and `generate_batch` with one attention implementation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import transformers

import raddle.integrations.transformers  # noqa: F401: registers "raddle"
from raddle.bench.generate.turns import Answer, Call, Tokens
from raddle.bench.serve.loads import Load, Prompt

#: A call: (model, name of the implementation, prompts, new tokens of each).
Generate = Callable[[Any, str, Sequence[Prompt], int], Answer]
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


def caller(model: Any, implementation: str, load: Load, seed: int, generate: Generate) -> Call:
    """A call for each round: prompts of the same lengths, whose tokens come in another order."""
    _, prompts = load.prompts(seed)

    def call(number: int) -> Answer:
        rng = np.random.default_rng([seed, number])
        mixed = [rng.permutation(prompt).tolist() for prompt in prompts]
        answer = generate(model, implementation, mixed, load.new)
        if [len(tokens) for tokens in answer.tokens] != [load.new] * len(prompts):
            raise RuntimeError(f"requests have {[len(tokens) for tokens in answer.tokens]} new tokens; expected {load.new}")
        return answer

    return call


# No token ends a request, so that all have as many.
def generate_padded(model: Any, implementation: str, prompts: Sequence[Prompt], new: int) -> Answer:
    """`generate`, timed until the tokens are on the host. Shorter prompts are padded on the left."""
    longest = max(map(len, prompts))
    pads = [longest - len(prompt) for prompt in prompts]
    ids = torch.tensor([[_PAD] * pad + prompt for pad, prompt in zip(pads, prompts)], device=model.device)
    mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads], device=model.device)
    config = transformers.GenerationConfig(max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=_PAD)
    model.set_attn_implementation(implementation)
    start = time.perf_counter()
    tokens: Tokens = model.generate(ids, attention_mask=mask, generation_config=config)[:, longest:].tolist()
    return Answer(tokens, time.perf_counter() - start)


def generate_continuous(model: Any, implementation: str, prompts: Sequence[Prompt], new: int) -> Answer:
    """`generate_batch`, timed from the first request's start to the last one's end.

    Starting and ending the thread that serves them, about half a second, is not counted. The cache has as many pages as
    the prompts need, and all requests may run at once.
    """
    paged = transformers.ContinuousBatchingConfig(max_batch_tokens=8192, safety_margin=0.0)
    page = getattr(paged, "page_size", None) or paged.block_size
    paged.num_blocks = sum(-(-(len(prompt) + new) // page) for prompt in prompts)
    if hasattr(paged, "auto_switch_to_flash"):
        paged.auto_switch_to_flash = False
    elif not implementation.startswith("paged|"):  # versions that take the name with its prefix alone as it is
        implementation = f"paged|{implementation}"
    config = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=_PAD)
    model.set_attn_implementation(implementation)
    found = model.generate_batch(
        list(prompts), generation_config=config, continuous_batching_config=paged, progress_bar=False
    ).values()
    errors = [each.error for each in found if each.error]  # of the thread, which ends requests and raises nothing
    if errors or len(found) != len(prompts):
        raise RuntimeError(errors[0] if errors else f"{len(found)} of {len(prompts)} requests were answered")
    seconds = max(each.lifespan[1] for each in found) - min(each.created_time for each in found)
    return Answer([list(each.generated_tokens) for each in found], seconds)


#: By the loads' names.
HOW: dict[str, Generate] = {
    "first": generate_padded,
    "equal": generate_padded,
    "padded": generate_padded,
    "continuous": generate_continuous,
}
