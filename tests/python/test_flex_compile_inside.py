"""Functions that are made inside of a compiled one, over its variables: one graph, as when they are made outside."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from raddle.flex import AuxRequest, and_masks, create_block_mask, flex_attention, masks, mods, with_offset
from test_flex_compile import CLOSE, HEADS, D, counted, fresh, inputs  # noqa: F401
from torch.nn.attention import flex_attention as theirs

LENGTHS = 9, 12, 13
TABLE = torch.rand(4)


def batches(*more):
    """Query, key and value of each length, and what each of ``more`` makes for it."""
    for n, qkv in zip(LENGTHS, inputs(LENGTHS)):
        yield (*qkv, *(make(n) for make in more))


def documents(n):
    return torch.randint(0, 3, (2, n))


def in_document(q, k, v, document):
    def mask(b, h, q_idx, kv_idx):
        return (document[b, q_idx] == document[b, kv_idx]) & (q_idx >= kv_idx)

    return flex_attention(q, k, v, block_mask=create_block_mask(mask, q.shape[0], None, q.shape[2], q.shape[2]))


def of_a_model(q, k, v, softcap, bias, sinks):
    """As models' own attention functions call it."""

    def score_mod(score, b, h, q_idx, kv_idx):
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score + bias[b][0][q_idx][kv_idx]

    out, aux = flex_attention(q, k, v, score_mod=score_mod, scale=0.2, return_aux=AuxRequest(lse=True))
    return out * torch.sigmoid(aux.lse.unsqueeze(-1) - sinks.view(1, -1, 1, 1))


def of_lengths(q, k, v):
    ahead = k.shape[2] - 2

    def mask(b, h, q_idx, kv_idx):
        return q_idx + ahead >= kv_idx

    return flex_attention(q[:, :, :2], k, v, block_mask=create_block_mask(mask, None, None, 2, k.shape[2]))


def joined(q, k, v):
    mask = and_masks(masks.causal(), lambda b, h, q_idx, kv_idx: q_idx - kv_idx < 5)
    block_mask = create_block_mask(mask, None, None, q.shape[2], q.shape[2])
    return flex_attention(q, k, v, score_mod=mods.softcap(20.0), block_mask=block_mask)


def moved(q, k, v, n):
    mask = with_offset(masks.causal(), n - 1)
    return flex_attention(q[:, :, :1], k, v, block_mask=create_block_mask(mask, None, None, 1, k.shape[2]))


def intermediate(q, k, v, names):
    gate, held = torch.sigmoid(q.mean(-1)), {"names": [names * 2]}

    def helper(b, h, idx):
        return gate[b, h, idx] * held["names"][0][idx]

    return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + helper(b, h, i) + helper(b, h, j))


def by_keyword(q, k, v, slope):
    def mod(score, b, h, q_idx, kv_idx, *, slope):
        return score + slope * (kv_idx - q_idx)

    return flex_attention(q, k, v, score_mod=functools.partial(mod, slope=slope))


def of_defaults(q, k, v, table, slope):
    gate = torch.sigmoid(table)

    def helper(h, distance, gate=gate, factor=2.0, *, slope=slope):
        return slope * distance * gate[h] * factor

    return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + helper(h, j - i))


def of_scalars(q, k, v, factor, shift):
    return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score * factor + shift * (i > j))


def of_a_maximum(q, k, v, table):
    def mod(score, b, h, i, j):
        return score * table.max() + table[(i - j).clamp(0, table.shape[0] - 1)] * TABLE.sum()

    return flex_attention(q, k, v, score_mod=mod)


NUMPY = np.arange(40) // 7


def of_numpy(q, k, v):
    mask = create_block_mask(lambda b, h, i, j: NUMPY[i] == NUMPY[j], None, None, q.shape[2], q.shape[2])
    return flex_attention(q, k, v, block_mask=mask)


def scaled(q, k, v, scale):
    return flex_attention(q, k, v, scale=scale)


PROGRAMS = {
    "documents": (in_document, [documents]),
    "a model's": (of_a_model, [lambda n: 20.0 + n, lambda n: torch.randn(2, 1, n, n), lambda n: torch.randn(HEADS)]),
    "lengths": (of_lengths, []),
    "joined masks": (joined, []),
    "an offset": (moved, [lambda n: n]),
    "intermediate tensors": (intermediate, [torch.rand]),
    "partial": (by_keyword, [lambda n: 0.1 * n]),
    "defaults": (of_defaults, [lambda n: torch.rand(HEADS), lambda n: 0.1 * n]),
    "scalar tensors": (of_scalars, [lambda n: torch.tensor(0.1 * n), lambda n: torch.tensor(n)]),
    "what is computed of tensors": (of_a_maximum, [lambda n: torch.rand(4) + 0 * float(TABLE.mul_(1.5)[0])]),
    "numpy": (of_numpy, []),
    "scale": (scaled, [lambda n: 0.1 * n]),
    "scale of a tensor": (scaled, [lambda n: torch.tensor(0.1 * n)]),
}


@pytest.mark.parametrize("program, more", PROGRAMS.values(), ids=PROGRAMS)
def test_programs_are_one_graph(program, more):
    assert counted(program, batches(*more)) == 1


def test_a_number_that_python_needs_is_guarded():
    def program(q, k, v, steps):
        def mod(score, b, h, i, j):
            for _ in range(steps):
                score = score * 0.5 + 1
            return score

        return flex_attention(q, k, v, score_mod=mod)

    assert counted(program, [(*next(inputs()), n) for n in (2, 3, 3, 2)]) == 2


class Block(torch.nn.Module):
    """A layer whose score mod is its method, and whose mask is made in each call."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(HEADS * D, 3 * HEADS * D)
        self.register_buffer("slopes", torch.rand(HEADS))
        self.cap = 20.0

    def score(self, score, b, h, q_idx, kv_idx):
        return self.cap * torch.tanh(score / self.cap) + self.slopes[h] * (kv_idx - q_idx)

    def forward(self, x, document):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, D).permute(2, 0, 3, 1, 4)

        def mask(b, h, q_idx, kv_idx):
            return (document[b, q_idx] == document[b, kv_idx]) & (q_idx >= kv_idx)

        block_mask = create_block_mask(mask, x.shape[0], None, x.shape[1], x.shape[1])
        out = flex_attention(q, k, v, score_mod=self.score, block_mask=block_mask)
        return x + out.transpose(1, 2).flatten(2)


def test_layers_compiled_one_by_one_share_a_graph():
    """More layers than graphs that torch.compile keeps of one code."""
    layers = [Block().eval() for _ in range(10)]
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = [torch.compile(layer, backend=counter, fullgraph=True, dynamic=True) for layer in layers]
    with torch.no_grad():
        for n in LENGTHS:
            x, document = torch.randn(2, n, HEADS * D), documents(n)
            found = functools.reduce(lambda x, layer: layer(x, document), compiled, x)
            expected = functools.reduce(lambda x, layer: layer(x, document), layers, x)
            torch.testing.assert_close(found, expected, **CLOSE[torch.get_default_dtype()])
    assert counter.frame_count <= 2  # the second: torch.compile's own, of the first layer's attributes


WHOLE = create_block_mask(masks.causal(), None, None, 40, 40, BLOCK_SIZE=8)


def moved_by(mask_mod, offset):
    def mask(b, h, q_idx, kv_idx):
        return mask_mod(b, h, q_idx + offset, kv_idx)

    return mask


def of_a_slice(q, k, v, whole, position):
    """A step of decoding: the row of blocks of its position, and the mask function moved there."""
    mask = whole[:, :, position // whole.BLOCK_SIZE[0]]
    mask.mask_mod = moved_by(whole.mask_mod, position[0])
    mask.seq_lengths = (1, 40)
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, 40 - x.shape[2])) for x in (k, v))
    return flex_attention(q[:, :, :1], k, v, block_mask=mask)


def of_a_set_mask(q, k, v, offset):
    """Blocks that were full stay."""
    mask = create_block_mask(masks.causal(), None, None, q.shape[2], q.shape[2], BLOCK_SIZE=4)
    mask.mask_mod = moved_by(mask.mask_mod, -offset)
    return flex_attention(q, k, v, block_mask=mask)


@pytest.mark.parametrize(
    "program, more",
    [
        (of_a_slice, [lambda n: WHOLE, lambda n: torch.tensor([n])]),
        (of_a_set_mask, [lambda n: torch.tensor(n - 8)]),
    ],
)
def test_masks_that_are_changed_inside(program, more):
    assert counted(program, batches(*more)) == 1


@pytest.mark.parametrize("name, value", [("mask_mod", masks.causal()), ("seq_lengths", (9, 40))])
def test_masks_that_were_made_outside_are_not_changed_inside(name, value):
    def program(q, k, v, mask):
        setattr(mask, name, value)
        return flex_attention(q, k, v, block_mask=mask)

    mask = create_block_mask(masks.causal(), None, None, 9, 9)
    compiled = torch.compile(program, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="expected it to be set outside, or of a mask made or sliced inside"):
        compiled(*next(inputs()), mask)


def unseparated(mask):
    """The mask with full blocks among the partial ones. torch 2.11 and 2.12 have no ``separate_full_blocks``."""
    dense = mask.to_dense()
    count, indices = dense.sum(-1, dtype=torch.int32), dense.argsort(dim=-1, descending=True, stable=True).int()
    how = {"BLOCK_SIZE": mask.BLOCK_SIZE, "mask_mod": mask.mask_mod, "seq_lengths": mask.seq_lengths}
    return theirs.BlockMask.from_kv_blocks(count, indices, **how)


@pytest.mark.parametrize("separate", [True, False])
def test_block_masks_of_pytorch(separate):
    def of(n):
        document = documents(n).sort(-1).values  # so that blocks are full, partial and empty
        how = {"device": document.device, "BLOCK_SIZE": 4}
        mask = theirs.create_block_mask(lambda b, h, i, j: document[b, i] >= document[b, j], 2, None, n, n, **how)
        return mask if separate else unseparated(mask)

    program = lambda q, k, v, mask: flex_attention(q, k, v, block_mask=mask)  # noqa: E731
    assert counted(program, batches(of)) == 1
