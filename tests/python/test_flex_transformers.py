"""transformers' ``attn_implementation="flex_attention"`` with the names that it imports from PyTorch taken from Raddle."""

from __future__ import annotations

import pytest
import raddle.flex
import torch
import transformers.integrations.flex_attention as path
from small_models import assert_same_tokens, greedy, like, model_of
from test_flex_compile import fresh  # noqa: F401
from transformers import masking_utils


@pytest.fixture(autouse=True)
def another_import(monkeypatch):
    for module in (path, masking_utils):
        for name in ("BlockMask", "create_block_mask", "flex_attention", "AuxRequest"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(raddle.flex, name))
    monkeypatch.setattr(path.WrappedFlexAttention, "_instance", None)
    monkeypatch.setattr(path.WrappedFlexAttention, "_is_flex_compiled", False)
    with torch.no_grad():
        yield


def model_and_ids(name, rng, length=19):
    return model_of(name, rng, "flex_attention"), torch.from_numpy(rng.integers(2, 97, (3, length)))


def test_generate_with_padding_windows_and_a_cap(rng):
    model, ids = model_of("gemma2", rng, "flex_attention"), torch.from_numpy(rng.integers(2, 97, (3, 19)))
    keep = torch.ones_like(ids)
    keep[1, :5] = 0
    expected, logits = greedy(model, ids, attention_mask=keep, max_new_tokens=6)
    found = model.generate(ids, attention_mask=keep, max_new_tokens=6, do_sample=False)[:, ids.shape[1] :]
    for row in range(len(ids)):
        assert_same_tokens(found[row], expected[row], logits[row])


def test_a_compiled_model_is_one_graph(rng):
    """transformers makes the mask in the graph, and looks there at its type."""
    model = model_of("gemma3", rng, "flex_attention")
    eager = like(model, "eager")
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    atol = 1e-5 if torch.get_default_dtype() == torch.float32 else 3e-2
    for length in (19, 23, 31):
        ids = torch.tensor(rng.integers(2, 97, (3, length)))
        expected = eager(ids, use_cache=False).logits
        torch.testing.assert_close(compiled(ids, use_cache=False).logits.float(), expected, rtol=0, atol=atol)


def test_a_mask_of_a_compiled_function_is_a_block_mask():
    @torch.compile(fullgraph=True, backend="eager")
    def kinds(x):
        made = raddle.flex.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, x.shape[0], x.shape[0])
        return x + isinstance(made, raddle.flex.BlockMask) + 2 * isinstance(x, raddle.flex.BlockMask)

    assert kinds(torch.zeros(4)).tolist() == [1.0] * 4
