"""Heads above 256 wide: MLA with absorbed weights, whose V is the first 512 of K's 576 columns, and others."""

import numpy as np
import pytest
import raddle
from draws import DTYPES, KV_DTYPES, SCALES, SCHEDULES, covering, draw
from engine import OnDevice, spec_of, twin
from layout_draws import LAYOUTS

MLA = {"dim": 576, "dim_vo": 512, "num_kv_heads": 1, "latent": True}
LENGTHS = [(1, 300), (2, 131), (5, 40), (0, 7), (3, 1)]


@pytest.mark.parametrize(
    "row",
    covering(
        layout=[name for name in LAYOUTS if name != "paged_interleaved"],
        variant=["causal", "gpt_oss"],
        dtype=["float16", "bfloat16"],
        group=[16, 20, 128],
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
@pytest.mark.parametrize("latent", [True, False])
@pytest.mark.parametrize("variant", ["sigmoid", "everything", "rope_interleaved"])
def test_variants(engine, rng, variant, latent, dtype):
    """Keys that RoPE turns are no values any more, wherever these lie."""
    problem = draw(rng, "paged", variant, dtype, group=20, lengths=LENGTHS, **{**MLA, "latent": latent})
    engine.check(problem, num_workers=5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim, dim_vo", [(264, 264), (512, 512), (320, 64), (64, 504), (8, 264), (576, 8)])
def test_head_dims(engine, rng, dtype, dim, dim_vo):
    problem = draw(rng, "paged", "gemma2", dtype, dim, dim_vo, group=3, num_kv_heads=2, lengths=[*LENGTHS, (17, 90)])
    engine.check(problem, num_workers=7)


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


def test_values_that_are_other_columns_of_keys(engine, rng):
    """Where V begins elsewhere in K's rows, it is a tensor of its own."""
    problem = draw(rng, "paged", "causal", "float16", group=16, lengths=LENGTHS, **MLA)
    k, _ = problem.kv[0]
    problem.kv[0] = k, k[..., 64:]
    engine.check(problem, num_workers=3)


def test_values_that_are_columns_of_other_keys(engine, rng):
    """The same address, another stride: V's page p lies where K's page 2 p does."""
    problem = draw(rng, "paged", "causal", "float16", group=16, lengths=[(1, 90), (2, 30)], page_size=16, **MLA)
    k, _ = problem.kv[0]
    twice = np.repeat(k, 2, axis=0)
    twice[1::2] = rng.permutation(np.nan_to_num(k))
    problem.kv[0] = k, twice[::2, ..., :512]
    engine.check(problem, num_workers=3)


def test_parts_of_ones_own(engine, rng):
    """Values and outputs that a variant changes, and changes back."""
    source = """struct ThereAndBack {
  float by;
  template <class Vec> RADDLE_FN void value(Vec& v, const Key&) const {
    v.map([&](float x, i32) { return x * by; });
  }
  template <class Vec> RADDLE_FN void output(Vec& o, const Row&, float) const {
    const float ones = o.sum([](float) { return 1.0f; });
    o.map([&](float x, i32) { return x * ones / (512.0f * by); });
  }
};"""
    problem = draw(rng, "paged", "causal", "float16", group=16, lengths=LENGTHS, **MLA)
    expected, _ = engine.run(problem, num_workers=4)
    there_and_back = raddle.Variant("ThereAndBack", source, {"by": float})(by=2.0)
    spec = spec_of(problem)
    attn = raddle.Attention(
        raddle.AttentionSpec(**{**spec.fields(), "variant": [there_and_back, raddle.Causal()]}), device=engine.device
    )
    attn = attn if engine.device == "cpu" else OnDevice(attn)
    plan = attn.plan(twin(problem.layout), num_workers=4)
    np.testing.assert_array_equal(engine.run_plan(attn, plan, problem)[0], expected)


@pytest.mark.parametrize(
    "row",
    covering(
        kv_dtype=KV_DTYPES,
        dtype=["float16", "bfloat16"],
        k=SCALES,
        v=SCALES,
        group=[1, 16, 40],
        latent=[True, False],
    ),
    ids=lambda row: "-".join(str(x) for x in row.values()),
)
def test_8_bits(engine, rng, row):
    """On GPUs rows are widened in shared memory, also where one slot has K and V, of which each has its own scales."""
    row = dict(row)
    scales = row.pop("k"), row.pop("v")
    lengths = [(qo, kv) for qo, kv in LENGTHS if qo * row["group"] <= 256]
    problem = draw(rng, "paged", "causal", scales=scales, lengths=lengths, **{**MLA, **row})
    engine.check(problem, num_workers=3)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dim, dim_vo", [(264, 264), (320, 72), (72, 504), (16, 264)])
def test_8_bits_of_other_head_dims(engine, rng, dim, dim_vo, kv_dtype):
    how = {"kv_dtype": kv_dtype, "scales": ("token", "token"), "lengths": [*LENGTHS, (17, 90)]}
    problem = draw(rng, "paged", "gemma2", "float16", dim, dim_vo, group=3, num_kv_heads=2, **how)
    engine.check(problem, num_workers=7)


@pytest.mark.parametrize("variant", ["sigmoid", "everything", "rope_interleaved"])
def test_8_bits_of_variants(engine, rng, variant):
    """Parts see rows that are multiplied by their scales."""
    how = {"kv_dtype": "float8_e4m3fn", "scales": ("head", "token"), "lengths": LENGTHS}
    problem = draw(rng, "paged", variant, "bfloat16", group=20, **how, **MLA)
    engine.check(problem, num_workers=5)


@pytest.mark.parametrize("layout", ["ragged", "paged_hnd", "cascade"])
def test_8_bits_in_layouts(engine, rng, layout):
    how = {"kv_dtype": "int8", "scales": ("token", "token"), "lengths": LENGTHS}
    problem = draw(rng, layout, "gpt_oss", "float16", group=16, **how, **MLA)
    for state in (False, True):
        engine.check(problem, num_workers=7, state=state)
