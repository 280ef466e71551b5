"""What only GPUs have: streams, copies, scratch, captures, several devices. Run with --device cuda.

Without a GPU, `test_emulated.py` runs this file on the emulated driver, which tells what it was asked.
"""

import ctypes
import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest
import raddle
from checks import within
from device_arrays import DeviceArray
from draws import draw
from engine import OnDevice, spec_of, twin
from reference import SlidingWindow, attention
from small import refuses

HEADS = {"dim": 64, "group": 2, "num_kv_heads": 2, "dtype": "bfloat16"}
NOWHERE = "/nowhere/c++"
STREAM = 0x100  # the emulated driver takes any number for a stream


@pytest.fixture
def problem(rng):
    return draw(rng, "paged", "causal", lengths=[(1, 300), (3, 40), (0, 5), (2, 1)], page_size=16, **HEADS)


@pytest.fixture
def attn(gpu, problem):
    return raddle.Attention(spec_of(problem), device=gpu)


def tensors(problem, device=0, **changes):
    """q, (k, v) and an output on a device."""
    out = np.full(problem.q.shape, np.nan, problem.q.dtype)
    given = {"q": problem.q, "k": problem.kv[0][0], "v": problem.kv[0][1], "out": out, **changes}
    return {name: x if isinstance(x, DeviceArray) else DeviceArray(x, device) for name, x in given.items()}


def run(attn, plan, q, k, v, out, **how):
    attn.run(plan, q, (k, v), out=out, **how)
    return out.numpy()


def test_a_plan_serves_many_runs(attn, problem):
    plan = attn.plan(twin(problem.layout), num_workers=5)
    exact, lent = attention(problem), tensors(problem)
    for _ in range(3):
        within(exact, run(attn, plan, **lent))
    assert "1 launch of 5 blocks" in plan.explain()


def test_nothing_is_allocated_after_the_first_batches(emulator, attn, problem):
    lent, layout = tensors(problem), twin(problem.layout)
    for _ in range(3):
        plan = attn.plan(layout, num_workers=5)
        attn.run(plan, lent["q"], (lent["k"], lent["v"]), out=lent["out"])
    counts = [emulator.raddle_emulator_allocations, emulator.raddle_emulator_uploads, emulator.raddle_emulator_launches]
    allocations, uploads, launches = (count() for count in counts)
    for _ in range(4):
        plan = attn.plan(layout, num_workers=5)
        for _ in range(3):
            attn.run(plan, lent["q"], (lent["k"], lent["v"]), out=lent["out"])
    assert emulator.raddle_emulator_allocations() == allocations
    assert emulator.raddle_emulator_uploads() == uploads + 4, "one copy a plan"
    assert emulator.raddle_emulator_launches() == launches + 12, "one launch a run"


def test_no_call_of_the_driver_is_refused(emulator, problem):
    """Sanitizers and profilers count every call that is, also where the caller knows what to do then."""
    before = emulator.raddle_emulator_refusals()
    attn = raddle.Attention(spec_of(problem), device="cuda")
    lent = tensors(problem)
    run(attn, attn.plan(twin(problem.layout), num_workers=5), **lent)
    assert emulator.raddle_emulator_refusals() == before


def test_a_copy_in_flight_is_not_overwritten(emulator, attn, problem):
    """While events do not pass, every plan has pinned memory of its own."""
    emulator.raddle_emulator_events_pass(0)
    before = emulator.raddle_emulator_allocations()
    plans = [attn.plan(twin(problem.layout), num_workers=n) for n in (3, 5, 7)]
    assert emulator.raddle_emulator_allocations() >= before + 3
    exact, lent = attention(problem), tensors(problem)
    for plan in plans:
        within(exact, run(attn, plan, **lent))


def test_a_cascade_is_one_launch(emulator, gpu, rng):
    problem = draw(rng, "cascade", "causal", lengths=[(1, 30), (2, 70)], **HEADS)
    attn = OnDevice(raddle.Attention(spec_of(problem), device=gpu))
    plan = attn.plan(twin(problem.layout), num_workers=4)
    before = emulator.raddle_emulator_launches()
    out = attn.run(plan, problem.q, problem.kv)
    assert emulator.raddle_emulator_launches() == before + 1 and "1 launch" in plan.explain()
    within(attention(problem), out)


def test_runs_on_other_streams_have_scratch_of_their_own(emulator, attn, problem):
    import tvm_ffi

    plan, exact, lent = attn.plan(twin(problem.layout), num_workers=9), attention(problem), tensors(problem)
    device = tvm_ffi.device(attn.device)
    for stream in (STREAM, 0, STREAM + 8, STREAM):
        with tvm_ffi.use_raw_stream(device, stream):
            within(exact, run(attn, plan, **lent))


def test_captured_streams_are_refused(emulator, attn, problem):
    import tvm_ffi

    plan, lent = attn.plan(twin(problem.layout)), tensors(problem)
    emulator.raddle_emulator_capture(STREAM)
    with tvm_ffi.use_raw_stream(tvm_ffi.device(attn.device), STREAM):
        with refuses(ValueError, "plan is no reservation", "capturing"):
            run(attn, plan, **lent)
        with refuses(ValueError, "capturing"):
            attn.plan(twin(problem.layout))
    assert np.isnan(lent["out"].numpy().astype(np.float32)).all()


def test_tensors_elsewhere_are_refused_by_name(attn, problem):
    plan, lent = attn.plan(twin(problem.layout)), tensors(problem)
    host = {"q": problem.q, "k": problem.kv[0][0], "v": problem.kv[0][1], "out": np.zeros_like(problem.q)}
    for name, words in {"q": "q", "k": "kv: k", "v": "kv: v", "out": "out"}.items():
        with refuses(ValueError, f"{words} lies on device 'cpu'", "'cuda:0'"):
            attn.run(plan, **{"kv": None, **_renamed({**lent, name: host[name]})})
    on_host = raddle.Attention(raddle.AttentionSpec(4, 2, 64, variant=[raddle.Causal()]))
    with refuses(ValueError, "q lies on device 'cuda:0'", "'cpu'"):
        on_host.run(on_host.plan(twin(problem.layout)), **_renamed({**host, "q": lent["q"]}))
    with refuses(ValueError, "plan is for device 'cpu'", "'cuda:0'"):
        run(attn, on_host.plan(twin(problem.layout)), **lent)
    with refuses(TypeError, "out", "DeviceArray"):
        attn.run(plan, lent["q"], (lent["k"], lent["v"]))
    with refuses(ValueError, "kv_indptr lies on device 'cuda:0'", "host"):
        raddle.RaggedKV(np.zeros(2, np.int32), DeviceArray(np.zeros(2, np.int32)))


def _renamed(lent):
    return {"q": lent["q"], "kv": (lent["k"], lent["v"]), "out": lent["out"]}


def test_another_gpu(emulator, attn, problem):
    second = raddle.Attention(attn.spec, device="cuda:1")
    assert (attn.device, second.device) == ("cuda:0", "cuda:1")
    plan = second.plan(twin(problem.layout))
    within(attention(problem), run(second, plan, **tensors(problem, device=1)))
    with refuses(ValueError, "q lies on device 'cuda:0'", "'cuda:1'"):
        run(second, plan, **tensors(problem))
    with refuses(ValueError, "plan is for device 'cuda:1'", "'cuda:0'"):
        run(attn, plan, **tensors(problem))
    context = ctypes.c_void_p(1)
    assert emulator.cuCtxGetCurrent(ctypes.byref(context)) == 0 and context.value is None, "left as it was found"


def test_rows_are_aligned(attn, problem):
    plan = attn.plan(twin(problem.layout))
    odd = np.zeros((*problem.q.shape[:2], 70), problem.q.dtype)[..., :64]
    with refuses(ValueError, "q has stride 70 in dimension 1", "multiple of 8"):
        run(attn, plan, **tensors(problem, q=odd))
    with refuses(ValueError, "out begins at an address", "16 bytes"):
        run(attn, plan, **tensors(problem, out=DeviceArray(problem.q, shift=8)))
    k = problem.kv[0][0]
    with refuses(ValueError, "kv: k has stride", "multiple of 8"):
        wide = np.zeros((*k.shape[:-1], k.shape[-1] + 2), k.dtype)[..., : k.shape[-1]]
        run(attn, plan, **tensors(problem, k=wide))


def test_arrays_of_a_run_go_up_once(emulator, gpu, rng):
    problem = draw(rng, "paged", "sinks", lengths=[(1, 30), (2, 70)], **HEADS)
    attn = raddle.Attention(spec_of(problem), device=gpu)
    plan, lent = attn.plan(twin(problem.layout)), tensors(problem)
    layers = [rng.normal(0.0, 3.0, problem.q.shape[1]).astype(np.float32) for _ in range(3)]
    before = emulator.raddle_emulator_uploads()
    for _ in range(2):
        for sinks in layers:
            problem.variant[0].logits = sinks
            within(attention(problem), run(attn, plan, **lent, params={"sinks.logit": sinks}))
    assert emulator.raddle_emulator_uploads() == before + 3


NEAR = raddle.Variant(
    "Near",
    """struct Near {
  float by;
  i32 far;
  Tensor<const float, 1> factor;
  RADDLE_FN bool mask(const Row& r, const Key& c) const { return r.q_pos - c.kv_pos <= far; }
  RADDLE_FN float logits(float s, const Row& r, const Key&) const { return by * factor.data[r.q_head] * s; }
};""",
    {"far": int, "factor": raddle.Tensor["Hq"], "by": float},
)


def test_own_source_without_a_cpp_compiler(gpu, rng):
    """In a process that cannot find one: the same answer, every tile partial, and explain says so."""
    if os.environ.get("RADDLE_CXX") != NOWHERE:
        environment = {**os.environ, "RADDLE_CXX": NOWHERE, "CXX": os.environ.get("CXX", "c++")}
        test = f"{__file__}::test_own_source_without_a_cpp_compiler"
        command = [sys.executable, "-m", "pytest", "-q", "--device", gpu, test]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout
        return
    problem = draw(rng, "paged", [SlidingWindow(7)], lengths=[(1, 300), (30, 40)], page_size=16, **HEADS)
    own = NEAR(far=7, by=0.5, factor=np.full(problem.q.shape[1], 2.0, np.float32))
    spec = dataclasses.replace(spec_of(problem), variant=own)
    attn = OnDevice(raddle.Attention(spec, device=gpu))
    plan = attn.plan(twin(problem.layout))
    assert "coverage of Near is unknown" in plan.explain()
    within(attention(problem), attn.run(plan, problem.q, problem.kv[0]))


def test_failures_say_what_was_launched(emulator, attn, problem):
    plan, lent = attn.plan(twin(problem.layout), num_workers=6), tensors(problem)
    emulator.raddle_emulator_launches_fail(1)
    threads = 384 if "kernel family: wgmma" in plan.explain() else 128
    launched = f"6 blocks of {threads} threads"
    words = ["launching the kernel bf16 64/64 Causal", launched, "shared memory", "EMULATED_ERROR"]
    with refuses(RuntimeError, *words):
        run(attn, plan, **lent)


def test_out_of_memory_says_how_much_it_takes(emulator, gpu, rng):
    problem = draw(rng, "paged", "causal", lengths=[(64, 3000)], **HEADS)
    attn = raddle.Attention(spec_of(problem), device=gpu)
    lent = tensors(problem)
    plan = attn.plan(twin(problem.layout), num_workers=300)
    before = emulator.raddle_emulator_launches()
    emulator.raddle_emulator_memory_left(1000)
    with refuses(RuntimeError, "the workspace of this plan takes", "bytes; 'cuda:0' has 1000"):
        run(attn, plan, **lent)
    assert emulator.raddle_emulator_launches() == before
    emulator.raddle_emulator_memory_left(2**40)
    attn.plan(twin(problem.layout))


def test_dtypes_without_kernels(gpu):
    with refuses(ValueError, "dtype is 'float32'", "bfloat16"):
        raddle.Attention(raddle.AttentionSpec(4, 2, 64, dtype="float32"), device=gpu)


def test_rows_of_8_bits_are_aligned(gpu, rng):
    problem = draw(rng, "paged", "causal", dim=24, group=2, num_kv_heads=1, kv_dtype="float8_e4m3fn", dtype="float16")
    attn, out = raddle.Attention(spec_of(problem), device=gpu), np.zeros_like(problem.q)
    with refuses(ValueError, "kv: k has stride", "multiple of 16"):
        run(attn, attn.plan(twin(problem.layout)), **tensors(problem, out=DeviceArray(out)))


def test_folded_shapes(gpu, rng):
    """Heads in rows, pools of slots and an LSE by heads: the same bits as of tensors with all dimensions."""
    problem = draw(rng, "paged", "causal", lengths=[(1, 30), (3, 40), (2, 2)], page_size=1, **HEADS)
    rows, heads, dim = problem.q.shape
    pools = [np.ascontiguousarray(x.reshape(-1, 2, dim)) for x in problem.kv[0]]
    attn = raddle.Attention(spec_of(problem), device=gpu)
    plan = attn.plan(twin(problem.layout), num_workers=3)
    paged = [DeviceArray(x[:, None]) for x in pools]
    lse = DeviceArray(np.zeros((rows, heads), np.float32))
    out = run(attn, plan, **tensors(problem, k=paged[0], v=paged[1]), lse=lse)
    q, into = problem.q.reshape(rows, -1), np.zeros_like(problem.q).reshape(rows, -1)
    folded = tensors(problem, q=q, k=pools[0], v=pools[1], out=into)
    by_heads = DeviceArray(np.zeros((heads, rows), np.float32).T)
    got = run(attn, plan, **folded, lse=by_heads)
    np.testing.assert_array_equal(got.reshape(out.shape).view(np.uint16), out.view(np.uint16))
    np.testing.assert_array_equal(by_heads.numpy(), lse.numpy())
    run(attn, plan, **folded, lse=by_heads, lse_base_2=True)
    np.testing.assert_array_equal(by_heads.numpy(), lse.numpy() * np.float32(np.log2(np.e)))
