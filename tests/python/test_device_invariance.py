"""Batch invariance with lengths on a GPU: chunks end at the host's columns, whatever the rest of the batch is.

Needs --device cuda; test_emulated.py runs this file on the emulated driver.
"""

import numpy as np
import pytest
import raddle
from checks import within
from device_arrays import DeviceArray
from device_table import HEADS, Table, Tensors
from draws import draw
from engine import spec_of, twin
from reference import Causal, SlidingWindow, SoftCap, attention
from small import refuses, reserved
from test_same_bits import reordered

PAGE = 64
MAXIMA = {"max_requests": 6, "max_qo_tokens": 48, "max_kv_tokens": 12_000}
#: Decodes and drafts of which some are cut, at 2,048 columns and multiples; a prompt in one tile and one in two.
LENGTHS = [(1, 4101), (3, 2049), (1, 70), (33, 2100), (1, 2048), (8, 1300)]


def drawn(rng, variant=None, lengths=LENGTHS):
    return draw(rng, "paged", variant or [Causal()], lengths=lengths, page_size=PAGE, **HEADS)


def attention_of(gpu, variant=None):
    spec = spec_of(drawn(np.random.default_rng(0), variant, [(1, 1)]), batch_invariant=True)
    return raddle.Attention(spec, device=gpu)


class Batches:
    """A reservation that plans on the GPU, with room for its batches at fixed addresses."""

    def __init__(self, attn, form="table", **changes):
        self.attn = attn
        self.reservation = reserved(attn, **{**MAXIMA, "device_lengths": True, **changes})
        tokens = changes.get("max_qo_tokens", MAXIMA["max_qo_tokens"])
        self.table, self.tensors = Table(form, page_size=PAGE), Tensors(page_size=PAGE, tokens=tokens)
        self.lse = DeviceArray(np.zeros((tokens, 4), np.float32))

    def write(self, problem):
        self.table.write(problem.layout), self.tensors.write(problem)

    def launch(self):
        self.reservation.update(self.table.layout)
        self.run(self.reservation)

    def run(self, plan):
        self.attn.run(plan, self.tensors.q, self.tensors.kv, out=self.tensors.out, lse=self.lse)

    def bits(self, rows):
        return self.tensors.out.numpy()[:rows].view(np.uint16), self.lse.numpy()[:rows].view(np.uint32)

    def planned(self, problem):
        """Bits of O and LSE."""
        self.write(problem)
        self.launch()
        self.reservation.check()
        return self.bits(len(problem.q))


def same(got, expected):
    for a, b in zip(got, expected):
        np.testing.assert_array_equal(a, b)


def of_request(problem, bits, i):
    rows = slice(*problem.layout.qo_indptr[i : i + 2])
    return tuple(x[rows] for x in bits)


@pytest.mark.parametrize("form", ["lists", "table"])
@pytest.mark.parametrize("variant", [[], [SoftCap(30.0), SlidingWindow(2500), Causal()]], ids=["causal", "window"])
def test_bits_are_those_of_the_hosts_plan(gpu, rng, form, variant):
    attn = attention_of(gpu, variant)
    device = Batches(attn, form, num_workers=5)
    host = reserved(attn, **MAXIMA, num_workers=3)
    for lengths in (LENGTHS, [(1, int(n)) for n in rng.integers(0, 4200, 3)]):
        problem = drawn(rng, variant, lengths)
        bits = device.planned(problem)
        within(attention(problem), device.tensors.out.numpy()[: len(problem.q)])
        host.update(twin(problem.layout))
        device.tensors.write(problem)
        device.run(host)
        same(bits, device.bits(len(problem.q)))


def test_a_requests_bits_depend_on_nothing_else(gpu, rng, monkeypatch):
    """Not on its neighbours, their order, the reservation and its workers; nor on whether its kernel is the short."""
    monkeypatch.setenv("RADDLE_BACKEND", "mma")  # on wgmma, such attentions have no kernel of short queries
    attn, problem = attention_of(gpu), drawn(rng)
    whole = Batches(attn, num_workers=7).planned(problem)
    order = rng.permutation(len(LENGTHS))
    mixed = reordered(problem, order)
    bits = Batches(attn, num_workers=2, max_kv_tokens=20_000).planned(mixed)
    for at, i in enumerate(order):
        same(of_request(mixed, bits, at), of_request(problem, whole, i))
    alone = Batches(attn, num_workers=20, max_qo_len=8, max_qo_tokens=16)
    for i in (0, 1, 4, 5):
        bits = alone.planned(reordered(problem, [i]))
        assert "(short queries)" in alone.reservation.plan.explain()
        same(bits, of_request(problem, whole, i))


def test_a_captured_update_cuts_alike_at_every_replay(gpu, rng, emulator):
    import tvm_ffi

    attn, stream = attention_of(gpu), 0x7A0
    batches = Batches(attn, num_workers=5)
    emulator.raddle_emulator_capture(stream)
    with tvm_ffi.use_raw_stream(tvm_ffi.device(attn.device), stream):
        batches.launch()
    emulator.raddle_emulator_capture(None)
    first = drawn(rng, lengths=[(1, 4100), (4, 2500), (1, 2049)])
    again = reordered(first, [2, 0])
    batches.write(first)
    emulator.raddle_emulator_replay(stream)
    batches.reservation.check()
    bits = batches.bits(len(first.q))
    within(attention(first), batches.tensors.out.numpy()[: len(first.q)])
    batches.write(again)
    emulator.raddle_emulator_replay(stream)
    batches.reservation.check()
    after = batches.bits(len(again.q))
    same(of_request(again, after, 0), of_request(first, bits, 2))
    same(of_request(again, after, 1), of_request(first, bits, 0))


def test_what_does_not_fit_is_said(gpu, rng):
    attn = attention_of(gpu)
    batches = Batches(attn, max_kv_tokens=4000)
    batches.write(drawn(rng, lengths=[(1, 4001)]))
    batches.launch()
    assert (batches.tensors.out.numpy() == 7.0).all()
    with refuses(ValueError, "kv_len has more keys than max_kv_tokens = 4000"):
        batches.reservation.check()
    # In other tiles than its rows ask for, a request would have other bits.
    decodes = Batches(attn, max_qo_len=2)
    problem = drawn(rng, lengths=[(1, 90), (3, 70), (2, 30)])
    decodes.write(problem)
    decodes.launch()
    with refuses(ValueError, "request 1: qo_indptr gives it more rows than max_qo_len = 2"):
        decodes.reservation.check()
    out = decodes.tensors.out.numpy()[:6]
    assert (out[1:4] == 7.0).all()
    for rows, i in ((slice(0, 1), 0), (slice(4, 6), 2)):
        within(attention(reordered(problem, [i])), out[rows])


def test_what_is_refused(gpu):
    attn = attention_of(gpu)
    with refuses(ValueError, "max_levels is 2; expected 1 with batch_invariant=True"):
        reserved(attn, **MAXIMA, device_lengths=True, max_levels=2)
    with refuses(ValueError, "max_kv_tokens is 134213633; expected at most 134213632 with batch_invariant=True"):
        reserved(attn, **{**MAXIMA, "max_kv_tokens": 65534 * 2048 + 1}, device_lengths=True)
    with refuses(ValueError, "discover_prefixes is 16; expected False"):
        batches = Batches(attn)
        batches.reservation.update(Table("table", page_size=PAGE, discover_prefixes=16).layout)
