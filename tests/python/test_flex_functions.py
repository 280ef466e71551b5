"""Functions that kernels do not have by themselves, and tensors of traced values: the C++ against torch in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checks import within
from flex_compiled import Compiled
from raddle.flex import TraceError, create_block_mask, flex_attention
from raddle.flex.trace import takes_score, trace_mask, trace_score
from reference import Flex
from small import refuses
from test_flex_attention import draw, exact_of

ONE = {
    "erf": torch.erf, "erfc": torch.erfc, "log1p": torch.log1p, "expm1": torch.expm1, "sinh": torch.sinh,
    "cosh": torch.cosh, "tan": torch.tan, "atan": torch.atan, "asin": torch.asin, "acos": torch.acos,
    "asinh": torch.asinh, "acosh": torch.acosh, "atanh": torch.atanh, "gelu": F.gelu, "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "softplus": F.softplus, "elu": F.elu, "selu": F.selu,
    "softplus_beta": lambda x: F.softplus(x, 2.0, 9.0), "leaky_relu": lambda x: F.leaky_relu(x, 0.2), "mish": F.mish,
    "round": torch.round, "trunc": torch.trunc, "logsigmoid": F.logsigmoid, "hardtanh": F.hardtanh, "relu6": F.relu6,
    "log10": torch.log10, "softsign": F.softsign, "special_erf": torch.special.erf, "method": lambda x: x.erf().sinh(),
    "nan_to_num": lambda x: torch.nan_to_num(x, 1.0, 2.0, 3.0), "isinf": lambda x: torch.isinf(x) * 1.0,
    "isfinite": lambda x: torch.isfinite(x) * 1.0, "fmod": lambda x: torch.fmod(x, 3.0), "power": lambda x: x**2.5,
    "inverse_power": lambda x: x**-3, "exponential": lambda x: 1.3**x, "lerp": lambda x: torch.lerp(x, 2 * x, 0.3),
    "copysign": lambda x: torch.copysign(torch.ones_like(x) * 2, x), "hypot": lambda x: torch.hypot(x, x + 1),
    "atan2": lambda x: torch.atan2(x, x - 1) + torch.atan2(x, 1 - x), "logaddexp": lambda x: torch.logaddexp(x, -x),
    "isin": lambda x: torch.isin(torch.round(x), torch.tensor([1.0, -2.0])) * 1.0,
    "frac": torch.frac, "celu": lambda x: F.celu(x, 0.7), "hardswish": F.hardswish, "hardsigmoid": F.hardsigmoid,
    "hardshrink": F.hardshrink, "softshrink": F.softshrink, "tanhshrink": F.tanhshrink,
    "threshold": lambda x: F.threshold(x, 0.1, 20.0), "logaddexp2": lambda x: torch.logaddexp2(x, -x),
    "xlogy": lambda x: torch.xlogy(x, abs(x)), "sinc": lambda x: torch.sinc(x / 9),
    "type_as": lambda x: (x > 0).type_as(x),
    "traced_power": lambda x: torch.pow(torch.abs(x), x / 16), "odd_power": lambda x: torch.pow(x, torch.round(x / 30)),
}  # fmt: skip
ERFC = 4e-7  # absolute: 1 - erf
ABSOLUTE = {"erf": ERFC, "erfc": ERFC, "gelu": 60 * ERFC, "gelu_tanh": 3e-5, "special_erf": ERFC, "method": 2 * ERFC,
            "atan2": ERFC, "cosh": ERFC, "log10": ERFC, "logaddexp": 2e-6, "tan": 0, "lerp": 1e-5, "mish": 4e-5,
            "tanhshrink": 2**-20, "logaddexp2": 3e-6, "sinc": ERFC}  # fmt: skip
RELATIVE = {"exponential": 1e-5, "inverse_power": 1e-6, "power": 3e-6, "tan": 2e-5}
POWERS = {"traced_power", "odd_power"}


def relative_of_powers(exact):
    """x^y is 2^t with t = y·log2(x): log2 and the product leave t 2.5 · 2^-24 of its value off, 2^t adds 4 · 2^-24."""
    t = np.abs(np.log2(np.abs(exact)))
    return math.log(2) * t * 2.5 * 2.0**-24 + 4 * 2.0**-24


def as_score(function):
    def mod(score, b, h, q, kv):
        return function(score)

    mod.__name__ = "mod"
    return mod


def test_elementary_functions(rng, tmp_path):
    traced = [trace_score(as_score(function)) for function in ONE.values()]
    x = np.concatenate([rng.standard_normal(700) * size for size in (1e-4, 0.1, 1.0, 9.0, 40.0)])
    x = np.float32([*x, 0.0, -0.0, math.inf, -math.inf, math.nan, 0.5, 1.5, -2.5, 1.0, -1.0, 4194305.5, -8388609.0])
    at, compiled = np.zeros((len(x), 4), np.int32), Compiled(tmp_path, traced)
    for i, (name, function) in enumerate(ONE.items()):
        with np.errstate(all="ignore"):
            exact = function(torch.from_numpy(x).double()).numpy()
            held = exact.astype(np.float32)
            for found in (compiled.run(i, at, x), traced[i].evaluate(*at.T, x)):
                finite = np.isfinite(held) & (np.abs(held) > 1e-30)
                relative = relative_of_powers(exact) if name in POWERS else RELATIVE.get(name, 2e-6)
                allowed = relative * np.abs(exact) + ABSOLUTE.get(name, 1e-7)
                off = np.abs(found - exact)[finite] / allowed[finite]
                assert off.max() <= 1.0, (name, x[finite][off.argmax()], found[finite][off.argmax()])
                assert np.array_equal(np.isnan(found), np.isnan(held)), name
                assert np.array_equal(found[np.isinf(held)], held[np.isinf(held)]), name


B, H, S, D = 2, 3, 12, 5
Q_ROPE, K_ROPE = torch.randn(B, H, S, D), torch.randn(B, S, D)
CHOSEN, WIDTHS = torch.randint(0, 4, (B, H, 3, 2)), torch.tensor([1, 4, 9])


def dot(score, b, h, q, kv):
    return score + torch.dot(Q_ROPE[b, h, q], K_ROPE[b, kv])


def product_and_sum(score, b, h, q, kv):
    return score + (Q_ROPE[b, h, q] * K_ROPE[b, kv]).sum() + Q_ROPE[b, h, q, :] @ K_ROPE[b, kv, :]


def norms(score, b, h, q, kv):
    far = torch.linalg.vector_norm(Q_ROPE[b, h, q] - K_ROPE[b, kv])
    return score / (1 + far) + K_ROPE[b, kv].norm() + (K_ROPE[b, kv] ** 2).mean() + K_ROPE[b, kv].abs().max()


def chosen_blocks(b, h, q, kv):
    return (CHOSEN[b, h, q // 4] == kv // 4).any()


def any_width(b, h, q, kv):
    return (WIDTHS == q - kv).any() | torch.isin(q - kv, WIDTHS) | torch.isin(kv, torch.tensor([3]))


def stacked(score, b, h, q, kv):
    return torch.stack([score, score * 0.5, q * 0.1]).max(dim=0).values + torch.stack((q, kv)).sum()


def new_dimensions(b, h, q, kv):
    return (q.unsqueeze(-1) >= torch.stack([kv, kv + 2])).all() | (kv[None] == q[None])[0]


def slices(score, b, h, q, kv):
    rows = Q_ROPE[b, h, q, 1:3].sum() + K_ROPE[b, kv, ...].sum(-1) + Q_ROPE[b, :, q, 0].max()
    return score + rows + Q_ROPE[b, h, q][::2].sum() + torch.matmul(K_ROPE[b, :3], Q_ROPE[b, h, q]).sum()


def integer_powers(score, b, h, q, kv):
    return score + 2**h + (q - 6) ** 3 + torch.pow(kv - 4, b + 2) + 1.5 ** -(h + 1)


def whole_slices(score, b, h, q, kv):
    return score + K_ROPE[b, :S][q, 0] * K_ROPE[b, :, :D][kv][1] + Q_ROPE[b, :][h, q, 2]


BYTES, SIGNED = torch.randint(0, 256, (S,), dtype=torch.uint8), torch.randint(-128, 128, (S,), dtype=torch.int8)
SHORTS = torch.randint(-30000, 30000, (S,), dtype=torch.int16)


def narrow_integers(score, b, h, q, kv):
    """They wrap as they do in torch; with integers of other kinds they are these."""
    wrapped = (BYTES[q] - BYTES[kv]).float() + (SIGNED[q] * SIGNED[kv]).float() + (SHORTS[q] + SHORTS[kv]).float()
    numbers = (BYTES[q] * 2 + 9).float() + (~BYTES[kv]).float() + (-BYTES[q] >> 1).float() + (SIGNED[q] << 3).float()
    mixed = (BYTES[q] + SIGNED[kv]).float() + (BYTES[q] + kv).float() + (SIGNED[kv] + (q > kv)).float()
    chosen = torch.where(q > kv, BYTES[q], BYTES[kv]) + torch.maximum(BYTES[q], BYTES[kv])
    total = torch.stack([BYTES[q], BYTES[kv]]).sum() + BYTES[q].long() * BYTES[kv].int()
    return score + wrapped + numbers + mixed + chosen + total


def constants_of_64_bits(score, b, h, q, kv):
    """From 2^63 on an integer takes the bits, a float the value."""
    bits = (q.long() * 0x9E3779B97F4A7C15 >> 40) % 1000
    return score + bits + torch.where(score.abs() * 0xC2B2AE3D27D4EB4F > 1e19, 1.0, 0.0)


def weights(score, b, h, q, kv):
    row = torch.softmax(Q_ROPE[b, h, q], -1) @ K_ROPE[b, kv].log_softmax(0)
    return score + row + torch.logsumexp(torch.stack([score, Q_ROPE[b, h, q, 0]]), 0) + F.softmax(K_ROPE[b, :2, 0], dim=0)[1]


def contractions(score, b, h, q, kv):
    mixed = torch.einsum("d,ed,e->", Q_ROPE[b, h, q], K_ROPE[b, :D], K_ROPE[b, kv])
    outer = torch.einsum("i,j->ij", Q_ROPE[b, h, q], K_ROPE[b, kv]).t()[1, 3] + torch.outer(K_ROPE[b, 0], K_ROPE[b, kv])[2, 4]
    products = torch.bmm(Q_ROPE[b, :2, :3], Q_ROPE[b, :2, :D, :3].transpose(1, 2)[:, :3, :D].transpose(1, 2)).sum()
    return score + mixed + outer + products * 0.1 + F.linear(Q_ROPE[b, h, q], K_ROPE[b, :2], K_ROPE[b, kv, :2]).sum()


def choices(score, b, h, q, kv):
    row, near = Q_ROPE[b, h, q], torch.stack([kv % D, q % D])
    taken = torch.take(row, near).sum() + torch.index_select(K_ROPE[b, :3], 1, near)[2, 0] + row[kv % D - D]
    gathered = torch.gather(K_ROPE[b, :3], 1, torch.stack([near, near + 0, near * 0])).sum() + row.unsqueeze(0)[0, q % D]
    return score + taken + gathered + K_ROPE[b, :3][:, kv % D].sum() + torch.take_along_dim(row, near, 0)[1]


def places(score, b, h, q, kv):
    row = Q_ROPE[b, h, q]
    at = row.argmax() + torch.argmin(K_ROPE[b, :3], dim=1)[1] * 10 + row.max(dim=0).indices * 100
    return score + at + torch.count_nonzero(row > 0) + torch.min(K_ROPE[b, :4], 0).indices[2]


def statistics(score, b, h, q, kv):
    row, other = Q_ROPE[b, h, q], K_ROPE[b, kv]
    spread = row.var() + torch.std(other, unbiased=False) + torch.var(K_ROPE[b, :3], dim=1, correction=0).sum()
    return score + spread + F.cosine_similarity(row, other, dim=0) + row.cumsum(0)[3] + torch.cumprod(other, -1)[2]


def rearranged(score, b, h, q, kv):
    row, rows = Q_ROPE[b, h, q], K_ROPE[b, :3]
    turned = row.flip(0)[1] + torch.roll(row, 2)[0] + rows.permute(1, 0)[4, 2] + rows.transpose(0, 1)[3].sum()
    first, *_ = torch.unbind(rows + row.expand(3, D), 1)
    return score + turned + first.sum() + torch.flip(rows, [0, 1])[0, 0] + row.broadcast_to(2, D)[1, 1]


ROWS = [dot, product_and_sum, norms, chosen_blocks, any_width, stacked, new_dimensions, slices, integer_powers]
ROWS += [weights, contractions, choices, places, statistics, rearranged]
ROWS += [whole_slices, narrow_integers, constants_of_64_bits]


def test_rows_of_captured_arrays(rng, tmp_path):
    traced = [(trace_score if takes_score(fn) else trace_mask)(fn) for fn in ROWS]
    compiled = Compiled(tmp_path, traced)
    at = np.stack([rng.integers(0, n, 100) for n in (B, H, S, S)], 1)
    score = rng.standard_normal(100).astype(np.float32)
    for i, fn in enumerate(ROWS):
        rows = [[torch.tensor(int(x)) for x in row] for row in at]
        scores = [[torch.tensor(s)] if takes_score(fn) else [] for s in score]
        expected = [float(fn(*s, *row)) for s, row in zip(scores, rows)]
        for found in (compiled.run(i, at, score), traced[i].evaluate(*at.T, score)):
            np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-5, err_msg=fn.__name__)


def test_rows_in_attention(rng):
    """Selected blocks and a rotary part of their own, as sparse and latent attention have them."""
    q, k, v = draw(rng, batch=B, heads=H, kv_heads=H, rows=S, keys=S)
    mask = create_block_mask(chosen_blocks, B, H, S, S)
    out = flex_attention(q, k, v, score_mod=dot, block_mask=mask, return_lse=True)
    table = np.einsum("bhqd,bkd->bhqk", Q_ROPE.double(), K_ROPE.double())
    blocks = CHOSEN.numpy()

    def exact_dot(s, b, h, q_idx, kv_idx):
        return s + table[b, h, q_idx, kv_idx]

    def exact_blocks(b, h, q_idx, kv_idx):
        return (blocks[b, h, q_idx // 4, 0] == kv_idx // 4) | (blocks[b, h, q_idx // 4, 1] == kv_idx // 4)

    within(exact_of(q, k, v, Flex(exact_dot, error=1e-5), Flex(exact_blocks)), *out)


def scattered(b, h, q_idx, kv_idx):
    return ((q_idx.long() * 73856093 ^ kv_idx.long() * 19349663) >> 5) % 7 < 3


def test_hashes_are_torchs(rng):
    """Of 64 bits: in 32 they are others from index 30 on."""
    q, k, v = map(torch.tensor, draw(rng, rows=90, keys=90, kv_heads=4))
    idx = torch.arange(90)
    keep = scattered(0, 0, idx[:, None], idx[None])
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
    block_mask = create_block_mask(scattered, None, None, 90, 90)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=block_mask), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("mod", "words"),
    [
        (lambda score, b, h, q, kv: torch.lgamma(score), "`lgamma` of a traced value is unknown; write it with"),
        (lambda score, b, h, q, kv: torch.erfinv(score), "known are erf and"),
        (lambda score, b, h, q, kv: torch.sort(K_ROPE[b, kv])[0], "`sort` of a traced tensor is unknown"),
        (lambda score, b, h, q, kv: torch.einsum("ii->", K_ROPE[b, :D]), "expected one letter a dimension, each once"),
        (lambda score, b, h, q, kv: K_ROPE[b, :3][..., kv % D], "is indexed with a traced value and more"),
        (lambda score, b, h, q, kv: K_ROPE[b].sum() + BIG[h].sum(), "at most 1024 elements"),
        (lambda score, b, h, q, kv: F.gelu(score, approximate="fast"), "expected 'none' or 'tanh'"),
        (lambda score, b, h, q, kv: K_ROPE[b, kv], "returns an array"),
        (lambda score, b, h, q, kv: K_ROPE[b, kv] + 1, "returns a Vector"),
    ],
)
def test_what_is_not_known_says_what_to_write(mod, words):
    with refuses(TraceError, words):
        trace_score(mod)


BIG = torch.zeros(3, 40, 40)
