"""Masks of bits: the format, batches of their own, lengths that do not fit."""

import numpy as np
import pytest
import raddle
from checks import within
from draws import DTYPES, WORKERS, Place, draw, packed_mask
from engine import twin
from reference import Causal, PackedMask, Problem, SlidingWindow, attention
from small import refuses

HEADS = dict(dim=32, group=2, num_kv_heads=2)


def place_of(rng, problem):
    return Place(rng, problem.q.shape[1], problem.q.shape[2], None, problem.layout)


def masked(rng, problem, keep=0.5):
    return Problem(problem.q, problem.kv, problem.layout, [packed_mask(place_of(rng, problem), keep)])


def test_the_format():
    """Rows of 3 keys: bits 0…2 are row 0's. The next request begins at a byte of its own."""
    bits, indptr = raddle.pack_masks([[[1, 0, 0], [0, 1, 1], [1, 1, 1]], [[0, 1]], np.ones((0, 5))])
    assert bits.tolist() == [0b11110001, 0b1, 0b10] and indptr.tolist() == [0, 2, 3, 3]
    q = np.zeros((4, 1, 8), np.float32)
    v = np.arange(10, dtype=np.float32)[:, None, None] * np.ones((1, 1, 8), np.float32)
    layout = raddle.RaggedKV([0, 3, 4, 4], [0, 3, 5, 10])
    attn = raddle.Attention(raddle.AttentionSpec(1, 1, 8, dtype="float32", variant=[raddle.PackedMask(bits, indptr)]))
    out = attn.run(attn.plan(layout), q, (np.zeros_like(v), v))
    np.testing.assert_array_equal(out[:, 0, 0], [0.0, 1.5, 1.0, 4.0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workers", WORKERS)
def test_long_keys(engine, rng, dtype, workers):
    """Bits that begin anywhere in a byte: kv_len is no multiple of 8."""
    problem = draw(rng, "paged", "plain", dtype, lengths=[(1, 3001), (70, 701), (5, 3)], **HEADS)
    engine.check(masked(rng, problem), num_workers=workers)


def test_equals_causal_written_out(engine, rng):
    problem = draw(rng, "paged", "causal", lengths=[(40, 90), (1, 33), (30, 4), (7, 0)], **HEADS)
    layout = problem.layout
    masks = [np.tri(qo, kv, kv - qo, bool) for qo, kv in zip(np.diff(layout.qo_indptr), layout.kv_len)]
    bits = Problem(problem.q, problem.kv, layout, [PackedMask(*raddle.pack_masks(masks))])
    exact = attention(problem)
    within(exact, *engine.run(bits))
    within(exact, *engine.run(problem))


def test_rows_that_keep_nothing_or_everything(engine, rng):
    problem = draw(rng, "paged", "plain", lengths=[(9, 200)], **HEADS)
    mask = np.ones((9, 200), bool)
    mask[3], mask[4, :199] = False, False
    bits = Problem(problem.q, problem.kv, problem.layout, [PackedMask(*raddle.pack_masks([mask]))])
    engine.check(bits, num_workers=7)
    out, lse = engine.run(bits)
    assert (out[3] == 0).all() and np.isneginf(lse[3]).all()


def test_a_token_tree(engine, rng):
    """Eight drafts in a tree over 60 committed keys: positions are depths, bits say which are ancestors."""
    parent = [-1, 0, 0, 1, 1, 2, 3, 6]
    tree = np.eye(8, dtype=bool)
    for i, p in enumerate(parent):
        if p >= 0:
            tree[i] |= tree[p]
    depth = tree.sum(1) - 1
    mask = np.hstack([np.ones((8, 60), bool), tree])
    problem = draw(rng, "paged", "plain", lengths=[(8, 68)], qo_pos=(60 + depth).astype(np.int32), **HEADS)
    bits = PackedMask(*raddle.pack_masks([mask]))
    engine.check(Problem(problem.q, problem.kv, problem.layout, [bits, SlidingWindow(40)]), num_workers=3)


def test_every_batch_has_bits_of_its_own(engine, rng):
    """Plan members of any length: one Attention serves batches of different shapes."""
    problem = draw(rng, "paged", "plain", lengths=[(3, 20)], **HEADS)
    attn = engine.attention(masked(rng, problem))
    for lengths in ([(1, 70)], [(5, 9), (1, 300)], [(64, 64)]):
        batch = draw(rng, "paged", "plain", lengths=lengths, **HEADS)
        bits = packed_mask(place_of(rng, batch))
        params = {"packed_mask.bits": bits.bits, "packed_mask.indptr": bits.indptr.astype(np.int64)}
        plan = attn.plan(twin(batch.layout), params=params)
        found = attn.run(plan, batch.q, batch.kv[0], return_lse=True)
        within(attention(Problem(batch.q, batch.kv, batch.layout, [bits])), *found)
        with refuses(ValueError, "packed_mask.bits", "plan member"):
            attn.run(plan, batch.q, batch.kv[0], params={"packed_mask.bits": bits.bits})


def test_two_masks_of_bits(engine, rng):
    problem = draw(rng, "cascade", "plain", lengths=[(3, 20), (1, 100)], **HEADS)
    both = [masked(rng, problem).variant[0] for _ in range(2)]
    engine.check(Problem(problem.q, problem.kv, problem.layout, [both[0] | both[1], Causal()]))


def planned(bits, indptr):
    """Two requests, 2 x 9 and 1 x 5: 3 bytes and 1."""
    variant = [raddle.PackedMask(np.asarray(bits, np.uint8), indptr)]
    attn = raddle.Attention(raddle.AttentionSpec(1, 1, 8, dtype="float32", variant=variant))
    return attn.plan(raddle.RaggedKV([0, 2, 3], [0, 9, 14]))


@pytest.mark.parametrize(
    "bits, indptr, error, words",
    [
        ([0] * 4, [0, 3], ValueError, ["packed_mask.indptr has 2 entries", "3"]),
        ([0] * 4, [0, 2, 3], ValueError, ["packed_mask.indptr gives request 0 2 bytes", "expected 3", "2 rows x 9 keys"]),
        ([0] * 5, [0, 3, 5], ValueError, ["packed_mask.indptr gives request 1 2 bytes", "expected 1"]),
        ([0] * 4, [0, 18, 23], ValueError, ["packed_mask.indptr gives request 0 18 bytes"]),
        ([0] * 4, [-1, 2, 3], ValueError, ["packed_mask.indptr begins with -1"]),
        ([0] * 3, [0, 3, 4], ValueError, ["packed_mask.bits has 3 bytes", "at least 4"]),
        ([], [0, 3, 4], ValueError, ["packed_mask.bits has 0 bytes"]),
        ([0] * 4, [0, 2**31, 3], ValueError, ["indptr holds 2147483648", "32-bit"]),
        ([0] * 4, [0.0, 3.0, 4.0], TypeError, ["indptr"]),
    ],
)
def test_bits_that_do_not_fit_a_batch(bits, indptr, error, words):
    with refuses(error, *words):
        planned(bits, indptr)
    assert planned([255] * 4, [0, 3, 4]).num_items >= 1


def test_bits_of_another_kind():
    with refuses(TypeError, "bits", "uint8"):
        raddle.PackedMask(np.zeros(4, np.float32), [0, 4])
    with refuses(TypeError, "bits", "uint8"):
        raddle.PackedMask(np.zeros((2, 2), np.uint8), [0, 4])
    with refuses(ValueError, "masks[1] has 1 dimensions"):
        raddle.PackedMask.from_masks([np.ones((2, 2)), np.ones(3)])
    assert "packed_mask(bits=" in repr(raddle.PackedMask.from_masks([np.ones((2, 9))]))
