"""Rotary embeddings: interleaved pairs, YaRN, far positions, tables of the caller's own."""

import numpy as np
import pytest
import raddle
from draws import DTYPES, draw
from engine import twin
from layout_draws import LAYOUTS
from reference import Causal, LinearScaling, Llama31Scaling, Problem, Rope, RopeTables, YarnScaling
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [24, 40, 56, 72, 120, 248])
def test_halves_that_are_no_whole_chunks(engine, rng, dtype, dim):
    """Elements of such pairs change places through a row's own memory, whose padding stays zero."""
    for rotary_dim in (12, 20, dim - 4):
        problem = draw(rng, "ragged", [Rope(rotary_dim, 500000.0, offset=4554)], dtype, dim, lengths=[(17, 70)])
        engine.check(problem)


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


@pytest.mark.parametrize("factor", [0.5, 1.0, 8.0])
def test_all_frequencies_divided(engine, rng, factor):
    """Positions interpolated; a factor of 1 changes no bit."""
    for rotary_dim, interleaved in ((2, False), (32, True)):
        rope = Rope(rotary_dim, 10000.0, LinearScaling(factor), 3000, interleaved)
        # Rows that see one key alone would hide what rotates.
        engine.check(problem := draw(rng, "paged", [rope], lengths=[(3, 40), (1, 25)], **HEADS))
        plain = Rope(rotary_dim, 10000.0, None, 3000, interleaved)
        same = engine.run(Problem(problem.q, problem.kv, problem.layout, [plain]))[0] == engine.run(problem)[0]
        assert same.all() == (factor == 1.0)


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
        (lambda: raddle.Rope(8, scaling=raddle.LinearScaling(-1.0)), ValueError, ["scaling.factor is -1"]),
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


# --- tables -----------------------------------------------------------------------------------


def tables_of(rope, positions):
    """What a model keeps: cosines and sines of a rope, rounded to float32."""
    cos, sin = rope.cos_sin(np.arange(positions))
    return RopeTables(cos.astype(np.float32), sin.astype(np.float32), rope.interleaved, rope.offset)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tables_of_a_rope_are_the_rope(engine, rng, dtype, interleaved):
    rope = Rope(24, 10000.0, YarnScaling(4.0, 64.0), 5, interleaved)
    problem = draw(rng, "paged", [rope, Causal()], dtype, lengths=[(3, 90), (1, 300), (20, 20)], **HEADS)
    tables = Problem(problem.q, problem.kv, problem.layout, [tables_of(rope, 305), Causal()])
    engine.check(tables, num_workers=7)
    tolerance = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 8e-2}[dtype]
    for a, b in zip(engine.run(problem), engine.run(tables)):
        np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), atol=tolerance)


def test_offsets_of_each_request(engine, rng):
    """The table just holds the positions of every request."""
    problem = draw(rng, "ragged", "plain", lengths=[(1, 50), (9, 20)], **HEADS)
    tables = tables_of(Rope(32, offset=np.int32([0, 30])), 50)
    engine.check(Problem(problem.q, problem.kv, problem.layout, [tables]))
    tables.offset = np.int32([30, 0])
    with refuses(ValueError, "rope_tables.cos has 50 rows", "request 0 has positions 30 to 79"):
        engine.run(Problem(problem.q, problem.kv, problem.layout, [tables]))


@pytest.mark.parametrize(
    "lengths, layout, words",
    [
        ([(1, 20), (1, 21)], "paged", ["20 rows", "request 1 has positions 0 to 20"]),
        ([(5, 3)], "paged", ["20 rows", "request 0 has positions -2 to 2"]),
        ([(2, 20)], "paged_positions", ["20 rows", "request 0 has positions"]),
        ([(1, 30)], "bsr", ["20 rows", "request 0 has positions 0 to 29"]),
    ],
)
def test_positions_beyond_the_tables(engine, rng, lengths, layout, words):
    problem = draw(rng, layout, "plain", lengths=lengths, **HEADS)
    if layout == "paged_positions":
        problem.layout.qo_pos[:] = 20
    if layout == "bsr":  # whatever its blocks are, the row is beyond
        words = words[:1]
    variant = [tables_of(Rope(8), 20)]
    with refuses(ValueError, "rope_tables.cos", *words):
        engine.run(Problem(problem.q, problem.kv, problem.layout, variant))


def test_requests_without_rows_ask_for_no_positions(engine, rng):
    problem = draw(rng, "paged", "plain", lengths=[(0, 500), (2, 20)], **HEADS)
    engine.check(Problem(problem.q, problem.kv, problem.layout, [tables_of(Rope(8), 20)]))


def test_tables_of_a_layer(engine, rng):
    problem = draw(rng, "paged", [tables_of(Rope(16), 60)], lengths=[(3, 60)], **HEADS)
    other = tables_of(Rope(16, 500.0), 99)
    attn = engine.attention(problem)
    plan = attn.plan(twin(problem.layout))
    params = {"rope_tables.cos": other.cos, "rope_tables.sin": other.sin}
    out = attn.run(plan, problem.q, problem.kv[0], params=params)
    np.testing.assert_array_equal(
        out, engine.run(Problem(problem.q, problem.kv, problem.layout, [other]))[0]
    )
    with refuses(ValueError, "rope_tables.sin is [60, 8]", "rope_tables.cos, [99, 8]"):
        attn.run(plan, problem.q, problem.kv[0], params={"rope_tables.cos": other.cos})
    with refuses(ValueError, "rope_tables.cos", "dimension 1"):
        attn.run(plan, problem.q, problem.kv[0], params={"rope_tables.cos": np.ones((60, 17), np.float32)})
    with refuses(ValueError, "rope_tables.cos has 60 rows", "offset 1"):
        attn.run(plan, problem.q, problem.kv[0], params={"rope_tables.offset": np.int32([1])})


@pytest.mark.parametrize(
    "cos, sin, error, words",
    [
        (np.ones(8), np.ones(8), ValueError, ["cos has 1 dimensions", "2"]),
        (np.ones((4, 8)), np.ones((4, 7)), ValueError, ["sin is [4, 7]", "[4, 8]"]),
        (np.ones((0, 8)), np.ones((0, 8)), ValueError, ["cos is empty"]),
        (np.ones((4, 8), np.int32), np.ones((4, 8)), TypeError, ["cos", "floats"]),
        (None, np.ones((4, 8)), TypeError, ["cos is a NoneType"]),
    ],
)
def test_bad_tables(cos, sin, error, words):
    with refuses(error, *words):
        raddle.RopeTables(cos, sin)
    with refuses(ValueError, "rope_tables.cos, dimension 1, has 8"):
        raddle.Attention(raddle.AttentionSpec(1, 1, 8, variant=[raddle.RopeTables(np.ones((4, 8)), np.ones((4, 8)))]))
