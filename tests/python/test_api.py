"""The Python package: what it returns for which inputs, its functions, and what a call costs."""

import sys

import ml_dtypes
import numpy as np
import pytest
import raddle
import torch
from small import SPEC, attention, paged, refuses, run

# --- numpy ------------------------------------------------------------------------------------


def test_results_of_numpy(small_problem):
    out, lse = run(**small_problem, return_lse=True)
    assert isinstance(out, np.ndarray) and out.shape == (3, 4, 16) and out.dtype == np.float32
    assert isinstance(lse, np.ndarray) and lse.shape == (3, 4) and lse.dtype == np.float32
    state, state_lse = run(**small_problem, return_state=True)
    assert state.dtype == np.float32 and state_lse.shape == (3, 4)
    given, given_lse = np.empty_like(out), np.empty_like(lse)
    assert run(**small_problem, out=given, lse=given_lse) is given
    np.testing.assert_array_equal(given, out)
    np.testing.assert_array_equal(given_lse, lse)


def test_bfloat16_of_numpy(small_problem):
    half = {name: x.astype(ml_dtypes.bfloat16) for name, x in small_problem.items()}
    out = run(**half, spec={**SPEC, "dtype": "bfloat16"})
    assert out.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(out.astype(np.float32), run(**small_problem), atol=0.05)


def test_a_sigmoid_has_no_lse(small_problem):
    spec = {**SPEC, "variant": raddle.Sigmoid(-1.0)}
    assert isinstance(run(**small_problem, spec=spec, return_state=True), np.ndarray)
    with refuses(ValueError, "lse"):
        run(**small_problem, spec=spec, return_lse=True)


def test_what_was_never_made_has_a_repr():
    """Error reporters show the variables of the frame in which a constructor raised."""
    for kind in (raddle.PagePool, raddle.PagedKV, raddle.SoftCap, raddle.RadixCache, raddle.Plan, raddle.Reservation):
        assert repr(kind.__new__(kind)) == f"{kind.__name__}(not made)"


def test_a_head_dim_of_v_of_its_own(small_problem):
    v = np.ascontiguousarray(small_problem["v"][..., :8])
    out = run(small_problem["q"], small_problem["k"], v, spec={**SPEC, "head_dim_vo": 8})
    np.testing.assert_array_equal(out, run(**small_problem)[..., :8])


def test_k_and_v_in_one_tensor(small_problem):
    both = np.stack([small_problem["k"], small_problem["v"]], axis=1)
    attn = attention()
    plan = attn.plan(paged())
    for kv in (both, [both], (both[:, 0], both[:, 1])):
        np.testing.assert_array_equal(attn.run(plan, small_problem["q"], kv), run(**small_problem))
    with refuses(ValueError, "kv is one tensor", "dimension 1 is 16"):
        attn.run(plan, small_problem["q"], small_problem["k"])
    rows = np.stack([small_problem["k"][0], small_problem["v"][0]], axis=1)
    layout = raddle.RaggedKV([0, 3], [0, 16])
    expected = run(small_problem["q"], small_problem["k"][0], small_problem["v"][0], layout=layout)
    np.testing.assert_array_equal(attn.run(attn.plan(layout), small_problem["q"], rows), expected)


def test_strided_broadcast_and_read_only_views(rng, small_problem):
    expected = run(**small_problem)
    wide = rng.standard_normal((3, 4, 40)).astype(np.float32)
    wide[..., 7:23] = small_problem["q"]
    k = np.ascontiguousarray(small_problem["k"][::-1])[::-1]  # pages from back to front in memory
    v = np.frombuffer(small_problem["v"].tobytes(), np.float32).reshape(small_problem["v"].shape)
    assert not v.flags.writeable and k.strides[0] < 0
    np.testing.assert_array_equal(run(wide[..., 7:23], k, v), expected)
    one_page = np.broadcast_to(small_problem["k"][:1], small_problem["k"].shape)
    q, v = small_problem["q"], small_problem["v"]
    np.testing.assert_array_equal(run(q, one_page, v), run(q, one_page.copy(), v))
    out = np.full((3, 8, 16), np.nan, np.float32)
    run(**small_problem, out=out[:, ::2])
    np.testing.assert_array_equal(out[:, ::2], expected)
    assert np.isnan(out[:, 1::2]).all()


# --- torch ------------------------------------------------------------------------------------


def test_results_of_torch(small_problem):
    tensors = {name: torch.from_numpy(x) for name, x in small_problem.items()}
    out, lse = run(**tensors, return_lse=True)
    assert isinstance(out, torch.Tensor) and isinstance(lse, torch.Tensor)
    np.testing.assert_array_equal(out.numpy(), run(**small_problem))
    mixed = run(tensors["q"], small_problem["k"], small_problem["v"])
    assert isinstance(mixed, torch.Tensor) and torch.equal(mixed, out)


@pytest.mark.parametrize("name, called", [("q", "q"), ("k", "kv: k"), ("v", "kv: v"), ("out", "out"), ("lse", "lse")])
def test_gradients_are_refused_by_name(small_problem, name, called):
    tensors = {each: torch.from_numpy(x) for each, x in small_problem.items()}
    tensors.update(out=torch.empty(3, 4, 16), lse=torch.empty(3, 4))
    tensors[name].requires_grad_()
    with refuses(ValueError, f"{called} requires a gradient", f"pass {name}.detach()"):
        run(**tensors)
    with torch.no_grad():
        run(**{**tensors, name: torch.nn.Parameter(tensors[name])})


def test_torch_tensors_that_are_not_what_they_hold(small_problem):
    q, k, v = (torch.from_numpy(x) for x in small_problem.values())
    negative = torch.complex(q, q).conj().imag
    assert negative.is_neg()
    with refuses(ValueError, "q", "negative bit", "resolve_neg"):
        run(negative, k, v)
    with refuses(TypeError, "q has dtype complex64"):
        run(torch.complex(q, q).conj(), k, v)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), refuses(TypeError, "q is a FakeTensor"):
        run(torch.empty(3, 4, 16), k, v)
    with refuses(ValueError, "q lies on device 'meta'", "'cpu'"):
        run(q.to("meta"), k, v)


# --- functions --------------------------------------------------------------------------------


def test_attention_in_one_call(rng):
    q, k, v = (rng.standard_normal((2, 5, heads, 16)).astype(np.float32) for heads in (4, 2, 2))
    out, lse = raddle.attention(q, k, v, causal=True, return_lse=True, layout="BSHD")
    assert out.shape == q.shape and lse.shape == (2, 5, 4)
    for b in range(2):
        alone, alone_lse = raddle.attention(q[b], k[b], v[b], causal=True, return_lse=True)
        np.testing.assert_allclose(out[b], alone, atol=1e-6)
        np.testing.assert_allclose(lse[b], alone_lse, atol=1e-6)
    heads_first = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k, v)]
    np.testing.assert_array_equal(raddle.attention(*heads_first, causal=True, layout="BSHD"), out)
    capped = raddle.attention(q[0], k[0], v[0], variant=[raddle.SoftCap(2.0)], scale=0.5)
    assert not np.array_equal(capped, raddle.attention(q[0], k[0], v[0], scale=0.5))


def test_heads_or_rows_first(rng):
    """[B, H, S, D] by name gives what [B, S, H, D] gives; what can be either is refused without a name."""
    q, k, v = (rng.standard_normal((2, 6, heads, 16)).astype(np.float32) for heads in (4, 2, 2))
    expected, expected_lse = raddle.attention(q, k, v, causal=True, return_lse=True, layout="BSHD")
    heads_first = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
    out, lse = raddle.attention(*heads_first, causal=True, return_lse=True, layout="BHSD")
    assert out.shape == (2, 4, 6, 16) and lse.shape == (2, 4, 6)
    np.testing.assert_array_equal(out.swapaxes(1, 2), expected)
    np.testing.assert_array_equal(lse.swapaxes(1, 2), expected_lse)
    for tensors in ((q, k, v), heads_first):
        with refuses(ValueError, "either [B, S, H, D] or [B, H, S, D]", "layout='BSHD'", "layout='BHSD'"):
            raddle.attention(*tensors, causal=True)


def test_a_decode_step_needs_no_layout(rng):
    q, k, v = (rng.standard_normal((2, rows, 4, 16)).astype(np.float32) for rows in (1, 9, 9))
    expected = raddle.attention(q, k, v, layout="BSHD")
    np.testing.assert_array_equal(raddle.attention(q, k, v), expected)
    with refuses(ValueError, "only [B, H, S, D]", "expected layout='BHSD'"):
        raddle.attention(*(x.swapaxes(1, 2) for x in (q, k, v)))
    one = q[:, :, :1]
    np.testing.assert_array_equal(raddle.attention(one, one, one), one)  # a row and a head: both orders are one


def test_attention_of_nothing():
    empty = np.empty((2, 0, 1, 8), np.float32)
    q = np.ones((2, 3, 1, 8), np.float32)
    np.testing.assert_array_equal(raddle.attention(q, empty, empty), 0.0)
    assert raddle.attention(empty, q, q).shape == empty.shape


def test_bad_calls_of_attention(rng):
    q, k, v = (rng.standard_normal((2, 5, heads, 16)).astype(np.float32) for heads in (4, 2, 2))
    with refuses(ValueError, "4, 3 and 4 dimensions"):
        raddle.attention(q, k[0], v)
    with refuses(ValueError, "k has a batch of 1", "expected 2, as q has"):
        raddle.attention(q, k[:1], v)
    with refuses(ValueError, "v has 4 keys", "expected 5, as k has"):
        raddle.attention(q, k, v[:, :4])
    with refuses(ValueError, "v has 4 keys", "expected 5, as k has"):
        raddle.attention(q[0], k[0], v[0, :4])
    with refuses(ValueError, "k has 3 heads and q 4", "divisor"):
        raddle.attention(q, *(np.concatenate([x, x[:, :, :1]], 2) for x in (k, v)), layout="BSHD")
    with refuses(ValueError, "v has 3 heads", "expected 2"):
        raddle.attention(q, k, np.concatenate([v, v[:, :, :1]], 2), layout="BSHD")
    with refuses(ValueError, "k has a head dimension of 8", "expected 16, as q has"):
        raddle.attention(q, k[..., :8], v, layout="BSHD")
    with refuses(ValueError, "q has a head dimension of 12", "multiple of 8"):
        raddle.attention(q[..., :12], k[..., :12], v, layout="BSHD")
    with refuses(TypeError, "k has dtype float16", "expected float32, as q has"):
        raddle.attention(q, k.astype(np.float16), v)
    for causal in ("false", 0, None):
        with refuses(TypeError, f"causal is {causal!r}", "expected True or False"):
            raddle.attention(q, k, v, causal=causal)
    with refuses(ValueError, "layout is 'NHD'", "'BSHD' or 'BHSD'"):
        raddle.attention(q, k, v, layout="NHD")
    with refuses(ValueError, "layout is 'BHSD'", "'THD'", "3 dimensions"):
        raddle.attention(q[0], k[0], v[0], layout="BHSD")
    with refuses(TypeError, "q has dtype float64"):
        raddle.attention(q.astype(np.float64), k, v)
    with refuses(TypeError, "v is a str"):
        raddle.attention(q, k, "v")


def test_appended_keys_are_attended_to(rng, small_problem):
    new = rng.standard_normal((2, 3, 2, 16)).astype(np.float32)
    pools = np.full((6, 2, 16, 2, 16), np.nan, np.float32)
    raddle.append_kv(paged(), pools, *new)
    # Row r of request i is its key kv_len - qo_len + r: 19 of pages 1 and 4, 3 and 4 of page 2.
    np.testing.assert_array_equal(pools[4, :, 3], new[:, 0])
    np.testing.assert_array_equal(pools[2, :, 3:5], new[:, 1:])
    assert np.isfinite(pools).sum() == new.size
    pools.flags.writeable = False
    with refuses(ValueError, "kv", "read-only"):
        raddle.append_kv(paged(), pools, *new)
    with refuses(ValueError, "k_new", "2"):
        raddle.append_kv(paged(), (small_problem["k"], small_problem["v"]), new[0, :2], new[1])


def test_bad_states(rng):
    o, lse = np.zeros((2, 3, 4, 8), np.float32), np.zeros((2, 3, 4), np.float32)
    with refuses(TypeError, "o is float16"):
        raddle.merge_states(o.astype(np.float16), lse)
    with refuses(ValueError, "lse", "[2, 3]"):
        raddle.merge_states(o, lse[..., 0].copy())
    with refuses(ValueError, "o_b"):
        raddle.merge_state(o[0], lse[0], o[1, :2], lse[1])
    with refuses(ValueError, "finish has 2 query heads"):
        raddle.merge_states(o, lse, finish=raddle.AttentionSpec(2, 2, 8))


def test_every_row_of_the_support_matrix_has_a_reason_or_works():
    matrix = raddle.support_matrix()
    assert any(row["works"] for row in matrix)
    for row in matrix:
        assert row["works"] == (not row["reason"]), row


def test_command_line():
    from click.testing import CliRunner

    from raddle.cli import main

    text = CliRunner().invoke(main, ["doctor"]).output
    assert raddle.__version__ in text and raddle.cpu_isa() in text and "libraddle_ffi" in text
    shown = CliRunner().invoke(main, ["explain", "512:512", "1:4096", "--window", "128", "--workers", "5"])
    assert shown.exit_code == 0 and "for the busiest of 5 workers" in shown.output
    shared = CliRunner().invoke(main, ["explain", "1:4096", "1:4000", "1:90", "--shared", "2048"])
    for line in ("level 0: 1 group of requests, with 2048 keys", "level 1: 3 groups of requests, with 4090 keys"):
        assert line in shared.output
    wrong = CliRunner().invoke(main, ["explain", "512"])
    assert wrong.exit_code != 0 and "'512'" in wrong.output
    assert "replay" in CliRunner().invoke(main, ["--help"]).output


# --- the wrapper is thin ----------------------------------------------------------------------


def calls_of(call):
    """How many functions a call calls, of Python and of C: what it costs, however busy the machine is. `raddle bench
    plan` has the microseconds."""
    call()
    counted = []
    sys.setprofile(lambda frame, event, what: counted.append(event) if event in ("call", "c_call") else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(counted)


def test_python_adds_little_to_a_run(small_problem):
    q, k, v = (torch.from_numpy(x) for x in small_problem.values())
    attn, out = attention(), torch.empty(3, 4, 16)
    plan = attn.plan(paged())
    assert calls_of(lambda: attn.run(plan, q, (k, v), out=out)) < 25


def test_python_adds_little_to_a_plan(rng):
    kv_len = rng.integers(1, 3072, 16).astype(np.int32)
    page_indptr = np.r_[0, np.cumsum(-(-kv_len // 16))].astype(np.int32)
    pages = rng.permutation(page_indptr[-1]).astype(np.int32)
    qo_indptr = np.arange(17, dtype=np.int32)
    attn = raddle.Attention(raddle.AttentionSpec(32, 8, 128, variant=[raddle.Causal()]))
    assert calls_of(lambda: attn.plan(raddle.PagedKV(qo_indptr, page_indptr, pages, kv_len))) < 25
