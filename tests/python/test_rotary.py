"""Rotary embeddings: interleaved pairs, YaRN, the bits of frequencies far away."""

import numpy as np
import pytest
import raddle
from draws import DTYPES, draw
from engine import twin
from layout_draws import LAYOUTS
from reference import Llama31Scaling, Problem, Rope, YarnScaling
from small import refuses

HEADS = dict(dim=32, group=2, num_kv_heads=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_interleaved_is_half_split_with_elements_in_another_order(engine, rng, dtype, layout):
    """Exact: the same products and sums, but for the order in which the dot product adds them up."""
    n = 24
    problem = draw(rng, layout, [Rope(n, 500000.0, Llama31Scaling(), 77)], dtype, **HEADS)
    order = np.r_[np.arange(n).reshape(2, -1).T.ravel(), n:32]  # element 2i of the new one is i of the old
    kv = [(np.ascontiguousarray(k[..., order]), v) for k, v in problem.kv]
    interleaved = [Rope(n, 500000.0, Llama31Scaling(), 77, interleaved=True)]
    other = Problem(np.ascontiguousarray(problem.q[..., order]), kv, problem.layout, interleaved)
    tolerance = {"float32": 2e-5, "float16": 1e-2, "bfloat16": 8e-2}[dtype]
    for a, b in zip(engine.run(problem), engine.run(other)):
        np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), atol=tolerance)
    engine.check(other)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("where", [-(2**20), 2**20, 2**30])
def test_far_from_position_zero(engine, rng, interleaved, where):
    rope = Rope(32, 10000.0, YarnScaling(8.0, 4096.0), where, interleaved)
    engine.check(draw(rng, "paged", [rope], lengths=[(3, 90), (1, 400)], **HEADS), num_workers=7)


def test_yarn_of_factor_one_is_plain(engine, rng):
    problem = draw(rng, "paged", [Rope(32, scaling=YarnScaling(1.0, 64.0))], **HEADS)
    plain = Problem(problem.q, problem.kv, problem.layout, [Rope(32)])
    for a, b in zip(engine.run(problem), engine.run(plain)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "yarn",
    [
        YarnScaling(32.0, 4096.0, truncate=False),
        YarnScaling(40.0, 4096.0, mscale=1.0, mscale_all_dim=1.0),
        YarnScaling(40.0, 4096.0, mscale=0.707, mscale_all_dim=0.5),
        YarnScaling(4.0, 32768.0, attention_factor=0.5),
        YarnScaling(4.0, 8.0),
        YarnScaling(2.0, 1.0),
        YarnScaling(16.0, 1e6, beta_fast=1.001, beta_slow=1.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("theta", [1.5, 10000.0, 150000.0])
def test_yarn(engine, rng, yarn, theta):
    for rotary_dim, interleaved in ((2, False), (20, True), (32, False)):
        rope = Rope(rotary_dim, theta, yarn, 3000, interleaved)
        engine.check(draw(rng, "paged", [rope], **HEADS))


def test_a_temperature_is_a_run_member(engine, rng):
    problem = draw(rng, "paged", [Rope(32)], **HEADS)
    warm = Problem(problem.q, problem.kv, problem.layout, [Rope(32, scaling=YarnScaling(1.0, 64.0, 1, 0.5, 1.25))])
    attn = engine.attention(problem)
    plan = attn.plan(twin(problem.layout))
    out = attn.run(plan, problem.q, problem.kv[0], params={"rope.magnitude": 1.25})
    np.testing.assert_array_equal(out, engine.run(warm)[0])


def yarn(**changes):
    return lambda: raddle.Rope(8, scaling=raddle.YarnScaling(**{"factor": 4.0, "original_max_position": 64.0, **changes}))


@pytest.mark.parametrize(
    "make, error, words",
    [
        (yarn(factor=0.5), ValueError, ["scaling.factor is 0.5", "at least 1"]),
        (yarn(factor=float("nan")), ValueError, ["scaling.factor is nan"]),
        (yarn(factor="4"), TypeError, ["scaling.factor is a string"]),
        (yarn(original_max_position=0), ValueError, ["scaling.original_max_position is 0"]),
        (yarn(beta_slow=-1), ValueError, ["scaling.beta_slow is -1"]),
        (yarn(beta_fast=1.0), ValueError, ["scaling.beta_fast is 1", "above beta_slow"]),
        (yarn(attention_factor=0.0), ValueError, ["scaling.attention_factor is 0"]),
        (yarn(mscale=1.0), ValueError, ["scaling.mscale_all_dim is missing"]),
        (yarn(mscale_all_dim=1.0), ValueError, ["scaling.mscale is missing"]),
        (yarn(mscale=-2.0, mscale_all_dim=1.0), ValueError, ["scaling.mscale is -2"]),
        (lambda: raddle.Rope(8, scaling=raddle.Llama31Scaling(factor=0.0)), ValueError, ["scaling.factor is 0"]),
        (lambda: raddle.Rope(8, scaling=raddle.Llama31Scaling(8.0, 4.0, 4.0)), ValueError, ["scaling.high_freq_factor"]),
        (lambda: raddle.Rope(8, scaling={"factor": 4.0}), TypeError, ["scaling is a dict", "YarnScaling"]),
        (lambda: raddle.Rope(8, theta=float("inf")), ValueError, ["theta is inf"]),
        (lambda: raddle.Rope(8, interleaved="yes"), TypeError, ["interleaved is a string"]),
    ],
)
def test_bad_rotary_arguments(make, error, words):
    with refuses(error, *words):
        make()
