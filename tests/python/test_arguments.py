"""Specs, variants, plans and runs: what they refuse, and by which name."""

import copy
import pickle

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import raddle
import torch
from click.testing import CliRunner
from raddle.cli import main
from small import PAGED, SPEC, attention, paged, refuses, run


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"num_qo_heads": 0}, ValueError, ["num_qo_heads is 0"]),
        ({"num_qo_heads": 3}, ValueError, ["num_qo_heads is 3", "num_kv_heads"]),
        ({"num_qo_heads": "4"}, TypeError, ["num_qo_heads", "string"]),
        ({"head_dim": 12}, ValueError, ["head_dim is 12"]),
        ({"head_dim": 584}, ValueError, ["head_dim is 584", "at most 576"]),
        ({"head_dim_vo": 520}, ValueError, ["head_dim_vo is 520", "at most 512"]),
        ({"dtype": "float64"}, ValueError, ["dtype is 'float64'", "bfloat16"]),
        ({"variant": [raddle.Causal(), 3]}, TypeError, ["variant[1]", "int"]),
        ({"variant": [raddle.SoftCap(1.0) & raddle.Causal()]}, ValueError, ["softcap", "no mask"]),
        ({"variant": [raddle.Sinks([1.0])]}, ValueError, ["sinks.logit has 1", "4"]),
        ({"variant": [raddle.Sinks([1.0] * 4)] * 2}, ValueError, ["sink"]),
        ({"scale": float("nan")}, ValueError, ["scale"]),
        ({"scale": "big"}, TypeError, ["scale", "string"]),
        ({"scale": True}, TypeError, ["scale is a bool"]),
        ({"dtype": np.float64}, ValueError, ["dtype is 'float64'", "bfloat16"]),
        ({"dtype": torch.int8}, ValueError, ["dtype is 'int8'"]),
        ({"dtype": None}, TypeError, ["dtype is None", "float32"]),
        ({"dtype": 16}, TypeError, ["dtype is an int", "float32"]),
        ({"variant": None}, TypeError, ["variant is None", "()"]),
        ({"variant": raddle.Causal}, TypeError, ["variant is the class Causal", "parentheses: Causal("]),
        ({"variant": [raddle.Causal(), raddle.SoftCap]}, TypeError, ["variant[1] is the class SoftCap"]),
        ({"variant": "causal"}, TypeError, ["variant is a str", "list of variants"]),
        ({"variant": 3}, TypeError, ["variant is an int"]),
        ({"variant": raddle.Rope(128)}, ValueError, ["rotary_dim is 128", "head_dim = 16"]),
    ],
)
def test_bad_specs(changes, error, words):
    with refuses(error, *words):
        attention(**changes)


def test_a_cpu_with_a_number_is_the_cpu():
    assert raddle.Attention(raddle.AttentionSpec(**SPEC), device="cpu:0").device == "cpu"


def test_other_devices_are_refused():
    for device in ("tpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1x", "CUDA"):
        with refuses(ValueError, f"device is '{device}'", "'cpu', 'cuda' or 'cuda:<number>'"):
            raddle.Attention(raddle.AttentionSpec(**SPEC), device=device)
    with refuses(RuntimeError, "CUDA"):  # what is missing: a driver, a GPU, or that one of them
        raddle.Attention(raddle.AttentionSpec(**{**SPEC, "dtype": "float16"}), device="cuda:99")


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: raddle.SoftCap(0.0), ValueError, ["cap is 0"]),
        (lambda: raddle.SoftCap("x"), TypeError, ["cap", "string"]),
        (lambda: raddle.SoftCap(True), TypeError, ["cap is a bool"]),
        (lambda: raddle.SoftCap(10**400), TypeError, ["cap is an int of more than 64 bits"]),
        (lambda: raddle.SlidingWindow(1.5), TypeError, ["left", "float"]),
        (lambda: raddle.SlidingWindow(2**40), ValueError, ["left", "32-bit"]),
        (lambda: raddle.Sinks(["a"]), TypeError, ["logits", "string"]),
        (lambda: raddle.Sinks(np.ones((2, 2))), ValueError, ["logits has 2 dimensions"]),
        (lambda: raddle.Rope(7), ValueError, ["rotary_dim is 7"]),
        (lambda: raddle.Rope(8, theta=0.5), ValueError, ["theta is 0.5"]),
        (lambda: raddle.Rope(8, offset=[0.5]), TypeError, ["offset"]),
        (lambda: raddle.Rope(8, offset=2**40), ValueError, ["offset is 1099511627776", "32-bit"]),
        (lambda: raddle.Causal() & 3, TypeError, ["right side of &", "int"]),
    ],
)
def test_bad_variants(make, error, words):
    with refuses(error, *words):
        make()


def test_variants_and_specs_show_their_values():
    assert repr(raddle.SoftCap(30.0)) == "softcap(cap=30)"
    assert "causal() | window(left=3, right=-1)" in repr(raddle.Causal() | raddle.SlidingWindow(3))
    assert "softcap(cap=30)" in repr(raddle.AttentionSpec(4, 2, 16, variant=raddle.SoftCap(30.0)))


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_sinks_of_any_float_dtype(small_problem, dtype):
    logits = [0.5, -1.0, 2.0, 0.25]
    expected = run(**small_problem, spec={**SPEC, "variant": raddle.Sinks(logits)})
    sinks = raddle.Sinks(np.array(logits, dtype))
    np.testing.assert_array_equal(run(**small_problem, spec={**SPEC, "variant": sinks}), expected)


def test_bad_plans():
    attn = attention(variant=[raddle.SlidingWindow(4), raddle.SoftCap(9.0)])
    with refuses(TypeError, "layout", "dict"):
        attn.plan(PAGED)
    with refuses(ValueError, "schedule is 'best'", "linear"):
        attn.plan(paged(), schedule="best")
    with refuses(TypeError, "num_workers", "float"):
        attn.plan(paged(), num_workers=2.0)
    with refuses(ValueError, "window.middle"):
        attn.plan(paged(), params={"window.middle": 1})
    with refuses(ValueError, "softcap.cap", "run member"):
        attn.plan(paged(), params={"softcap.cap": 1.0})
    with refuses(TypeError, "params['window.left']", "str"):
        attn.plan(paged(), params={"window.left": "far"})
    with refuses(TypeError, "params['window.left']", "bool"):
        attn.plan(paged(), params={"window.left": True})
    for too_large in (2**40, 2**70):
        with refuses(TypeError, "window.left", "expected"):
            attn.plan(paged(), params={"window.left": too_large})
    with refuses(TypeError, "params is a list", "dict"):
        attn.plan(paged(), params=[1])
    with refuses(TypeError, "params has 1 as a key", "names"):
        attn.plan(paged(), params={1: 2})


def test_params_override_members(small_problem):
    kv = (small_problem["k"], small_problem["v"])
    attn = attention(variant=[raddle.SlidingWindow(4), raddle.SoftCap(9.0)])
    plan = attn.plan(paged(), params={"window.left": 9})
    out = attn.run(plan, small_problem["q"], kv, params={"softcap.cap": np.float32(2.0)})
    other = attention(variant=[raddle.SlidingWindow(9), raddle.SoftCap(2.0)])
    np.testing.assert_array_equal(out, other.run(other.plan(paged()), small_problem["q"], kv))
    with refuses(ValueError, "window.left", "plan member"):
        attn.run(plan, small_problem["q"], kv, params={"window.left": 3})


def test_a_plan_shows_how():
    plan = attention().plan(paged(), num_workers=3)
    assert plan.num_workers == 3 and plan.num_items >= 1 and plan.num_query_tiles >= 1
    assert plan.balance >= 1.0 and plan.num_contractions >= 0
    assert "work items" in plan.explain() and "workers" in repr(plan)
    maxima = {"max_requests": 2, "max_qo_tokens": 3, "max_kv_tokens": 25}
    bound = raddle.workspace_bytes(raddle.AttentionSpec(**SPEC), raddle.Maxima(**maxima), 3)
    assert 0 <= plan.workspace_bytes <= bound
    with refuses(ValueError, "max_requests is -1"):
        raddle.workspace_bytes(raddle.AttentionSpec(**SPEC), raddle.Maxima(**{**maxima, "max_requests": -1}), 3)




def bad_runs():
    def change(name, f):
        return lambda p: p.update({name: f(p.get(name))})

    yield change("q", lambda q: q[:2]), ValueError, ["q", "[2, 4, 16]", "[3, 4, 16]"]
    yield change("q", lambda q: q.astype(np.float16)), TypeError, ["q is float16", "float32"]
    yield change("q", lambda q: q.astype(np.int32)), TypeError, ["q has dtype int32"]
    yield change("q", lambda q: q.astype(np.complex64)), TypeError, ["q has dtype complex64"]
    yield change("q", lambda q: q.astype(">f4")), TypeError, ["q is", ">f4"]
    yield change("q", lambda q: np.repeat(q, 2, axis=-1)[..., ::2]), ValueError, ["q", "stride 2"]
    yield change("q", lambda q: q[None, None, None, None]), ValueError, ["q has 7 dimensions"]
    yield change("q", lambda q: None), TypeError, ["q is a NoneType"]
    yield change("q", lambda q: q.tolist()), TypeError, ["q is a list"]
    yield change("k", lambda k: k[:3]), ValueError, ["kv: k has 3 pages", "page 4"]
    yield change("v", lambda v: v[:, :8]), ValueError, ["kv: v", "[6, 8, 2, 16]"]
    yield change("v", lambda v: v[..., :8].copy()), ValueError, ["kv: v", "8", "16"]
    yield change("k", lambda k: None), TypeError, ["kv: k is a NoneType"]
    yield change("out", lambda _: np.empty((3, 4, 16), np.float16)), TypeError, ["out is float16"]
    yield change("out", lambda _: np.empty((3, 4, 15), np.float32)), ValueError, ["out", "[3, 4, 15]"]
    yield change("out", lambda _: np.broadcast_to(np.float32(0), (3, 4, 16))), ValueError, ["out", "read-only"]
    yield change("lse", lambda _: np.empty((3, 4), np.float64)), TypeError, ["lse has dtype float64"]
    yield change("lse", lambda _: np.empty((4, 3), np.float32)), ValueError, ["lse", "[4, 3]"]
    yield change("scale", lambda _: "large"), TypeError, ["scale", "string"]
    yield change("scale", lambda _: float("inf")), ValueError, ["scale is inf"]
    yield change("params", lambda _: {"softcap.cap": 3.0}), ValueError, ["softcap.cap"]
    yield change("params", lambda _: [1]), TypeError, ["params is a list"]
    yield change("q", lambda q: torch.tensor(q).to_sparse()), TypeError, ["q has layout", "q.to_dense()"]
    yield change("k", lambda k: torch.tensor(k).to_sparse()), TypeError, ["kv: k has layout", "k.to_dense()"]
    yield change("v", lambda v: torch.tensor(v).to("meta")), ValueError, ["kv: v lies on device 'meta'"]
    yield change("v", lambda v: torch.tensor(v, requires_grad=True)), ValueError, ["kv: v requires a gradient"]
    yield change("k", lambda k: torch.tensor(k * (1 + 1j)).conj().imag), ValueError, ["kv: k has its negative bit"]
    yield change("out", lambda _: torch.empty(3, 4, 16, device="meta")), ValueError, ["out lies on device 'meta'"]
    yield change("out", lambda _: torch.zeros(3, 4, 16).to_sparse()), TypeError, ["out has layout"]


@pytest.mark.parametrize("change, error, words", list(bad_runs()), ids=lambda x: x[0] if isinstance(x, list) else "")
def test_bad_runs_write_nothing(small_problem, change, error, words):
    out = np.full((3, 4, 16), np.nan, np.float32)
    args = {**small_problem, "out": out}
    change(args)
    with refuses(error, *words):
        run(**args)
    assert np.isnan(out).all()


def test_bad_kv(small_problem):
    attn = attention()
    plan = attn.plan(paged())
    q, k, v = small_problem.values()
    with refuses(ValueError, "kv has 3 entries"):
        attn.run(plan, q, (k, v, v))
    with refuses(TypeError, "kv[1]: v has dtype int32"):
        attn.run(plan, q, [(k, v), (k, v.astype(np.int32))])
    with refuses(ValueError, "kv has 2 pairs", "1"):
        attn.run(plan, q, [(k, v), (k, v)])
    with refuses(TypeError, "plan", "a raddle.Layout"):
        attn.run(paged(), q, (k, v))
    with refuses(ValueError, "plan is of another attention"):
        attention(num_kv_heads=4).run(plan, q, (np.repeat(k, 2, 2), np.repeat(v, 2, 2)))


# --- bounds that once were missing ------------------------------------------------------------


def test_more_levels_than_a_cascade_can_have():
    level = raddle.PagedKV([0, 1], [0, 1], [0], [1], page_size=1)
    with refuses(ValueError, "levels has 9", "8"):
        raddle.Cascade([level] * 9)


def test_blocks_beyond_the_slots_of_kv():
    layout = raddle.BlockSparse(1, 4, [0, 3], [0, 1, 2], num_rows=1)
    attn = raddle.Attention(raddle.AttentionSpec(1, 1, 8, dtype="float32"))
    q, pool = np.zeros((1, 1, 8), np.float32), np.zeros((10, 1, 8), np.float32)
    with refuses(ValueError, "10 slots", "slot 11"):
        attn.run(attn.plan(layout), q, (pool, pool))


def test_a_plan_of_another_attention():
    layout = raddle.RaggedKV([0, 1], [0, 3])
    wide = raddle.Attention(raddle.AttentionSpec(1, 1, 256, dtype="float32", variant=[raddle.Rope(256)]))
    narrow = raddle.Attention(raddle.AttentionSpec(1, 1, 8, dtype="float32"))
    twin = raddle.Attention(raddle.AttentionSpec(1, 1, 8, dtype="float32"))
    q, kv = np.ones((1, 1, 8), np.float32), np.ones((3, 1, 8), np.float32)
    with refuses(ValueError, "plan is of another attention"):
        narrow.run(wide.plan(layout), q, (kv, kv))
    np.testing.assert_array_equal(narrow.run(twin.plan(layout), q, (kv, kv)), q)


def test_a_spec_to_finish_with_is_checked():
    o, lse = np.zeros((2, 1, 1, 8), np.float32), np.zeros((2, 1, 1), np.float32)
    with refuses(ValueError, "num_kv_heads"):
        raddle.merge_states(o, lse, finish=raddle.AttentionSpec(1, 3, 8))


def test_too_many_workers():
    attn = raddle.Attention(raddle.AttentionSpec(1, 1, 8, dtype="float32"))
    with refuses(ValueError, "num_workers is 2147483647", "65536"):
        attn.plan(raddle.RaggedKV([0, 1], [0, 3]), num_workers=2**31 - 1)


def test_empty_mask_bits_are_not_no_mask_bits():
    with refuses(ValueError, "mask_bits", "0 bytes"):
        raddle.BlockSparse(1, 4, [0, 1], [0], num_rows=1, num_cols=4, mask_bits=np.zeros(0, np.uint8))


def test_outputs_whose_rows_coincide():
    attn = raddle.Attention(raddle.AttentionSpec(1, 1, 8, dtype="float32"))
    q, kv = np.zeros((2, 1, 8), np.float32), np.zeros((3, 1, 8), np.float32)
    out = np.lib.stride_tricks.as_strided(np.zeros((1, 1, 8), np.float32), (2, 1, 8), (0, 32, 4))
    with refuses(ValueError, "out has stride 0"):
        attn.run(attn.plan(raddle.RaggedKV([0, 2], [0, 3])), q, (kv, kv), out=out)


def test_hnd_pages_as_blocks(rng):
    """As many heads as rows a page: a pool read in the wrong order would not be noticed by its shape."""
    paged = raddle.PagedKV([0, 1], [0, 2], [1, 0], [7], page_size=4, kv_layout="HND")
    attn = raddle.Attention(raddle.AttentionSpec(4, 4, 8, dtype="float32"))
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((1, 4, 8), (2, 4, 4, 8), (2, 4, 4, 8)))
    expected = attn.run(attn.plan(paged), q, (k, v))
    np.testing.assert_array_equal(attn.run(attn.plan(paged.to_block_sparse()), q, (k, v)), expected)


def test_nan_in_q_is_not_swallowed():
    attn = raddle.Attention(raddle.AttentionSpec(1, 1, 8, dtype="float32"))
    q, kv = np.full((1, 1, 8), np.nan, np.float32), np.ones((3, 1, 8), np.float32)
    out, lse = attn.run(attn.plan(raddle.RaggedKV([0, 1], [0, 3])), q, (kv, kv), return_lse=True)
    assert np.isnan(out).all() and np.isnan(lse).all()


def test_handles_copy_as_themselves():
    layout = raddle.RaggedKV([0, 1], [0, 3])
    plan = raddle.Attention(raddle.AttentionSpec(1, 1, 8)).plan(layout)
    for handle in (layout, plan, raddle.Causal()):
        assert copy.deepcopy(handle) is handle and copy.copy(handle) is handle


def test_rows_of_unequal_length():
    with refuses(ValueError, "page_indices has rows of unequal length", "pad with -1"):
        raddle.PagedKV([0, 1, 2], page_indices=[[1, 2, 3], [1]], kv_len=[3, 1], page_size=1)


def test_lengths_near_the_end_of_32_bits():
    with refuses(ValueError, "kv_len[0] is 2147483647", "at most"):
        raddle.PagedKV([0, 1], page_indices=[[0]], kv_len=[2**31 - 1], page_size=2**31 - 1)


@pytest.mark.parametrize("dtype", [np.float16, np.dtype("float16"), torch.float16, jnp.float16, "torch.float16"])
def test_dtypes_of_every_library(dtype):
    assert raddle.AttentionSpec(**{**SPEC, "dtype": dtype}).dtype == "float16"


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, jnp.bfloat16, torch.bfloat16])
def test_bfloat16_of_every_library(dtype):
    assert raddle.AttentionSpec(**{**SPEC, "dtype": dtype}).dtype == "bfloat16"


def test_variants_of_the_one_call_function(small_problem):
    q, k = small_problem["q"], small_problem["q"]
    for variant, words in ((None, ["variant is None"]), (raddle.Causal, ["variant is the class Causal"])):
        with refuses(TypeError, *words):
            raddle.attention(q, k, k, variant=variant)


def test_a_cascade_of_no_list():
    with refuses(TypeError, "levels is a PagedKV", "list of layouts"):
        raddle.Cascade(paged())


def test_a_sparse_index_array():
    with refuses(TypeError, "kv_indptr has layout", "dense"):
        raddle.RaggedKV(torch.tensor([0, 1]), torch.tensor([0, 1]).to_sparse())


def test_what_is_no_spec():
    attn = attention()
    o, lse = np.zeros((2, 1, 4, 16), np.float32), np.zeros((2, 1, 4), np.float32)
    with refuses(TypeError, "finish is an Attention", "AttentionSpec", ".spec"):
        raddle.merge_states(o, lse, finish=attn)
    with refuses(TypeError, "finish is a Sinks", "AttentionSpec"):
        raddle.merge_states(o, lse, finish=raddle.Sinks([1.0] * 4))
    with refuses(TypeError, "spec is the class AttentionSpec"):
        raddle.Attention(raddle.AttentionSpec)
    with refuses(TypeError, "spec is an Attention"):
        raddle.workspace_bytes(attn, raddle.Maxima(1, 1, 1))


@pytest.mark.parametrize(
    "args, words",
    [
        (["1:99999999999"], ["1:99999999999", "32-bit"]),
        (["1:2147483000"] * 5, ["pages", "--page-size"]),
        (["--page-size", "0", "1:1"], ["--page-size", "0"]),
        (["--workers", "0", "1:1"], ["--workers", "0"]),
        (["1:\N{SUPERSCRIPT TWO}"], ["expected two numbers with a colon", "1:4096"]),
        (["--heads", "3:2", "1:1"], ["num_qo_heads is 3"]),
        (["--heads", "32", "1:1"], ["--heads '32'", "expected two numbers"]),
    ],
)
def test_bad_arguments_of_explain(args, words):
    result = CliRunner().invoke(main, ["explain", *args])
    assert result.exit_code != 0 and isinstance(result.exception, SystemExit)
    assert all(word in result.output for word in words), result.output
