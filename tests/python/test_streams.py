"""Streams that callers destroy, that are one a thread, and that wait for another one's capture. Run with --device cuda."""

import gc
import itertools
import threading

import numpy as np
import pytest
import raddle
import tvm_ffi
from draws import draw
from engine import spec_of, twin
from raddle import _library
from reference import attention
from checks import within
from small import refuses
from test_cuda import HEADS, run, tensors

PER_THREAD = 2  # CU_STREAM_PER_THREAD
_allocate = _library.function("raddle.cuda.allocate")
streams = itertools.count(0x700000, 0x100)


@pytest.fixture
def problem(rng):
    return draw(rng, "paged", "causal", lengths=[(1, 300), (3, 40), (2, 1)], page_size=16, **HEADS)


def on(attn, stream):
    return tvm_ffi.use_raw_stream(tvm_ffi.device(attn.device), stream)


def plan_and_run(attn, problem, lent):
    plan = attn.plan(twin(problem.layout), num_workers=9)
    within(attention(problem), run(attn, plan, **lent))
    return plan


def test_streams_that_die_before_an_attention(emulator, gpu, problem):
    misuses = emulator.raddle_emulator_misuses()
    attn, lent, stream = raddle.Attention(spec_of(problem), device=gpu), tensors(problem), next(streams)
    with on(attn, stream):
        plan = plan_and_run(attn, problem, lent)
    emulator.raddle_emulator_destroy_stream(stream)
    within(attention(problem), run(attn, plan, **lent))
    del plan, attn
    gc.collect()
    again = raddle.Attention(spec_of(problem), device=gpu)
    for _ in range(3):
        plan_and_run(again, problem, lent)
    assert emulator.raddle_emulator_misuses() == misuses


def test_a_stream_for_each_batch(emulator, gpu, problem):
    """Memory that streams used which are gone is freed, many blocks at a time."""
    misuses, counts = emulator.raddle_emulator_misuses(), []
    attn, lent = raddle.Attention(spec_of(problem), device=gpu), tensors(problem)
    for _ in range(200):
        stream = next(streams)
        with on(attn, stream):
            attn.run(attn.plan(twin(problem.layout), num_workers=9), lent["q"], (lent["k"], lent["v"]), out=lent["out"])
        emulator.raddle_emulator_destroy_stream(stream)
        counts.append(emulator.raddle_emulator_allocations() - emulator.raddle_emulator_releases())
    within(attention(problem), lent["out"].numpy())
    assert max(counts[140:]) <= max(counts[70:140]), "memory does not pile up"
    assert emulator.raddle_emulator_misuses() == misuses


def allocate(gpu, mebibytes, stream):
    """Device memory of a size that nothing else has."""
    return _allocate(nbytes=mebibytes << 20, device=gpu, stream=stream)


def test_memory_waits_for_the_stream_that_used_it(emulator, gpu):
    first, second, counts = next(streams), next(streams), emulator.raddle_emulator_allocations
    memory = allocate(gpu, 37, first)
    del memory
    before, waits = counts(), emulator.raddle_emulator_waits()
    memory = allocate(gpu, 37, second)
    assert counts() == before + 1, "no mark says when the first stream has finished"
    del memory
    memory = allocate(gpu, 11, first)  # a call that names the first stream marks where it was
    before = counts()
    memory = allocate(gpu, 37, second), allocate(gpu, 37, second)
    assert counts() == before and emulator.raddle_emulator_waits() == waits + 1
    assert memory


def test_streams_in_turns_find_their_memory_again(emulator, gpu):
    turns, counts = [next(streams) for _ in range(32)], []
    for stream in 4 * turns:
        memory = allocate(gpu, 29, stream)
        del memory
        counts.append(emulator.raddle_emulator_allocations())
    assert counts[31] == counts[-1]


def test_the_per_thread_stream_is_one_a_thread(emulator, gpu):
    """Memory that one thread used on it is no other thread's before there is a mark, which only that thread can make."""
    counts = [emulator.raddle_emulator_allocations()]

    def work(turns):
        for _ in range(turns):
            memory = allocate(gpu, 53, PER_THREAD)
            del memory
            counts.append(emulator.raddle_emulator_allocations())

    for turns in (2, 1):
        thread = threading.Thread(target=work, args=(turns,))
        thread.start()
        thread.join()
    assert np.diff(counts).tolist() == [1, 0, 1], "each thread takes memory once"


def test_threads_on_the_per_thread_stream_have_scratch_of_their_own(emulator, gpu, rng):
    problem = draw(rng, "paged", "causal", lengths=[(3, 40000)], page_size=16, **HEADS)
    attn, lent = raddle.Attention(spec_of(problem), device=gpu), tensors(problem)
    plan = attn.plan(twin(problem.layout), num_workers=1000)  # scratch that is larger than all else
    counts, failed = [], []

    def work():
        try:
            for _ in range(2):
                with on(attn, PER_THREAD):
                    attn.run(plan, lent["q"], (lent["k"], lent["v"]), out=lent["out"])
                counts.append(emulator.raddle_emulator_allocations())
        except Exception as error:
            failed.append(error)

    emulator.raddle_emulator_launch_nothing(1)
    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    emulator.raddle_emulator_launch_nothing(0)
    assert not failed
    assert counts[0] == counts[1] < counts[2] == counts[3], "each thread's first run takes scratch, its second none"


def test_the_default_stream_beside_a_capture_that_it_would_end(emulator, gpu, problem):
    attn, lent = raddle.Attention(spec_of(problem), device=gpu), tensors(problem)
    plan, spare = attn.plan(twin(problem.layout)), plan_and_run(attn, problem, lent)
    reservation = attn.reserve(raddle.Maxima(8, 64, 4096))
    reservation.update(twin(problem.layout))
    within(attention(problem), run(attn, reservation, **lent))
    before, misuses = lent["out"].numpy().copy(), emulator.raddle_emulator_misuses()
    emulator.raddle_emulator_capture_blocks(1)
    emulator.raddle_emulator_capture(next(streams))
    words = "the stream is the default one", "captures a graph"
    for call in (
        lambda: attn.plan(twin(problem.layout)),
        lambda: run(attn, plan, **lent),
        lambda: run(attn, reservation, **lent),
        lambda: reservation.update(twin(problem.layout)),
        lambda: attn.reserve(raddle.Maxima(8, 64, 4096)),
    ):
        with refuses(ValueError, *words):
            call()
    del spare
    gc.collect()
    assert emulator.raddle_emulator_misuses() == misuses
    emulator.raddle_emulator_capture(None)
    np.testing.assert_array_equal(lent["out"].numpy().astype(np.float32), before.astype(np.float32))
    plan_and_run(attn, problem, lent)
