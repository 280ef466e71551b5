"""The KV cache on a GPU: the same bits as on the CPU. Run with --device cuda; see test_cuda.py."""

from __future__ import annotations

import numpy as np
import pytest
import raddle
from device_arrays import DeviceArray, usual_gpu
from draws import numpy_dtype
from engine import twin
from layout_draws import paged, paged_pools
from small import refuses

LENGTHS = [(1, 1), (5, 70), (0, 30), (17, 33), (2, 100)]
HEADS, DIM = 2, 64


def same_bits(on_gpu, on_cpu):
    for device, host in zip(on_gpu, on_cpu):
        np.testing.assert_array_equal(
            np.ascontiguousarray(device.numpy()).view(np.uint8), np.ascontiguousarray(host).view(np.uint8)
        )


def drawn(rng, dtype, kv_layout, lengths=LENGTHS):
    layout = paged(rng, lengths, kv_layout=kv_layout)
    return layout, paged_pools(rng, layout, HEADS, DIM, 32, numpy_dtype(dtype))[0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("rope", [None, raddle.Rope(DIM), raddle.Rope(32, interleaved=True)])
def test_append(gpu, rng, dtype, kv_layout, rope):
    layout, pools = drawn(rng, dtype, kv_layout)
    new = [rng.standard_normal((25, HEADS, dim)).astype(numpy_dtype(dtype)) for dim in (DIM, 32)]
    there, new_there = [DeviceArray(x) for x in pools], [DeviceArray(x) for x in new]
    table = twin(layout)
    for _ in range(2):  # the second call finds layout and variant up there
        raddle.append_kv(table, tuple(there), *new_there, rope=rope)
    raddle.append_kv(table, tuple(pools), *new, rope=rope)
    same_bits(there, pools)


KINDS = {
    "number": lambda rng, pool: 0.37,
    "head": lambda rng, pool: np.exp(rng.standard_normal(HEADS)).astype(np.float32),
    "token": lambda rng, pool: np.exp(rng.standard_normal(pool.shape[:-1])).astype(np.float32),
}


def on_gpu(x):
    return DeviceArray(x) if isinstance(x, np.ndarray) else x


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("float16", "float8_e4m3fn"), ("bfloat16", "float8_e5m2")])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rope", [None, raddle.Rope(DIM)])
def test_append_quantised(gpu, rng, dtype, kv_dtype, kv_layout, kind, rope):
    layout, pools = drawn(rng, kv_dtype, kv_layout)
    new = [rng.standard_normal((25, HEADS, dim)).astype(numpy_dtype(dtype)) for dim in (DIM, 32)]
    scales = [KINDS[kind](rng, pool) for pool in pools]
    there, new_there, scales_there = ([on_gpu(x) for x in arrays] for arrays in (pools, new, scales))
    table = twin(layout)
    raddle.append_kv(table, tuple(there), *new_there, rope, k_scale=scales_there[0], v_scale=scales_there[1])
    raddle.append_kv(table, tuple(pools), *new, rope, k_scale=scales[0], v_scale=scales[1])
    same_bits(there, pools)
    if kind == "token":
        same_bits(scales_there, scales)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_quantised_pools_move_with_their_scales(gpu, rng, kv_layout):
    layout, pools = drawn(rng, "float8_e4m3fn", kv_layout)
    scales = [KINDS["token"](rng, pool) for pool in pools]
    there, scales_there = [on_gpu(x) for x in pools], [on_gpu(x) for x in scales]
    parents = np.concatenate([np.arange(qo) - 1 for qo, _ in LENGTHS]).astype(np.int32)
    parents[2:4] = -1
    accepted = np.array([qo - 1 for qo, _ in LENGTHS])
    pages = rng.permutation(len(pools[0]))
    half = len(pages) // 2
    for where, of in ((there, scales_there), (pools, scales)):
        raddle.accept_tree(twin(layout), tuple(where), parents, accepted, scales=tuple(of))
        raddle.copy_pages(tuple(where), pages[:half], pages[half : 2 * half], scales=tuple(of))
    same_bits([*there, *scales_there], [*pools, *scales])


@pytest.mark.parametrize("kind", KINDS)
def test_summaries_of_quantised_keys(gpu, rng, kind):
    layout, (k, v) = drawn(rng, "float8_e5m2", "HND")
    scale = KINDS[kind](rng, k)
    summary = np.full((len(k), 2, HEADS, DIM), np.nan, np.float16)
    there = DeviceArray(summary)
    raddle.summarize_pages(twin(layout), (DeviceArray(k), DeviceArray(v)), there, k_scale=on_gpu(scale))
    raddle.summarize_pages(twin(layout), (k, v), summary, k_scale=scale)
    same_bits([there], [summary])


def test_copy_pages(gpu, rng):
    pools = [rng.standard_normal((12, 5, HEADS, dim)).astype(np.float16) for dim in (DIM, 32)]
    there = [DeviceArray(x) for x in pools]
    pages = rng.permutation(12)
    raddle.copy_pages(tuple(there), pages[:6], pages[6:])
    raddle.copy_pages(tuple(pools), pages[:6], pages[6:])
    same_bits(there, pools)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_accept_tree(gpu, rng, kv_layout):
    layout, pools = drawn(rng, "bfloat16", kv_layout)
    there = [DeviceArray(x) for x in pools]
    parents = np.concatenate([[rng.integers(-1, n) if n else -1 for n in range(qo)] for qo, _ in LENGTHS])
    accepted = np.array([rng.integers(-1, qo) for qo, _ in LENGTHS])
    table, parents = twin(layout), parents.astype(np.int32)
    kv_len = raddle.accept_tree(table, tuple(there), parents, accepted)
    np.testing.assert_array_equal(kv_len, raddle.accept_tree(table, tuple(pools), parents, accepted))
    same_bits(there, pools)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("per_head", [False, True])
def test_summaries_and_selected_pages(gpu, rng, dtype, per_head):
    layout, (k, v) = drawn(rng, dtype, "NHD")
    table = twin(layout)
    summary = np.full((len(k), 2, HEADS, DIM), np.nan, k.dtype)
    summary_there = DeviceArray(summary)
    pools_there = tuple(DeviceArray(x) for x in (k, v))
    for new_only in (False, True):
        raddle.summarize_pages(table, pools_there, summary_there, new_only)
        raddle.summarize_pages(table, (k, v), summary, new_only)
        same_bits([summary_there], [summary])
    q = rng.standard_normal((25, 3 * HEADS, DIM)).astype(k.dtype)
    selected = raddle.select_pages(table, q, summary, 5, per_head=per_head)
    out = raddle.SelectedPages(*(DeviceArray(np.full_like(x, -9)) for x in selected))
    assert raddle.select_pages(table, DeviceArray(q), summary_there, 5, per_head=per_head, out=out) is out
    same_bits(out, selected)


@pytest.mark.parametrize("dim", [64, 512])
@pytest.mark.parametrize("finish", [None, [raddle.Sinks(np.linspace(-1.0, 1.0, 4))]])
def test_merge_states(gpu, rng, finish, dim):
    o = rng.standard_normal((3, 5, 4, dim)).astype(np.float32)
    lse = rng.normal(0.0, 4.0, o.shape[:-1]).astype(np.float32)
    lse[rng.random(lse.shape) < 0.3] = -np.inf
    spec = None if finish is None else raddle.AttentionSpec(4, 2, dim, dtype="bfloat16", variant=finish)
    out = DeviceArray(np.full_like(o[0], np.nan)), DeviceArray(np.full_like(lse[0], np.nan))
    raddle.merge_states(DeviceArray(o), DeviceArray(lse), spec, out=out)
    same_bits(out, raddle.merge_states(o, lse, spec))
    two = [DeviceArray(x) for x in (o[0], lse[0], o[1], lse[1])]
    raddle.merge_state(*two, out=(two[0], two[1]))  # in place
    same_bits(two[:2], raddle.merge_state(o[0], lse[0], o[1], lse[1]))


def test_merge_uneven_states(gpu, rng):
    """Bounds that lie on the GPU: what is outside of the states is no state."""
    o = rng.standard_normal((20, 4, 64)).astype(np.float32)
    lse = rng.normal(0.0, 4.0, o.shape[:-1]).astype(np.float32)
    lse[rng.random(lse.shape) < 0.3] = -np.inf
    indptr = np.array([0, 3, 3, 11, 20], np.int32)
    out = DeviceArray(np.full((4, 4, 64), np.nan, np.float32)), DeviceArray(np.full((4, 4), np.nan, np.float32))
    raddle.merge_states(DeviceArray(o), DeviceArray(lse), out=out, indptr=DeviceArray(indptr))
    same_bits(out, raddle.merge_states(o, lse, indptr=indptr))
    far = DeviceArray(np.array([-5, 3, 3, 11, 99], np.int32))
    raddle.merge_states(DeviceArray(o), DeviceArray(lse), out=out, indptr=far)
    same_bits(out, raddle.merge_states(o, lse, indptr=indptr))
    with refuses(ValueError, "indptr does not lie where o does"):
        raddle.merge_states(DeviceArray(o), DeviceArray(lse), out=out, indptr=indptr)


@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_slots_in_a_graph(gpu, rng, emulator, kv_dtype, kv_layout):
    """A replay reads the slots and rows of its step; what is no slot of the pool is none."""
    import tvm_ffi

    kind = numpy_dtype("bfloat16")
    shape = (7, 16, HEADS, DIM) if kv_layout == "NHD" else (7, HEADS, 16, DIM)
    pools = [np.zeros(shape, kind if kv_dtype is None else np.uint8) for _ in range(2)]
    how = {"kv_layout": kv_layout} if kv_dtype is None else {"kv_layout": kv_layout, "kv_dtype": kv_dtype, "k_scale": 0.3}
    there = [DeviceArray(x) for x in pools]
    slots, new = DeviceArray(np.full(9, -1)), [DeviceArray(np.zeros((12, HEADS, DIM), kind)) for _ in range(2)]
    raddle.append_kv(slots, tuple(there), *new, **how)  # compiles the kernel
    stream = 0xA00 + (kv_layout == "NHD") + 2 * (kv_dtype is None)
    emulator.raddle_emulator_capture(stream)
    with tvm_ffi.use_raw_stream(tvm_ffi.device(usual_gpu()), stream):
        raddle.append_kv(slots, tuple(there), *new, **how)
    emulator.raddle_emulator_capture(None)
    same_bits(there, pools)
    for _ in range(3):
        step, rows = rng.permutation(7 * 16)[:9], [rng.standard_normal(x.shape).astype(kind) for x in new]
        step[rng.integers(9)] = -1
        slots.write(np.where(step == step.max(), step + 7 * 16, step) if _ else step)
        for array, values in zip(new, rows):
            array.write(values)
        emulator.raddle_emulator_replay(stream)
        raddle.append_kv(np.where(step == step.max(), -1, step) if _ else step, tuple(pools), *rows, **how)
        same_bits(there, pools)


def test_what_cannot_be_is_named(gpu, rng):
    layout, (k, v) = drawn(rng, "bfloat16", "NHD")
    table, k_there, v_there = twin(layout), DeviceArray(k), DeviceArray(v)
    new = [DeviceArray(np.zeros((25, HEADS, dim), k.dtype)) for dim in (DIM, 32)]
    with pytest.raises(ValueError, match=rf"pool\.v lies on 'cpu'; expected '{usual_gpu()}', as k_new does"):
        raddle.append_kv(table, (k_there, v), *new)
    with pytest.raises(ValueError, match=r"pool\.k has stride 1 in dimension|multiple of 16 bytes"):
        raddle.append_kv(table, (DeviceArray(k, shift=2), v_there), *new)
    fp8 = [DeviceArray(np.zeros(x.shape, numpy_dtype("float8_e4m3fn"))) for x in (k, v)]
    with pytest.raises(ValueError, match=rf"v_scale lies on device 'cpu'; expected '{usual_gpu()}', as pool\.v does"):
        raddle.append_kv(table, tuple(fp8), *new, v_scale=np.ones(HEADS, np.float32))
    with pytest.raises(ValueError, match="page 0 where|to_pages"):
        raddle.copy_pages((k_there, v_there), [0, 1], [2, 2])
    same_bits([k_there, v_there], [k, v])
