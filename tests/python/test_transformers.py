"""``attn_implementation="raddle"`` in transformers: logits, greedy tokens, padding, caches, and what is refused."""

import numpy as np
import pytest
import raddle.integrations.transformers
import torch
from small_models import MODELS, assert_same_tokens, greedy, like, model_of
from transformers import AttentionInterface, masking_utils

from raddle.integrations.transformers import masks, windows
from raddle.integrations.transformers.windows import Window

NAMES = pytest.mark.parametrize("name", list(MODELS))
CACHES = pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
#: SoftCap's tanh has an absolute error of 2^-21, times the cap.
CAP_ERROR = {"gemma2": 5.0 * 2.0**-21}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def tokens(rng, batch=3, length=19):
    return torch.from_numpy(rng.integers(2, 97, (batch, length)))


def padding(ids, side, rng):
    """Between nothing and all but one token of each sequence, on one side."""
    keep = torch.ones_like(ids)
    for row, count in zip(keep[1:], rng.integers(1, ids.shape[1], len(ids) - 1)):
        row[: int(count)] = 0
    return keep.flip(1) if side == "right" else keep


def assert_as_good_as_eager(name, model, inputs, rows=slice(None)):
    """Errors against attention in float64 are at most twice those of eager attention in float32."""
    exact = like(model, "exact", torch.float64)(**inputs).logits[rows]
    eager = like(model, "eager")(**inputs).logits[rows].double()
    found = model(**inputs).logits[rows].double()
    rms = (eager - exact).square().mean().sqrt()
    # Errors of logits pass through layers: each adds its own, amplified by those behind it.
    assert (found - exact).square().mean().sqrt() <= 2 * rms + 20 * CAP_ERROR.get(name, 0.0)


@NAMES
def test_logits(name, rng):
    assert_as_good_as_eager(name, model_of(name, rng), {"input_ids": tokens(rng)})


@NAMES
@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_of_padded_batches(name, side, rng):
    ids = tokens(rng)
    keep = padding(ids, side, rng)
    assert_as_good_as_eager(name, model_of(name, rng), {"input_ids": ids, "attention_mask": keep}, keep.bool())


@NAMES
@CACHES
@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
def test_greedy_tokens(name, cache, padded, rng):
    model, ids = model_of(name, rng), tokens(rng)
    keep = padding(ids, "left", rng) if padded else torch.ones_like(ids)
    how = dict(attention_mask=keep, max_new_tokens=12, **cache)
    expected, logits = greedy(model, ids, **how)
    found = model.generate(ids, do_sample=False, **how)[:, ids.shape[1] :]
    for row in range(len(ids)):
        assert_same_tokens(found[row], expected[row], logits[row])
    assert len(expected.unique()) > 4  # it says something


@pytest.mark.parametrize("order", ["heads first", "tokens first", "of unlike strides", "of odd strides"])
def test_padded_caches_are_read_where_they_lie(order, rng):
    """K and V of padded batches as ragged rows, of caches in either order, and copied only where they are in neither."""
    mask = masks.Mask(3, 5, 12, windows.CAUSAL, 7, keep=np.arange(12) >= np.array([[0], [4], [9]]))
    q = torch.from_numpy(rng.standard_normal((3, 5, 4, 16)).astype(np.float32))
    key, value = torch.from_numpy(rng.standard_normal((2, 3, 2, 12, 16)).astype(np.float32))

    def laid(x, tokens_first):
        return x.transpose(1, 2).contiguous().transpose(1, 2) if tokens_first else x

    cache = [laid(key, order == "tokens first"), laid(value, order in ("tokens first", "of unlike strides"))]
    if order == "of odd strides":
        flat = torch.zeros(3 * 2 * 12 * 16 + 2 * 8)
        cache[0] = flat.as_strided(key.shape, (2 * 12 * 16 + 8, 12 * 16, 16, 1)).copy_(key)
    pools, apart = mask.pools(*cache)
    reads = all(pool.data_ptr() == x.data_ptr() for pool, x in zip(pools, cache))
    assert reads == (order in ("heads first", "tokens first"))
    attention = raddle.Attention(raddle.AttentionSpec(4, 2, 16, dtype="float32", variant=[raddle.SlidingWindow(-1, 0)]))
    out = attention.run(attention.plan(mask.layout(apart)), q, pools)
    for row, begin in enumerate([0, 4, 9]):
        k, v = (x[row, :, begin:].transpose(0, 1) for x in (key, value))
        first = max(0, begin - 7)  # rows of padding see nothing
        alone = raddle.attention(q[row, first:], k, v, causal=True)
        torch.testing.assert_close(out.view(q.shape)[row, first:], alone, rtol=0, atol=1e-5)
        assert not out.view(q.shape)[row, :first].any()


def test_prefill_in_pieces(rng):
    model, ids = model_of("gemma3", rng), tokens(rng, length=23)
    first = model(ids[:, :9], use_cache=True)
    second = model(ids[:, 9:], past_key_values=first.past_key_values)
    found = torch.cat([first.logits, second.logits], 1)
    torch.testing.assert_close(found, model(ids).logits, rtol=0, atol=1e-4)


def test_bfloat16(rng):
    model, ids = model_of("llama", rng), tokens(rng)
    exact = model(ids).logits
    errors = [(like(model, name, torch.bfloat16)(ids).logits - exact).square().mean().sqrt() for name in ("eager", "raddle")]
    assert errors[1] <= 1.2 * errors[0]


def test_padding_between_tokens_is_traced(rng):
    model, ids = model_of("llama", rng), tokens(rng)
    keep = torch.ones_like(ids)
    keep[0, 4:7] = keep[2, 9] = 0
    assert_as_good_as_eager("llama", model, {"input_ids": ids, "attention_mask": keep}, keep.bool())


@pytest.mark.parametrize("kind", ["bool", "float", "by head"])
def test_masks_of_the_users_own(kind, rng):
    model, ids = model_of("llama", rng), tokens(rng)
    length = ids.shape[1]
    keep = torch.tril(torch.from_numpy(rng.random((3, 1, length, length)) < 0.7)) | torch.eye(length, dtype=torch.bool)
    mask = torch.where(keep, torch.from_numpy(rng.standard_normal(keep.shape)).float(), torch.finfo(torch.float32).min)
    given = keep if kind == "bool" else mask.expand(-1, 4, -1, -1) if kind == "by head" else mask
    eager = torch.where(keep, 0.0, torch.finfo(torch.float32).min) if kind == "bool" else mask
    expected = like(model, "eager")(ids, attention_mask=eager).logits
    torch.testing.assert_close(model(ids, attention_mask=given).logits, expected, rtol=0, atol=1e-4)


def test_packed_sequences(rng):
    """Several sequences in one row, told apart by their positions."""
    model, ids = model_of("llama", rng), tokens(rng, 1, 24)
    positions = torch.cat([torch.arange(n) for n in (7, 12, 5)])[None]
    found = model(ids, position_ids=positions, use_cache=False).logits
    begin = 0
    for n in (7, 12, 5):
        alone = model(ids[:, begin : begin + n]).logits
        torch.testing.assert_close(found[:, begin : begin + n], alone, rtol=0, atol=1e-4)
        begin += n


def test_masks_are_functions_of_any_kind(rng):
    """What transformers composes (chunks, blocks that see themselves) against its own dense mask."""
    chunked = masking_utils.chunked_causal_mask_function(5, torch.tensor([0, 3]))
    blocks = masking_utils.blockwise_overlay(torch.from_numpy(rng.integers(-1, 2, (2, 17))))
    for function in (chunked, masking_utils.or_masks(masking_utils.causal_mask_function, blocks)):
        keep = torch.ones(2, 17, dtype=torch.bool)
        keep[1, :3] = False
        given = dict(batch_size=2, q_length=17, kv_length=17, mask_function=function, attention_mask=keep)
        dense = masking_utils.sdpa_mask(**given, allow_is_causal_skip=False)
        query, key, value = (torch.from_numpy(rng.standard_normal((2, 2, 17, 16))).float() for _ in range(3))
        attend = AttentionInterface()["raddle"]
        mask = masks.make_mask(**given)
        found, _ = attend(torch.nn.Module(), query, key, value, mask)
        sliced, _ = attend(torch.nn.Module(), query, key, value, mask[:, :, :17])  # as some models pass them on
        assert sliced.equal(found)
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=dense).transpose(1, 2)
        some = dense.any(-1).transpose(1, 2)[..., None].expand_as(expected)
        torch.testing.assert_close(found[some], expected[some], rtol=0, atol=1e-5)
        assert (found[~some] == 0).all()


def test_windows_need_no_tracing():
    causal, sliding = masking_utils.causal_mask_function, masking_utils.sliding_window_causal_mask_function(9)
    assert windows.window_of(causal) == Window(-1, 0)
    assert windows.window_of(sliding) == Window(8, 0)
    assert windows.window_of(masking_utils.sliding_window_bidirectional_mask_function(9)) == Window(9, 9)
    assert windows.window_of(masking_utils.and_masks(sliding, masking_utils.sliding_window_overlay(5))) == Window(4, 0)
    assert windows.window_of(masking_utils.or_masks(causal, sliding)) is None
    assert windows.window_of(masking_utils.and_masks(causal, lambda b, h, q, k: k > 3)) is None


def test_a_mask_takes_no_room_and_ends_with_its_tensor():
    mask = masks.make_mask(batch_size=2, q_length=4096, kv_length=4096)
    assert mask.shape == (2, 1, 4096, 4096) and mask.untyped_storage().nbytes() == 8
    number = int(mask[0, 0, 0, 0])
    assert number in masks._lent
    view = mask[:, :, :7]
    del mask
    for _ in range(20):
        masks.make_mask(batch_size=1, q_length=1, kv_length=1)
    assert number in masks._lent
    del view
    for _ in range(20):
        masks.make_mask(batch_size=1, q_length=1, kv_length=1)
    assert number not in masks._lent


def test_compiled_with_a_static_cache(rng):
    """torch.compile sees one operator a layer; masks go into the graph as they are."""
    model, ids = model_of("gemma2", rng, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]), tokens(rng)
    expected, logits_of = greedy(model, ids, max_new_tokens=6)
    compiled = torch.compile(model.forward, backend="eager", fullgraph=True)
    cache = raddle_cache(model, ids.shape[1] + 6)
    step, position = ids, 0
    found = []
    for _ in range(6):
        keep = torch.ones(3, position + step.shape[1], dtype=torch.bool)
        inputs = dict(config=model.config, inputs_embeds=torch.empty(*step.shape, 0), past_key_values=cache)
        made = masking_utils.create_masks_for_generate(**inputs, attention_mask=keep, position_ids=None)
        positions = torch.arange(position, position + step.shape[1])[None]
        logits = compiled(step, attention_mask=made, past_key_values=cache, position_ids=positions).logits
        position += step.shape[1]
        step = logits[:, -1:].argmax(-1)
        found.append(step)
    for row, tokens_of_row in enumerate(torch.cat(found, 1)):
        assert_same_tokens(tokens_of_row, expected[row], logits_of[row])


def raddle_cache(model, length):
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=length)
    cache.early_initialization(3, 2, 16, torch.float32, torch.device("cpu"))
    return cache


class TestRefusals:
    def call(self, rng, **changes):
        query, key = torch.zeros(2, 4, 5, 16), torch.zeros(2, 2, 5, 16)
        arguments = dict(query=query, key=key, value=key, attention_mask=None)
        return AttentionInterface()["raddle"](torch.nn.Module(), **{**arguments, **changes})

    @pytest.mark.parametrize(
        "changes, message",
        [
            (dict(dropout=0.1), "dropout is 0.1; expected 0"),
            (dict(position_bias=torch.zeros(1)), "position_bias is given"),
            (dict(attention_mask=torch.zeros(2, 1, 5, 6)), r"attention_mask is torch.float32 \[2, 1, 5, 6\]; expected"),
            (dict(attention_mask=torch.zeros(2, 1, 5, 5, dtype=torch.int64)), "attention_mask is an int64 tensor"),
            (dict(attention_mask=masks.make_mask(2, 5, 6)), r"attention_mask is for .* \(2, 5, 6\)"),
        ],
    )
    def test_arguments(self, rng, changes, message):
        with pytest.raises(ValueError, match=message):
            self.call(rng, **changes)

    def test_a_models_head_dim_before_its_cache_is_written(self, rng):
        model = model_of("llama", rng, head_dim=20)
        cache = raddle_cache(model_of("llama", rng), 8)
        with pytest.raises(ValueError, match="head_dim of the model is 20; expected a multiple of 8"):
            model(tokens(rng), past_key_values=cache)
        assert all((layer.keys == 0).all() for layer in cache.layers)

    def test_gradients(self, rng):
        model = model_of("llama", rng)
        with torch.enable_grad(), pytest.raises(ValueError, match="requires a gradient; Raddle is forward-only"):
            model(tokens(rng))


def test_an_untried_version_is_named_once(monkeypatch, caplog):
    integration = raddle.integrations.transformers
    monkeypatch.setattr(integration, "_registered", False)
    monkeypatch.setattr(integration.transformers, "__version__", "9.9.9")
    integration.register()
    integration.register()
    assert [r.getMessage() for r in caplog.records if "9.9.9" in r.getMessage()] == [
        "raddle was tried with transformers 5.17.x, 5.18.x, 5.24.x; this is 9.9.9"
    ]
    assert np.all(["raddle" in AttentionInterface()])
