"""`BlockMask` against PyTorch's: the same blocks, slices and numbers; and what it is made of."""

import tracemalloc

import numpy as np
import pytest
import raddle
import torch
from raddle.flex import BlockMask, and_masks, create_block_mask, masks, mods, noop_mask, or_masks, with_offset
from small import refuses
from torch.nn.attention import flex_attention as theirs

LISTS = [f"{full}{by}_{what}" for full in ("", "full_") for by in ("kv", "q") for what in ("num_blocks", "indices")]


def banded(b, h, q_idx, kv_idx):
    return (kv_idx <= q_idx + h * 16) & (kv_idx >= q_idx - 50 * (b + 1))


def pair_of_masks(mask_mod, *lengths, size=16):
    return (
        create_block_mask(mask_mod, *lengths, device="cpu", BLOCK_SIZE=size),
        theirs.create_block_mask(mask_mod, *lengths, device="cpu", BLOCK_SIZE=size),
    )


def same(ours, reference):
    assert ours.shape == reference.shape
    assert ours.BLOCK_SIZE == reference.BLOCK_SIZE
    assert ours.numel() == reference.numel()
    assert ours.sparsity() == pytest.approx(reference.sparsity(), abs=1e-4)
    assert torch.equal(ours.to_dense(), reference.to_dense().to(torch.int32))
    for name in LISTS:
        found, expected = getattr(ours, name), getattr(reference, name)
        assert found.shape == expected.shape and found.dtype == torch.int32, name
        if name.endswith("indices"):  # entries past the number of blocks mean nothing
            listed = torch.arange(expected.shape[-1]) < getattr(reference, name[:-7] + "num_blocks")[..., None]
            found, expected = found[listed], expected[listed]
        assert torch.equal(found, expected.to(torch.int32)), name


@pytest.mark.parametrize("size", [16, (32, 8), 48])
@pytest.mark.parametrize("lengths", [(2, 3, 150, 200), (None, None, 64, 64), (1, 2, 7, 130)])
def test_as_pytorch(lengths, size):
    ours, reference = pair_of_masks(banded, *lengths, size=size)
    same(ours, reference)


@pytest.mark.parametrize(
    "index",
    [0, -1, (1, 2), slice(0, 1), (slice(None), slice(1, 3)), (0, slice(None), 9), (0, 0, slice(2, None)),
     (slice(None), slice(None), slice(1, 9, 3)), (0, 0, torch.tensor([1, 3])), (torch.tensor([1]), 0)],
)  # fmt: skip
def test_slices_as_pytorch(index):
    ours, reference = pair_of_masks(banded, 2, 3, 150, 200)
    same(ours[index], reference[index])


def test_crops_as_pytorch():
    ours, reference = pair_of_masks(banded, 2, 3, 160, 208)
    given = from_blocks(reference, mask_mod=banded)
    same(given._adjust(96, 128), reference._adjust(96, 128))


def from_blocks(reference, full=True, **more):
    full = (reference.full_kv_num_blocks, reference.full_kv_indices) if full else ()
    size = reference.BLOCK_SIZE
    return BlockMask.from_kv_blocks(reference.kv_num_blocks, reference.kv_indices, *full, BLOCK_SIZE=size, **more)


def test_from_kv_blocks_as_pytorch():
    _, reference = pair_of_masks(banded, 2, 3, 150, 200)
    same(from_blocks(reference, mask_mod=banded, seq_lengths=(150, 200)), reference)
    partial = theirs.BlockMask.from_kv_blocks(reference.kv_num_blocks, reference.kv_indices, BLOCK_SIZE=16)
    assert torch.equal(from_blocks(reference, full=False).to_dense(), partial.to_dense().to(torch.int32))


@pytest.mark.parametrize("size", [16, (24, 10)])
def test_given_blocks_count_whatever_the_mask_says(rng, size):
    """Absent blocks are skipped, full ones kept, and what lies past the number of blocks means nothing."""
    rows, columns, batch, heads = 5, 6, 2, 3
    kinds = rng.integers(0, 3, (batch, heads, rows, columns))
    lists = []
    for kind in (1, 2):
        count = (kinds == kind).sum(-1).astype(np.int32)
        index = np.argsort(kinds != kind, axis=-1, kind="stable").astype(np.int32)
        index[np.arange(columns) >= count[..., None]] = -77
        lists += [count, index]
    given = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=size, mask_mod=banded)
    height, width = given.BLOCK_SIZE
    assert given.shape == (batch, heads, rows * height, columns * width)
    place = np.ogrid[:batch, :heads, : rows * height, : columns * width]
    pairs = kinds.repeat(height, 2).repeat(width, 3)
    expected = (pairs == 2) | ((pairs == 1) & banded(*place))
    assert np.array_equal(given.as_mask()(*place), expected)


def test_one_request_and_head_stand_for_all():
    given = BlockMask.from_kv_blocks([[1, 1]], [[[0, 9], [1, 9]]], BLOCK_SIZE=4)
    assert given.shape == (1, 1, 8, 8)
    place = np.ogrid[:3, :5, :8, :8]
    keep = np.broadcast_to(given.as_mask()(*place), (3, 5, 8, 8))
    assert np.array_equal(keep, np.broadcast_to(place[2] // 4 == place[3] // 4, keep.shape))


def test_a_slice_needs_a_mask_for_its_rows():
    whole = create_block_mask(masks.causal(), None, None, 64, 64, BLOCK_SIZE=16)
    part = whole[:, :, 2:]
    with refuses(ValueError, "block_mask is a slice", "mask_mod"):
        part.as_mask()
    part.mask_mod = with_offset(whole.mask_mod, 32)
    place = np.ogrid[:1, :1, :32, :64]
    assert np.array_equal(part.as_mask()(*place), place[2] + 32 >= place[3])


def test_a_new_mask_leaves_the_blocks():
    ours, reference = pair_of_masks(banded, 2, 3, 64, 64)
    ours.mask_mod = reference.mask_mod = noop_mask
    same(ours, reference)
    place = np.ogrid[:2, :3, :64, :64]
    kept = np.repeat(np.repeat(ours.to_dense().numpy(), 16, 2), 16, 3)
    assert np.array_equal(ours.as_mask()(*place), kept.astype(bool))


@pytest.mark.parametrize(
    "mask_mod",
    [masks.causal(), masks.sliding_window(1023), masks.document(np.arange(0, 2**20 + 1, 2**14))],
    ids=lambda mask: mask.__name__,
)
def test_a_million_tokens_are_ready_at_once(mask_mod):
    tracemalloc.start()
    calls = []

    def counted(b, h, q_idx, kv_idx):
        calls.append(kv_idx)
        return mask_mod(b, h, q_idx, kv_idx)

    block_mask = create_block_mask(counted, None, None, 2**20, 2**20)
    assert "1048576" in str(block_mask)
    assert block_mask.numel() == 2**40
    assert len(calls) < 100  # of 2**40 pairs, and 2**26 blocks
    assert tracemalloc.get_traced_memory()[1] < 100e6
    tracemalloc.stop()


def test_a_picture():
    block_mask = create_block_mask(masks.causal(), None, None, 64, 64, BLOCK_SIZE=16)
    assert block_mask.to_string() == "(0, 0)\n▒···\n█▒··\n██▒·\n███▒"
    assert block_mask.to_string(grid_size=2) == "(0, 0)\n▒·\n█▒"
    assert "sparsity=37.50%" in repr(block_mask)
    assert block_mask.to_string() in str(block_mask)


def test_masks_join():
    place = np.ogrid[:1, :1, :40, :40]
    parts = masks.causal(), masks.sliding_window(5), masks.prefix_lm(3)
    each = [mask(*place) for mask in parts]
    assert np.array_equal(and_masks(*parts)(*place), each[0] & each[1] & each[2])
    assert np.array_equal(or_masks(*parts)(*place), each[0] | each[1] | each[2])
    assert and_masks()(*place).all() and noop_mask(*place).all() and not or_masks()(*place).any()


def test_offsets():
    b, h, q_idx, kv_idx = np.ogrid[:2, :1, :4, :40]
    assert np.array_equal(with_offset(masks.causal(), 7)(b, h, q_idx, kv_idx), kv_idx <= q_idx + 7)
    by_request = with_offset(masks.causal(), [7, 20])(b, h, q_idx, kv_idx)
    assert np.array_equal(by_request, kv_idx <= q_idx + np.array([7, 20]).reshape(2, 1, 1, 1))
    shifted = with_offset(lambda score, b, h, q_idx, kv_idx: score * q_idx, 3)
    assert shifted(2.0, 0, 0, 4, 0) == 14.0


BLOCKS = {"kv_num_blocks": [[1, 2]], "kv_indices": [[[0, 1], [0, 1]]], "BLOCK_SIZE": 8}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_num_blocks": [[1, 3]]}, ("kv_num_blocks", "0 … 2")),
        ({"kv_num_blocks": [[1]]}, ("kv_num_blocks", "(1, 1)", "(1, 2)")),
        ({"kv_indices": [[[0, 1], [0, 2]]]}, ("kv_indices", "0 … 1")),
        ({"kv_indices": [0, 1]}, ("kv_indices", "1 dimensions")),
        ({"full_kv_num_blocks": [[1, 1]]}, ("full_kv_num_blocks and full_kv_indices",)),
        ({"BLOCK_SIZE": 0}, ("BLOCK_SIZE", "0", "at least 1")),
        ({"seq_lengths": (40, 16)}, ("kv_indices", "2 rows", "5")),
    ],
)
def test_bad_blocks_are_refused(changes, words):
    with refuses(ValueError, *words):
        BlockMask.from_kv_blocks(**{**BLOCKS, **changes})


def test_bad_arguments_are_refused():
    with refuses(TypeError, "kv_indices", "float64", "integers"):
        BlockMask.from_kv_blocks([[1]], [[[0.5]]])
    with refuses(ValueError, "Q_LEN", "-8"):
        create_block_mask(masks.causal(), 1, 1, -8, 8)
    with refuses(TypeError, "mask_mod", "score mod"):
        create_block_mask(lambda score, b, h, q_idx, kv_idx: score, 1, 1, 8, 8)
    with refuses(TypeError, "mask_mod", "2 arguments"):
        create_block_mask(lambda q_idx, kv_idx: q_idx >= kv_idx, 1, 1, 8, 8)
    sizes = ({"BLOCK_SIZE": 1.5}, "BLOCK_SIZE is a float"), ({"seq_lengths": 5}, "seq_lengths is an int")
    for changes, words in sizes:
        with refuses(TypeError, words):
            BlockMask.from_kv_blocks(**{**BLOCKS, **changes})
    with refuses(TypeError, "cap is None; expected a number"):
        mods.softcap(None)
    with refuses(ValueError, "grid_size is 0"):
        create_block_mask(masks.causal(), 1, 1, 8, 8).to_string(0)
    with refuses(TypeError, "mask_mods[1]", "int"):
        and_masks(masks.causal(), 3)
    with pytest.raises(IndexError, match="index 9"):
        create_block_mask(masks.causal(), 1, 1, 8, 8)[9]


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "cpu", torch.device("cuda"), None])
def test_masks_have_no_device(device):
    """FlexAttention's tutorials pass device="cuda", which says where PyTorch's block tables go."""
    mask = create_block_mask(masks.causal(), 1, 1, 8, 8, device=device)
    assert mask.to(device) is mask
    assert mask.to_dense().tolist() == [[[[1]]]]


def test_nothing_is_kept_outside_of_given_blocks():
    """As ``variant=``, where rows, keys and requests may be more than the mask's."""
    blocks = np.broadcast_to(np.arange(2, dtype=np.int32), (2, 1, 2, 2))
    mask = BlockMask.from_kv_blocks(np.int32([[[1, 2]], [[2, 1]]]), blocks, BLOCK_SIZE=8)
    attn = raddle.Attention(raddle.AttentionSpec(2, 2, 8, dtype="float32", variant=[mask]))
    x = np.zeros((3 * 40, 2, 8), np.float32)
    _, lse = attn.run(attn.plan(raddle.RaggedKV([0, 40, 80, 120], [0, 40, 80, 120])), x, (x, x), return_lse=True)
    kept = np.exp(lse[:, 0]).reshape(3, 40).round().astype(int)
    np.testing.assert_array_equal(kept[0], np.repeat([8, 16, 0], [8, 8, 24]))
    np.testing.assert_array_equal(kept[1], np.repeat([16, 8, 0], [8, 8, 24]))
    np.testing.assert_array_equal(kept[2], 0)
