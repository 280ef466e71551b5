"""Traced functions: the C++ they become computes what Python does, pair by pair."""

from __future__ import annotations

import enum
import functools
import math
import types

import numpy as np
import pytest
import torch

import flex_draws as draws
from flex_compiled import Compiled
from raddle.flex import ops
from raddle.flex.trace import Traced, takes_score, trace_mask, trace_score

SLOPES = np.exp2(-np.arange(1, 9)).astype(np.float64)
TABLE = np.random.default_rng(0).standard_normal((8, 64))
CUBE = np.random.default_rng(1).integers(-9, 9, (3, 8, 64))
HYPER = np.random.default_rng(2).standard_normal((2, 3, 4, 8))
FLAGS = np.random.default_rng(3).integers(0, 2, 64).astype(bool)
DOC = np.repeat(np.arange(8), 8)
SCALE = 0.125
T_SLOPES, T_DOC, T_FLAGS, T_TABLE = (torch.from_numpy(x) for x in (SLOPES, DOC, FLAGS, TABLE))
T_BF16 = torch.from_numpy(TABLE).bfloat16()


def wide(x):
    """An integer of a function as int64."""
    return ops.cast(x, "int64")


def parts(width, b, h, q, kv, *, back):
    return (q - kv < width) & (kv - q < back)


def make_functions():
    """Score and mask functions as people write them. Evaluated with Python's own numbers they are the reference."""
    cap, window, bias, step = 7.5, 5, np.float32(0.25), 3
    offsets = {"left": 4, "right": (2, 1)}

    def alibi(score, b, h, q, kv):
        return score + SLOPES[h] * (kv - q)

    def soft_cap(score, b, h, q, kv):
        return cap * ops.tanh(score / cap)

    def relative(score, b, h, q, kv):
        return score + TABLE[h, ops.clamp(q - kv, -31, 31) + 31]

    def nested_index(score, b, h, q, kv):
        return score * HYPER[1][b][q % 4, h]

    def piecewise(score, b, h, q, kv):
        return ops.where(kv > q, -math.inf, ops.where(h < 4, score * SCALE, score - bias))

    def elementary(score, b, h, q, kv):
        return ops.exp(-abs(score)) + ops.exp2(score / 4) + ops.log(1 + score * score) + ops.log2(2 + abs(score))

    def trigonometric(score, b, h, q, kv):
        return ops.sin(score) * ops.cos(q / 8) + ops.sigmoid(score) + ops.sqrt(abs(score))

    def rounding(score, b, h, q, kv):
        whole = math.floor(score) + math.ceil(score) - math.trunc(score)
        return ops.floor(score * 3) + whole + ops.cast(score, "int32")

    def division(score, b, h, q, kv):
        d = q - kv
        return score + d / 3 + d // 4 + d % 5 + q // -3 + kv % -7 + q // (b + 1) - (q - 9) % (h + 1)

    def shifts(score, b, h, q, kv):
        return score + ((q << 2) ^ (kv >> 1)) + ((q & 7) | (h << b)) + ~kv + (-q & 12)

    def extremes(score, b, h, q, kv):
        return min(score, 1.5) + max(q, kv, 7) + ops.maximum(score, -0.5) - abs(q - kv)

    def powers(score, b, h, q, kv):
        return score**3 + q**2 - (q - kv) ** 2 + kv**0 + 2.0 ** (-(h + 1) * 8.0 / 8)

    def with_default(score, b, h, q, kv, gain=1.5, shift=2):
        return score * gain + (q - shift)

    def loops(score, b, h, q, kv):
        for i in range(step):
            score = score * 0.5 + helper(q, i)
        return score if step > 1 else q

    def containers(score, b, h, q, kv):
        return ops.where((q - kv <= offsets["left"]) & (kv - q <= offsets["right"][0]), score, -1e9)

    def helper(q, i):
        return q * i + cap

    def hashes(score, b, h, q, kv):
        x = (wide(q) * 73856093) ^ (wide(kv) * 19349663) ^ (b * 2654435761)
        return score + (x >> 7) % 1000 + (x & 255) - wide(q) * wide(kv) * 65537 // 2**33 - (wide(q) << 35) % 77

    def narrow_longs(score, b, h, q, kv):
        return score + wide(q) % 16 + wide(kv) // 3 + TABLE[wide(h) % 8, wide(kv) & 63] - ops.minimum(wide(q), kv)

    def long_branches(score, b, h, q, kv):
        far = ops.where(q > kv, wide(q) * 2**33, kv)
        return ops.cast(far // 2**30, "float32") + ops.cast(ops.cast(far, "int32") % 7, "float32") + abs(-far) % 13

    def of_int64(score, b, h, q, kv):
        return score + (CUBE[1, h, kv] * 73856093 + CUBE[0, 0, q]) % 1021

    def same_twice(score, b, h, q, kv):
        d = (q - kv) * 0.5
        return ops.where(d > 1, d, d * d) + score

    def bools(score, b, h, q, kv):
        return score + (q > kv) + (q >= kv) * 2 - ((q == kv) | (q != 3)) * (b > 0)

    def constant(score, b, h, q, kv):
        return 0

    def unchanged(score, b, h, q, kv):
        return score

    def only_head(score, b, h, q, kv):
        return SLOPES[h]

    def negative_index(score, b, h, q, kv):
        return score + SLOPES[-1] + SLOPES[h - 8] + TABLE[-2, -kv]

    def tanh_cheap(score, b, h, q, kv):
        return ops.tanh_approx(score)

    def reserved(score, b, h, q, kv):
        s = double = score  # noqa: F841
        return double + class_

    class_ = 0.5

    def causal(b, h, q, kv):
        return q >= kv

    def sliding(b, h, q, kv):
        return (q >= kv) & (q - kv <= window)

    def prefix(b, h, q, kv):
        return (kv < window + b) | (kv <= q)

    def document(b, h, q, kv):
        return (DOC[q] == DOC[kv]) & (q >= kv)

    def dilated(b, h, q, kv):
        return ((q - kv) % step == 0) & (abs(q - kv) <= step * window)

    def flags(b, h, q, kv):
        return FLAGS[kv] | ~FLAGS[q] & (q > kv)

    def cube(b, h, q, kv):
        return CUBE[b, h, kv] > CUBE[b][h][q]

    def natten(b, h, q, kv):
        x, y, u, v = q % 8, q // 8, kv % 8, kv // 8
        return (abs(x - u) <= 2) & (abs(y - v) <= 1)

    def parity_mask(b, h, q, kv):
        return ((q - kv) & 1) != 0

    def always(b, h, q, kv):
        return True

    def either(b, h, q, kv):
        return causal(b, h, q, kv) & sliding(b, h, q, kv) | prefix(b, h, q - 2, kv)

    def xor_masks(b, h, q, kv):
        return (q > kv) ^ (h % 2 == 1)

    def divmods(b, h, q, kv):
        n, r = divmod(q, 7)
        return n * 7 + r - kv > -3

    class Window:
        def __init__(self, width, table):
            self.width, self.table = width, table

        def __call__(self, b, h, q, kv):
            return (q - kv) < self.width + self.table[h]

        def method(self, b, h, q, kv):
            return (kv - q) < self.width

    config = types.SimpleNamespace(width=6)

    def configured(b, h, q, kv):
        return q - kv < config.width

    window_object = Window(3, np.arange(8))
    return [value for value in locals().values() if isinstance(value, types.FunctionType) and value is not helper] + [
        window_object,
        window_object.method,
        functools.partial(parts, 4, back=9),
        lambda b, h, q, kv: q - kv < 2,
    ]


def make_torch_functions():
    """Functions written for PyTorch. Torch itself is their reference."""
    number, zero_dim = 3.0, torch.tensor(0.5)
    F = torch.nn.functional

    def t_alibi(score, b, h, q, kv):
        return score + T_SLOPES[h] * (kv - q)

    def t_soft_cap(score, b, h, q, kv):
        return torch.tanh(score / number) * number

    def t_where(score, b, h, q, kv):
        return torch.where(q >= kv, score, float("-inf"))

    def t_where_scalars(score, b, h, q, kv):
        return torch.where((q - kv).abs() <= 3, score + zero_dim, torch.tensor(-1.0)) + torch.zeros_like(score)

    def t_methods(score, b, h, q, kv):
        return score.exp().clamp(min=0.1, max=5.0) + q.to(torch.float32).sqrt() + (q - kv).float().abs().add(1, alpha=2)

    def t_named(score, b, h, q, kv):
        x = torch.div(q, 3, rounding_mode="floor") + torch.div(q - kv, 3, rounding_mode="trunc")
        return torch.minimum(score, torch.sigmoid(score)) + F.relu(score) + torch.remainder(q, 5) + x

    def t_bf16(score, b, h, q, kv):
        return score + T_BF16[h, kv].to(score.dtype)

    def t_reflected(score, b, h, q, kv):
        return torch.tensor(2.0) * score + torch.tensor(3) - torch.rsub(score, 1.0) + torch.square(score)

    def t_sliced(score, b, h, q, kv):
        return score + T_TABLE[2:6][h % 4, kv] + (T_SLOPES * 2)[h] + torch.exp(T_SLOPES)[h]

    def t_inside(score, b, h, q, kv):
        local = torch.tensor([0.5, 1.0, 2.0])
        return score * local[b]

    def t_document(b, h, q, kv):
        return torch.logical_and(T_DOC[q] == T_DOC[kv], kv <= q)

    def t_flags(b, h, q, kv):
        return torch.bitwise_or(T_FLAGS[kv], q.ge(kv)) & torch.logical_not(q.eq(3))

    def t_noop(b, h, q, kv):
        return b.new_ones(size=(), dtype=torch.bool)

    def t_shift(b, h, q, kv):
        return torch.bitwise_right_shift(q, 2) == (kv >> 2).long()

    return [value for value in locals().values() if isinstance(value, types.FunctionType)]


def trace(fn) -> Traced:
    return trace_score(fn) if takes_score(fn) else trace_mask(fn)


def reference(fn, at, score, convert=lambda x: x):
    """The user's function evaluated element by element."""
    convert_score = (lambda s: convert(float(s))) if convert is not torch.tensor else torch.tensor
    given = [[convert_score(s)] if takes_score(fn) else [] for s in score]
    return np.array([float(fn(*s, *map(convert, map(int, row)))) for s, row in zip(given, at)])


@pytest.fixture(scope="module")
def functions():
    return make_functions() + make_torch_functions()


@pytest.fixture(scope="module")
def compiled(functions, tmp_path_factory):
    return Compiled(tmp_path_factory.mktemp("traced"), [trace(fn) for fn in functions])


def test_every_function_gives_what_python_gives(functions, compiled, rng):
    at, score = draws.draw_points(rng, 300), (4 * rng.standard_normal(300)).astype(np.float32)
    for i, fn in enumerate(functions):
        name = compiled.traced[i].name
        expected = reference(fn, at, score, torch.tensor if name.startswith("t_") else lambda x: x)
        found = compiled.run(i, at, score)
        elementwise = compiled.traced[i].evaluate(*at.T, score)
        for result in (found, elementwise):
            differs = ~((result == expected) | np.isinf(expected))
            error = np.abs(result[differs] - expected[differs])
            assert error.size == 0 or not compiled.traced[i].is_mask, name
            scale = 1e-4 if "cheap" in name or "bf16" in name else 3e-6
            assert np.nanmax(error, initial=0) <= scale * np.abs(expected[np.isfinite(expected)]).max(), name
            assert np.array_equal(np.isnan(result), np.isnan(expected)), name
            assert np.array_equal(result[np.isinf(expected)], expected[np.isinf(expected)]), name


def test_random_expressions_have_the_same_bits(rng, tmp_path):
    arrays = draws.draw_arrays(rng)
    masks = [draws.draw_mask(rng, arrays) for _ in range(24)]
    scores = [draws.draw_score(rng, arrays) for _ in range(24)]
    compiled = Compiled(tmp_path, [trace_mask(m) for m in masks] + [trace_score(s) for s in scores])
    at, score = draws.draw_points(rng, 500), rng.standard_normal(500).astype(np.float32)
    for i, fn in enumerate(masks + scores):
        found = compiled.run(i, at, score)
        direct = draws.with_numpy(fn, at, None if compiled.traced[i].is_mask else score)
        np.testing.assert_array_equal(found, compiled.traced[i].evaluate(*at.T, score), compiled.traced[i].source)
        np.testing.assert_array_equal(found, direct, compiled.traced[i].source)


def test_no_index_reads_out_of_bounds():
    table = np.arange(12.0).reshape(3, 4)
    traced = trace_score(lambda score, b, h, q, kv: table[q, kv])
    at = np.array([(0, 0, q, kv) for q in (-(2**31), -4, -3, -1, 0, 2, 3, 2**31 - 1) for kv in (-5, -4, 0, 3, 4)])
    expected = [table[np.clip(q + 3 * (q < 0), 0, 2), np.clip(kv + 4 * (kv < 0), 0, 3)] for _, _, q, kv in at]
    np.testing.assert_array_equal(traced.evaluate(*at.T), expected)
    assert "traced::wrap" in traced.source


def body(traced):
    return traced.source.split("const {\n")[1].split("\n  }")[0].strip()


def near_body(fn):
    """What `near_logits` returns, if the struct has it."""
    parts = trace_score(fn).source.split("near_logits(float s, float s_scale, ")
    return parts[1].split("return ")[1].split(";")[0] if len(parts) > 1 else None


def test_a_multiple_of_the_distance_is_told_as_a_slope():
    """Whichever way it is written; the slope may depend on the row alone."""
    ends = {
        "traced::at(SLOPES, r.q_head)": (
            lambda score, b, h, q, kv: score + SLOPES[h] * (kv - q),
            lambda score, b, h, q, kv: score + (kv - q) * SLOPES[h],
            lambda score, b, h, q, kv: SLOPES[h] * (kv - q) + score,
            lambda score, b, h, q, kv: score - SLOPES[h] * (q - kv),
        ),
        "-traced::at(SLOPES, r.q_head)": (
            lambda score, b, h, q, kv: score - SLOPES[h] * (kv - q),
            lambda score, b, h, q, kv: score + SLOPES[h] * (q - kv),
            lambda score, b, h, q, kv: score - -SLOPES[h] * (q - kv),
        ),
        "5.e-01f": (lambda score, b, h, q, kv: score + 0.5 * (kv - q),),
        "-(-2.0f)": (lambda score, b, h, q, kv: score + -2.0 * (q - kv),),
    }
    for slope, functions in ends.items():
        for fn in functions:
            source = trace_score(fn).source
            assert source.split("distance_slope(const Row&")[1].split("return ")[1].split(";")[0] == slope, source
    for none in (
        lambda score, b, h, q, kv: score * 2.0 + SLOPES[h] * (kv - q),
        lambda score, b, h, q, kv: score + SLOPES[h] * abs(kv - q),
        lambda score, b, h, q, kv: score + SLOPES[kv] * (kv - q),
        lambda score, b, h, q, kv: score + score * (kv - q),
        lambda score, b, h, q, kv: score + SLOPES[h] * (kv - 2 * q),
        lambda score, b, h, q, kv: SLOPES[h] * (kv - q) - score,
    ):
        assert "distance_slope" not in trace_score(none).source


def test_soft_caps_have_a_sooner_form():
    """Of logits that are far below the cap. Whatever else a function does to its score is done to the scaled one."""
    cap, other = 30.0, 20.0
    near = "native::near_soft_cap(s, s_scale, cap)"
    assert near_body(lambda score, b, h, q, kv: cap * ops.tanh(score / cap)) == near
    assert near_body(lambda score, b, h, q, kv: ops.tanh(score / cap) * cap + 1.0) == f"{near} + 1.0f"
    assert near_body(lambda score, b, h, q, kv: ops.where(q >= kv, cap * ops.tanh(score / cap), score * 2)) == (
        f"(c.kv_pos <= r.q_pos) ? {near} : ((s_scale * s) * 2.0f)"
    )
    for none in (
        lambda score, b, h, q, kv: score + 1.0,
        lambda score, b, h, q, kv: cap * ops.tanh(score / other),
        lambda score, b, h, q, kv: cap * ops.tanh((score + 1.0) / cap),
        lambda score, b, h, q, kv: cap * ops.tanh(score / cap) + ops.tanh(score),
        lambda score, b, h, q, kv: cap * ops.tanh(score / cap) + other * ops.tanh(score / other),
    ):
        assert near_body(none) is None


def test_a_function_becomes_what_one_would_write_by_hand():
    cap, window = 30.0, 4
    assert body(trace_score(lambda score, b, h, q, kv: cap * ops.tanh(score / cap))) == (
        "return cap * native::tanh_ratio(s, cap);"
    )
    assert body(trace_score(lambda score, b, h, q, kv: score + SLOPES[h] * (kv - q))) == (
        "return native::product_sum(traced::at(SLOPES, r.q_head), "
        "static_cast<float>(traced::sub(c.kv_pos, r.q_pos)), s);"
    )
    assert body(trace_mask(lambda b, h, q, kv: q - kv <= window)) == (
        "return traced::sub(r.q_pos, c.kv_pos) <= window;"
    )


def test_a_common_subexpression_is_computed_once():
    def twice(score, b, h, q, kv):
        return ops.exp(score - q) + ops.exp(score - q)

    source = trace_score(twice).source
    assert source.count("math::exp") == 1 and source.count("static_cast") == 1


def test_numbers_are_members_and_arrays_are_copies():
    width, scale, table, flag = 7, 0.5, np.arange(8), True

    def mod(score, b, h, q, kv):
        if flag:
            score = score * scale
        return ops.where(q - kv < width, score, table[h])

    traced = trace_score(mod)
    assert traced.values["width"] == 7 and traced.values["scale"] == 0.5 and "flag" not in traced.values
    assert traced.values["table"].dtype == np.int32
    table[:] = 0
    assert traced.values["table"][3] == 3
    changed = traced.evaluate(0, 0, 9, np.arange(9), 1.0, values={"width": 2})
    np.testing.assert_array_equal(changed, [0] * 8 + [0.5])
    width = 9
    assert trace_score(mod).values["width"] == 9 and trace_score(mod).source == traced.source


class Mode(int, enum.Enum):
    NEAR = 3


def test_torchs_methods_and_casts():
    """What Python's own numbers have not, or have otherwise: as torch's tensors of rank 0."""
    ninf, near, widths = -math.inf, Mode.NEAR, np.array([1, 4, 9])
    table = torch.tensor([2, 5])

    def kept_by_method(score, b, h, q, kv):
        return score.where(q >= kv, ninf)

    def chosen_integers(b, h, q, kv):
        return q.where(q >= kv, kv) > 5

    def any_width(b, h, q, kv):
        keep = q == kv
        for width in widths:
            keep = keep | (q - kv == width)
        first, last = table
        return keep & (q > first + last) & (4 in widths)

    def wrapped(b, h, q, kv):
        return ((q - kv).to(torch.uint8) < 4) | (((q - kv) * 100).to(torch.int8) < -near)

    def truncated(b, h, q, kv):
        return torch.div(q + (2**30 + 1 - kv), -2, rounding_mode="trunc") % 2 == 0

    q, kv = np.arange(16)[:, None] - 3, np.arange(16)
    score = np.float32(q * 0.5 - kv)
    gap = q - kv
    wanted = {
        kept_by_method: np.where(q >= kv, score, -math.inf),
        chosen_integers: np.where(q >= kv, q, kv) > 5,
        any_width: ((gap == 0) | np.isin(gap, widths)) & (q > 7),
        wrapped: (gap.astype(np.uint8) < 4) | ((gap * 100).astype(np.int8) < -3),
        truncated: np.trunc((q + (2**30 + 1 - kv)) / -2).astype(np.int64) % 2 == 0,
    }
    for fn, want in wanted.items():
        traced = trace_score(fn) if takes_score(fn) else trace_mask(fn)
        np.testing.assert_array_equal(traced.evaluate(0, 0, q, kv, score), want, fn.__name__)


def test_constants_are_cast_as_kernels_cast():
    def ints(score, b, h, q, kv):
        return score + score.new_full((), 0.99999999999).int() + score.new_full((), 1e10).int() * 0

    assert trace_score(ints).evaluate(0, 0, 0, 0, 0.0) == 1.0


def test_a_number_that_python_needs_is_fixed():
    window, steps = 4, 2

    def mod(b, h, q, kv):
        keep = q >= kv
        for i in range(steps):
            keep = keep & (q - kv != i)
        return keep & (q - kv < window) if window > 0 else keep

    traced = trace_mask(mod)
    assert traced.values == {} and "< 4" in traced.source


def test_numbers_become_constants_where_parameters_fail():
    size = 3

    def mod(b, h, q, kv):
        assert isinstance(size, int)
        return q - kv < size

    traced = trace_mask(mod)
    assert traced.values == {} and "< 3" in traced.source


def test_names_are_identifiers_of_their_own():
    def named(name):
        def mod(score, b, h, q, kv):
            return score

        mod.__name__ = name
        return trace_score(mod).name

    assert named("<lambda>") == "lambda"
    assert named("double") == "double_mod"
    assert named("softcap") == "softcap_mod"
    assert named("größe x") == "gr_e_x"
    assert named("2d") == "mod_2d"


def test_members_that_share_a_name_are_told_apart():
    def window(width):
        return lambda b, h, q, kv: q - kv < width

    first, second = window(3), window(5)
    traced = trace_mask(lambda b, h, q, kv: first(b, h, q, kv) | second(b, h, q, kv) & first(b, h, kv, q))
    assert traced.values == {"width": 3, "width_2": 5}


def test_the_function_itself_is_unchanged():
    scale, table = 2.0, np.arange(4.0)

    def mod(score, b, h, q, kv):
        return score * scale + table[h]

    before = [cell.cell_contents for cell in mod.__closure__]
    trace_score(mod)
    assert all(a is b for a, b in zip(before, (cell.cell_contents for cell in mod.__closure__)))
    assert mod(1.0, 0, 3, 0, 0) == 5.0


def test_masks_joined_by_torch_are_looked_into():
    from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

    def window(width):
        return lambda b, h, q, kv: q - kv < width

    joined = and_masks(lambda b, h, q, kv: DOC[q] == DOC[kv], or_masks(window(3), window(5)), noop_mask)
    traced = trace_mask(joined)
    assert traced.values["width"] == 3 and traced.values["width_2"] == 5
    np.testing.assert_array_equal(traced.values["DOC"], DOC)
    q, kv = np.arange(64)[:, None], np.arange(64)
    np.testing.assert_array_equal(traced.evaluate(0, 0, q, kv), (DOC[q] == DOC[kv]) & (q - kv < 5))


def test_jax_arrays_are_captured():
    import jax.numpy as jnp

    table = jnp.arange(8.0)
    traced = trace_score(lambda score, b, h, q, kv: score + table[h])
    np.testing.assert_array_equal(traced.evaluate(0, np.arange(8), 0, 0, 1.0), np.arange(8) + 1.0)
