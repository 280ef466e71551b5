"""Tensors in and out of the library: DLPack, without copies.

Inputs may be of torch, numpy (bfloat16 and 8-bit floats by ml_dtypes), JAX or CuPy; outputs that Raddle allocates are
of the same kind and on the same device. What shape, dtype and strides a tensor must have is checked in C++; only what
DLPack does not carry is checked here.

`kinds` tells which framework a tensor is of and where it lies, `dtypes` names what it holds; `inputs`, `pools` and
`outputs` lend tensors to the library, and make those that it writes; `streams` knows torch's current stream, `saved`
what pickles hold.
"""

from raddle._tensors.dtypes import dtype_name
from raddle._tensors.inputs import host_array, lend, lend_flag, lend_index, lend_indices, lend_integer, lend_unasked
from raddle._tensors.kinds import TorchTensor, device_of, is_on_gpu, kind_of, refuse_tracer
from raddle._tensors.outputs import finished, lend_output, like, make_output, shape_of_out, shape_of_rows
from raddle._tensors.pools import lend_pool, lend_pools, lend_scale
from raddle._tensors.saved import plain, restorable
from raddle._tensors.streams import current_stream

__all__ = [
    "TorchTensor",
    "current_stream",
    "device_of",
    "dtype_name",
    "finished",
    "host_array",
    "is_on_gpu",
    "kind_of",
    "lend",
    "lend_flag",
    "lend_index",
    "lend_indices",
    "lend_integer",
    "lend_output",
    "lend_pool",
    "lend_pools",
    "lend_scale",
    "lend_unasked",
    "like",
    "make_output",
    "plain",
    "refuse_tracer",
    "restorable",
    "shape_of_out",
    "shape_of_rows",
]
