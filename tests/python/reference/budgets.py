"""How far a kernel may be off, element by element, derived from its roundings.

Inputs are exact. Logits, weights and sums are fp32; a transform of Q or K is rounded once to the matrix dtype;
the output is rounded once to its dtype. Write u for the unit roundoff (half an ulp of 1) and δ_j for the error
of key j's logit, weights' own roundings included. Then, exactly and not only to first order,

    |Δo|   ≤  Σ_j p_j (e^δ_j - 1) |v_j - o| / Σ_j p_j e^-δ_j   +  c(n) u32 (Σ_j p_j |v_j| + |o|)  +  u_out |o|
    |ΔLSE| ≤  Σ_j p_j (e^δ_j - 1)  +  c(n) u32  +  c u32 |LSE|

where the first sum is bounded by Cauchy-Schwarz, Σ w|v - o| ≤ √(Σw · Σw(v - o)²), so that all of it is a few
matrix products. Roundings are taken as independent (Hoeffding): n of them add up to LAMBDA·√n rather than n.
That fails once in 10⁷ elements at the very bound, and every term is itself a bound.
"""

from __future__ import annotations

import numpy as np

UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SMALLEST = {"float32": 2.0**-126, "float16": 2.0**-24, "bfloat16": 2.0**-126}  # below: absolute error
U32 = UNIT["float32"]
LAMBDA = 6.0
FUNCTION = 4.0  # errors of exp and sigmoid, in units of u32
TANH = 2.0**-21  # that of tanh in soft caps, an absolute one
TURN = 2.0**-20  # error of sines and cosines where rows have 16 bits: GPUs have an instruction for them


def accumulated(n: int) -> float:
    """Roundings, in units of u32 of the sum of magnitudes, of a sum of n products in any order."""
    return min(n, LAMBDA * np.sqrt(n)) + 4.0


def logit_error(problem, keys, work) -> np.ndarray:
    """δ [Hkv, G, R, N]: dot product, transforms, scale, logits parts and exponential."""
    from .exact import pairs
    from .variants import Flex, Rotation, SoftCap, logits_parts, parts

    scale = problem.softmax_scale
    dim = work.q.shape[-1]
    delta = accumulated(dim) * U32 * scale * pairs(np.abs(work.q), np.abs(work.k))
    rotations = parts(problem.variant, Rotation)
    if rotations:
        u = UNIT[str(problem.q.dtype)]
        dq, dk = (rotation_error(x, rotations[-1], u) for x in (work.q, work.k))
        delta += LAMBDA * scale * np.sqrt(pairs(dq**2, work.k**2) + pairs(work.q**2, dk**2))
    delta += 2.0 * U32 * np.abs(work.raw)
    s = work.raw
    for part in logits_parts(problem.variant):
        before, s = s, part.logits(s, keys)
        if isinstance(part, SoftCap):  # its slope is at most 1, its size at most cap; tanh has an absolute error
            delta = np.minimum(delta + 2.0 * U32 * np.abs(s) + TANH * part.cap, 2.0 * part.cap)
        elif isinstance(part, Flex):  # its operations are few, and none is larger than what goes in and comes out
            size = np.abs(before) + np.where(np.isneginf(s), 0.0, np.abs(s))
            names = getattr(getattr(part.fn, "__code__", None), "co_names", ())
            tanh = TANH if "tanh" in names else 0.0
            delta = part.moved(before, delta, keys) + max(4.0 * FUNCTION * U32, tanh) * size
        else:  # the distance as a float, the product, the sum
            delta = delta + 2.0 * U32 * np.abs(part.bias(before, keys)) + U32 * np.abs(s)
    # Beyond e^300 a budget forbids nothing but infinities, which no budget allows.
    return np.minimum(delta + exp_error(work.s), 300.0)


def rotation_error(x: np.ndarray, rotation, u: float) -> np.ndarray:
    """Of each element of a rotated vector: its rounding to the matrix dtype, and fp32 products and angles."""
    a, b, rest = rotation.pairs(np.abs(x))
    turned = (2.0 * FUNCTION * U32 + (TURN if u > U32 else 0.0)) * (a + b)
    return u * np.abs(x) + rotation.unpaired(turned, turned, np.zeros_like(rest))


def exp_error(s: np.ndarray) -> np.ndarray:
    """Relative error of exp(s - max), as an error of s; 0 for a key that is masked."""
    masked = np.isneginf(s)
    size = np.where(masked, 0.0, np.abs(s))
    top = np.max(size, axis=-1, keepdims=True, initial=0.0)
    return np.where(masked, 0.0, FUNCTION * U32 * (size + top + 2.0))


def of_softmax(p, p_sink, v, delta, out, lse, dtype, product=None, weights=None):
    """Budgets of O [.., R, Dvo] and LSE [.., R] for weights p [.., R, N] and values v.

    ``weights`` is the dtype that a kernel on matrix instructions rounds its weights to; None: they stay fp32.
    """
    from .exact import weighted

    product = product or weighted
    n = p.shape[-1]
    w = p * np.expm1(delta)
    total = w.sum(axis=-1)[..., None]
    # The sink is a key of value 0 whose logit is exact but for the exponential.
    sink = (p_sink * FUNCTION * U32 * (np.abs(np.where(np.isneginf(lse), 0.0, lse)) + 8.0))[..., None]
    spread = product(w, v**2) - 2.0 * out * product(w, v) + out**2 * total
    spread = np.sqrt(total * np.maximum(spread, 0.0)) + sink * np.abs(out)
    shrink = (p * np.exp(-delta)).sum(axis=-1) + p_sink
    shrink = np.where(shrink > 0.0, shrink, 1.0)[..., None]
    size = product(p, np.abs(v))
    error = spread / shrink + accumulated(n) * U32 * (size + np.abs(out))
    if weights:
        error = error + weight_rounding(p, p.max(axis=-1, initial=0.0), v, out, weights)
    budget = error + round_off(out, error, v, dtype)
    empty = np.isneginf(lse)
    lse_error = total[..., 0] + sink[..., 0] + accumulated(n) * U32
    lse_error = lse_error + FUNCTION * U32 * np.abs(np.where(empty, 0.0, lse))
    return budget, np.where(empty, 0.0, lse_error)


def weight_rounding(p, largest, v, out, dtype):
    """What rounding each weight once to a 16-bit dtype adds to an element's error.

    Roundings of unequal weights are independent, equal weights round alike (the second term), and small weights
    of float16 underflow; ``largest`` [.., R] is the weight that the kernel holds as 1. For scales of V see
    docs/design/quantisation.md.
    """
    from .exact import weighted

    independent = LAMBDA * np.sqrt(weighted(p**2, v**2))
    underflow = 2.0**-25 if dtype == "float16" else 0.0
    lost = underflow * largest[..., None] * accumulated(p.shape[-1]) * np.max(np.abs(v), initial=0.0)
    return UNIT[dtype] * (independent + np.abs(out)) + lost


def of_sum(w, v, delta, out, dtype, weights=None):
    """Budget of O = Σ_j w_j v_j, where a logit's error moves its weight by at most a factor e^δ."""
    from .exact import weighted

    size = weighted(w * (np.expm1(delta) + 2.0 * FUNCTION * U32), np.abs(v))
    error = size + accumulated(w.shape[-1]) * U32 * weighted(w, np.abs(v))
    if weights:
        error = error + weight_rounding(w, np.ones(w.shape[:-1]), v, out, weights)
    return error + round_off(out, error, v, dtype)


def round_off(out, error, v, dtype):
    """Rounding of the output, which may already be off by `error`, and weights and results that underflow."""
    underflow = SMALLEST[dtype] + SMALLEST["float32"] * v.shape[-2] * np.max(np.abs(v), initial=0.0)
    return UNIT[dtype] * (np.abs(out) + error) + np.where(out == 0.0, 0.0, underflow)
