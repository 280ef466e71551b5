"""A key that is its row of V followed by its row of K (k_extends_v): MLA whose latents and rotary keys lie apart."""

import dataclasses

import numpy as np
import pytest
import raddle
from checks import within
from draws import DTYPES, KV_DTYPES, SCALES, SCHEDULES, covering, draw
from engine import spec_of, twin
from layout_draws import LAYOUTS
from reference import attention

MLA = {"dim": 576, "dim_vo": 512, "num_kv_heads": 1, "k_extends_v": True}
LENGTHS = [(1, 300), (2, 131), (5, 40), (0, 7), (3, 1)]


def joined(problem):
    """The same problem with one cache: K has all columns, and V is a view of its first ones."""
    kv = []
    for k, v in problem.kv:
        whole = np.concatenate([v, k], axis=-1)
        kv.append((whole, whole[..., : v.shape[-1]]))
    return dataclasses.replace(problem, kv=kv, k_extends_v=False)


@pytest.mark.parametrize(
    "row",
    covering(
        layout=[name for name in LAYOUTS if name != "paged_interleaved"],
        variant=["causal", "gpt_oss", "softcap"],
        dtype=DTYPES,
        group=[1, 16, 20, 128],
        workers=[1, 7, 40],
        schedule=SCHEDULES,
    ),
    ids=lambda row: "-".join(str(x) for x in row.values()),
)
def test_mla(engine, rng, row):
    row = dict(row)
    how = {"num_workers": row.pop("workers"), "schedule": row.pop("schedule")}
    lengths = [(qo, kv) for qo, kv in LENGTHS if qo * row["group"] <= 256]
    engine.check(draw(rng, lengths=lengths, **row, **MLA), **how)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim, dim_vo", [(576, 512), (288, 256), (96, 64), (16, 8), (136, 8), (112, 72), (72, 64), (576, 504)])
@pytest.mark.parametrize("layout", ["paged", "ragged"])
def test_head_dims(engine, rng, layout, dtype, dim, dim_vo):
    """Of several KV heads, decode and prefill: parts that end inside of vectors, tiles and lines, too."""
    lengths = [*LENGTHS, (17, 90), (40, 150)]
    problem = draw(
        rng, layout, "gemma2", dtype, dim, dim_vo, group=3, num_kv_heads=2, lengths=lengths, k_extends_v=True
    )
    engine.check(problem, num_workers=7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", ["plain", "sigmoid", "everything", "rope_interleaved", "window", "packed_mask"])
def test_variants(engine, rng, variant, dtype):
    """Those that turn keys, too: they see whole rows, and V stays as it is stored."""
    problem = draw(rng, "paged", variant, dtype, group=20, lengths=LENGTHS, **MLA)
    engine.check(problem, num_workers=5)


@pytest.mark.parametrize("group", [1, 4, 16, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_as_one_cache(engine, rng, dtype, group):
    """What one cache gives: the same bits wherever products have the same order, which short queries on CPUs have not."""
    lengths = [(1, 300), (1, 5)] if group < 128 else [(1, 300), (3, 40)]
    problem = draw(rng, "paged", "causal", dtype, group=group, lengths=lengths, page_size=16, **MLA)
    (out, lse), (other, other_lse) = (engine.run(each, num_workers=3) for each in (problem, joined(problem)))
    if engine.device != "cpu" or group == 128:
        np.testing.assert_array_equal(out, other)
        np.testing.assert_array_equal(lse, other_lse)
    exact = attention(problem)
    within(exact, out, lse)
    within(exact, other, other_lse)


@pytest.mark.parametrize("layout", ["paged", "cascade"])
def test_states(engine, rng, layout):
    problem = draw(rng, layout, "gpt_oss", "float16", group=16, lengths=LENGTHS, **MLA)
    for workers in (1, 9):
        engine.check(problem, num_workers=workers, state=True)


def test_batch_invariant_bits(engine, rng):
    problem = draw(rng, "paged", "causal", "float16", group=16, lengths=[(1, 5000), (3, 700)], page_size=16, **MLA)
    runs = [engine.run(problem, num_workers=n, batch_invariant=True) for n in (1, 9)]
    for a, b in zip(*runs):
        np.testing.assert_array_equal(a, b)


def test_values_that_a_variant_changes(engine, rng):
    """Keys stay as they are stored: f_v comes after both products of a slot."""
    source = """struct Doubled {
  template <class Vec> RADDLE_FN void value(Vec& v, const Key&) const {
    v.map([](float x, i32) { return 2.0f * x; });
  }
};"""
    doubled = raddle.Variant("Doubled", source, {})()
    for how in ({}, {"kv_dtype": "int8", "scales": ("head", "token")}):
        problem = draw(rng, "paged", "causal", "float16", group=20, lengths=LENGTHS, **how, **MLA)
        expected, _ = engine.run(problem, num_workers=4, state=True)
        found, _ = engine.run(dataclasses.replace(problem, variant=[*problem.variant, doubled]), num_workers=4, state=True)
        # With 8 bits, scales multiply values in the one case and weights in the other, before these are rounded.
        np.testing.assert_allclose(found, 2 * expected, rtol=0.0, atol=2e-3 * np.abs(expected).max() if how else 0.0)


def test_a_reservation(engine, rng):
    """Replanned for one batch after another, with results of plain plans."""
    how = {"dtype": "float16", "group": 16, "page_size": 16, **MLA}
    kinds = [draw(rng, lengths=lengths, **how) for lengths in ([(1, 90)], LENGTHS)]
    attn = engine.attention(kinds[0])
    own = getattr(attn, "attention", attn)
    reserved = own.reserve(raddle.Maxima(8, 16, 600))
    for problem in kinds:
        reserved.update(twin(problem.layout))
        out, lse = engine.run_plan(attn, reserved, problem)
        within(attention(problem), out, lse)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_of_both_caches(engine, rng, dtype):
    """A key begins with its row of V, so that only one number of both can be a part of the softmax scale."""
    problem = draw(rng, "paged", "causal", dtype, group=16, lengths=[*LENGTHS, (40, 150)], **MLA)
    scaled = [dataclasses.replace(problem, k_scale=k, v_scale=v) for k, v in ((0.37, 0.37), (0.37, 0.5), (None, 2.0))]
    engine.check(scaled[0], num_workers=3)
    for each, said in zip(scaled[1:], ("k_scale is 0.37, and v_scale 0.5", "k_scale is 1, and v_scale 2")):
        with pytest.raises(ValueError, match=f"{said}; expected equal ones with k_extends_v=True, or K and V of 8 bits"):
            engine.run(each)


DIMS = [(576, 512), (112, 72), (72, 64)]
EIGHT_BITS = covering(kv_dtype=KV_DTYPES, dtype=DTYPES, k=SCALES, v=SCALES, group=[1, 16, 40], dim=DIMS)
SMALL = {"dim": 24, "dim_vo": 16, "group": 2, "k_extends_v": True}


@pytest.mark.parametrize("row", EIGHT_BITS, ids=lambda row: "-".join(str(x) for x in row.values()))
def test_8_bits(engine, rng, row):
    """Each part of a key has the scale of its tensor."""
    row = dict(row)
    (dim, dim_vo), scales = row.pop("dim"), (row.pop("k"), row.pop("v"))
    lengths = [*LENGTHS, (40, 150)]
    problem = draw(rng, "paged", "causal", dim=dim, dim_vo=dim_vo, scales=scales, lengths=lengths, k_extends_v=True, **row)
    if engine.device == "cpu" or dim_vo % 64 == 0:
        engine.check(problem, num_workers=3)
        return
    with pytest.raises(ValueError, match=f"head_dim_vo is {dim_vo}; expected a multiple of 64 on a GPU, with k_extends_v"):
        raddle.Attention(spec_of(problem), device=engine.device)


def test_8_bits_that_a_variant_turns(engine, rng):
    how = {"kv_dtype": "int8", "scales": ("head", "token"), "lengths": LENGTHS, "k_extends_v": True}
    problem = draw(rng, "paged", "rope", "float32", 96, 64, **how)
    if engine.device == "cpu":
        engine.check(problem, num_workers=3)
        return
    with pytest.raises(ValueError, match="variant changes keys; expected none that does on a GPU, with k_extends_v"):
        raddle.Attention(spec_of(problem), device=engine.device)


@pytest.mark.parametrize("variant", ["sigmoid", "sinks"])
def test_8_bits_of_other_variants(engine, rng, variant):
    how = {"kv_dtype": "float8_e5m2", "scales": ("token", "head"), "lengths": [*LENGTHS, (40, 150)], "page_size": 16}
    problem = draw(rng, "paged", variant, "bfloat16", group=16, **how, **MLA)
    engine.check(problem, num_workers=3)


@pytest.mark.parametrize("dim_vo", [64, 128])
def test_a_head_dim_without_columns_of_k(dim_vo):
    expected = f"head_dim is 64, and head_dim_vo {dim_vo}; expected a head_dim above head_dim_vo with k_extends_v=True"
    with pytest.raises(ValueError, match=expected):
        raddle.Attention(raddle.AttentionSpec(4, 2, 64, dim_vo, dtype="float32", k_extends_v=True))


def test_whole_keys_are_refused_by_their_shape(rng):
    problem = joined(draw(rng, lengths=[(1, 9)], page_size=4, **SMALL))
    attn = raddle.Attention(dataclasses.replace(spec_of(problem), k_extends_v=True))
    out = np.full((1, problem.q.shape[1], 16), np.nan, np.float32)
    with pytest.raises(ValueError, match=r"kv: k is \[.*24\] float32; expected .*, 8\] float32"):
        attn.run(attn.plan(twin(problem.layout)), problem.q, problem.kv[0], out=out)
    assert np.isnan(out).all()


def test_folded_shapes(rng):
    """[tokens, Hkv · D] of ragged keys, and pools of three dimensions where pages have one token."""
    ragged = draw(rng, "ragged", num_kv_heads=2, lengths=LENGTHS, **SMALL)
    paged = draw(rng, "paged", num_kv_heads=2, lengths=LENGTHS, page_size=1, **SMALL)
    for problem, fold in ((ragged, lambda x: x.reshape(len(x), -1)), (paged, lambda x: x[:, 0])):
        attn = raddle.Attention(spec_of(problem))
        plan = attn.plan(twin(problem.layout))
        folded = tuple(map(fold, problem.kv[0]))
        np.testing.assert_array_equal(attn.run(plan, problem.q, folded), attn.run(plan, problem.q, problem.kv[0]))


def test_outputs_over_either_cache_are_refused(rng):
    problem = draw(rng, num_kv_heads=1, lengths=[(1, 40)], page_size=1, **SMALL)
    attn = raddle.Attention(spec_of(problem))
    plan, (k, v) = attn.plan(twin(problem.layout)), problem.kv[0]
    for name, pool in (("k", k), ("v", v)):
        with pytest.raises(ValueError, match=f"out shares memory with kv: {name}"):
            attn.run(plan, problem.q, (k, v), out=pool.reshape(-1)[:32].reshape(1, 2, 16))


def test_a_plan_of_the_other_kind_is_refused(rng):
    problem = draw(rng, lengths=[(1, 40)], **SMALL)
    spec = spec_of(problem)
    plan = raddle.Attention(dataclasses.replace(spec, k_extends_v=False)).plan(twin(problem.layout))
    with pytest.raises(ValueError, match="plan is of another attention"):
        raddle.Attention(spec).run(plan, problem.q, problem.kv[0])


def test_explain_counts_every_column_once():
    """2 heads of 24 columns in fp32: 96 bytes a key and head, not those of K and V apart."""
    spec = raddle.AttentionSpec(4, 2, 24, 16, dtype="float32", k_extends_v=True)
    layout = raddle.RaggedKV([0, 1], [0, 1000])
    for apart, bytes_read in ((True, "192 kB"), (False, "320 kB")):
        plan = raddle.Attention(dataclasses.replace(spec, k_extends_v=apart)).plan(layout)
        assert f"reads: {bytes_read} of keys and values" in plan.explain()
