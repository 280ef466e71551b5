"""Arrays of JAX: JAX in, JAX out, outside jit; inside, refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import raddle
from small import PAGED, SPEC, paged, refuses, run

DTYPES = {"float32": jnp.float32, "float16": jnp.float16, "bfloat16": jnp.bfloat16}


@pytest.fixture
def arrays(small_problem):
    return {name: jnp.asarray(x) for name, x in small_problem.items()}


def bits(x):
    x = np.asarray(x)
    return x.view(f"u{x.itemsize}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_jax_in_jax_out(arrays, dtype):
    typed = {name: x.astype(DTYPES[dtype]) for name, x in arrays.items()}
    spec = {**SPEC, "dtype": dtype, "variant": [raddle.Rope(16), raddle.Causal()]}
    out, lse = run(**typed, spec=spec, return_lse=True)
    assert isinstance(out, jax.Array) and isinstance(lse, jax.Array)
    assert out.dtype == DTYPES[dtype] and lse.dtype == jnp.float32 and out.devices() == typed["q"].devices()
    expected = run(**{name: np.asarray(x) for name, x in typed.items()}, spec=spec, return_lse=True)
    for a, b in zip((out, lse), expected):
        np.testing.assert_array_equal(bits(a), bits(b))


def test_results_are_not_overwritten(arrays):
    """A result may share memory with what Raddle wrote; the next run must not write there."""
    first = run(**arrays)
    kept = np.array(first)
    for _ in range(5):
        run(**{**arrays, "q": arrays["q"] + 1.0})
    np.testing.assert_array_equal(first, kept)


def test_results_of_lazy_computations(arrays):
    """JAX computes in the background: Raddle waits for its inputs."""
    q = arrays["q"]
    for _ in range(50):
        q = jnp.tanh(q @ jnp.full((16, 16), 0.1)) + 1e-3
    np.testing.assert_array_equal(run(q, arrays["k"], arrays["v"]), run(np.asarray(q), arrays["k"], arrays["v"]))


def test_layouts_members_and_scales_of_jax(arrays):
    layout = paged(**{name: jnp.asarray(x) for name, x in PAGED.items() if name != "page_size"})
    spec = {**SPEC, "variant": [raddle.Sinks(jnp.arange(4.0)), raddle.Causal()]}
    attn = raddle.Attention(raddle.AttentionSpec(**spec))
    plan = attn.plan(layout)
    kv = (arrays["k"], arrays["v"])
    out = attn.run(plan, arrays["q"], kv, params={"sinks.logit": jnp.full(4, 0.5)})
    meant = {**SPEC, "variant": [raddle.Sinks([0.5] * 4), raddle.Causal()]}
    np.testing.assert_array_equal(out, run(**arrays, spec=meant))


def test_states_merge(arrays):
    state = run(**arrays, return_state=True)
    o, lse = raddle.merge_state(*state, *state)
    assert isinstance(o, jax.Array) and isinstance(lse, jax.Array)
    np.testing.assert_allclose(o, state[0], atol=1e-6)
    np.testing.assert_allclose(lse, state[1] + np.log(2.0), atol=1e-5)
    merged = raddle.merge_states(jnp.stack([state[0]] * 2), jnp.stack([state[1]] * 2))
    assert isinstance(merged[0], jax.Array)


def test_one_call_with_a_batch_dimension(arrays):
    q, k, v = (arrays[n][None, :, :4] for n in ("q", "k", "v"))
    k, v = k[:, 0], v[:, 0]
    out = raddle.attention(q, k, v, causal=True)
    assert isinstance(out, jax.Array) and out.shape == q.shape


def test_mixed_kinds_follow_q(arrays, small_problem):
    out = run(small_problem["q"], arrays["k"], arrays["v"])
    assert isinstance(out, np.ndarray)
    assert isinstance(run(arrays["q"], small_problem["k"], small_problem["v"]), jax.Array)
    numpy_out = np.empty((3, 4, 16), np.float32)
    assert run(**arrays, out=numpy_out) is numpy_out
    np.testing.assert_array_equal(numpy_out, out)


def test_what_is_written_cannot_be_jax(arrays):
    with refuses(TypeError, "out is a JAX array", "immutable"):
        run(**arrays, out=run(**arrays))
    with refuses(TypeError, "lse is a JAX array", "immutable"):
        run(**arrays, lse=jnp.zeros((3, 4)))
    with refuses(TypeError, "kv_pool: k is a JAX array", "immutable", "expected an array"):
        raddle.append_kv(paged(), (arrays["k"], arrays["v"]), arrays["k"][:3, 0], arrays["v"][:3, 0])


def test_deleted_arrays(arrays):
    gone = arrays["q"] + 1.0
    gone.delete()
    with refuses(TypeError, "q is a", "deleted"):
        run(gone, arrays["k"], arrays["v"])


TRANSFORMS = {
    "jit": jax.jit,
    "grad": lambda f: jax.grad(lambda x: jnp.sum(f(x))),
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None]),
    "eval_shape": lambda f: lambda x: jax.eval_shape(f, x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name, called", [("q", "q"), ("k", "kv: k"), ("v", "kv: v")])
def test_inside_transforms_inputs_are_refused_by_name(arrays, transform, name, called):
    with refuses(TypeError, f"{called} is a JAX tracer", "outside jit"):
        TRANSFORMS[transform](lambda x: run(**{**arrays, name: x}))(arrays[name])


def test_inside_jit_everything_is_refused_by_name(arrays):
    attn = raddle.Attention(raddle.AttentionSpec(**SPEC, variant=[raddle.Sinks([0.0] * 4)]))
    plan, kv, q = attn.plan(paged()), (arrays["k"], arrays["v"]), arrays["q"]
    state = attn.run(plan, q, kv, return_state=True)
    indptr, one_o = jnp.array([0, 1, 3]), state[0][None]
    calls = [
        ("q", q, lambda x: raddle.attention(x, x, x)),
        ("scale", 0.5, lambda x: attn.run(plan, q, kv, scale=x)),
        ("params['sinks.logit']", jnp.ones(4), lambda x: attn.run(plan, q, kv, params={"sinks.logit": x})),
        ("logits", jnp.ones(4), raddle.Sinks),
        ("slopes", jnp.ones(4), raddle.Alibi),
        ("cap", 3.0, raddle.SoftCap),
        ("bias", 3.0, raddle.Sigmoid),
        ("offset", jnp.arange(3), lambda x: raddle.Rope(8, offset=x)),
        ("qo_indptr", indptr, lambda x: raddle.RaggedKV(x, [0, 2, 4])),
        ("o_a", state[0], lambda x: raddle.merge_state(x, state[1], *state)),
        ("lse", state[1][None], lambda x: raddle.merge_states(one_o, x)),
        ("k_new", arrays["k"], lambda x: raddle.append_kv(paged(), tuple(map(np.array, kv)), x, arrays["v"])),
    ]
    for name, x, call in calls:
        with refuses(TypeError, f"{name} is a JAX tracer", "outside jit"):
            jax.jit(call)(x)
