"""A tensor in a GPU's memory without any framework: for `raddle replay`, and for `raddle.Timeline`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tvm_ffi

from raddle import _library
from raddle._tensors import current_stream, device_of

_allocate = _library.function("raddle.cuda.allocate")
_tensor_of = _library.function("raddle.cuda.tensor_of")
_upload = _library.function("raddle.cuda.upload")
_download = _library.function("raddle.cuda.download")
_set_bytes = _library.function("raddle.cuda.set_bytes")
_synchronize = _library.function("raddle.cuda.synchronize")


@tvm_ffi.register_object("raddle.DeviceMemory")
class _Memory(_library.Handle):
    """Memory of Raddle's own pool, which it goes back to."""

    __slots__ = ()


class DeviceTensor:
    """A contiguous tensor on a GPU; Raddle, and every library that takes DLPack, reads it without a copy.

    Its contents are undefined. Everything happens on the current stream, in order; only `numpy` waits.

    Args:
        device: "cuda:1", as `Attention.device` says it; "cuda": the GPU that is current.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, device: str) -> None:
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.nbytes = math.prod(shape) * self.dtype.itemsize
        stream = None if device == "cuda" else current_stream(device)
        self._memory = _allocate(nbytes=self.nbytes, device=device, stream=stream)
        self._tensor = self.rows(shape[0])
        self.device = device_of(self._tensor)

    def rows(self, count: int) -> tvm_ffi.Tensor:
        """The first so many rows, as Raddle takes them."""
        return _tensor_of(memory=self._memory, shape=[count, *self.shape[1:]], dtype=self.dtype.name)

    def write(self, array: np.ndarray) -> None:
        """Copies rows of the same shape and dtype to the first rows."""
        if array.shape[1:] != self.shape[1:] or array.dtype != self.dtype or len(array) > self.shape[0]:
            found = f"{array.dtype} {array.shape}"
            raise ValueError(f"array is {found}; expected at most {self.dtype} {self.shape}")
        stream = current_stream(self.device)
        _upload(memory=self._memory, array=_bytes(np.ascontiguousarray(array)), stream=stream)

    def numpy(self, rows: int | None = None) -> np.ndarray:
        """A copy of the first so many rows, None: all; waits for it."""
        found = np.empty((self.shape[0] if rows is None else rows, *self.shape[1:]), self.dtype)
        _download(memory=self._memory, array=_bytes(found), stream=current_stream(self.device))
        return found

    def fill(self, byte: int, first: int = 0, count: int | None = None) -> None:
        """Gives all bytes of rows ``first … first + count`` (None: to the end) a value."""
        row = self.nbytes // max(1, self.shape[0])
        count = self.shape[0] - first if count is None else count
        stream = current_stream(self.device)
        _set_bytes(memory=self._memory, at=first * row, nbytes=count * row, value=byte, stream=stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options)


def synchronize(device: str) -> None:
    """Waits for the current stream of a GPU."""
    _synchronize(device=device, stream=current_stream(device))


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)
