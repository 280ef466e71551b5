"""torch.compile: calls are operators of its graphs, and a plan of another batch compiles nothing."""

import numpy as np
import pytest
import raddle
import torch
from small import SPEC, reserved

ROWS, KEYS = 3, 25
#: How a graph is captured and made functional, as torch's default backend has it, without the C++ that it writes.
CAPTURED = {"fullgraph": True, "backend": "aot_eager"}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def tensors(rng, rows=ROWS, keys=KEYS):
    torch.manual_seed(int(rng.integers(2**31)))
    return torch.randn(rows, 4, 16), torch.randn(keys, 2, 16), torch.randn(keys, 2, 16)


def ragged(rows=ROWS, keys=KEYS):
    return raddle.RaggedKV([0, rows], [0, keys])


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def equal(found, expected):
    both = (x if isinstance(x, tuple) else (x,) for x in (found, expected))
    for a, b in zip(*both):
        assert torch.equal(a, b)


def test_a_new_plan_compiles_nothing(rng):
    attn = raddle.Attention(raddle.AttentionSpec(**SPEC, variant=[raddle.Causal()]))

    def layer(plan, q, k, v):
        return attn.run(plan, 2 * q, (k, v)) + q

    compiled = torch.compile(layer, **CAPTURED)
    for step, rows in enumerate((3, 4, 5, 7, 2)):
        q, k, v = tensors(rng, rows, KEYS + step)
        plan = attn.plan(ragged(rows, KEYS + step))
        equal(compiled(plan, q, k, v), layer(plan, q, k, v))
        if step == 1:
            compiled_by_now = graphs()
    assert graphs() == compiled_by_now


def test_two_layers_of_one_plan(rng):
    """Different members, scales and pools a layer; the mutated outputs are the caller's."""
    variant = [raddle.Sinks([0.5] * 4), raddle.SoftCap(30.0), raddle.Causal()]
    attn = raddle.Attention(raddle.AttentionSpec(**SPEC, variant=variant))

    def layers(plan, q, pools, sinks, out):
        for nth, kv in enumerate(pools):
            params = {"softcap.cap": 20.0 + nth, "sinks.logit": sinks[nth]}
            q = q + attn.run(plan, q, kv, scale=0.5 / (nth + 1), params=params)
        attn.run(plan, q, pools[0], out=out, params={"sinks.logit": [0.25, 1.0, -1.0, 2.0]})
        return q

    q, k, v = tensors(rng)
    one_tensor = torch.stack([v, k], 1)
    args = attn.plan(ragged()), q, [(k, v), one_tensor], torch.randn(2, 4)
    outs = [torch.full((ROWS, 4, 16), float("nan")) for _ in range(2)]
    equal(torch.compile(layers, fullgraph=True)(*args, outs[0]), layers(*args, outs[1]))
    equal(outs[0], outs[1])


@pytest.mark.parametrize("how", [{}, {"return_state": True}, {"return_lse": True, "lse_base_2": True}], ids=str)
def test_heads_folded_into_rows(rng, how):
    attn = raddle.Attention(raddle.AttentionSpec(**SPEC, variant=[raddle.Causal()]))
    q, k, v = tensors(rng)
    args = attn.plan(ragged()), q.flatten(1), k.flatten(1), v

    def call(plan, q, k, v):
        return attn.run(plan, q, (k, v), **how)

    equal(torch.compile(call, **CAPTURED)(*args), call(*args))


@pytest.mark.parametrize("how", [{}, {"return_lse": True}, {"return_state": True}], ids=str)
def test_levels_states_and_reservations(rng, how):
    attn = raddle.Attention(raddle.AttentionSpec(**{**SPEC, "dtype": "bfloat16"}, variant=[raddle.Causal()]))
    q, k, v = (x.bfloat16() for x in tensors(rng))
    reservation = reserved(attn, max_requests=2, max_qo_tokens=8, max_kv_tokens=64)
    reservation.update(ragged())

    def call(plan, q, kv):
        return attn.run(plan, q, kv, **how)

    equal(torch.compile(call, **CAPTURED)(reservation, q, [(k, v)]), call(reservation, q, [(k, v)]))


def test_unused_rows_of_a_reservation(rng):
    attn = raddle.Attention(raddle.AttentionSpec(**SPEC))
    q, k, v = tensors(rng)
    reservation = reserved(attn, max_requests=2, max_qo_tokens=ROWS + 3, max_kv_tokens=64)
    reservation.update(ragged())
    padded = torch.cat([q, torch.full((3, *q.shape[1:]), float("nan"))])
    out = torch.full_like(padded, float("nan"))

    def call(plan, q, kv, out):
        return attn.run(plan, q, kv, out=out, zero_unused_rows=True)

    torch.compile(call, **CAPTURED)(reservation, padded, (k, v), out)
    equal(out[:ROWS], attn.run(attn.plan(ragged()), q, (k, v)))
    assert not out[ROWS:].any()


def test_scales_of_quantized_keys_and_values(rng):
    attn = raddle.Attention(raddle.AttentionSpec(**SPEC, variant=[raddle.SoftCap(30.0)], kv_dtype=torch.float8_e4m3fn))
    q, k, v = tensors(rng)
    kv = tuple(x.to(torch.float8_e4m3fn) for x in (k, v))
    plan = attn.plan(ragged())

    def call(plan, q, kv, k_scale, v_scale):
        return attn.run(plan, q, kv, k_scale=k_scale, v_scale=v_scale, params={"softcap.cap": 5.0})

    compiled = torch.compile(call, **CAPTURED)
    by_token = torch.rand(KEYS, 2)
    for scales in ((0.5, torch.tensor([2.0, 3.0])), (by_token, None), ([None], [by_token]), (2, [0.25])):
        equal(compiled(plan, q, kv, *scales), call(plan, q, kv, *scales))


def test_a_level_without_a_scale_among_others(rng):
    attn = raddle.Attention(raddle.AttentionSpec(2, 2, 16, dtype="float32", kv_dtype=torch.float8_e4m3fn))
    shared = raddle.PagedKV([0, 2], [0, 1], [0], [8], page_size=8, qo_rows=[0, 1])
    own = raddle.PagedKV([0, 1, 2], [0, 1, 2], [0, 1], [5, 6], page_size=8)
    plan = attn.plan(raddle.Cascade([shared, own]))
    q = torch.from_numpy(rng.standard_normal((2, 2, 16)).astype(np.float32))
    pools = [torch.from_numpy(rng.standard_normal((n, 8, 2, 16))).to(torch.float8_e4m3fn) for n in (1, 1, 2, 2)]

    def call(plan, q, kv, k_scale):
        return attn.run(plan, q, kv, k_scale=k_scale)

    kv = [tuple(pools[:2]), tuple(pools[2:])]
    for scales in ([0.25, None], [None, 0.25]):
        equal(torch.compile(call, **CAPTURED)(plan, q, kv, scales), call(plan, q, kv, scales))


@pytest.mark.parametrize("return_lse", [False, True])
def test_attention_without_a_plan(rng, return_lse):
    q, k, v = tensors(rng)

    def call(q, k, v, layout=None):
        return raddle.attention(q, k, v, causal=True, scale=0.3, return_lse=return_lse, layout=layout)

    compiled = torch.compile(call, **CAPTURED)
    equal(compiled(q, k, v), call(q, k, v))
    heads_first = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16), "BHSD"
    equal(compiled(*heads_first), call(*heads_first))
    batch = torch.randn(2, 3, 4, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 16)
    equal(compiled(*batch), call(*batch))


def test_errors_keep_their_names(rng):
    attn = raddle.Attention(raddle.AttentionSpec(**SPEC))
    plan, (q, k, v) = attn.plan(ragged()), tensors(rng)
    compiled = torch.compile(attn.run, **CAPTURED)
    with pytest.raises(TypeError, match="kv: k has dtype float64; expected float32, as the spec says"):
        compiled(plan, q, (k.double(), v))
    with pytest.raises(ValueError, match="requires a gradient"):
        compiled(plan, torch.nn.Parameter(q), (k, v))
    with torch.no_grad():
        equal(compiled(plan, torch.nn.Parameter(q), (k, v)), attn.run(plan, q, (k, v)))
    with pytest.raises(Exception, match="timeline is given under torch.compile; expected None"):
        torch.compile(lambda x: attn.run(plan, x, (k, v), timeline=q), **CAPTURED)(q)


def test_a_plan_that_is_gone(rng):
    """A graph knows a plan by its number alone."""
    attn = raddle.Attention(raddle.AttentionSpec(**SPEC))
    plan, (q, k, v) = attn.plan(ragged()), tensors(rng)
    out, numbers = torch.zeros_like(q), (attn.number, plan.number)
    rest = [k, v], [2], out, None, False, False, None, "", [], []
    torch.ops.raddle.run(*numbers, q, *rest)
    equal(out, attn.run(plan, q, (k, v)))
    del plan
    with pytest.raises(RuntimeError, match="the plan of a compiled graph is gone; expected one that is kept"):
        torch.ops.raddle.run(*numbers, q, *rest)


def test_numbers_of_plans_that_are_gone_are_forgotten():
    from raddle import _torch_op

    attn = raddle.Attention(raddle.AttentionSpec(**SPEC))
    kept = [attn.plan(ragged()) for _ in range(3)]
    for _ in range(2 * _torch_op._LEAST_SWEPT):
        attn.plan(ragged())
    assert len(_torch_op._numbered) < 2 * _torch_op._LEAST_SWEPT
    assert all(_torch_op._numbered[each.number]() is each for each in (attn, *kept))
