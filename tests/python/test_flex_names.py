"""Code that was written for PyTorch's FlexAttention, of which the import alone is changed: names, attributes, errors."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import raddle.flex as ours
import torch
from torch.nn.attention import flex_attention as theirs

PUBLIC = [name for name in theirs.__all__ if callable(getattr(theirs, name))]
# PyTorch names the arguments of this one otherwise; they are given by position.
BY_POSITION = {"noop_mask"}


def parameters(function):
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_name_of_pytorch_is_there(name):
    """With its parameters, in their order: where PyTorch adds one, this fails."""
    found, expected = getattr(ours, name), getattr(theirs, name)
    if name == "FlexKernelOptions":
        assert issubclass(found, dict)
    elif name in BY_POSITION:
        assert len(parameters(found)) == len(parameters(expected))
    else:
        rest = [each for each in parameters(expected) if not each.startswith("dq_") or name != "BlockMask"]
        assert [each for each in parameters(found) if each in rest] == rest


def test_block_masks_have_every_attribute_of_pytorchs():
    a, b = (make(banded, 2, 3, 150, 200, device="cpu") for make in (ours.create_block_mask, theirs.create_block_mask))
    public = {name for name in dir(b) if not name.startswith("_")} | set(vars(b))
    assert {name for name in public if not hasattr(a, name)} == set()
    methods = [name for name in public if inspect.isroutine(getattr(b, name))]
    for name in methods:
        expected = [each for each in parameters(getattr(b, name)) if not each.startswith("dq_")]
        found = parameters(getattr(a, name))
        assert [each for each in found if each in expected] == expected, name
    for name in public - set(methods) - {"mask_mod", "seq_lengths"}:
        with pytest.raises(AttributeError, match=f"{name} of a BlockMask is read-only"):
            setattr(a, name, None)


def banded(b, h, q_idx, kv_idx):
    return (kv_idx <= q_idx + h * 16) & (kv_idx >= q_idx - 50 * (b + 1))


def alike(found, expected):
    assert type(found) is type(expected) or callable(found) and callable(expected)
    if isinstance(expected, torch.Tensor):
        assert found.shape == expected.shape and found.dtype == torch.int32
    elif not callable(expected):
        assert found == expected


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("separate", [True, False])
def test_tuples_of_parts(flatten, separate):
    how = {"device": "cpu", "BLOCK_SIZE": 16, "separate_full_blocks": separate}
    a, b = (make(banded, 2, 3, 150, 200, **how) for make in (ours.create_block_mask, theirs.create_block_mask))
    found, expected = a.as_tuple(flatten), b.as_tuple(flatten)
    assert len(found) == len(expected)
    for each, other in zip(found, expected):
        alike(each, other)
    again = ours.BlockMask(*a.as_tuple(flatten=False)[:9], a.BLOCK_SIZE, banded)
    assert torch.equal(again.to_dense(), a.to_dense()) and again.shape == a.shape
    if not separate:
        assert a.full_kv_num_blocks is None and a.full_q_indices is None
        assert torch.equal(a.kv_num_blocks, b.kv_num_blocks)


def test_constructor_by_pytorchs_keywords():
    b = theirs.create_block_mask(banded, 2, 3, 160, 208, device="cpu", BLOCK_SIZE=16)
    names = [name for name in parameters(theirs.BlockMask) if hasattr(b, name)]
    a = ours.BlockMask(**{name: getattr(b, name) for name in names})
    assert torch.equal(a.to_dense(), b.to_dense().int()) and a.mask_mod is b.mask_mod
    fewer = ours.BlockMask.from_kv_blocks(b.kv_num_blocks, b.kv_indices, BLOCK_SIZE=16, compute_q_blocks=False)
    assert fewer.q_num_blocks is None and fewer.full_kv_indices is None


@pytest.mark.parametrize("mod", [banded, lambda score, b, h, q, kv: torch.where(q > kv, score + h, -float("inf"))])
def test_create_mask(mod):
    found, expected = (make(mod, 2, 3, 20, 30, device="cpu") for make in (ours.create_mask, theirs.create_mask))
    assert found.dtype == torch.bool and torch.equal(found, expected)
    assert ours.create_mask(mod, None, None, 4, 5).shape == (1, 1, 4, 5)


def raised(call, *args, **kwargs):
    with pytest.raises(Exception) as caught:  # noqa: PT011: its type is what is asked for
        call(*args, **kwargs)
    return caught.value


def wrong_calls(flex):
    x = torch.ones(2, 4, 32, 16)
    mask = flex.create_block_mask(banded, 2, None, 32, 32, device="cpu", BLOCK_SIZE=16)
    lists = mask.kv_num_blocks, mask.kv_indices
    return {
        "rank": lambda: flex.flex_attention(x[0], x[0], x[0]),
        "heads": lambda: flex.flex_attention(x, x[:, :2], x[:, :2]),
        "lengths": lambda: flex.flex_attention(x, x[:, :, :16], x[:, :, :16], block_mask=mask),
        "long lengths": lambda: flex.flex_attention(x.repeat(1, 1, 9, 1), x, x, block_mask=mask),
        "sliced": lambda: flex.flex_attention(x[:, :, :16], x, x, block_mask=mask[:, :, 0]),
        "mask of a slice": lambda: mask[:, :, 0].mask_mod(0, 0, 0, 0),
        "batch": lambda: flex.flex_attention(x, x[:1], x[:1]),
        "one of two lists": lambda: flex.BlockMask.from_kv_blocks(*lists, full_kv_num_blocks=lists[0]),
        "lists of one dimension": lambda: flex.BlockMask.from_kv_blocks(lists[0][0, 0], lists[1][0, 0, 0]),
        "no mask": lambda: flex.and_masks(banded, 3),
        "no mask in or": lambda: flex.or_masks(3),
        "both returns": lambda: flex.flex_attention(x, x, x, return_lse=True, return_aux=flex.AuxRequest(lse=True)),
        "maxima": lambda: flex.flex_attention(x, x, x, return_aux=flex.AuxRequest(max_scores=True)),
        "too many indices": lambda: mask[0, 0, 0, 0],
    }


@pytest.mark.parametrize("name", wrong_calls(ours))
def test_errors_are_of_the_type_that_pytorch_raises(monkeypatch, name):
    monkeypatch.setattr(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    expected, found = raised(wrong_calls(theirs)[name]), raised(wrong_calls(ours)[name])
    assert isinstance(found, type(expected)), f"{found!r} where PyTorch has {expected!r}"


def test_inputs_that_require_a_gradient(rng):
    x = torch.ones(1, 2, 4, 8, requires_grad=True)
    assert isinstance(raised(ours.flex_attention, x, x, x), ValueError)
    with torch.no_grad():
        assert ours.flex_attention(x, x, x).shape == x.shape


def test_a_tensor_as_scale(rng):
    x = torch.tensor(rng.standard_normal((1, 2, 9, 8)), dtype=torch.float32)
    expected = ours.flex_attention(x, x, x, scale=0.5)
    for scale in (torch.tensor(0.5), np.float32(0.5), torch.tensor([0.5])[0], np.array(0.5)):
        assert torch.equal(ours.flex_attention(x, x, x, scale=scale), expected)


def test_kernel_options_are_taken():
    x = torch.ones(1, 2, 9, 8)
    options = ours.FlexKernelOptions(BLOCK_M=64)
    assert torch.equal(ours.flex_attention(x, x, x, kernel_options=options), ours.flex_attention(x, x, x))


def test_doubles_say_why_not():
    x = torch.ones(1, 2, 9, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="float64.*accumulate in float32.*query.float"):
        ours.flex_attention(x, x, x)
