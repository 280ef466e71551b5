"""A captured array that is shorter than what a function indexes for a batch is refused, and no other is."""

import numpy as np
import pytest
import raddle
import torch
from raddle.flex import BlockMask, create_block_mask, flex_attention, masks, ops, with_offset
from small import refuses, reserved

SHORT, LONG = np.arange(10, dtype=np.int32), np.arange(40, dtype=np.int32)
TABLE = np.linspace(0, 1, 10, dtype=np.float32)
STARTS = np.int32([0, 40])


def attention_of(*variant, heads=2):
    return raddle.Attention(raddle.AttentionSpec(heads, heads, 8, dtype="float32", variant=list(variant)))


def planned(*variant, qo_len=(40,), kv_len=(40,), heads=2, **options):
    attn = attention_of(*variant, heads=heads)
    rows, keys = (np.cumsum([0, *lengths]) for lengths in (qo_len, kv_len))
    plan = attn.plan(raddle.RaggedKV(rows, keys, qo_pos=options.pop("qo_pos", None)), **options)
    q, k = (np.zeros((end[-1], heads, 8), np.float32) for end in (rows, keys))
    return attn, plan, q, (k, k)


SHORT_MASKS = {
    "q_idx": lambda b, h, q, kv: SHORT[q] >= 0,
    "kv_idx": lambda b, h, q, kv: SHORT[kv] >= 0,
    "division": lambda b, h, q, kv: SHORT[kv // 3] >= 0,
    "shift": lambda b, h, q, kv: SHORT[kv >> 1] >= 0,
    "remainder": lambda b, h, q, kv: SHORT[kv % 11] >= 0,
    "difference": lambda b, h, q, kv: SHORT[q - kv] >= 0,
    "below the first": lambda b, h, q, kv: SHORT[kv - 40] >= 0,
    "clamped too late": lambda b, h, q, kv: SHORT[ops.minimum(kv, 10)] >= 0,
    "guarded too late": lambda b, h, q, kv: (kv < 11) & (SHORT[kv] >= 0),
    "chosen too late": lambda b, h, q, kv: SHORT[ops.where(kv < 11, kv, 0)] >= 0,
    "or": lambda b, h, q, kv: (kv < 10) | (SHORT[kv] >= 0),
    "index of an index": lambda b, h, q, kv: SHORT[LONG[kv]] >= 0,
    "two dimensions": lambda b, h, q, kv: LONG.reshape(2, 20)[h, kv] >= 0,
    "a captured number": (lambda shift: lambda b, h, q, kv: SHORT[ops.maximum(kv - shift, 0)] >= 0)(25),
}
LONG_MASKS = {
    "long": lambda b, h, q, kv: LONG[q] == LONG[kv],
    "division": lambda b, h, q, kv: SHORT[kv // 4] >= 0,
    "shift": lambda b, h, q, kv: SHORT[kv >> 2] >= 0,
    "remainder": lambda b, h, q, kv: SHORT[kv % 10] >= 0,
    "clamp": lambda b, h, q, kv: SHORT[ops.clamp(kv, 0, 9)] >= 0,
    "negative": lambda b, h, q, kv: LONG[kv - 40] >= 0,
    "guarded": lambda b, h, q, kv: (kv < 10) & (SHORT[kv] >= 0),
    "guarded by or": lambda b, h, q, kv: (kv >= 10) | (SHORT[kv] >= 0),
    "guarded by where": lambda b, h, q, kv: ops.where(kv < 10, SHORT[kv] >= 0, q > 3),
    "chosen index": lambda b, h, q, kv: SHORT[ops.where(kv < 10, kv, 0)] >= 0,
    "window": lambda b, h, q, kv: (q >= kv) & (q - kv < 10) & (SHORT[q - kv] >= 0),
    "by head": lambda b, h, q, kv: SHORT[h] >= 0,
    "by request": lambda b, h, q, kv: SHORT[b] >= 0,
    "index of an index": lambda b, h, q, kv: SHORT[(LONG // 4)[kv]] >= 0,
    "unknown": lambda b, h, q, kv: SHORT[(10.0 * ops.sin(kv.float())).int()] >= 0,
    "bucket": lambda b, h, q, kv: SHORT[ops.minimum(9, (ops.log(1.0 + ops.abs(q - kv).float()) * 2.0).int())] >= 0,
}


@pytest.mark.parametrize("mask", SHORT_MASKS.values(), ids=SHORT_MASKS)
def test_short_arrays_are_refused(mask):
    with refuses(ValueError, "captured array", "elements and is indexed with", "request 0", "expected"):
        planned(mask)
    if mask is SHORT_MASKS["index of an index"]:  # what arrays hold is looked at when a plan is made
        return
    with refuses(ValueError, "captured array", "elements and is indexed with", "expected"):
        create_block_mask(mask, 1, 2, 40, 40)


@pytest.mark.parametrize("mask", LONG_MASKS.values(), ids=LONG_MASKS)
def test_arrays_that_suffice_are_taken(mask):
    attn, plan, q, kv = planned(mask)
    assert np.isfinite(attn.run(plan, q, kv)).all()
    x = np.zeros((1, 2, 40, 8), np.float32)
    flex_attention(x, x, x, block_mask=create_block_mask(mask, None, None, 40, 40))


def test_the_message_names_function_array_length_index_and_request():
    document = np.zeros((2, 20), np.int32)

    def same_document(b, h, q_idx, kv_idx):
        return document[b, q_idx] == document[b, kv_idx]

    with refuses(
        ValueError, "same_document: captured array document, dimension 1, has 20 elements and is indexed with 29",
        "for request 1 (q_idx = 25 to 29)", "expected at least 30 elements", "raddle.flex.ops.clamp(index, 0, 19)",
    ):  # fmt: skip
        planned(same_document, qo_len=(3, 5), kv_len=(18, 30))
    planned(same_document, qo_len=(3, 5), kv_len=(18, 20))
    with refuses(ValueError, "array document has 2 elements and is indexed with 2 for request 2 (b = 2)", "at least 3"):
        planned(same_document, qo_len=(1, 1, 1), kv_len=(8, 8, 8))


def test_lengths_are_each_requests_own():
    """Documents of all requests in one array: what one request adds and another is long must not add up."""
    packed, starts = np.zeros(50, np.int32), np.int32([0, 40])
    mask = lambda b, h, q, kv: packed[starts[b] + q] == packed[starts[b] + kv]
    planned(mask, qo_len=(40, 10), kv_len=(40, 10))
    with refuses(ValueError, "has 50 elements and is indexed with 50 for request 1"):
        planned(mask, qo_len=(40, 11), kv_len=(40, 11))


def test_heads_and_empty_requests():
    slopes = np.ones(2, np.float32)
    mask = lambda b, h, q, kv: slopes[h] > 0
    planned(mask, heads=2)
    with refuses(ValueError, "slopes has 2 elements and is indexed with 3", "(h = 0 to 3)"):
        planned(mask, heads=4)
    planned(SHORT_MASKS["kv_idx"], qo_len=(0, 3), kv_len=(40, 3))  # a request without rows asks nothing


def test_a_plan_may_bring_a_longer_array():
    document = np.zeros(10, np.int32)

    def same(b, h, q, kv):
        return document[q] == document[kv]

    attn, layout = attention_of(same), raddle.RaggedKV([0, 40], [0, 40])
    with refuses(ValueError, "document has 10 elements"):
        attn.plan(layout)
    attn.plan(layout, params={"same.document": np.zeros(40, np.int32)})


def bias(score, b, h, q_idx, kv_idx):
    return score + TABLE[q_idx - kv_idx]


def test_arrays_of_scores_are_looked_at_when_they_are_known():
    """A run may bring arrays of its own, so that a plan does not refuse those of the spec."""
    attn, plan, q, kv = planned(bias)
    out = np.full((40, 2, 8), 7.0, np.float32)
    with refuses(ValueError, "bias: captured array TABLE has 10 elements and is indexed with 39"):
        attn.run(plan, q, kv, out=out)
    with refuses(ValueError, "bias: captured array TABLE has 30 elements"):
        attn.run(plan, q, kv, out=out, params={"bias.TABLE": np.zeros(30, np.float32)})
    assert (out == 7.0).all()
    attn.run(plan, q, kv, params={"bias.TABLE": np.zeros(40, np.float32)})


def test_a_score_is_only_asked_for_what_masks_keep():
    attn, plan, q, kv = planned(bias, raddle.SlidingWindow(9), raddle.Causal())
    attn.run(plan, q, kv)
    attn, plan, q, kv = planned(bias, raddle.SlidingWindow(10), raddle.Causal())
    with refuses(ValueError, "TABLE has 10 elements"):
        attn.run(plan, q, kv)


def test_explicit_positions():
    far = np.int32([0, 1, 1000])
    table = np.zeros(16, np.int32)
    jump = lambda b, h, q, kv: table[ops.where(q > 500, 0, q)] >= 0
    planned(jump, qo_len=(3,), kv_len=(3,), qo_pos=far)
    with refuses(ValueError, "indexed with 1000 for request 0 (q_idx = 0 to 1000)"):
        planned(lambda b, h, q, kv: table[q] >= 0, qo_len=(3,), kv_len=(3,), qo_pos=far)
    hole = lambda b, h, q, kv: table[ops.where((q > 10) & (q < 900), 99, 0)] >= 0  # no row has such a position
    planned(hole, qo_len=(3,), kv_len=(3,), qo_pos=far)


def test_reservations_refuse_and_keep_the_old_plan():
    attn = attention_of(SHORT_MASKS["kv_idx"])
    reservation = reserved(attn, max_requests=1, max_qo_tokens=4, max_kv_tokens=64)
    reservation.update(raddle.RaggedKV([0, 2], [0, 8]))
    before = reservation.plan.num_items
    with refuses(ValueError, "indexed with 10"):
        reservation.update(raddle.RaggedKV([0, 2], [0, 11]))
    assert reservation.plan.num_items == before


def test_flex_attention_refuses_new_lengths():
    x = torch.zeros(1, 2, 40, 8)
    with refuses(ValueError, "SHORT has 10 elements"):
        flex_attention(x, x, x, score_mod=lambda score, b, h, q, kv: score + SHORT[kv])
    flex_attention(x[:, :, :10], x[:, :, :10], x[:, :, :10], score_mod=lambda score, b, h, q, kv: score + SHORT[kv])


def test_the_librarys_own_masks_are_taken():
    for mask in (masks.document([0, 10, 30]), with_offset(masks.causal(), np.zeros(1, np.int32))):
        planned(mask)
    blocks = BlockMask.from_kv_blocks(np.int32([[[1, 2]]]), np.int32([[[[0, 1], [0, 1]]]]), BLOCK_SIZE=8)
    planned(blocks)  # rows and keys outside of the blocks keep nothing
