"""Masks of bits in reservations: a batch's own, of any size, and, with --device cuda, in graphs of captured runs."""

import pytest
import raddle
from checks import within
from draws import Place, draw, packed_mask
from engine import twin
from reference import Causal, Problem, SlidingWindow, SoftCap, attention
from reference.variants import AnyOf
from small import refuses, reserved
from test_captured_runs import HEADS, MAXIMA, Captured

SOME = [[(5, 90), (1, 33)], [(1, 7)], [(9, 130), (3, 0), (0, 5), (12, 12)], [(1, 150)] * 6, [(0, 0)], [(24, 200)]]


def masked(rng, lengths, keep=0.6, kind="paged", variant=()):
    """A problem with bits of its own; ``variant``: more parts."""
    problem = draw(rng, kind, "plain", lengths=lengths, page_size=16, **HEADS)
    bits = packed_mask(Place(rng, problem.q.shape[1], problem.q.shape[2], None, problem.layout), keep)
    return Problem(problem.q, problem.kv, problem.layout, [bits, *variant])


def params_of(problem):
    bits = problem.variant[0]
    bits = bits.masks[0] if isinstance(bits, AnyOf) else bits
    return {"packed_mask.bits": bits.bits, "packed_mask.indptr": bits.indptr}


class CapturedMask(Captured):
    def update(self, problem):
        self.reservation.update(twin(problem.layout), params=params_of(problem))


def test_every_update_brings_bits(engine, rng):
    """No batch decides for those after it, nor does the spec's mask."""
    spec = masked(rng, [(3, 20)])
    attn = engine.attention(spec)
    owner = attn if engine.device == "cpu" else attn.attention
    reservation = reserved(owner, **MAXIMA, num_workers=5)
    for lengths in SOME + SOME[::-1]:
        problem = masked(rng, lengths)
        reservation.update(twin(problem.layout), params=params_of(problem))
        within(attention(problem), attn.run(reservation, problem.q, problem.kv[0]))
    reservation.update(twin(spec.layout))
    within(attention(spec), attn.run(reservation, spec.q, spec.kv[0]))


def test_what_an_update_may_bring(engine, rng):
    problem = masked(rng, [(5, 90), (1, 33)], variant=[SoftCap(30.0), SlidingWindow(20)])
    attn = engine.attention(problem)
    owner = attn if engine.device == "cpu" else attn.attention
    reservation = reserved(owner, **MAXIMA, num_workers=5, max_mask_bytes=100)
    reservation.update(twin(problem.layout), params=params_of(problem))
    larger = masked(rng, [(9, 90)])
    bits, indptr = params_of(problem).values()
    for params, words in (
        ({"window.left": 5}, ["params: 'window.left' is the reservation's", "reserve(params=…)", "packed mask"]),
        ({"softcap.cap": 5.0}, ["params: 'softcap.cap' is a run member"]),
        ({"packed_mask.bit": bits}, ["no member is named 'packed_mask.bit'"]),
        ({"packed_mask.indptr": indptr[:-1]}, ["packed_mask.indptr has 2 entries", "3"]),
        ({"packed_mask.bits": bits[:-1]}, ["packed_mask.bits has"]),
        (params_of(larger), ["params: 'packed_mask.bits' has 102 bytes", "at most max_mask_bytes = 100"]),
    ):
        with refuses(ValueError, *words):
            reservation.update(twin(problem.layout), params=params)
        within(attention(problem), attn.run(reservation, problem.q, problem.kv[0]))
    with refuses(ValueError, "max_mask_bytes is -1; expected at least 0"):
        reserved(owner, **MAXIMA, max_mask_bytes=-1)


# --- graphs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [SOME[0], [(0, 0)]], ids=["some", "none"])
def test_replays_read_the_bits_of_the_last_update(engine, emulator, rng, first):
    captured = CapturedMask(engine, emulator, masked(rng, first))
    for lengths in SOME:
        captured.check(masked(rng, lengths))


def test_bits_beside_other_masks(engine, emulator, rng):
    def beside(lengths):
        problem = masked(rng, lengths, 0.2)
        either = AnyOf([problem.variant[0], SlidingWindow(30)])
        return Problem(problem.q, problem.kv, problem.layout, [either, SoftCap(20.0), Causal()])

    captured = CapturedMask(engine, emulator, beside(SOME[0]))
    for lengths in SOME:
        captured.check(beside(lengths))


def test_runs_with_values_of_their_own_read_the_same_bits(engine, emulator, rng):
    """Layers whose cap differs: their runs are of another variant, and their graphs of the same bits."""

    def capped(lengths, cap):
        return masked(rng, lengths, variant=[SoftCap(cap)])

    captured = CapturedMask(engine, emulator, capped(SOME[4], 50.0), given={"params": {"softcap.cap": 5.0}})
    for lengths in SOME:
        problem = capped(lengths, 5.0)
        captured.check(problem)


def test_a_reservation_has_room_for_any_mask_within_its_maxima(engine, emulator, rng):
    captured = CapturedMask(engine, emulator, masked(rng, [(1, 9)]))
    captured.check(masked(rng, [(24, 1000)]))
    few = CapturedMask(engine, emulator, masked(rng, [(1, 9)]), max_qo_len=4)
    few.check(masked(rng, [(4, 160)] * 6))


@pytest.mark.parametrize("kinds, Br, Bc", [(["bsr_bits", "bsr"], 4, 8), (["bsr_bits"], 1, 16)])
def test_bits_of_block_sparse_matrices(engine, emulator, rng, kinds, Br, Bc):
    def drawn(n, lengths):
        return draw(rng, kinds[n % len(kinds)], "plain", lengths=lengths, Br=Br, Bc=Bc, **HEADS)

    some = [[(5, 90)], [(1, 7)], [(9, 130)], [(24, 190)]]
    captured = Captured(engine, emulator, drawn(0, [(9, 40)]), max_requests=24, max_kv_tokens=5000)
    for n, lengths in enumerate(some):
        captured.check(drawn(n, lengths))


class CapturedTree(Captured):
    def update(self, problem):
        layout = problem.layout
        arguments = {name: value for name, value in vars(layout).items() if value is not None and name != "qo_pos"}
        self.reservation.update(raddle.TokenTree(**arguments, max_nodes=12))


def test_trees_of_any_shape(engine, emulator, rng):
    def drawn(lengths):
        return draw(rng, "token_tree", [SlidingWindow(60)], lengths=lengths, page_size=16, **HEADS)

    captured = CapturedTree(engine, emulator, drawn([(3, 40), (1, 9)]), max_levels=2)
    for lengths in ([(12, 90), (12, 33)], [(1, 7)], [(9, 130), (0, 5), (12, 12)], [(4, 150)] * 6, [(0, 0)]):
        captured.check(drawn(lengths))


def test_without_memory_the_plan_before_stays(engine, emulator, rng):
    problem = masked(rng, [(5, 90), (1, 33)])
    attn = engine.attention(problem)
    reservation = reserved(attn.attention, **MAXIMA, num_workers=5, max_mask_bytes=2**30)
    emulator.raddle_emulator_memory_left(1000)
    with refuses(RuntimeError, "the masks of this reservation", "bytes free"):
        reservation.update(twin(problem.layout), params=params_of(problem))
    emulator.raddle_emulator_memory_left(2**40)
    reservation.update(twin(problem.layout), params=params_of(problem))
    within(attention(problem), attn.run(reservation, problem.q, problem.kv[0]))
