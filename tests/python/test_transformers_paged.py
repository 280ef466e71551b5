"""``attn_implementation="paged|raddle"``: transformers' continuous batching over its paged cache, without gathering it."""

import pytest
import raddle.integrations.transformers
import torch
import transformers
from small_models import MODELS, assert_same_tokens, greedy, model_of
from transformers import AttentionInterface, ContinuousBatchingConfig, GenerationConfig

from raddle.integrations.transformers import paged

NEW_TOKENS = 10


def generate_batch(model, prompts, **how):
    page = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"
    how[page] = 16
    config = ContinuousBatchingConfig(num_blocks=96, max_batch_tokens=how.pop("max_batch_tokens", 64), **how)
    generation = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    found = model.generate_batch(prompts, generation_config=generation, continuous_batching_config=config)
    return [result.generated_tokens for result in found.values()]


def assert_as_one_by_one(found, model, prompts):
    """Tokens of each prompt are those of eager attention without a cache of pages."""
    assert len(found) == len(prompts)
    for tokens, prompt in zip(found, prompts):
        expected, logits = greedy(model, torch.tensor([prompt]), max_new_tokens=NEW_TOKENS)
        assert_same_tokens(tokens, expected[0], logits[0])


@pytest.fixture
def prompts(rng):
    """Shorter and longer than the windows of the models."""
    return [rng.integers(2, 97, n).tolist() for n in (3, 11, 1, 25, 8)]


@pytest.mark.parametrize("implementation", ["raddle", "paged|raddle"])
def test_the_name_with_and_without_its_prefix(implementation, rng, prompts):
    model = model_of("llama", rng, implementation)
    assert_as_one_by_one(generate_batch(model, prompts), model, prompts)
    # Later than 5.18 the prefix is dropped.
    keeps = transformers.__version__.startswith(("5.17.", "5.18."))
    assert model.config._attn_implementation == (implementation if keeps else implementation.removeprefix("paged|"))


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("max_batch_tokens", [64, 12], ids=["whole prompts", "pieces of prompts"])
def test_greedy_tokens(name, max_batch_tokens, rng, prompts, monkeypatch):
    """A budget of 12 tokens cuts prompts, so that rows of prompts and of decoding share batches."""
    kinds = set()

    def spied(self, *args, init=paged.Step.__init__):
        init(self, *args)
        kinds.add((self.reads_cache, self.reads_new))

    monkeypatch.setattr(paged.Step, "__init__", spied)
    monkeypatch.setattr(torch, "index_select", None)  # by which transformers would gather keys
    model = model_of(name, rng)
    assert_as_one_by_one(generate_batch(model, prompts, max_batch_tokens=max_batch_tokens), model, prompts)
    windowed = "sliding_window" in MODELS[name][1]
    assert kinds >= {(True, False)} | ({(True, True)} if windowed and max_batch_tokens == 12 else set())


def test_prefixes_that_requests_share(rng):
    model, prefix = model_of("llama", rng), rng.integers(2, 97, 40).tolist()
    prompts = [prefix + rng.integers(2, 97, n).tolist() for n in (2, 5, 3)]
    assert_as_one_by_one(generate_batch(model, prompts), model, prompts)


class TestRefusals:
    @pytest.mark.parametrize(
        "given, message",
        [
            (dict(), "cache is None; expected a paged one"),
            (dict(cache=object(), block_table=torch.zeros(1, 1, 1)), "block_table is given; expected None"),
            (dict(cache=object(), dropout=0.5), "dropout is 0.5"),
        ],
    )
    def test_arguments(self, given, message):
        raddle.integrations.transformers.register()
        query = torch.zeros(1, 4, 3, 16)
        with pytest.raises(ValueError, match=message):
            AttentionInterface()["paged|raddle"](torch.nn.Module(), query, query, query, None, **given)
