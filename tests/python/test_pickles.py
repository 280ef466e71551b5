"""Specs, variants and layouts are values: they pickle, also from one process to another."""

import copy
import multiprocessing
import pickle

import numpy as np
import pytest
import raddle
import torch
from raddle.flex import create_block_mask, masks, mods
from small import refuses

TABLE = np.linspace(-1, 1, 40, dtype=np.float32)


def bias(score, b, h, q_idx, kv_idx):
    return score + TABLE[kv_idx]


VARIANTS = {
    "causal": lambda: raddle.Causal(),
    "window": lambda: raddle.SlidingWindow(5, 2),
    "cap": lambda: raddle.SoftCap(20.0),
    "sinks": lambda: raddle.Sinks([0.5, -1.0]),
    "alibi": lambda: raddle.Alibi(raddle.alibi_slopes(2)),
    "rope": lambda: raddle.Rope(8, scaling=raddle.Llama31Scaling()),
    "rope tables": lambda: raddle.RopeTables(np.ones((40, 4), np.float32), np.zeros((40, 4), np.float32)),
    "joined": lambda: raddle.Causal() & raddle.SlidingWindow(3) | raddle.SlidingWindow(1),
    "packed": lambda: raddle.PackedMask.from_masks([np.tril(np.ones((6, 6), bool))]),
    "source": lambda: raddle.Variant(
        "Twice", "struct Twice { float by; RADDLE_FN float logits(float s, const Row&, const Key&) const "
        "{ return by * s; } };", params={"by": float},
    )(by=2.0),
    "traced": lambda: bias,
    "a closure": lambda: masks.document([0, 3, 6]),
    "block mask": lambda: create_block_mask(masks.causal(), None, None, 6, 6),
    "mod": lambda: mods.softcap(30.0),
}  # fmt: skip


def run(spec, layout):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((6, 2, 8)).astype(np.float32) for _ in range(3))
    attn = raddle.Attention(spec)
    return attn.run(attn.plan(layout), q, (k, v))


@pytest.mark.parametrize("make", VARIANTS.values(), ids=VARIANTS)
def test_specs_pickle(make):
    spec = raddle.AttentionSpec(2, 2, 8, dtype="float32", variant=[make()], scale=0.3)
    loaded = pickle.loads(pickle.dumps(spec))
    assert [type(x) for x in loaded.variant] == [type(x) for x in spec.variant]
    assert [repr(x) for x in loaded.variant] == [repr(x) for x in spec.variant]
    layout = raddle.RaggedKV([0, 6], [0, 6])
    np.testing.assert_array_equal(run(loaded, layout), run(spec, layout))
    assert copy.copy(spec) == spec and copy.deepcopy(spec).variant == spec.variant


def test_a_loaded_function_still_checks_its_arrays():
    spec = pickle.loads(pickle.dumps(raddle.AttentionSpec(2, 2, 8, dtype="float32", variant=[bias])))
    attn = raddle.Attention(spec)
    q, k = np.zeros((1, 2, 8), np.float32), np.zeros((41, 2, 8), np.float32)
    with refuses(ValueError, "bias: captured array TABLE has 40 elements and is indexed with 40"):
        attn.run(attn.plan(raddle.RaggedKV([0, 1], [0, 41])), q, (k, k))


TABLES = dict(page_indices=[[0, 1, 2], [0, 1, 3]], kv_len=[5, 6], page_size=2)
LAYOUTS = {
    "ragged": lambda: raddle.RaggedKV([0, 2, 6], [0, 3, 6], qo_pos=[4, 5, 0, 1, 2, 3]),
    "paged": lambda: raddle.PagedKV([0, 2, 6], **TABLES),
    "HND": lambda: raddle.PagedKV([0, 2, 6], **TABLES, kv_layout="HND", qo_pos=np.arange(6)),
    "prefixes": lambda: raddle.PagedKV([0, 2, 6], **TABLES, discover_prefixes=2),
    "block-sparse": lambda: raddle.BlockSparse.from_dense_mask(np.tril(np.ones((6, 6), bool)), 2, 2),
    "ragged rows": lambda: raddle.RaggedKV([0, 2, 6], kv_first=[9, 3], kv_len=[3, 6], kv_begin=[0, 7]),
    "no requests": lambda: raddle.RaggedKV([0], [0]),
    "cascade": lambda: raddle.Cascade(
        [
            raddle.PagedKV([0, 6], None, [[0, 1]], [4], 2, qo_rows=np.arange(6)),
            raddle.PagedKV([0, 2, 6], None, [[2], [3]], [1, 2], 2),
        ]
    ),
    "tree": lambda: raddle.TokenTree([0, 2, 6], **TABLES, parents=[-1, 0, -1, 0, 0, 1]),
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_pickle(make):
    layout = make()
    loaded = pickle.loads(pickle.dumps(layout))
    assert type(loaded) is type(layout) and repr(loaded) == repr(layout)
    attn = raddle.Attention(raddle.AttentionSpec(2, 2, 8, dtype="float32", variant=[raddle.Causal()]))
    assert attn.plan(loaded).explain() == attn.plan(layout).explain()
    q = np.random.default_rng(1).standard_normal((layout.num_rows, 2, 8)).astype(np.float32)
    shape = {"ragged": (6, 2, 8), "ragged rows": (12, 2, 8), "no requests": (6, 2, 8), "block-sparse": (6, 2, 8), "HND": (4, 2, 2, 8)}
    pool = np.random.default_rng(2).standard_normal(shape.get(_name_of(make), (4, 2, 2, 8))).astype(np.float32)
    out = [attn.run(attn.plan(each), q, (pool, pool)) for each in (layout, loaded)]
    np.testing.assert_array_equal(*out)


def _name_of(make):
    return next(name for name, each in LAYOUTS.items() if each is make)


def test_a_loaded_tree_accepts():
    tree = LAYOUTS["tree"]()
    loaded = pickle.loads(pickle.dumps(tree))
    np.testing.assert_array_equal(loaded.parents, tree.parents)
    pools = np.zeros((4, 2, 2, 8), np.float32), np.zeros((4, 2, 2, 8), np.float32)
    np.testing.assert_array_equal(loaded.accept(pools, [1, 3]), tree.accept(pools, [1, 3]))


def test_why_a_layout_is_as_it_is_stays_known():
    attn = raddle.Attention(raddle.AttentionSpec(2, 2, 8))
    layout = raddle.Cascade.from_page_tables(attn, [0, 2, 6], **TABLES)
    assert layout.explain() and pickle.loads(pickle.dumps(layout)).explain() == layout.explain()


def test_a_spawned_process_gets_them():
    spec = raddle.AttentionSpec(2, 2, 8, dtype="float32", variant=[raddle.Causal(), bias])
    layout = raddle.RaggedKV([0, 6], [0, 6])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        np.testing.assert_array_equal(pool.apply(run, (spec, layout)), run(spec, layout))


def test_what_does_not_pickle_says_so():
    attn = raddle.Attention(raddle.AttentionSpec(2, 2, 8))
    for handle, words in (
        (attn, "an Attention cannot be pickled"),
        (attn.plan(raddle.RaggedKV([0, 1], [0, 1])), "a Plan cannot be pickled"),
        (raddle.PagePool(4), "a PagePool cannot be pickled"),
    ):
        with refuses(TypeError, words):
            pickle.dumps(handle)


@pytest.mark.parametrize(
    "alias, name",
    [
        ("bf16", "bfloat16"),
        ("half", "float16"),
        ("fp16", "float16"),
        ("float", "float32"),
        ("fp32", "float32"),
        ("torch.bfloat16", "bfloat16"),
        (torch.float16, "float16"),
        (np.float32, "float32"),
    ],
)
def test_names_of_dtypes(alias, name):
    assert raddle.AttentionSpec(2, 2, 8, dtype=alias).dtype == name


@pytest.mark.parametrize(
    "alias, name",
    [
        ("fp8", "float8_e4m3fn"),
        ("fp8_e4m3", "float8_e4m3fn"),
        ("fp8_e5m2", "float8_e5m2"),
        (torch.float8_e4m3fn, "float8_e4m3fn"),
        (torch.int8, "int8"),
    ],
)
def test_names_of_quantised_dtypes(alias, name):
    assert raddle.AttentionSpec(2, 2, 8, kv_dtype=alias).kv_dtype == name
