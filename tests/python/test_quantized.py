"""K and V of 8 bits: their values are what is stored times scales, which enter every layout, variant and schedule."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import raddle
import torch
from draws import DTYPES, KV_DTYPES, SCALES, covering, draw
from engine import twin
from layout_draws import LAYOUTS, paged
from reference import PagedKV, Problem
from test_same_bits import reshaped, same, strided

LENGTHS = {
    "decode": [(1, 400), (1, 33), (1, 1)],
    "prefill": [(150, 150), (40, 260)],
    "chunks": [(5, 70), (0, 30), (17, 40), (1, 300), (8, 3)],
}
VARIANTS = ["plain", "causal", "band", "softcap", "sigmoid", "rope", "rope_interleaved", "gpt_oss", "everything"]
ROWS = covering(
    layout=list(LAYOUTS),
    variant=VARIANTS,
    dtype=DTYPES,
    kv_dtype=KV_DTYPES,
    k_scale=SCALES,
    v_scale=SCALES,
    dim=[64, 24, 128],
    group=[1, 4],
    lengths=list(LENGTHS),
)


def drawn(rng, k_scale="token", v_scale="token", lengths="chunks", kv_dtype="float8_e4m3fn", **how):
    return draw(rng, scales=(k_scale, v_scale), lengths=LENGTHS[lengths], kv_dtype=kv_dtype, **how)


def with_scales(problem, k_scale, v_scale):
    return Problem(problem.q, problem.kv, problem.layout, problem.variant, problem.scale, k_scale, v_scale)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_pair_of_choices(engine, rng, row):
    engine.check(drawn(rng, **row), num_workers=int(rng.integers(1, 9)))


@pytest.mark.every_isa
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("variant", ["plain", "rope"])
def test_on_every_isa(engine, rng, kv_dtype, lengths, variant):
    for dtype in ("float32", "bfloat16"):
        engine.check(drawn(rng, layout="paged", variant=variant, dtype=dtype, kv_dtype=kv_dtype, lengths=lengths))


@pytest.mark.every_isa
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dim", [16, 128])
def test_every_number_has_its_value(engine, kv_dtype, dim):
    """A single key gets all the weight, so that the output is its value; a NaN spoils no other element."""
    v = np.arange(256, dtype=np.uint8).view(kv_dtype).reshape(256 // dim, 1, dim)
    v = np.where(np.isinf(v.astype(np.float32)), v.dtype.type(1), v)
    problem = draw(
        np.random.default_rng(0), "ragged", "plain", "float32", dim, group=1, num_kv_heads=1,
        lengths=[(1, 1)] * (256 // dim), kv_dtype=kv_dtype,
    )
    problem.kv[0][1][...] = v
    out, _ = engine.run(problem)
    np.testing.assert_array_equal(out, v.astype(np.float32))


@pytest.mark.parametrize("state", [False, True])
def test_states(engine, rng, state):
    engine.check(drawn(rng, layout="cascade", variant="gpt_oss", dtype="bfloat16"), state=state, num_workers=7)


@pytest.mark.parametrize("variant", ["causal", "rope"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_one_number_however_it_is_given(engine, rng, variant, lengths):
    problem = drawn(rng, "none", "none", lengths, layout="paged", variant=variant, dtype="bfloat16")
    heads = problem.kv[0][0].shape[2]

    def run(make):
        return engine.run(with_scales(problem, make(0.37), make(2.5)), num_workers=3)

    expected = run(float)
    same(expected, run(np.float32))
    same(expected, run(lambda x: np.full((), x, np.float32)))
    same(expected, run(lambda x: np.full(heads, x, np.float32)))
    same(expected, run(lambda x: np.full(problem.kv[0][0].shape[:-1], x, np.float32)))
    plain = engine.run(problem)
    same(plain, engine.run(with_scales(problem, 1.0, np.ones(heads, np.float32))))
    assert not np.array_equal(plain[0], expected[0])


@pytest.mark.parametrize("lengths", LENGTHS)
def test_scales_of_any_size(engine, rng, lengths):
    """A kernel that rounds weights times scales to float16 would lose those of 2^-60."""
    problem = drawn(rng, lengths=lengths, layout="paged", variant="causal", dtype="bfloat16")
    tiny = np.float32(2.0**-60)
    expected, _ = engine.run(problem, num_workers=3)
    out, _ = engine.run(with_scales(problem, problem.k_scale, problem.v_scale * tiny), num_workers=3)
    # Of what is small already, 2^-60 times as much is no normal number, and which zero it becomes is chance.
    normal = np.abs(expected.astype(np.float32)) > 2.0**-40
    scaled = (expected.astype(np.float32) * tiny).astype(out.dtype)
    same([scaled[normal]], [out[normal]])
    assert (np.abs(out[~normal].astype(np.float32)) <= tiny * np.float32(2.0**-39)).all()
    spread = np.float32(2.0) ** rng.integers(-8, 9, problem.v_scale.shape).astype(np.float32)
    engine.check(with_scales(problem, problem.k_scale, problem.v_scale * spread), num_workers=3)


@pytest.mark.every_isa
@pytest.mark.parametrize("variant", ["causal", "everything"])
def test_pages_and_strides_change_no_bit(engine, rng, variant):
    problem = drawn(rng, layout="paged", variant=variant, dtype="float16", dim=72, dim_vo=72, page_size=7)
    expected = engine.run(problem, num_workers=3)
    for page_size, order in ((1, "NHD"), (16, "HND"), (64, "NHD")):
        seed = int(rng.integers(2**31))
        both = problem.kv[0], (problem.k_scale[..., None], problem.v_scale[..., None])
        loose = (Problem(problem.q, [pair], problem.layout, problem.variant) for pair in both)
        again, tokens = (reshaped(np.random.default_rng(seed), one, page_size, order) for one in loose)
        scales = [np.ascontiguousarray(x[..., 0]) for x in tokens.kv[0]]
        same(expected, engine.run(with_scales(again, *scales), num_workers=3))
    loose = [tuple(strided(engine, rng, x) for x in problem.kv[0])]
    scales = [np.repeat(x, 2, axis=-1)[..., ::2] for x in (problem.k_scale, problem.v_scale)]
    same(expected, engine.run(Problem(problem.q, loose, problem.layout, problem.variant, None, *scales), num_workers=3))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_bits_in_bytes_and_tensors_of_torch(engine, rng, kv_dtype):
    problem = drawn(rng, "tensor", "head", layout="ragged", kv_dtype=kv_dtype, dtype="bfloat16")
    expected, _ = engine.run(problem)
    attn = engine.attention(problem)
    plan = attn.plan(twin(problem.layout))
    scales = {"k_scale": problem.k_scale, "v_scale": problem.v_scale}
    in_bytes = [x.view(np.uint8) for x in problem.kv[0]]
    same([attn.run(plan, problem.q, tuple(in_bytes), **scales)], [expected])
    if engine.device == "cpu":
        q = torch.from_numpy(problem.q.view(np.uint16)).view(torch.bfloat16)
        kv = tuple(torch.from_numpy(x).view(getattr(torch, kv_dtype)) for x in in_bytes)
        scales = {"k_scale": torch.tensor(problem.k_scale), "v_scale": torch.from_numpy(problem.v_scale)}
        out = attn.run(plan, q, kv, **scales)
        same([out.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)], [expected])


@pytest.mark.parametrize("variant", ["softcap", "rope"])
def test_fused_parts_have_the_same_bits(engine, rng, variant):
    problem = drawn(rng, layout="paged", variant=variant, dtype="bfloat16", kv_dtype="float8_e5m2")
    same(engine.run(problem, num_workers=4), engine.run(problem, num_workers=4, fuse=True))


def test_batch_invariance(engine, rng):
    """A request alone, and among others with scales of their own."""
    problem = drawn(rng, lengths="decode", layout="paged", variant="causal", dtype="bfloat16")
    together, _ = engine.run(problem, num_workers=7, batch_invariant=True)
    layout = problem.layout
    first = PagedKV(layout.qo_indptr[:2], layout.page_indptr[:2], layout.page_indices, layout.kv_len[:1], layout.page_size)
    one = Problem(problem.q[:1], problem.kv, first, problem.variant, None, problem.k_scale, problem.v_scale)
    alone, _ = engine.run(one, num_workers=2, batch_invariant=True)
    same([together[:1]], [alone])


def test_one_scale_for_all_levels(engine, rng):
    problem = drawn(rng, "tensor", "head", layout="cascade", dtype="float16")
    k_scale, v_scale = problem.k_scale[0], problem.v_scale[1]
    engine.check(with_scales(problem, k_scale, v_scale))
    engine.check(with_scales(problem, [k_scale, None], [None, v_scale]))


def test_the_dtype_itself_is_no_quantisation(engine, rng):
    problem = draw(rng, "paged", dtype="bfloat16")
    attn = engine.attention(problem)
    plan = attn.plan(twin(problem.layout))
    spec = raddle.AttentionSpec(**{**attn.spec.fields(), "kv_dtype": "bfloat16"})
    assert raddle.Attention(spec, device=engine.device).spec.kv_dtype == "bfloat16"
    assert raddle.Attention(spec, device=engine.device).plan(twin(problem.layout)).num_items == plan.num_items


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"kv_dtype": "fp4"}, ValueError, "kv_dtype is 'fp4'; expected 'float8_e4m3fn', 'float8_e5m2', 'int8' or None"),
        ({"kv_dtype": "float16"}, ValueError, "kv_dtype is 'float16'; expected .* or dtype, 'bfloat16'"),
        ({"kv_dtype": 8}, TypeError, "kv_dtype is an int; expected 'float8_e4m3fn'"),
        ({"dtype": "float8_e5m2"}, ValueError, "dtype is 'float8_e5m2'; expected 'float32', 'float16' or 'bfloat16'"),
    ],
)
def test_bad_dtypes_are_named(fields, error, message):
    with pytest.raises(error, match=message):
        raddle.Attention(raddle.AttentionSpec(4, 2, 16, **fields))


def test_dtypes_of_every_library():
    for dtype in ("float8_e4m3fn", ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn, np.dtype(ml_dtypes.float8_e4m3fn)):
        assert raddle.AttentionSpec(4, 2, 16, kv_dtype=dtype).kv_dtype == "float8_e4m3fn"


@pytest.fixture
def small(rng):
    problem = drawn(rng, "none", "none", layout="paged", dtype="float16", num_kv_heads=2, page_size=16)
    out = np.full(problem.q.shape, 7.0, np.float16)
    yield problem, out
    assert (out == 7.0).all()


@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        (np.ones(3, np.float32), ValueError, r"_scale is \[3\] float32; expected a number, \[2\] .* or \[\d+, 16, 2\]"),
        (np.ones((9, 2), np.float32), ValueError, r"_scale is \[9, 2\] float32"),
        (np.ones((1, 16, 2), np.float32), ValueError, r"_scale is \[1, 16, 2\] float32"),
        (np.ones(2, np.float16), TypeError, "_scale is float16; expected float32"),
        (np.ones(2, np.float64), TypeError, "_scale is float64; expected float32"),
        (float("inf"), ValueError, "_scale is inf; expected a finite number"),
        ([1.0, 2.0], ValueError, "_scale has 2 entries; expected 1"),
        ("1", TypeError, "_scale is a str; expected a number or a tensor"),
        (True, TypeError, "_scale is a bool; expected a number"),
    ],
    ids=lambda x: str(x)[:12],
)
@pytest.mark.parametrize("which", ["k_scale", "v_scale"])
def test_bad_scales_are_named(small, which, scale, error, message):
    problem, out = small
    attn = raddle.Attention(raddle.AttentionSpec(4, 2, 64, dtype="float16", kv_dtype="float8_e4m3fn"))
    with pytest.raises(error, match=which[0] + message):
        attn.run(attn.plan(twin(problem.layout)), problem.q, problem.kv[0], out=out, **{which: scale})


def test_bad_pools_are_named(small):
    problem, out = small
    (k, v), plan_of = problem.kv[0], twin(problem.layout)
    attn = raddle.Attention(raddle.AttentionSpec(4, 2, 64, dtype="float16", kv_dtype="float8_e4m3fn"))
    plan = attn.plan(plan_of)
    with pytest.raises(TypeError, match="kv: v is float8_e5m2; expected float8_e4m3fn"):
        attn.run(plan, problem.q, (k, v.astype(ml_dtypes.float8_e5m2)), out=out)
    with pytest.raises(TypeError, match="kv: k is float16; expected float8_e4m3fn"):
        attn.run(plan, problem.q, (k.astype(np.float16), v), out=out)
    with pytest.raises(TypeError, match="q has dtype uint8"):
        attn.run(plan, problem.q.view(np.uint8), (k, v), out=out)
    plain = raddle.Attention(raddle.AttentionSpec(4, 2, 64, dtype="float16"))
    plan = plain.plan(plan_of)
    with pytest.raises(TypeError, match="kv: k is float8_e4m3fn; expected float16"):
        plain.run(plan, problem.q, (k, v), out=out)
    with pytest.raises(TypeError, match="kv: k has dtype uint8"):
        plain.run(plan, problem.q, (k.view(np.uint8), v.view(np.uint8)), out=out)
    kv = k.astype(np.float16), v.astype(np.float16)
    with pytest.raises(ValueError, match="v_scale is .*, and kv: v is float16; expected one number"):
        plain.run(plan, problem.q, kv, out=out, v_scale=np.ones(2, np.float32))
