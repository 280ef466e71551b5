"""Arrays in a GPU's memory by the driver alone: what tests lend to Raddle where no framework has them.

They cross by DLPack. The same code runs on the emulated driver (tests/gpu/emulator.cpp) and on a real one.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
_NAMED = {"bfloat16": 4, "float8_e4m3fn": 10, "float8_e5m2": 12}
_CUDA = 2
_usual_ordinal = 0


def use_gpu(device: str) -> None:
    """Has arrays lie on that GPU unless they say otherwise: "cuda", "cuda:1"."""
    global _usual_ordinal
    _usual_ordinal = int(device.partition(":")[2] or 0)


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_lent: dict[int, Any] = {}  # what a capsule points to, until its taker is done with it


@_DELETER
def _delete(address):
    _lent.pop(address, None)


@functools.lru_cache(maxsize=None)
def _driver():
    cuda = ctypes.CDLL("libcuda.so.1")
    for name in ("cuMemAlloc_v2", "cuMemFree_v2", "cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2"):
        getattr(cuda, name).restype = ctypes.c_int
    assert cuda.cuInit(0) == 0
    return cuda


@functools.lru_cache(maxsize=None)
def _context(ordinal: int) -> ctypes.c_void_p:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    assert _driver().cuDeviceGet(ctypes.byref(device), ordinal) == 0
    assert _driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    return context


def _call(ordinal: int, name: str, *arguments: Any) -> None:
    before = ctypes.c_void_p()
    assert _driver().cuCtxPushCurrent_v2(_context(ordinal)) == 0
    result = getattr(_driver(), name)(*arguments)
    assert _driver().cuCtxPopCurrent_v2(ctypes.byref(before)) == 0
    assert result == 0, f"{name} returns {result}"


def usual_gpu() -> str:
    """Where arrays lie that do not say so, as messages name it."""
    return f"cuda:{_usual_ordinal}"


class DeviceArray:
    """A copy of a numpy array on GPU ``ordinal``, by default the tests' own; ``numpy()`` copies it back.

    Its strides are the array's.

    ``shift`` bytes part its first element from a multiple of 256.
    """

    def __init__(self, array: np.ndarray, ordinal: int | None = None, shift: int = 0):
        self.shape, self.dtype, self.ndim, self.strides = array.shape, array.dtype, array.ndim, array.strides
        self.ordinal = ordinal = _usual_ordinal if ordinal is None else ordinal
        reach = [(n - 1) * step for n, step in zip(array.shape, array.strides)] if array.size else []
        before = -sum(r for r in reach if r < 0)
        self._bytes = before + sum(r for r in reach if r > 0) + array.itemsize if array.size else 0
        self._base = ctypes.c_uint64()
        _call(ordinal, "cuMemAlloc_v2", ctypes.byref(self._base), ctypes.c_size_t(self._bytes + 1024))
        self.address = self._base.value + (before + 255) // 256 * 256 + shift
        self._first = self.address - before
        if self._bytes:
            host = ctypes.c_void_p(array.ctypes.data - before)
            _call(ordinal, "cuMemcpyHtoD_v2", ctypes.c_uint64(self._first), host, ctypes.c_size_t(self._bytes))

    def first_columns(self, count: int) -> DeviceArray:
        """A view of the first elements of every row; it keeps this array."""
        return self._of_shape((*self.shape[:-1], count))

    def first_rows(self, count: int) -> DeviceArray:
        """A view of the first rows; it keeps this array."""
        return self._of_shape((count, *self.shape[1:]))

    def _of_shape(self, shape: tuple[int, ...]) -> DeviceArray:
        view = object.__new__(DeviceArray)
        view.__dict__.update(self.__dict__, shape=shape, _base=ctypes.c_uint64(), _whole=self)
        return view

    def __del__(self):
        if self._base.value:
            _call(self.ordinal, "cuMemFree_v2", self._base)

    def write(self, array: np.ndarray) -> None:
        """Copies a contiguous array of the same shape into this one."""
        assert array.shape == self.shape and array.strides == self.strides and array.flags.c_contiguous
        host = ctypes.c_void_p(array.ctypes.data)
        _call(self.ordinal, "cuMemcpyHtoD_v2", ctypes.c_uint64(self.address), host, ctypes.c_size_t(array.nbytes))

    def numpy(self) -> np.ndarray:
        """A copy on the host; waits for the default stream."""
        if not self._bytes:
            return np.zeros(self.shape, self.dtype)
        raw = np.empty(self._bytes, np.uint8)
        to = ctypes.c_void_p(raw.ctypes.data)
        _call(self.ordinal, "cuMemcpyDtoH_v2", to, ctypes.c_uint64(self._first), ctypes.c_size_t(self._bytes))
        return np.ndarray(self.shape, self.dtype, raw, self.address - self._first, self.strides)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, self.ordinal

    def __dlpack__(self, **_: Any) -> Any:
        shape = (ctypes.c_int64 * max(1, self.ndim))(*self.shape)
        strides = (ctypes.c_int64 * max(1, self.ndim))(*(step // self.dtype.itemsize for step in self.strides))
        code = _NAMED[self.dtype.name] if self.dtype.name in _NAMED else _CODES[self.dtype.kind]
        bits = 8 * self.dtype.itemsize
        tensor = _Tensor(self.address, _CUDA, self.ordinal, self.ndim, code, bits, 1, shape, strides, 0)
        managed = _Managed(tensor, None, ctypes.cast(_delete, ctypes.c_void_p))
        _lent[ctypes.addressof(managed)] = managed, shape, strides, self
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return make(ctypes.addressof(managed), b"dltensor", None)
