"""Budgets are worth something: real faults leave them, and errors are no larger than PyTorch's.

A fault is planted into the exact answer, which is then rounded as a kernel would: nothing but the fault is seen.
"""

import numpy as np
import pytest
import torch
from checks import excess
from draws import DTYPES, draw, numpy_dtype
from reference import Causal, Problem, RaggedKV, SlidingWindow, attention, merge_states

KV_LEN = 4096


def peaked(rng, dtype, variant=(), qo_len=1, at=None) -> Problem:
    """Keys whose logits spread over ±4, and one, `at`, that a row gives about a twentieth of its weight."""
    problem = draw(
        rng, "ragged", list(variant), dtype, dim=64, group=2, num_kv_heads=2, lengths=[(qo_len, KV_LEN)], peak=2.0
    )
    if at is not None:
        lse = attention(problem).lse[-1].reshape(2, 2)
        k = problem.kv[0][0]
        q = problem.q[-1].astype(np.float64).reshape(2, 2, 64)[:, 0]
        size = (q**2).sum(-1, keepdims=True) * problem.softmax_scale
        k[at] = q / size * (lse[:, :1] - 3.0)
    return problem


def caught(exact, out, lse, dtype) -> None:
    kind = numpy_dtype(dtype)
    assert excess(out.astype(np.float32).astype(kind), exact.out, exact.out_budget).max() > 1.0, "O hides the fault"
    assert excess(lse.astype(np.float32), exact.lse, exact.lse_budget).max() > 1.0, "LSE hides the fault"


def rounded_is_within(exact, dtype):
    kind = numpy_dtype(dtype)
    assert excess(exact.out.astype(np.float32).astype(kind), exact.out, exact.out_budget).max() <= 1.0
    assert excess(exact.lse.astype(np.float32), exact.lse, exact.lse_budget).max() <= 1.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("at", [0, 2077, KV_LEN - 1])
def test_one_key_dropped(rng, dtype, at):
    problem = peaked(rng, dtype, at=at)
    exact = attention(problem)
    rounded_is_within(exact, dtype)
    k, v = (np.delete(x, at, axis=0) for x in problem.kv[0])
    fault = attention(Problem(problem.q, [(k, v)], RaggedKV([0, 1], [0, KV_LEN - 1]), []))
    caught(exact, fault.out, fault.lse, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("off", [-1, 1])
def test_a_window_off_by_one(rng, dtype, off):
    left = 1000
    edge = KV_LEN - 1 - left - (1 if off > 0 else 0)
    problem = peaked(rng, dtype, [SlidingWindow(left), Causal()], at=edge)
    fault = attention(Problem(problem.q, problem.kv, problem.layout, [SlidingWindow(left + off), Causal()]))
    caught(attention(problem), fault.out, fault.lse, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swapped_heads(rng, dtype):
    exact = attention(peaked(rng, dtype))
    order = [1, 0, 2, 3]
    caught(exact, exact.out[:, order], exact.lse[:, order], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_a_wrong_weight_in_a_merge(rng, dtype, factor):
    problem = peaked(rng, dtype)
    exact = attention(problem)
    k, v = problem.kv[0]
    halves = [(k[:2000], v[:2000]), (k[2000:], v[2000:])]
    states = [attention(Problem(problem.q, [kv], RaggedKV([0, 1], [0, len(kv[0])]), []), state=True) for kv in halves]
    o, lse = np.stack([s.out for s in states]), np.stack([s.lse for s in states])
    rounded_is_within(exact, dtype)
    lse[0] += np.log(factor)
    fault = merge_states(o, lse)
    caught(exact, fault.out, fault.lse, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_scale_left_out(rng, dtype):
    problem = peaked(rng, dtype)
    fault = attention(Problem(problem.q, problem.kv, problem.layout, [], scale=1.01 * problem.softmax_scale))
    caught(attention(problem), fault.out, fault.lse, dtype)


def rms(errors) -> float:
    return float(np.sqrt(np.mean(np.square(np.concatenate([e.ravel() for e in errors])))))


@pytest.mark.parametrize("shape", [(1, 2048), (192, 192)], ids=["decode", "prefill"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_error_is_no_larger_than_sdpas(engine, rng, dtype, shape):
    ours, theirs = [], []
    for _ in range(10):
        problem = draw(rng, "ragged", "causal", dtype, dim=128, group=4, num_kv_heads=2, lengths=[shape], peak=1.0)
        exact = attention(problem).out
        ours.append(engine.run(problem)[0].astype(np.float64) - exact)
        theirs.append(by_sdpa(problem, dtype, causal=shape[0] > 1) - exact)
    assert rms(ours) <= 1.02 * rms(theirs), f"RMS error {rms(ours):.4g}, PyTorch's {rms(theirs):.4g}"


def by_sdpa(problem, dtype, causal):
    tensors = [torch.from_numpy(x.astype(np.float32)).to(getattr(torch, dtype)) for x in (problem.q, *problem.kv[0])]
    q, k, v = (x.transpose(0, 1)[None] for x in tensors)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return out[0].transpose(0, 1).double().numpy()
