"""Masks as transformers passes them on: a tensor of the shape of a mask that holds the number of a `Mask`.

transformers makes a mask once a forward pass and hands it to every layer. It takes tensors of four dimensions for
finished masks, moves them and passes them into compiled graphs. So a mask is one element, expanded: the number by which
a layer finds the `Mask`, with its plan.
"""

from __future__ import annotations

import itertools
from typing import Any, Callable

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformers.masking_utils import causal_mask_function

from raddle.attention import Attention
from raddle.flex.trace import Traced, trace_mask, trace_score
from raddle.integrations.transformers.windows import CAUSAL, EVERYTHING, Window, window_of
from raddle.layouts import Layout, PagedKV, RaggedKV
from raddle.plans import Plan


class Mask:
    """Which keys the rows of a batch of equally long sequences see, and the plans made of it.

    Args:
        batch, q_length, kv_length: sequences, rows of each, keys of each.
        window: what rows see by position.
        first_position: of the rows, counted from the first key.
        keep: [batch, kv_length] bool, which keys are tokens and no padding; None: all.
        mods: further functions, traced, which see positions as above.
    """

    def __init__(
        self,
        batch: int,
        q_length: int,
        kv_length: int,
        window: Window = EVERYTHING,
        first_position: int = 0,
        keep: np.ndarray | None = None,
        mods: tuple[Traced, ...] = (),
    ) -> None:
        self.shape = (batch, q_length, kv_length)
        if q_length == 1 and first_position >= kv_length - 1:
            window = window._replace(right=-1)  # no key is behind a decode's row
        self.window, self.first_position, self.mods = window, first_position, mods
        self._spans = None if keep is None else spans_of(keep)
        self._is_padded = self._spans is not None and bool(self._spans[0].any())
        #: By kind of layer and `pools`' rows: each layer of a step asks, the first of its kind plans.
        self.planned: dict[Any, tuple[Attention, Plan]] = {}

    def layout(self, apart: int) -> Layout:
        """Where the keys of `pools` lie that are no padding: of a padded batch, sequences are ``apart`` rows apart."""
        batch, q_length, kv_length = self.shape
        rows = np.arange(batch + 1) * q_length
        positions = None
        if self._spans is not None or self.first_position != kv_length - q_length:  # the layout's own
            positions = np.tile(np.arange(q_length, dtype=np.int32) + np.int32(self.first_position), batch)
        sequences = np.arange(batch)
        begin, end = self._spans or (None, np.full(batch, kv_length))
        if not self._is_padded:
            return PagedKV(rows, None, sequences[:, None], end, kv_length, "HND", qo_pos=positions)
        first, length = sequences * apart + begin, end - begin
        return RaggedKV(rows, kv_first=first, kv_len=length, kv_begin=begin, qo_pos=positions)

    def pools(self, key: torch.Tensor, value: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], int]:
        """K and V [batch, Hkv, kv_length, D] as the layout takes them, and rows from a sequence to the next.

        Of a padded batch they are ragged views of the same memory, [rows, Hkv, D], in which heads overlap.
        """
        if not self._is_padded:
            return (key, value), 0
        apart = _rows_apart(key)
        if apart < 0 or _rows_apart(value) != apart:
            key, value, apart = key.contiguous(), value.contiguous(), key.shape[1] * key.shape[2]
        rows = (key.shape[0] - 1) * apart + key.shape[2]
        return (_ragged(key, rows), _ragged(value, rows)), apart

    def plan(self, attention: Attention, apart: int) -> Plan:
        """A plan of this batch for an attention of its mods; `apart` as in `layout`."""
        params = members_of(mod for mod in self.mods if mod.is_mask)
        if self.window != EVERYTHING:  # which the attention's own is, so that a GPU has it already
            params.update({"window.left": self.window.left, "window.right": self.window.right})
        return attention.plan(self.layout(apart), params=params or None)


def _rows_apart(x: torch.Tensor) -> int:
    """Keys of one head from a sequence of a cache to the next; -1 where that is no whole number."""
    between, step = x.stride(0), x.stride(2)
    if x.shape[0] == 1:
        return 0
    return between // step if step > 0 and between % step == 0 else -1


def _ragged(x: torch.Tensor, rows: int) -> torch.Tensor:
    """A cache [batch, Hkv, length, D] as so many rows [rows, Hkv, D], one a key of its first head."""
    _, heads, _, dim = x.shape
    _, of_head, of_row, of_column = x.stride()
    return x.as_strided((rows, heads, dim), (of_row, of_head, of_column))


def members_of(mods: Any) -> dict[str, Any]:
    """What traced functions capture, by the names of members."""
    return {f"{mod.name}.{member}": value for mod in mods for member, value in mod.values.items()}


def spans_of(keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First column that is kept and the one after the last, of each row; (0, 0) of a row that keeps nothing."""
    some = keep.any(axis=1)
    begin = np.where(some, keep.argmax(axis=1), 0).astype(np.int32)
    end = np.where(some, keep.shape[1] - keep[:, ::-1].argmax(axis=1), 0).astype(np.int32)
    return begin, end


@torch.compiler.disable
def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    config: Any = None,
    **_: Any,
) -> torch.Tensor:
    """The mask function of ``attn_implementation="raddle"``, by the signature of AttentionMaskInterface.

    Causal masks and windows are plan members; other functions are traced (`raddle.flex`). Padding is no mask: the plan
    leaves it out, unless it lies between tokens. Once a forward pass the host waits for an offset on a GPU, and for
    whether a padding mask there leaves any token out; if so, the mask is copied.
    """
    _check_model(config)
    first_position = int(q_offset) - int(kv_offset)
    keep = None if attention_mask is None else _padding(attention_mask, int(kv_offset), kv_length)
    window, mods = window_of(mask_function), []
    if window is None:
        window = EVERYTHING
        mods.append(trace_mask(_from(mask_function, int(kv_offset))))
    if keep is not None and not _is_contiguous(keep):
        mods.append(trace_mask(_kept(keep)))
    mask = Mask(batch_size, q_length, kv_length, window, first_position, keep, tuple(mods))
    return _lend(mask)


def mask_of(
    attention_mask: torch.Tensor | None, shape: tuple[int, int, int], num_heads: int, window: Window
) -> Mask:
    """What a layer was given: a mask of `make_mask`, a user's own [B, 1 or Hq, Sq, Skv], or none, which is ``window``.

    Args:
        shape: (batch, rows, keys) of the layer's query and key, which has num_heads query heads.

    Raises:
        ValueError: a mask that is for other lengths, or of another kind.
    """
    if attention_mask is None:
        return Mask(*shape, window)
    mask = getattr(attention_mask, _ATTRIBUTE, None)
    if mask is None:
        is_number = attention_mask.dtype == torch.int64 and attention_mask.ndim == 4
        mask = _of_number(attention_mask) if is_number else _given(attention_mask, shape, num_heads)
    if mask.shape != shape:
        raise ValueError(f"attention_mask is for (batch, rows, keys) = {mask.shape}; query and key have {shape}")
    return mask


_numbers = itertools.count(2**40)
_lent: dict[int, tuple[StorageWeakRef, Mask]] = {}
_LEAST_SWEPT = 16
_ATTRIBUTE = "raddle_mask"


def _lend(mask: Mask) -> torch.Tensor:
    """The tensor by which layers find the mask, which lives as long as the tensor's memory does.

    It has the mask as an attribute, which takes a layer no time to read. A slice of it, or what torch.compile passes
    on, has only the tensor's value: a number of the mask.
    """
    if len(_lent) >= _LEAST_SWEPT:
        for number, (memory, _) in list(_lent.items()):
            if memory.expired():
                _lent.pop(number, None)
    number = next(_numbers)
    holder = torch.tensor([number])
    _lent[number] = (StorageWeakRef(holder.untyped_storage()), mask)
    batch, q_length, kv_length = mask.shape
    lent = holder.expand(batch, 1, q_length, kv_length)
    setattr(lent, _ATTRIBUTE, mask)
    return lent


def _of_number(attention_mask: torch.Tensor) -> Mask:
    found = _lent.get(int(attention_mask[0, 0, 0, 0]))
    if found is None:
        raise ValueError("attention_mask is an int64 tensor; expected a mask of Raddle, of bools or of floats")
    return found[1]


def _padding(attention_mask: torch.Tensor, kv_offset: int, kv_length: int) -> np.ndarray | None:
    """[batch, kv_length] bool, or None where all are tokens.

    Columns beyond the mask's last are no tokens: a static cache has room left.
    """
    if attention_mask.ndim != 2:
        raise ValueError(f"attention_mask has {attention_mask.ndim} dimensions; expected 2 [batch, tokens], or 4")
    if attention_mask.shape[1] >= kv_offset + kv_length and attention_mask.all():  # one number comes from a GPU
        return None
    keep = attention_mask.bool().cpu().numpy()[:, kv_offset : kv_offset + kv_length]
    keep = np.pad(keep, ((0, 0), (0, kv_length - keep.shape[1])))
    return None if keep.all() else keep


def _is_contiguous(keep: np.ndarray) -> bool:
    begin, end = spans_of(keep)
    return bool((keep.sum(axis=1) == end - begin).all())


def _from(mask_function: Callable[..., Any], kv_offset: int) -> Callable[..., Any]:
    """The mask as it is seen from positions that count from the first key."""

    def composed_mask(batch_idx, head_idx, q_idx, kv_idx):
        return mask_function(batch_idx, head_idx, q_idx + kv_offset, kv_idx + kv_offset)

    return composed_mask


def _kept(keep: np.ndarray) -> Callable[..., Any]:
    def padding_mask(batch_idx, head_idx, q_idx, kv_idx):
        return keep[batch_idx, kv_idx]

    return padding_mask


def _given(given: torch.Tensor, shape: tuple[int, int, int], num_heads: int) -> Mask:
    """A user's own mask: bools that keep, or floats that are added to the logits."""
    expected = f"[{shape[0]} or 1, {num_heads} or 1, {shape[1]}, {shape[2]}]"
    sizes = tuple(given.shape)
    fits = len(sizes) == 4 and sizes[0] in (1, shape[0]) and sizes[1] in (1, num_heads) and sizes[2:] == shape[1:]
    if not fits or not (given.dtype == torch.bool or given.is_floating_point()):
        raise ValueError(f"attention_mask is {given.dtype} {list(sizes)}; expected bools or floats {expected}")
    per_batch, per_head = int(sizes[0] > 1), int(sizes[1] > 1)
    array = given.detach()

    def given_mask(batch_idx, head_idx, q_idx, kv_idx):
        return array[batch_idx * per_batch, head_idx * per_head, q_idx, kv_idx]

    def given_bias(score, batch_idx, head_idx, q_idx, kv_idx):
        return score + array[batch_idx * per_batch, head_idx * per_head, q_idx, kv_idx]

    mod = trace_mask(given_mask) if given.dtype == torch.bool else trace_score(given_bias)
    return Mask(*shape, mods=(mod,))


def _check_model(config: Any) -> None:
    """Raises ValueError for a model that Raddle does not serve, before a cache is written."""
    dim = getattr(config, "head_dim", None)
    if dim is not None and (dim % 8 or dim > 512):
        expected = "a multiple of 8, at most 512, for attn_implementation='raddle'"
        raise ValueError(f"head_dim of the model is {dim}; expected {expected}")


__all__ = ["CAUSAL", "EVERYTHING", "Mask", "Window", "make_mask", "mask_of", "members_of"]
