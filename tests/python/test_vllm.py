"""The backend for vLLM, on the CPU and without vLLM: steps of a serving loop as vLLM runs them, against the reference."""

import dataclasses
import importlib.metadata
import sys
import types

import fake_vllm
import ml_dtypes
import numpy as np
import pytest
import raddle
import torch
from checks import within
from reference import Alibi, Causal, PagedKV, Problem, Sinks, SlidingWindow, SoftCap, attention
from reference.variants import Flex
from raddle.integrations import vllm as integration
from raddle.integrations.vllm import layers as layers_module
from raddle.integrations.paged import plans as plans_module
from small import refuses

backend = fake_vllm.backend()

HEADS, KV_HEADS, DIM, PAGE, PAGES = 4, 2, 32, 16, 60
SLOPES = [0.25, 0.0625, 0.015625, 0.00390625]
# vLLM's arguments of a layer -> the variant that it means
LAYERS = {
    "plain": ({}, [Causal()]),
    "window": ({"sliding_window": 40}, [SlidingWindow(39), Causal()]),
    "softcap": ({"logits_soft_cap": 20.0}, [SoftCap(20.0), Causal()]),
    "no cap": ({"logits_soft_cap": 0.0}, [Causal()]),
    "alibi": ({"alibi_slopes": SLOPES}, [Alibi(np.array(SLOPES, np.float32)), Causal()]),
}


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch):
    """No parts of other tests; prefixes from two pages on."""
    monkeypatch.setattr(layers_module, "_own", [])
    monkeypatch.setenv("RADDLE_VLLM_MIN_PREFIX", "32")


def impl_of(scale=DIM**-0.5, **given):
    return backend.Impl(HEADS, DIM, scale, KV_HEADS, **given)


def array(x):
    """A torch tensor of bfloat16 as the reference takes it."""
    return x.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def caches_of(layout):
    """A cache's shape, and the order of its dimensions in memory: of vLLM 0.24, or of 0.33 ("BNHC", "BHNC", "HBNC")."""
    if layout in ("NHD", "HND"):
        return backend.Backend.get_kv_cache_shape(PAGES, PAGE, KV_HEADS, DIM), {"NHD": (0, 1, 2, 3, 4), "HND": (0, 1, 3, 2, 4)}[layout]
    return (PAGES, KV_HEADS, PAGE, 2 * DIM), ["BHNC".index(c) for c in layout]


def halves(cache):
    """K and V [blocks, block_size, Hkv, D]."""
    if cache.ndim == 5:
        return cache[:, 0], cache[:, 1]
    return cache[..., :DIM].transpose(1, 2), cache[..., DIM:].transpose(1, 2)


class Model:
    """Layers with caches of their own, the requests' tables, and a step of all layers."""

    def __init__(self, rng, layers, variants, layout="NHD", **config):
        self.rng, self.variants = rng, variants
        self.layers = {name: fake_vllm.Layer(impl) for name, impl in layers.items()}
        for layer in self.layers.values():
            layer.impl.process_weights_after_loading(torch.bfloat16)
        self.config = fake_vllm.config(self.layers, **config)
        space = types.SimpleNamespace(block_size=PAGE)
        self.builder = backend.Builder(space, list(self.layers), self.config, torch.device("cpu"))
        shape, order = caches_of(layout)
        # Keys of earlier steps are anything; so are slots that no request has reached.
        physical = [self.tensor(*(shape[i] for i in order)) for _ in layers]
        self.caches = dict(zip(layers, (x.permute(np.argsort(order).tolist()) for x in physical)))
        # Six requests of 13 pages; the first three have their first four pages in common.
        self.table = self.rng.permutation(PAGES)[: 6 * 9 + 4].astype(np.int32)
        own, shared = self.table[:54].reshape(6, 9), self.table[54:]
        self.table = np.array([[*(shared if i < 3 else row[:4]), *row[4:], *row[:4]] for i, row in enumerate(own)])
        self.table = torch.from_numpy(self.table.astype(np.int32))

    def tensor(self, *shape):
        return torch.from_numpy(self.rng.standard_normal(shape).astype(np.float32)).to(torch.bfloat16)

    def common(self, lengths, padded_requests=0):
        """vLLM's metadata of requests of (new tokens, tokens): padded requests have none."""
        lengths = [*lengths, *[(0, 0)] * padded_requests]
        new, held = np.array(lengths).T
        starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
        slots = [int(self.table[i, p // PAGE]) * PAGE + p % PAGE for i, (n, t) in enumerate(lengths) for p in range(t - n, t)]
        return fake_vllm.CommonAttentionMetadata(
            # As vLLM has them: room for more requests than there are, what lies behind is of earlier batches.
            query_start_loc=torch.from_numpy(np.append(starts, -7).astype(np.int32)),
            seq_lens=torch.from_numpy(held.astype(np.int32)),
            block_table_tensor=self.table[: len(lengths)],
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            num_reqs=len(lengths),
            num_actual_tokens=int(starts[-1]),
            max_query_len=int(new.max()),
        )

    def step(self, lengths, padding=0, padded_requests=0):
        """Computes all layers and compares them with the reference; returns the metadata."""
        common = self.common(lengths, padded_requests)
        metadata = self.builder.build(0, common)
        rows = common.num_actual_tokens
        for name, layer in self.layers.items():
            q, k, v = self.tensor(rows + padding, HEADS, DIM), *self.tensor(2, rows + padding, KV_HEADS, DIM)
            out, cache = torch.full_like(q, 7.0), self.caches[name]
            layer.impl.do_kv_cache_update(layer, k, v, cache, common.slot_mapping)
            assert layer.impl.forward(layer, q, k, v, cache, metadata, output=out) is out
            assert (out[rows:] == 0.0).all()
            within(attention(self.problem(name, q[:rows], lengths)), array(out[:rows]))
        return metadata

    def problem(self, name, q, lengths):
        starts = np.concatenate([[0], np.cumsum([n for n, _ in lengths])]).astype(np.int32)
        lists = [self.table[i, : -(-t // PAGE)].numpy() for i, (_, t) in enumerate(lengths)]
        indptr = np.concatenate([[0], np.cumsum([len(x) for x in lists])]).astype(np.int32)
        kv_len = np.array([t for _, t in lengths], np.int32)
        layout = PagedKV(starts, indptr, np.concatenate(lists), kv_len, PAGE)
        kv = tuple(array(half) for half in halves(self.caches[name]))
        return Problem(array(q), [kv], layout, self.variants[name], scale=self.layers[name].impl.scale)


# Chunked prompts beside decodes, q_len > 1 decodes, a batch beyond what is captured, prefixes in common.
STEPS = [
    {"lengths": [(40, 40), (1, 1)], "padding": 3},
    {"lengths": [(30, 70)]},
    {"lengths": [(5, 75), (1, 66), (1, 67)], "padding": 1},
    {"lengths": [(1, 76), (1, 67), (1, 68), (1, 1)], "padded_requests": 2, "padding": 2},
    {"lengths": [(3, 79), (3, 70)], "padded_requests": 1},
]


@pytest.mark.parametrize("layout", ["NHD", "HND", "BNHC", "BHNC", "HBNC"])
@pytest.mark.parametrize("name", LAYERS)
def test_steps_of_a_serving_loop(rng, monkeypatch, name, layout):
    monkeypatch.setattr(fake_vllm, "LAYOUT", layout)
    given, variant = LAYERS[name]
    model = Model(rng, {"a": impl_of(**given), "b": impl_of(0.11, **given)}, {"a": variant, "b": variant}, layout)
    for step in STEPS:
        metadata = model.step(**step)
        assert len(metadata.plans) == 1, "one plan serves both layers, whose scales differ"


def test_layers_of_several_kinds_in_one_group(rng):
    """Sinks and caps differ from layer to layer of one plan; windows and what is there at all make plans."""
    sinks = [torch.nn.Parameter(torch.randn(HEADS).to(torch.bfloat16)) for _ in range(2)]
    layers = {f"sinks {i}": impl_of(sinks=sinks[i]) for i in range(2)}
    layers |= {f"cap {cap}": impl_of(logits_soft_cap=cap) for cap in (5.0, 30.0)} | {"window": impl_of(sliding_window=9)}
    variants = {f"sinks {i}": [Sinks(sinks[i].detach().float().numpy()), Causal()] for i in range(2)}
    variants |= {f"cap {cap}": [SoftCap(cap), Causal()] for cap in (5.0, 30.0)}
    variants["window"] = [SlidingWindow(8), Causal()]
    model = Model(rng, layers, variants)
    for step in STEPS:
        assert len(model.step(**step).plans) == 3
    assert [each.min_prefix for each in model.builder.plans] == [32, 32, 0]
    for i in range(2):  # weights that are loaded anew, where they lie
        sinks[i].data.add_(2.0 - i)
        layers[f"sinks {i}"].process_weights_after_loading(torch.bfloat16)
        variants[f"sinks {i}"][0].logits = sinks[i].detach().float().numpy()
    model.step(**STEPS[0])


def test_prefixes_are_read_once(rng, monkeypatch):
    """Three requests have four pages in common, which make a level, unless it is turned off or vLLM caches none."""
    lengths = [(1, 76), (1, 67), (1, 68)]

    def reads(**config):
        model = Model(rng, {"a": impl_of()}, {"a": [Causal()]}, **config)
        (reservation,) = model.builder.build(0, model.common(lengths)).plans
        return reservation.plan.explain()

    shared, apart = reads(), reads(prefix_caching=False)
    assert "level 0: 1 group of requests, with 64 keys" in shared and "level 0" not in apart
    monkeypatch.setenv("RADDLE_VLLM_MIN_PREFIX", "0")
    assert reads() == apart
    monkeypatch.setenv("RADDLE_VLLM_MIN_PREFIX", "many")
    with refuses(ValueError, "RADDLE_VLLM_MIN_PREFIX is 'many'"):
        reads()


def test_batches_choose_their_reservation(rng, monkeypatch):
    """By what is equal when a graph is captured and replayed: its rows, and whether it decodes.

    One row shares no prefix."""

    def chosen(**config):
        model = Model(rng, {"a": impl_of()}, {"a": [Causal()]}, **config)
        (plans,) = model.builder.plans
        names = [name for name in ("alone", "decodes", "few", "many") if getattr(plans, name) is not None]
        for lengths in ([(1, 1)], [(3, 30), (1, 9)], [(4, 30)], [(18, 18)], [(19, 19)], [(60, 60)]):
            used = model.step(lengths).plans[0]
            yield next(name for name in names if used.same_as(getattr(plans, name)))

    assert list(chosen(drafted=2)) == ["alone", "decodes", "few", "few", "many", "many"]
    monkeypatch.setattr(plans_module, "SHORT_PREFIX_ROWS", 3 * HEADS // KV_HEADS)
    assert list(chosen(drafted=2)) == ["alone", "few", "few", "few", "many", "many"]
    assert list(chosen(drafted=2, prefix_caching=False)) == ["decodes", "decodes", "few", "few", "many", "many"]
    assert list(chosen()) == ["alone", "few", "few", "many", "many", "many"]
    assert list(chosen(drafted=2, mixed="FULL")) == ["alone"] + ["few"] * 3 + ["many"] * 2
    assert list(chosen(captured=64, mixed="FULL")) == ["alone"] + ["few"] * 5


def test_quantised_keys_and_values(rng):
    model = Model(rng, {"a": impl_of(kv_cache_dtype="fp8")}, {"a": [Causal()]})
    layer = fake_vllm.Layer(model.layers["a"].impl, 0.02, 0.015)
    cache = torch.full((PAGES, 2, PAGE, KV_HEADS, DIM), 0x7F, dtype=torch.uint8)
    lengths = [(50, 50), (0, 0), (7, 7)]
    common = model.common(lengths)
    q, k, v = model.tensor(57, HEADS, DIM), *model.tensor(2, 57, KV_HEADS, DIM)
    layer.impl.do_kv_cache_update(layer, k, v, cache, common.slot_mapping)
    out = torch.empty_like(q)
    layer.impl.forward(layer, q, k, v, cache, model.builder.build(0, common), out)
    model.caches["a"] = torch.zeros(PAGES, 2, PAGE, KV_HEADS, DIM, dtype=torch.bfloat16)
    problem = model.problem("a", q, lengths)
    kv = tuple(cache[:, half].numpy().view(ml_dtypes.float8_e4m3fn) for half in (0, 1))
    problem = dataclasses.replace(problem, kv=[kv], k_scale=0.02, v_scale=0.015)
    within(attention(problem), array(out))


# --- parts of one's own ------------------------------------------------------------------------------


def near_or_first(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx < 20) | (kv_idx < 3)


def near_and_before(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 7)


def test_a_python_function_for_some_layers(rng):
    names = [f"model.layers.{i}.self_attn.attn" for i in range(3)]
    integration.variant("model.layers.*", near_or_first)
    integration.variant("model.layers.2.*", [near_and_before], replace=True)
    integration.variant("draft.*", raddle.SoftCap(1.0))
    layers = {names[0]: impl_of(), names[1]: impl_of(logits_soft_cap=20.0), names[2]: impl_of(logits_soft_cap=20.0)}
    variants = [[Flex(near_or_first), Causal()], [SoftCap(20.0), Flex(near_or_first), Causal()], [Flex(near_and_before)]]
    model = Model(rng, layers, dict(zip(names, variants)))
    for step in STEPS:
        assert len(model.step(**step).plans) == 3


def test_parts_that_are_none():
    with refuses(TypeError, "layers is a int; expected text"):
        integration.variant(3, near_or_first)
    integration.variant("*", None)
    with refuses(TypeError, "variant"):
        Model(np.random.default_rng(0), {"a": impl_of()}, {})


# --- what vLLM asks before it starts -----------------------------------------------------------------


def test_what_is_served_and_refused():
    served = backend.Backend
    assert served.get_name() == "CUSTOM" and served.get_impl_cls() is backend.Impl
    assert served.get_builder_cls()._cudagraph_support is fake_vllm.AttentionCGSupport.ALWAYS
    assert not served.forward_includes_kv_cache_update and served.supports_sink()
    assert [served.supports_head_size(n) for n in (64, 80, 256, 512, 20, 576)] == [True] * 4 + [False] * 2
    capability = types.SimpleNamespace
    assert served.supports_compute_capability(capability(major=7, minor=5))
    assert not served.supports_compute_capability(capability(major=7, minor=0))
    for head_size, dtype, stored, words in [
        (128, torch.bfloat16, "auto", None),
        (128, torch.bfloat16, None, None),
        (128, torch.bfloat16, "fp8", None),
        (512, torch.float16, "float16", None),
        (20, torch.bfloat16, "auto", "head_size is 20; Raddle takes multiples of 8, at most 512"),
        (128, torch.bfloat16, "float16", "kv_cache_dtype is float16, dtype torch.bfloat16"),
        (320, torch.bfloat16, "fp8_e5m2", "at most 256, with kv_cache_dtype=fp8_e5m2"),
        (72, torch.bfloat16, "fp8", "multiples of 16"),
    ]:
        found = served.supports_combination(head_size, dtype, stored, 16, False, False, False, False, None)
        assert found is None if words is None else words in found


def test_the_cache_of_several_layers_in_one_pool(monkeypatch):
    orders = backend.Backend.get_kv_cache_stride_order
    assert orders() == (0, 1, 2, 3, 4) and orders(True) == (1, 0, 2, 3, 4, 5)
    monkeypatch.setattr(fake_vllm, "LAYOUT", "HND")
    assert orders() == (0, 1, 3, 2, 4) and orders(True) == (1, 4, 0, 2, 3, 5)


def test_layers_that_are_refused_when_they_are_made():
    with refuses(NotImplementedError, "attn_type encoder_only"):
        impl_of(attn_type="encoder_only")
    with refuses(NotImplementedError, "chunk_lookback of an attention layer"):
        impl_of(chunk_lookback=4)


def test_calls_that_are_refused(rng):
    model = Model(rng, {"a": impl_of()}, {"a": [Causal()]})
    common = model.common([(2, 2)])
    for causal in (False, torch.tensor([True])):
        with refuses(NotImplementedError, "non-causal"):
            model.builder.build(0, dataclasses.replace(common, causal=causal))
    metadata, layer = model.builder.build(0, common), model.layers["a"]
    q = model.tensor(2, HEADS, DIM)
    with refuses(NotImplementedError, "a quantised output"):
        layer.impl.forward(layer, q, q, q, model.caches["a"], metadata, q.clone(), output_scale=torch.ones(1))
    assert not model.builder.use_cascade_attention(common_prefix_len=64)
    out = torch.ones_like(q)
    assert (layer.impl.forward(layer, q, q, q, model.caches["a"], None, out) == 0).all()


# --- vLLM finds it -----------------------------------------------------------------------------------


def test_registers(monkeypatch, caplog, tmp_path):
    for name, module in fake_vllm.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    (point,) = [each for each in points if each.name == "raddle"]
    file = tmp_path / "own.py"
    file.write_text("import raddle\nfrom raddle.integrations.vllm import variant\nvariant('a', raddle.SoftCap(3.0))\n")
    monkeypatch.setenv("RADDLE_VLLM_VARIANTS", str(file))
    point.load()(), integration.register()
    path = fake_vllm.registered[fake_vllm.AttentionBackendEnum.CUSTOM]
    assert path == f"{backend.Backend.__module__}.{backend.Backend.__qualname__}"
    assert len(layers_module._own) == 1 and layers_module.own_parts("a") is not None
    assert not caplog.records
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.31.1")
    monkeypatch.setenv("RADDLE_VLLM_VARIANTS", str(tmp_path / "missing.py"))
    with refuses(ImportError, "RADDLE_VLLM_VARIANTS is", "missing.py"):
        integration.register()
    assert "tried with vLLM 0.24.x; this is 0.31.1" in caplog.text
