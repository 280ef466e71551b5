"""Functions that were traced once: later calls read what they capture, and trace, compile and plan nothing again."""

from __future__ import annotations

import collections
import functools
import math
import subprocess
import sys
import types
from dataclasses import dataclass

import numpy as np
import pytest
import raddle
import torch
from checks import within
from raddle.flex import and_masks, create_block_mask, flex_attention, masks, mods, ops, program, trace
from raddle.flex.trace import trace_mask, trace_score
from reference import Flex
from test_flex_attention import draw, exact_of

WINDOW = 5
settings = types.ModuleType("settings")
settings.window = 5
Q, KV = np.arange(12)[:, None], np.arange(12)


@pytest.fixture
def traces(monkeypatch):
    """Counts runs of functions over symbolic values."""
    runs = []
    run = trace._run
    monkeypatch.setattr(trace, "_run", lambda *args: runs.append(args[0]) or run(*args))
    return runs


@dataclass
class Config:
    window: int = 5
    widths: tuple = (2, 3)

    def limit(self):
        return self.window + 0


class Model:
    shared = 5

    def __init__(self):
        self.config, self.table = Config(), np.arange(12)

    def mask(self, b, h, q, kv):
        return q - self.table[kv] < self.config.limit()


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(12))
        self.window = 5

    def forward(self, b, h, q, kv):
        return q - self.table[kv] < self.window


def near(b, h, q, kv, window=5):
    return q - kv < window


def change_global(value):
    globals()["WINDOW"] = value


def change_default(value):
    near.__defaults__ = (value,)


def in_closure():
    window = 5

    def change(value):
        nonlocal window
        window = value

    return (lambda b, h, q, kv: q - kv < window), change


def in_array(make):
    table = make([5] * 12)

    def change(value):
        table[:] = value

    return (lambda b, h, q, kv: q - kv < table[kv]), change


def in_computed_array():
    table = torch.arange(24).reshape(12, 2)

    def change(value):
        table[:, 1] = value

    def mask(b, h, q, kv):
        column = (table * 2)[:, 1] // 2
        return q - kv < column[kv]

    change(5)
    return mask, change


def in_containers():
    held = {"windows": [5, 9]}
    return (lambda b, h, q, kv: q - kv < held["windows"][0]), lambda value: held["windows"].__setitem__(0, value)


def in_object():
    model = Model()
    return model.mask, lambda value: setattr(model.config, "window", value)


def in_module_of_torch():
    layer = Layer()
    return (lambda b, h, q, kv: q - layer.table[kv] < layer.window), lambda value: setattr(layer, "window", value)


def in_called_module():
    layer = Layer()
    return layer, lambda value: setattr(layer, "window", value)


def in_class():
    return (lambda b, h, q, kv: q - kv < Model.shared), lambda value: setattr(Model, "shared", value)


def in_partial():
    held = {"window": 5}
    mask = functools.partial(near, **held)
    return mask, lambda value: mask.keywords.update(window=value)


def joined():
    mask, change = in_closure()
    return and_masks(mask, masks.causal()), change


def through_a_helper():
    mask, change = in_closure()
    return (lambda b, h, q, kv: mask(b, h, q, kv)), change


PLACES = {
    "closure": in_closure,
    "global": lambda: ((lambda b, h, q, kv: q - kv < WINDOW), change_global),
    "default": lambda: (near, change_default),
    "module": lambda: ((lambda b, h, q, kv: q - kv < settings.window), lambda v: setattr(settings, "window", v)),
    "numpy": lambda: in_array(np.array),
    "torch": lambda: in_array(torch.tensor),
    "computed array": in_computed_array,
    "containers": in_containers,
    "object": in_object,
    "torch.nn.Module": in_module_of_torch,
    "called torch.nn.Module": in_called_module,
    "class": in_class,
    "partial": in_partial,
    "joined masks": joined,
    "helper": through_a_helper,
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_values_are_read_at_each_call(traces, place):
    mask, change = place()
    first = trace_mask(mask)
    before = len(traces)
    for value in (2, 7, 5):
        change(value)
        again = trace_mask(mask)
        kept = (Q - KV < value) & (KV <= Q) if place is joined else Q - KV < value
        np.testing.assert_array_equal(again.evaluate(0, 0, Q, KV), kept)
        assert again.source is first.source
    assert len(traces) == before


def test_another_function_of_the_same_code_is_not_traced(traces):
    sources = {trace_score(mods.softcap(float(cap))).source for cap in range(2, 9)}
    runs = len(traces)
    assert len(sources) == 1 and runs <= 1
    documents = [masks.document(np.arange(0, n + 1, 4)) for n in (12, 40, 400)]
    kept = [trace_mask(mask).evaluate(0, 0, Q, KV) for mask in documents]
    assert len(traces) <= runs + 1
    for each in kept:
        np.testing.assert_array_equal(each, Q // 4 == KV // 4)


def test_other_kinds_are_traced_anew(traces):
    table, width, steps = np.arange(12), 5, 2

    def mask(b, h, q, kv):
        keep = q - table[kv] < width
        for i in range(steps):
            keep = keep & (q != i)
        return keep & (q < table.shape[0])

    def check():
        q, kv = Q[:9], KV[:9]
        np.testing.assert_array_equal(trace_mask(mask).evaluate(0, 0, q, kv), mask(0, 0, q, kv))

    for n, change in enumerate(
        [lambda: None, lambda: width + 0.5, lambda: steps + 1, lambda: table + 0.5, lambda: table[:9]], start=1
    ):
        value = change()
        if n == 2:
            width = value
        elif n == 3:
            steps = value
        elif n > 3:
            table = value
        check()
        runs = len(traces)
        check()
        assert len(traces) == runs


def test_what_was_one_object_need_not_stay_one():
    """An array, a cell or a function that two names had: one member, until they differ."""
    first = second = np.arange(12)
    other = inner = lambda q, kv: q - kv < 4

    def mask(b, h, q, kv):
        return (first[q] == second[kv]) | other(q, kv) & inner(kv, q)

    np.testing.assert_array_equal(trace_mask(mask).evaluate(0, 0, Q, KV), mask(0, 0, Q, KV))
    second = second // 3
    np.testing.assert_array_equal(trace_mask(mask).evaluate(0, 0, Q, KV), mask(0, 0, Q, KV))
    inner = lambda q, kv: q - kv < 1  # noqa: E731
    np.testing.assert_array_equal(trace_mask(mask).evaluate(0, 0, Q, KV), mask(0, 0, Q, KV))


def test_what_cannot_be_read_again_is_traced_each_time(traces):
    held = collections.deque([5])

    def mask(b, h, q, kv):
        return q - kv < held[0]

    for value in (5, 2, 9):
        held[0] = value
        np.testing.assert_array_equal(trace_mask(mask).evaluate(0, 0, Q, KV), Q - KV < value)
    assert len(traces) >= 3


def test_a_gradient_is_refused_at_each_call():
    weight = torch.ones(12)

    def mod(score, b, h, q, kv):
        return score + weight[kv]

    trace_score(mod)
    weight.requires_grad_()
    with pytest.raises(raddle.flex.TraceError, match="weight requires a gradient"):
        trace_score(mod)


def test_traces_hold_no_arrays():
    import gc
    import weakref

    table = torch.arange(12)
    alive = weakref.ref(table)
    trace_mask(lambda b, h, q, kv: q - (table + 1)[kv] < 3)
    del table
    gc.collect()
    assert alive() is None


@pytest.fixture
def plans(monkeypatch):
    """Counts plans."""
    made = []
    plan = raddle.Attention.plan
    monkeypatch.setattr(raddle.Attention, "plan", lambda *args, **how: made.append(args) or plan(*args, **how))
    return made


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_a_fixed_mask_keeps_its_plan(rng, traces, plans, kind):
    q, k, v = draw(rng, rows=20, keys=20)
    how = {"enable_gqa": True, "return_lse": True}
    document, cap = kind(np.repeat(np.arange(4), 5)), 20.0

    def mask(b, h, q_idx, kv_idx):
        return document[q_idx] == document[kv_idx]

    def score(s, b, h, q_idx, kv_idx):
        return cap * ops.tanh(s / cap)

    def check():
        parts = Flex(score, error=2e-6), Flex(lambda b, h, q, kv: np.asarray(document)[q] == np.asarray(document)[kv])
        within(exact_of(q, k, v, *parts), *flex_attention(q, k, v, score_mod=score, block_mask=block_mask, **how))

    block_mask = create_block_mask(mask, None, None, 20, 20)
    check()
    counted = len(traces), len(plans), raddle.cache.num_compiled()
    for cap in (20.0, 3.0, 20.0):
        check()
    assert (len(traces), len(plans), raddle.cache.num_compiled()) == counted
    document[:] = kind(np.repeat(np.arange(2), 10))  # in place: another plan, nothing else
    check()
    check()
    assert (len(traces), len(plans), raddle.cache.num_compiled()) == (counted[0], counted[1] + 1, counted[2])


def test_masks_that_take_turns_keep_their_plans(rng, plans):
    q, k, v = draw(rng, rows=20, keys=20)
    both = [create_block_mask(masks.sliding_window(n, 0), None, None, 20, 20) for n in (3, 9)]
    for block_mask in both * 2:
        flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)
    assert len(plans) == 2


def test_plans_of_large_arrays_are_not_collected(rng, plans, monkeypatch):
    """Each keeps a copy to compare with: of arrays beyond the limit the latest alone."""
    monkeypatch.setattr(program, "_MOST_BYTES", 3000)
    q, k, v = draw(rng, rows=20, keys=20)
    tables = [rng.integers(0, 2, (20, 20)).astype(bool) for _ in range(9)]
    both = [create_block_mask(lambda b, h, q, kv, t=t: t[q, kv], None, None, 20, 20) for t in tables]
    for block_mask in both[:2] + [both[1]] + both[2:] + [both[8], both[3], both[0]]:
        flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)
    assert len(plans) == 10  # all but the repeated ones and the fourth, one of the latest seven; the first is gone


def test_given_blocks_are_read_once(rng, traces, plans):
    q, k, v = draw(rng, rows=32, keys=32)
    whole = create_block_mask(masks.causal(), None, None, 32, 32, BLOCK_SIZE=16)
    lists = whole.kv_num_blocks, whole.kv_indices, whole.full_kv_num_blocks, whole.full_kv_indices
    given = raddle.flex.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=16, mask_mod=masks.causal())
    expected = flex_attention(q, k, v, block_mask=whole, enable_gqa=True)
    for _ in range(3):
        np.testing.assert_allclose(flex_attention(q, k, v, block_mask=given, enable_gqa=True), expected, atol=1e-6)
    counted = len(traces), len(plans)
    flex_attention(q, k, v, block_mask=given, enable_gqa=True)
    assert (len(traces), len(plans)) == counted


LARGE_BIAS = """
import resource, sys
import numpy as np
from raddle.flex import flex_attention

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

def call(bias):
    return flex_attention(x, x, x, score_mod=lambda score, b, h, q, kv: score + bias[h, q, kv])

x = np.ones((1, 1, 16, 8), np.float32)
call(np.zeros((1, 16, 16), np.float32))
large = np.zeros((1, 4096, 16384), np.float32)
large += 1.0
before = peak()
call(large)
print(peak() - before)
"""


def test_a_large_bias_is_not_copied():
    """256 MiB, in a process of its own, whose highest use of memory tells."""
    done = subprocess.run([sys.executable, "-c", LARGE_BIAS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 64 * 1024, f"{done.stdout} KiB more for a bias of {256 * 1024} KiB"


def test_old_programs_and_traces_are_forgotten(monkeypatch):
    monkeypatch.setattr(trace._Traces, "MOST_CODES", 3)
    traces = trace._Traces()
    monkeypatch.setattr(trace, "_traces", traces)
    for n in range(6):
        scope = {}
        exec(f"def mask(b, h, q, kv): return q - kv < {n}", scope)
        trace_mask(scope["mask"])
    assert len(traces._by_code) == 3
    assert math.isfinite(program._MOST_PROGRAMS)


def test_functions_of_one_text_have_their_own_numbers(rng):
    """Two codes with the same C++ share what is compiled, not what they capture."""
    q, k, v = draw(rng, rows=20, keys=20)

    def twin(limit, window):
        scope = {"limit": limit, "window": window}
        exec("def score(s, b, h, q, kv): return s * 0.25 + limit * (kv - q)", scope)
        exec("def mask(b, h, q, kv): return q - kv < window", scope)
        return scope["score"], scope["mask"]

    for limit, window in ((0.1, 3), (0.3, 9), (0.1, 3)):
        score, mask = twin(limit, window)
        block_mask = create_block_mask(mask, None, None, 20, 20)
        found = flex_attention(q, k, v, score_mod=score, block_mask=block_mask, enable_gqa=True, return_lse=True)
        within(exact_of(q, k, v, Flex(score), Flex(mask)), *found)


def test_programs_keep_no_captured_arrays(rng):
    import gc
    import weakref

    q, k, v = draw(rng, rows=20, keys=20)
    bias = torch.rand(20, 20)
    flex_attention(q, k, v, score_mod=lambda score, b, h, q, kv: score + bias[q, kv], enable_gqa=True)
    alive = weakref.ref(bias)
    del bias
    gc.collect()
    assert alive() is None


def test_host_copies_are_kept_until_they_are_stale():
    """Of a tensor that the library cannot read where it lies: one on a GPU, or here one with its negative bit set."""
    from raddle.flex import capture

    table = torch.randn(12, dtype=torch.complex64)
    x = table.conj().imag
    assert x.is_neg()
    first = capture.lent_array(x, "x")
    assert capture.lent_array(x, "x") is first and torch.equal(first, x)
    table.mul_(2)
    second = capture.lent_array(x, "x")
    assert torch.equal(second, x) and not torch.equal(second, first)
    kept = len(capture._host_copies)
    del x
    assert len(capture._host_copies) == kept - 1
    with torch.inference_mode():
        inferred = torch.randn(12, dtype=torch.complex64).conj().imag
        assert torch.equal(capture.lent_array(inferred, "inferred"), inferred) and len(capture._host_copies) == kept - 1
