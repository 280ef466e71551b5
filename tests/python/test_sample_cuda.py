"""Sampling on a GPU: the tokens of the CPU. Run with --device cuda; see test_cuda.py."""

from __future__ import annotations

import numpy as np
import pytest
import raddle
from device_arrays import DeviceArray, usual_gpu
from draws import numpy_dtype
from small import refuses

FILTERS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_k": 7},
    {"top_p": 0.6},
    {"top_k": 100, "top_p": 0.95, "min_p": 0.01, "temperature": 1.4},
]


# A GPU samples float32, too, unlike attention, whose tests skip what names it.
KINDS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def ints(x, dtype=np.int32):
    return DeviceArray(np.asarray(x, dtype))


def floats(x):
    return DeviceArray(np.asarray(x, np.float32))


def sampled(logits, out=None, **parameters):
    out = ints(np.full(len(logits.numpy()), -7)) if out is None else out
    raddle.sample(logits, out=out, **parameters)
    return out.numpy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parameters", FILTERS)
def test_tokens(gpu, rng, kind, parameters):
    vocab = int(rng.choice([1, 31, 513, 2049])) + int(rng.integers(0, 40))
    logits = (3 * rng.standard_normal((4, vocab))).astype(numpy_dtype(KINDS[kind]))
    logits[:, rng.integers(0, vocab, vocab // 2)] = logits[:, :1]  # equal ones
    logits[1, vocab // 2 :] = -np.inf
    seed = int(rng.integers(2**62))
    expected = raddle.sample(logits, seed=seed, **parameters)
    np.testing.assert_array_equal(sampled(DeviceArray(logits), seed=seed, **parameters), expected)


def test_parameters_of_rows(gpu, rng):
    rows, vocab = 6, 700
    logits = (2 * rng.standard_normal((rows, vocab))).astype(np.float32)
    counts = rng.choice([-1, 0, 0, 2], (rows, vocab)).astype(np.int32)
    numbers = {
        "temperature": rng.choice([0.0, 0.7, 1.0], rows),
        "top_p": rng.choice([0.5, 1.0], rows),
        "min_p": rng.choice([0.0, 0.1], rows),
        "repetition_penalty": rng.choice([1.0, 1.3], rows),
        "presence_penalty": rng.choice([0.0, 0.5], rows),
        "frequency_penalty": rng.choice([0.0, 0.2], rows),
    }
    numbers = {name: x.astype(np.float32) for name, x in numbers.items()}
    integers = {"top_k": rng.choice([0, 40], rows).astype(np.int32), "seed": rng.integers(0, 2**60, rows)}
    there = {name: DeviceArray(x) for name, x in {**numbers, **integers}.items()}
    counts_there, out = DeviceArray(counts), ints(np.zeros(rows), np.int64)
    for offset in range(2):
        expected = raddle.sample(logits, counts=counts, offset=offset, **numbers, **integers)
        tokens = sampled(DeviceArray(logits), out, counts=counts_there, offset=offset, **there)
        np.testing.assert_array_equal(tokens, expected)
        np.testing.assert_array_equal(counts_there.numpy(), counts)


def test_rows_without_a_token(gpu):
    """What lies on a GPU is not looked at before the kernel runs; rows beside them have theirs."""
    logits = np.zeros((6, 40), np.float32)
    logits[1, 3], logits[2, 39], logits[3] = np.nan, np.inf, -np.inf
    temperature, counts = floats([1, 1, 1, 1, -1, 1]), ints(np.zeros((6, 40)))
    tokens = sampled(DeviceArray(logits), temperature=temperature, counts=counts)
    assert (tokens[1:5] == -1).all() and (tokens[[0, 5]] >= 0).all()
    assert counts.numpy().sum(axis=1).tolist() == [1, 0, 0, 0, 0, 1]
    top_p = floats([0.5, 0, 2, np.nan, 1, 1])
    assert (sampled(floats(np.zeros((6, 40))), top_p=top_p)[1:4] == -1).all()


def test_a_step_in_a_graph(gpu, rng, emulator):
    """A replay reads logits, parameters and counts of its step, and leaves the counts of the next."""
    import tvm_ffi

    shape, stream = (3, 300), 0xB00
    logits, counts, out = floats(np.zeros(shape)), ints(np.zeros(shape)), ints(np.zeros(3))
    temperature, offset = floats(np.ones(3)), ints(np.zeros(3), np.int64)
    arrays = {"temperature": temperature, "offset": offset, "counts": counts}
    call = {"seed": 5, "top_k": 20, "presence_penalty": 1.5, **arrays}
    sampled(logits, out, **call)  # compiles the kernel
    counts.write(np.zeros(shape, np.int32))
    emulator.raddle_emulator_capture(stream)
    with tvm_ffi.use_raw_stream(tvm_ffi.device(usual_gpu()), stream):
        raddle.sample(logits, out=out, **call)
    emulator.raddle_emulator_capture(None)
    on_host = np.zeros(shape, np.int32)
    for step in range(4):
        rows = rng.standard_normal(shape).astype(np.float32)
        heat = rng.choice([0.0, 0.5, 1.0], 3).astype(np.float32)
        logits.write(rows), temperature.write(heat), offset.write(np.full(3, step))
        emulator.raddle_emulator_replay(stream)
        host = {"temperature": heat, "offset": step, "counts": on_host, "seed": 5, "top_k": 20, "presence_penalty": 1.5}
        np.testing.assert_array_equal(out.numpy(), raddle.sample(rows, **host))
        np.testing.assert_array_equal(counts.numpy(), on_host)


def test_what_cannot_be_is_named(gpu):
    logits, out = floats(np.zeros((2, 8))), ints(np.zeros(2))
    with refuses(ValueError, "temperature lies on 'cpu'; expected 'cuda:"):
        raddle.sample(logits, out=out, temperature=np.ones(2, np.float32))
    with refuses(ValueError, "out lies on 'cpu'"):
        raddle.sample(logits, out=np.zeros(2, np.int32))
    with refuses(ValueError, "seed lies on 'cpu'"):
        raddle.sample(logits, out=out, seed=[1, 2])
    with refuses(ValueError, "top_p is 2; expected a number above 0, at most 1"):
        raddle.sample(logits, out=out, top_p=2.0)
    with refuses(ValueError, "counts lies on 'cpu'"):
        raddle.sample(logits, out=out, counts=np.zeros((2, 8), np.int32))
