"""Query, key and value of `flex_attention` as the kernels take them, and outputs as torch lays them out."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from raddle._tensors.kinds import TorchTensor, device_of, torch

_MULTIPLE = 8  # of head dims


class Inputs:
    """One call's tensors: rows [B, L, Hq, E], keys and values as pages, the scale.

    Head dims that are no multiple of 8 are padded with zeros, which add nothing to a logit or an output. Elements that
    do not lie side by side are copied, and on a GPU queries that do not lie in units of 16 bytes. All else is read where
    it lies.
    """

    def __init__(self, query: Any, key: Any, value: Any, scale: Any) -> None:
        self.query = query
        self.batch, self.num_qo_heads, self.length, dim = query.shape
        keys_of, self.num_kv_heads, self.kv_length, self.dim_vo = value.shape
        self.shares_keys = keys_of != self.batch
        self.scale = scale if scale is None or type(scale) is float else float(scale)
        if dim % _MULTIPLE:
            query, key = _padded(query), _padded(key)
            if scale is None:
                self.scale = 1.0 / math.sqrt(dim)
        if self.dim_vo % _MULTIPLE:
            value = _padded(value)
        self.dim, self.padded_dim_vo = query.shape[3], value.shape[3]
        query, key, value = _side_by_side(query), _side_by_side(key), _side_by_side(value)
        if self.kv_length == 0:  # pages of no rows cannot be
            key = key.reshape(0, self.num_kv_heads, self.dim)
            value = value.reshape(0, self.num_kv_heads, self.padded_dim_vo)
        self.rows = _in_units(query).swapaxes(1, 2)
        self.kv = key, value

    @property
    def device(self) -> str:
        return device_of(self.query)

    @property
    def dtype(self) -> str:
        return str(self.query.dtype).rpartition(".")[2]

    def make_output(self) -> tuple[Any, Any]:
        """An output [B, Hq, L, Ev] of torch, its strides in the order of the query's as torch has them, and its rows,
        where they are a view of it. (None, None): `run` makes one."""
        if not isinstance(self.query, TorchTensor):
            return None, None
        out = like_in_order(self.query, (self.batch, self.num_qo_heads, self.length, self.dim_vo))
        return out, out.transpose(1, 2) if self.dim_vo == self.padded_dim_vo else None

    def finish(self, result: Any, rows_out: Any, out: Any) -> Any:
        """The output [B, Hq, L, Ev] of what was run."""
        if rows_out is not None:
            return out
        result = result.swapaxes(1, 2)
        result = result[..., : self.dim_vo] if self.dim_vo != self.padded_dim_vo else result
        return result if out is None else out.copy_(result)

    def finish_lse(self, lse: Any) -> Any:
        """[B, Hq, L] of [B, L, Hq]."""
        if self.length == 1:  # torch's strides, which a transpose of one row has not
            return lse.reshape(self.batch, self.num_qo_heads, 1)
        lse = lse.swapaxes(1, 2)
        return lse.contiguous() if isinstance(lse, TorchTensor) else lse


def like_in_order(query: Any, shape: tuple[int, ...]) -> Any:
    """An uninitialised tensor whose strides have the order of the query's; elements of a head lie side by side."""
    if query.is_contiguous():
        return query.new_empty(shape)
    strides = query.stride()
    order = [*sorted(range(3), key=lambda d: (-strides[d], d)), 3]  # outermost first
    place = [order.index(d) for d in range(4)]
    return query.new_empty([shape[d] for d in order]).permute(place)


def _padded(x: Any) -> Any:
    missing = -x.shape[3] % _MULTIPLE
    if isinstance(x, TorchTensor):
        return torch.nn.functional.pad(x, (0, missing))
    jax = sys.modules.get("jax")
    pad = jax.numpy.pad if jax is not None and isinstance(x, jax.Array) else np.pad
    return pad(x, ((0, 0), (0, 0), (0, 0), (0, missing)))


def _in_units(query: Any) -> Any:
    """Copied, unless rows and heads are whole units of 16 bytes apart, where a GPU reads them."""
    if not isinstance(query, TorchTensor) or query.is_cpu:
        return query
    unit = 16 // query.element_size()
    whole = query.data_ptr() % 16 == 0 and all(step % unit == 0 for step in query.stride()[:3])
    return query if whole else query.contiguous()


def _side_by_side(x: Any) -> Any:
    """Copied, unless the elements of a head lie side by side."""
    if isinstance(x, TorchTensor):
        return x if x.stride(3) == 1 else x.contiguous()
    if isinstance(x, np.ndarray) and x.strides[3] != x.itemsize:
        return np.ascontiguousarray(x)
    return x
