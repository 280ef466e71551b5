"""Tensors that the library writes: lent as they are, or made of the caller's kind."""

from __future__ import annotations

import functools
import sys
from typing import Any, Callable

import numpy as np

from raddle._tensors.dtypes import NUMPY
from raddle._tensors.inputs import lend
from raddle._tensors.kinds import TorchTensor, device_of, is_cupy, is_jax, kind_of, torch

_torch_dtype = functools.lru_cache(maxsize=None)(lambda name: getattr(torch, name))


def lend_output(x: Any, name: str, lend: Callable[[Any, str], Any] = lend) -> Any:
    """A tensor that is written, as the library takes it; errors speak of it as ``name``."""
    if type(x) is TorchTensor:
        return lend(x, name)
    if isinstance(x, np.ndarray) and not x.flags.writeable:
        raise ValueError(f"{name} is a read-only array; expected one that can be written")
    if is_jax(x):
        others = "an array of numpy or torch, which can be written"
        expected = f"None, or {others}" if name in ("out", "lse") else others
        raise TypeError(f"{name} is a JAX array, which is immutable; expected {expected}")
    return lend(x, name)


def make_output(x: Any, shape: tuple[int, ...] | None, dtype: str, name: str) -> tuple[Any, Any]:
    """What `like` makes, and that as the library takes it. Shape None: ``x`` has shape and dtype."""
    if type(x) is not TorchTensor:
        made = like(x, tuple(x.shape) if shape is None else shape, dtype)
        return made, lend_output(made, name)
    if shape is None:
        # To name a format takes longer than to ask whether x has it.
        named = {} if x.is_contiguous() else {"memory_format": torch.contiguous_format}
        made = torch.empty_like(x, **named)
    else:
        made = like(x, shape, dtype)
    return made, made


def shape_of_out(q: Any, num_heads: int, head_dim: int) -> tuple[int, ...]:
    """Of the output for ``q``, which has the heads, and requests, in dimensions of their own or not."""
    return (q.shape[0], num_heads * head_dim) if q.ndim == 2 else (*shape_of_rows(q), num_heads, head_dim)


def shape_of_rows(q: Any) -> tuple[int, ...]:
    """(rows,), or (requests, rows)."""
    return q.shape[:2] if q.ndim == 4 else q.shape[:1]


def like(x: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """An uninitialised tensor of the kind of ``x``, where ``x`` is. For JAX one that `finished` converts."""
    if isinstance(x, TorchTensor):
        try:
            return torch.empty(shape, dtype=_torch_dtype(dtype), device=x.device)
        except RuntimeError as error:
            if x.is_cuda:
                raise  # torch.OutOfMemoryError says it all
            raise MemoryError(f"a tensor of shape {list(shape)} for a result: {str(error).partition(chr(10))[0]}") from None
    if is_cupy(x):
        return _like_cupy(x, shape, dtype)
    if device_of(x) != "cpu":
        raise TypeError(
            f"out or lse is None and q is {kind_of(x)} on a GPU; expected a tensor to write: new ones are made for "
            "torch and CuPy"
        )
    return np.empty(shape, dtype=NUMPY[dtype])


def finished(x: Any, result: Any) -> Any:
    """A result that `like` made for ``x``, as the caller's kind."""
    if type(x) is not TorchTensor and is_jax(x):
        jax = sys.modules["jax"]
        return jax.device_put(jax.numpy.asarray(result), next(iter(x.devices())))
    return result


def _like_cupy(x: Any, shape: tuple[int, ...], dtype: str) -> Any:
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(x.device.id):
        return cupy.empty(shape, dtype=NUMPY[dtype])
