"""Programs of the kinds that people write with PyTorch's FlexAttention, run with both: only the import differs."""

from __future__ import annotations

import functools

import pytest
import raddle.flex as ours
import torch
from torch.nn.attention import flex_attention as theirs

B, HQ, HKV, D, S = 2, 4, 2, 16, 96


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setattr(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.fixture
def torch_rng(rng, torch_device):
    torch.manual_seed(int(rng.integers(2**31)))


def same(program):
    """A tanh errs by up to 2^-21, a logit that is capped at 30 by 30 times that. In float16, PyTorch's own logits do by
    2^-11 of numbers up to 16."""
    found, expected = program(ours), program(theirs)
    half = torch.get_default_dtype() == torch.float16
    close = {"rtol": 1e-2, "atol": 1e-2} if half else {"rtol": 1e-4, "atol": 5e-5}
    torch.testing.assert_close(found, expected, **close)


class Cache(torch.nn.Module):
    """Static buffers of keys and values, written at a position."""

    def __init__(self, batch):
        super().__init__()
        self.register_buffer("k", torch.zeros(batch, HKV, S, D))
        self.register_buffer("v", torch.zeros(batch, HKV, S, D))

    def update(self, pos, k, v):
        self.k[:, :, pos], self.v[:, :, pos] = k, v
        return self.k, self.v


def test_decoding_with_a_sliced_mask(torch_rng, torch_device):
    """A mask over the whole cache is made once; each step takes a row of its blocks and moves the function there."""
    prompt, steps = 21, 6
    x = torch.randn(prompt + steps, 3, 1, HQ, D)

    def moved(mask_mod, offset):
        def mask(b, h, q, kv):
            return mask_mod(b, h, q + offset, kv)

        return mask

    def program(flex):
        cache, outputs = Cache(1), []
        whole = flex.create_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, S, S, device=torch_device, BLOCK_SIZE=16)
        for pos in [torch.arange(prompt), *(torch.tensor([prompt + n]) for n in range(steps))]:
            q, k, v = x[pos].permute(1, 2, 3, 0, 4)
            k, v = cache.update(pos, k[:, :HKV], v[:, :HKV])
            block_index = torch.unique(pos // whole.BLOCK_SIZE[0])
            mask = whole[:, :, block_index]
            mask.mask_mod = moved(whole.mask_mod, pos[0])
            mask.seq_lengths = (len(pos), S)
            outputs.append(flex.flex_attention(q, k, v, block_mask=mask, enable_gqa=True))
        return torch.cat(outputs, 2)

    same(program)


def test_packed_and_padded_batches(torch_rng, torch_device):
    """A model's own path: documents and padding from a two-dimensional mask, offsets as tensors, a cap and a bias."""
    attention_mask = torch.ones(B, S, dtype=torch.long)
    attention_mask[1, 70:] = 0
    documents = (torch.arange(S) // 40).repeat(B, 1)
    bias = torch.randn(B, 1, S, S)
    q, k, v = torch.randn(B, HQ, S, D), torch.randn(B, HKV, S, D), torch.randn(B, HKV, S, D)

    def block_mask(flex, chunk, q_offset=None):
        ids = documents.clone()
        if chunk is not None:
            ids = attention_mask.clone().fill_(1).cumsum(-1) // chunk

        def causal(b, h, q, kv):
            return (q >= kv) & (ids[b, q] == ids[b, kv]) & (attention_mask[b, q] > 0) & (attention_mask[b, kv] > 0)

        def shifted(b, h, q, kv):
            return causal(b, h, q + q_offset, kv)

        mask_mod = causal if q_offset is None else shifted
        rows = S if q_offset is None else S - int(q_offset)
        return flex.create_block_mask(mask_mod, B, None, rows, S, device=torch_device)

    def attend(flex, mask, q, softcap=None, mask_bias=None):
        def score_mod(score, b, h, q_idx, kv_idx):
            if softcap is not None:
                score = softcap * torch.tanh(score / softcap)
            if mask_bias is not None:
                score = score + mask_bias[b][0][q_idx][kv_idx]
            return score

        options = {"BLOCK_M": 32} if flex is ours else None
        out, aux = flex.flex_attention(
            q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=True, scale=D**-0.5, kernel_options=options,
            return_aux=flex.AuxRequest(lse=True),
        )  # fmt: skip
        return out.transpose(1, 2).contiguous(), aux.lse.to(v.dtype)

    def program(flex):
        mask = block_mask(flex, None)
        found = [attend(flex, mask, q), attend(flex, mask, q, 30.0), attend(flex, mask, q, 30.0, bias)]
        found.append(attend(flex, block_mask(flex, 32), q, mask_bias=bias))
        found.append(attend(flex, block_mask(flex, None, torch.tensor(60)), q[:, :, 60:]))
        return found

    same(program)


def alibi():
    scale = torch.exp2(-((torch.arange(HQ) + 1) * 8.0 / HQ))
    return lambda score, b, h, q, kv: score + (kv - q) * scale[h]


def relative(limit):
    table = torch.randn(2 * limit + 1, HQ)

    def mod(score, b, h, q, kv):
        return score + table[(q - kv).clamp(-limit, limit) + limit, h]

    return mod


def capped(cap, approximate=torch.tanh):
    def mod(score, b, h, q, kv):
        return cap * approximate(score / cap)

    return mod


def latent(rows):
    q_rope, k_rope = torch.randn(B, HQ, rows, 8), torch.randn(B, rows, 8)
    return lambda score, b, h, q, kv: score + torch.dot(q_rope[b, h, q], k_rope[b, kv])


def window(size):
    def inside(b, h, q, kv):
        return q - kv <= size

    return lambda flex: flex.and_masks(inside, lambda b, h, q, kv: q >= kv)


def prefix_lm(length):
    return lambda flex: flex.or_masks(lambda b, h, q, kv: kv < length, lambda b, h, q, kv: q >= kv)


def packed(offsets):
    """Positions in the document instead of the batch, handed to the inner mask."""

    def make(flex):
        begins = torch.tensor(offsets)
        document = torch.repeat_interleave(torch.arange(len(begins) - 1), begins[1:] - begins[:-1])

        def mask(b, h, q, kv):
            inner = (q - begins[document[q]]) >= (kv - begins[document[kv]])
            return torch.where(document[q] == document[kv], inner, False)

        return mask

    return make


def neighbours(width, size):
    def at(idx):
        return idx // width, idx % width

    def mask(b, h, q, kv):
        (qy, qx), (ky, kx) = at(q), at(kv)
        x, y = qx.clamp(size // 2, width - 1 - size // 2), qy.clamp(size // 2, S // width - 1 - size // 2)
        return ((x - kx).abs() <= size // 2) & ((y - ky).abs() <= size // 2)

    return lambda flex: mask


def dilated(size, step):
    return lambda flex: lambda b, h, q, kv: (torch.abs(q - kv) <= size) & (torch.remainder(q - kv, step) == 0)


def selected(block):
    chosen = torch.randint(0, S // block, (B, HQ, S // block, 3))

    def make(flex):
        here = chosen.to(torch.get_default_device())

        def mask(b, h, q, kv):
            return (here[b, h, q // block] == kv // block).any() | (q // block == kv // block)

        return mask

    return make


def stand_alone(sinks, size):
    def keeps(sinks, b, h, q, kv):
        return (kv < sinks) | (q - kv < size)

    return lambda flex: flex.and_masks(functools.partial(keeps, sinks), lambda b, h, q, kv: kv <= q)


SCORES = {
    "none": lambda: None,
    "alibi": alibi,
    "relative": functools.partial(relative, 9),
    "capped": functools.partial(capped, 20.0),
    "latent": functools.partial(latent, S),
}
MASKS = {
    "window": window(17),
    "prefix": prefix_lm(25),
    "packed": packed([0, 30, 41, 96]),
    "neighbours": neighbours(12, 5),
    "dilated": dilated(20, 3),
    "selected": selected(16),
    "sinks": stand_alone(4, 9),
}


@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_examples_of_masks_and_scores(torch_rng, torch_device, mask, score):
    q, k, v = (torch.randn(B, HQ, S, D) for _ in "qkv")
    score_mod = score()

    def program(flex):
        block_mask = flex.create_block_mask(mask(flex), B, HQ, S, S, device=torch_device, BLOCK_SIZE=32)
        return flex.flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask)

    same(program)


def test_a_block_mask_of_pytorch_is_taken_as_it_is(torch_rng, torch_device):
    q, k, v = (torch.randn(B, HQ, S, D) for _ in "qkv")
    mask = theirs.create_block_mask(window(17)(theirs), None, None, S, S, device=torch_device, BLOCK_SIZE=16)
    expected = theirs.flex_attention(q, k, v, block_mask=mask)
    for _ in range(2):
        half = q.dtype == torch.float16
        close = {"rtol": 2e-3, "atol": 2e-3} if half else {"rtol": 2e-5, "atol": 2e-6}
        torch.testing.assert_close(ours.flex_attention(q, k, v, block_mask=mask), expected, **close)
    mask.kv_num_blocks[..., 2:] = 0  # in place: seen
    lists = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
    given = ours.BlockMask.from_kv_blocks(*lists, 16, mask.mask_mod, (S, S))
    found = ours.flex_attention(q, k, v, block_mask=mask)
    assert torch.equal(found, ours.flex_attention(q, k, v, block_mask=given)) and not torch.equal(found, expected)
