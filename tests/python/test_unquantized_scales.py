"""Scales of K and V of 16 and 32 bits: one number each, which stand for K and V multiplied by them."""

import numpy as np
import pytest
import raddle
import torch
from checks import within
from draws import covering, draw
from engine import OnDevice, twin
from layout_draws import LAYOUTS
from reference import Problem, attention
from small import refuses
from test_captured_runs import Captured
from test_same_bits import same

LENGTHS = {
    "decode": [(1, 300), (1, 33), (1, 1)],
    "prefill": [(70, 70), (20, 130)],
    "chunks": [(5, 70), (0, 30), (17, 40), (1, 200), (8, 3)],
}
VARIANTS = ["plain", "causal", "softcap", "alibi", "sigmoid", "sigmoid_plain", "rope", "gpt_oss", "everything"]
ROWS = covering(
    layout=list(LAYOUTS), variant=VARIANTS, dtype=["float32", "bfloat16"], lengths=list(LENGTHS), dim=[64, 24], group=[1, 4]
)
FEW = [(variant, lengths) for variant in ("causal", "gpt_oss", "sigmoid") for lengths in ("decode", "prefill")]


def scaled(problem, k_scale, v_scale):
    return Problem(problem.q, problem.kv, problem.layout, problem.variant, problem.scale, k_scale, v_scale)


def drawn(rng, lengths="chunks", k_scale=0.37, v_scale=-2.5, **how):
    return scaled(draw(rng, lengths=LENGTHS[lengths], **how), k_scale, v_scale)


def in_bf16(rng, variant, lengths="chunks", layout="paged", **how):
    where = {"dtype": "bfloat16", "dim": 64, "group": 2, "num_kv_heads": 2}
    return drawn(rng, lengths, layout=layout, variant=variant, **where, **how)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_pair_of_choices(engine, rng, row):
    engine.check(drawn(rng, **row), num_workers=int(rng.integers(1, 9)))


@pytest.mark.every_isa
@pytest.mark.parametrize("variant, lengths", FEW)
def test_whole_split_and_states(engine, rng, variant, lengths):
    problem = in_bf16(rng, variant, lengths)
    for workers in (1, 7):
        engine.check(problem, num_workers=workers)
        engine.check(problem, num_workers=workers, state=True)


@pytest.mark.parametrize("variant, lengths", FEW)
def test_on_wgmma(wgmma, engine, rng, variant, lengths):
    problem = in_bf16(rng, variant, lengths, page_size=16)
    for workers in (1, 7):
        engine.check(problem, num_workers=workers)
    engine.check(problem, num_workers=7, state=True)


@pytest.mark.parametrize("variant", ["causal", "gpt_oss"])
def test_one_number_of_all_levels(engine, rng, variant):
    problem = in_bf16(rng, variant, layout="cascade")
    engine.check(problem, num_workers=5)
    levels = len(problem.kv)
    assert levels > 1
    expected = engine.run(problem, num_workers=5)
    same(expected, engine.run(scaled(problem, [0.37] * levels, [-2.5] * levels), num_workers=5))
    with refuses(ValueError, "k_scale is 0.37 of level 0 and 1 of level 1", "expected one number of all"):
        engine.run(scaled(problem, [0.37] + [None] * (levels - 1), None))
    with refuses(ValueError, "v_scale is 1 of level 0 and 2 of level 1"):
        engine.run(scaled(problem, None, [1.0, 2.0] + [2.0] * (levels - 2)))


@pytest.mark.parametrize("lengths", LENGTHS)
def test_powers_of_two_are_exact(engine, rng, lengths):
    """A scale of K is one of the softmax, and a scale of V one of the output, bit for bit; 1 changes nothing."""
    problem = in_bf16(rng, "gpt_oss", lengths, k_scale=None, v_scale=None)
    out, lse = engine.run(problem, num_workers=3)
    same((out, lse), engine.run(scaled(problem, 1.0, 1), num_workers=3))
    four, same_lse = engine.run(scaled(problem, None, 4.0), num_workers=3)
    same([lse, (4 * out.astype(np.float32)).astype(out.dtype)], [same_lse, four])
    half = Problem(problem.q, problem.kv, problem.layout, problem.variant, 0.5 * problem.softmax_scale)
    same(engine.run(half, num_workers=3), engine.run(scaled(problem, 0.5, None), num_workers=3))


def test_a_scale_of_0(engine, rng):
    problem = in_bf16(rng, "causal", k_scale=0.0, v_scale=None)
    engine.check(problem, num_workers=3)
    out, _ = engine.run(scaled(problem, None, 0.0), num_workers=3)
    assert (out.astype(np.float32) == 0.0).all()


def test_one_number_however_it_is_given(engine, rng):
    problem = in_bf16(rng, "causal")
    expected = engine.run(problem)[0]
    for make in (np.float32, np.float64, of_torch):
        same([expected], [engine.run(scaled(problem, make(0.37), make(-2.5)))[0]])


def of_torch(x):
    """One element in host memory."""
    return torch.full((1, 1), x, dtype=torch.float32)


def refused(engine, problem, error, *words, **scales):
    attn = engine.attention(problem)
    plan, out = attn.plan(twin(problem.layout)), np.full(problem.q.shape, np.nan, problem.q.dtype)
    with refuses(error, *words):
        attn.run(plan, problem.q, problem.kv[0], out=out, **scales)
    assert np.isnan(out.astype(np.float32)).all()


def test_what_is_no_number_of_all(engine, rng):
    problem = in_bf16(rng, "causal", k_scale=None, v_scale=None)
    words = "and kv: {} is bfloat16", "expected one number, on the host", "only K and V of 8 bits"
    for name in ("k_scale", "v_scale"):
        said = [each.format(name[0]) for each in words]
        for shape in ((2,), problem.kv[0][0].shape[:-1]):
            refused(engine, problem, ValueError, f"{name} is [", *said, **{name: np.ones(shape, np.float32)})
        for bad in (float("nan"), float("inf")):
            refused(engine, problem, ValueError, f"{name} is {bad}; expected a finite number", **{name: bad})
        if engine.device != "cpu":
            there = np.ones(1, np.float32)  # which the engine lends to the GPU
            refused(engine, problem, ValueError, f"{name} lies on device 'cuda", *said, **{name: there})
    refused(engine, problem, ValueError, "k_scale is 3e+30, and scale", "finite product", k_scale=3e30, scale=3e30)


OWN = raddle.Variant(
    "Norms",
    """struct Norms {
  template <class Vec> RADDLE_FN void key(Vec& k, const Key&) const {
    const float n = 1.0f / math::sqrt(k.sum([](float x) { return x * x; }) + 1.0f);
    k.map([=](float x, i32) { return x * n; });
  }
  template <class Vec> RADDLE_FN void value(Vec& v, const Key&) const {
    v.map([](float x, i32) { return x * x; });
  }
};""",
)


def test_parts_of_ones_own_that_change_keys_and_values(engine, rng):
    """Nobody knows that a factor passes through them."""
    problem = in_bf16(rng, "plain", k_scale=None, v_scale=None)
    attn = raddle.Attention(raddle.AttentionSpec(4, 2, 64, dtype="bfloat16", variant=OWN()), engine.device)
    attn = attn if engine.device == "cpu" else OnDevice(attn)
    given = attn.plan(twin(problem.layout)), problem.q, problem.kv[0]
    for name, what in (("k_scale", "keys"), ("v_scale", "values")):
        with refuses(ValueError, f"{name} is 0.5, and the variant's Norms changes {what}", "expected 1, or K and V of 8"):
            attn.run(*given, **{name: 0.5})
    same([attn.run(*given)], [attn.run(*given, k_scale=1.0, v_scale=1.0)])


def test_in_later_replays_of_a_graph(engine, emulator, rng):
    """The graph keeps both numbers, and the kernel that multiplies by the second."""
    first, second = (in_bf16(rng, "causal", "decode", page_size=16) for _ in range(2))
    captured = Captured(engine, emulator, first, given={"k_scale": 0.37, "v_scale": -2.5})
    captured.check(second)
    captured.check(first)


def test_of_a_plan_that_outlives_its_attention(engine, rng):
    problem = in_bf16(rng, "causal", "decode")
    first, second = engine.attention(problem), engine.attention(problem)
    plan = first.plan(twin(problem.layout))
    del first
    out = second.run(plan, problem.q, problem.kv[0], k_scale=0.37, v_scale=-2.5)
    within(attention(problem), out)
