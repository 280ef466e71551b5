"""Tensors of PyTorch: torch in, torch out; the same numbers as SDPA; gradients refused by name."""

import numpy as np
import pytest
import raddle
import torch

SDPA = torch.nn.functional.scaled_dot_product_attention
TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=lambda d: str(d).split(".")[1])


@pytest.fixture
def tensors(rng):
    torch.manual_seed(int(rng.integers(2**31)))

    def make(dtype, rows=37, keys=90, heads=(8, 2), dim=64):
        q = torch.randn(rows, heads[0], dim).to(dtype)
        return q, torch.randn(keys, heads[1], dim).to(dtype), torch.randn(keys, heads[1], dim).to(dtype)

    return make


def attention_of(dtype, heads=(8, 2), dim=64, variant=()):
    return raddle.Attention(raddle.AttentionSpec(*heads, dim, dtype=str(dtype).split(".")[1], variant=list(variant)))


def one_request(rows, keys):
    return raddle.RaggedKV(torch.tensor([0, rows], dtype=torch.int32), torch.tensor([0, keys], dtype=torch.int32))


def by_sdpa(q, k, v, **how):
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    return SDPA(q, k, v, enable_gqa=True, **how).transpose(-3, -2)


@DTYPES
def test_torch_in_torch_out(tensors, dtype):
    q, k, v = tensors(dtype)
    attn = attention_of(dtype)
    out, lse = attn.run(attn.plan(one_request(37, 90)), q, (k, v), return_lse=True)
    assert isinstance(out, torch.Tensor) and out.dtype == dtype and out.shape == q.shape
    assert isinstance(lse, torch.Tensor) and lse.dtype == torch.float32 and lse.shape == (37, 8)
    torch.testing.assert_close(out, by_sdpa(q[None], k[None], v[None])[0], atol=TOLERANCE[dtype], rtol=0)


@DTYPES
def test_outputs_of_the_callers_own(tensors, dtype):
    q, k, v = tensors(dtype)
    attn = attention_of(dtype, variant=[raddle.Causal()])
    plan = attn.plan(one_request(37, 90))
    out = torch.full_like(q, float("nan"))
    assert attn.run(plan, q, (k, v), out=out) is out
    torch.testing.assert_close(out, attn.run(plan, q, (k, v)), atol=0, rtol=0)


@DTYPES
@pytest.mark.parametrize("causal", [False, True])
def test_one_call_without_a_plan(tensors, dtype, causal):
    q, k, v = tensors(dtype, rows=50, keys=50)
    out = raddle.attention(q, k, v, causal=causal)
    expected = by_sdpa(q[None], k[None], v[None], is_causal=causal)[0]
    torch.testing.assert_close(out, expected, atol=TOLERANCE[dtype], rtol=0)


@DTYPES
def test_one_call_with_a_batch_dimension(tensors, dtype):
    q, k, v = (x.reshape(3, -1, *x.shape[1:]) for x in tensors(dtype, rows=3 * 20, keys=3 * 20))
    out = raddle.attention(q, k, v, causal=True, layout="BSHD")
    assert out.shape == q.shape
    torch.testing.assert_close(out, by_sdpa(q, k, v, is_causal=True), atol=TOLERANCE[dtype], rtol=0)


def test_transposed_views_need_no_copy(tensors):
    """SDPA's own [B, H, S, D] memory, seen as [S, H, D]."""
    q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors(torch.float32))
    assert not q.is_contiguous()
    attn = attention_of(torch.float32)
    out = attn.run(attn.plan(one_request(37, 90)), q, (k, v))
    torch.testing.assert_close(out, by_sdpa(q[None], k[None], v[None])[0], atol=3e-6, rtol=0)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_an_input_that_requires_a_gradient_is_refused_by_name(tensors, name):
    q, k, v = tensors(torch.float32)
    {"q": q, "k": k, "v": v}[name].requires_grad_()
    attn = attention_of(torch.float32)
    plan = attn.plan(one_request(37, 90))
    with pytest.raises(ValueError, match=rf"\b{name}\b.*grad"):
        attn.run(plan, q, (k, v))
    with pytest.raises(ValueError, match=rf"\b{name}\b.*grad"):
        raddle.attention(q, k, v)


def test_no_grad_and_detached_inputs_are_fine(tensors):
    q, k, v = tensors(torch.float32)
    expected = raddle.attention(q, k, v)
    q.requires_grad_()
    torch.testing.assert_close(raddle.attention(q.detach(), k, v), expected, atol=0, rtol=0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parameters_are_taken_where_there_are_no_gradients(tensors, mode):
    q, k, v = tensors(torch.float32)
    sinks = torch.zeros(q.shape[1])
    attn = raddle.Attention(raddle.AttentionSpec(q.shape[1], k.shape[1], 64, dtype="fp32", variant=[raddle.Sinks(sinks)]))
    plan = attn.plan(one_request(37, 90))
    expected = attn.run(plan, q, (k, v))
    parameter = torch.nn.Parameter
    with mode():
        same = raddle.Attention(
            raddle.AttentionSpec(q.shape[1], k.shape[1], 64, dtype="fp32", variant=[raddle.Sinks(parameter(sinks))])
        )
        out = same.run(plan, parameter(q), (parameter(k), parameter(v)))
    torch.testing.assert_close(out, expected, atol=0, rtol=0)
    assert not out.requires_grad
    with pytest.raises(ValueError, match=r"q requires a gradient.*torch\.no_grad\(\)"):
        attn.run(plan, parameter(q), (k, v))


@DTYPES
def test_numpy_and_torch_hold_the_same_bits(tensors, dtype):
    import ml_dtypes

    q, k, v = tensors(dtype)
    bits = {2: torch.int16, 4: torch.int32}[q.element_size()]
    kind = ml_dtypes.bfloat16 if dtype == torch.bfloat16 else np.dtype(str(dtype).split(".")[1])
    arrays = [x.view(bits).numpy().view(kind) for x in (q, k, v)]
    out = raddle.attention(*arrays)
    assert isinstance(out, np.ndarray) and out.dtype == kind
    np.testing.assert_array_equal(out.view(f"i{q.element_size()}"), raddle.attention(q, k, v).view(bits).numpy())


def test_states_of_torch_tensors_merge(tensors):
    q, k, v = tensors(torch.float32)
    attn = attention_of(torch.float32)
    parts = [(k[:40], v[:40]), (k[40:], v[40:])]
    states = [attn.run(attn.plan(one_request(37, len(kv[0]))), q, kv, return_state=True) for kv in parts]
    out, lse = raddle.merge_state(*states[0], *states[1])
    whole, whole_lse = attn.run(attn.plan(one_request(37, 90)), q, (k, v), return_lse=True)
    assert isinstance(out, torch.Tensor)
    torch.testing.assert_close(out, whole, atol=2e-6, rtol=0)
    torch.testing.assert_close(lse, whole_lse, atol=2e-6, rtol=0)
