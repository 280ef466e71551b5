"""Tensors in and out of the library: DLPack, without copies.

Inputs may be of torch, numpy (bfloat16 and 8-bit floats by ml_dtypes), JAX or CuPy; outputs that Raddle allocates are of the
same kind and on the same device. What shape, dtype and strides a tensor must have is checked in C++; only what DLPack
does not carry is checked here.
"""

from __future__ import annotations

import functools
import operator
import sys
from typing import Any, Callable, Sequence

import ml_dtypes
import numpy as np
from tvm_ffi import Tensor as FfiTensor
from tvm_ffi import from_dlpack

from raddle import _library

_as_dtype = _library.function("raddle.as_dtype")

# tvm_ffi imports torch where it is installed, so it is known now whether there is one.
_torch = sys.modules.get("torch")
_TorchTensor = _torch.Tensor if _torch is not None else type("NoTorch", (), {})
# torch.compile of older ones falls back to running Raddle's calls as they are, outside its graphs.
_compiles = hasattr(_torch, "compiler") and hasattr(_torch.library, "register_fake")
if _compiles:
    from raddle import _torch_op as compiled

    is_traced = _torch.compiler.is_dynamo_compiling
    numbered = compiled.number
else:
    compiled = None

    def is_traced() -> bool:
        """Whether torch.compile looks at the caller, rather than running it."""
        return False

    def numbered(x: Any) -> Any:
        """An attention, plan or reservation, which torch.compile knows by a number."""
        return x


_ordinal_of = functools.lru_cache(maxsize=None)(lambda device: int(device.removeprefix("cuda:")))
_torch_dtype = functools.lru_cache(maxsize=None)(lambda name: getattr(_torch, name))
_raw_stream: Callable[[int], int] | None = None  # torch's, once it has opened a GPU
_CUDA, _CUDA_MANAGED = 2, 13  # DLPack's numbers
_STRIDED = _torch.strided if _torch is not None else None
_NUMPY_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "int32": np.int32}
# What numpy cannot export, as what it is viewed, and its name, which numpy is slow to tell.
_VIEWED = {
    np.dtype(ml_dtypes.bfloat16): (np.uint16, "bfloat16"),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.uint8, "float8_e4m3fn"),
    np.dtype(ml_dtypes.float8_e5m2): (np.uint8, "float8_e5m2"),
}


def lend(x: Any, name: str = "a tensor") -> Any:
    """An input or output tensor as the library takes it; errors speak of it as ``name``."""
    if type(x) is _TorchTensor:
        if x.layout is not _STRIDED or x.requires_grad or x.is_neg() or not (x.is_cpu or x.is_cuda):
            return _without_gradient(x, name)
        return x
    return _lend_other(x, name)


def lend_unasked(x: Any, name: str) -> Any:
    """`lend` for a call of every layer, which does not ask what DLPack itself refuses in a torch tensor.

    That is a RuntimeError without a name: who catches one has `lend` name the tensor.
    """
    if type(x) is not _TorchTensor or x.requires_grad or x.is_neg():
        return lend(x, name)
    return x


def lend_output(x: Any, name: str, lend: Callable[[Any, str], Any] = lend) -> Any:
    """The same for a tensor that is written."""
    if type(x) is _TorchTensor:
        return lend(x, name)
    if isinstance(x, np.ndarray) and not x.flags.writeable:
        raise ValueError(f"{name} is a read-only array; expected one that can be written")
    if _is_jax(x):
        others = "an array of numpy or torch, which can be written"
        expected = f"None, or {others}" if name in ("out", "lse") else others
        raise TypeError(f"{name} is a JAX array, which is immutable; expected {expected}")
    return lend(x, name)


def lend_index(x: Any, name: str) -> Any:
    """An array of integers: as `lend`, and lists of integers too."""
    if isinstance(x, (list, tuple)):
        # Without a dtype, so that 0.5 is an error and not 0; numpy has no better guess for no entries.
        try:
            x = np.asarray(x) if len(x) else np.zeros(0, np.int64)
        except ValueError:
            raise ValueError(f"{name} has rows of unequal length; expected equal ones: pad with -1") from None
    return lend(x, name)


def lend_indices(**arrays: Any) -> list[Any]:
    """Each as of `lend_index`, in their order, under their names; None stays None."""
    return [None if x is None else lend_index(x, name) for name, x in arrays.items()]


def lend_scale(x: Any, name: str) -> Any:
    """A scale of K or V: None, a number, a tensor, or a list of those, one a level."""
    if x is None or type(x) is float:
        return x
    if isinstance(x, list):
        return [lend_scale(each, f"{name}[{n}]") for n, each in enumerate(x)]
    if isinstance(x, (int, np.number)):
        return x if isinstance(x, int) else float(x)
    if isinstance(x, str):
        raise TypeError(f"{name} is {kind_of(x)}; expected a number or a tensor")
    return lend(x, name)


def refuse_tracer(x: Any, name: str) -> None:
    """Raises TypeError for what stands for a JAX array while a function is traced."""
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"{name} is a JAX tracer, which holds no values: expected an array; call Raddle outside jit, vmap and "
            "grad, between jitted functions (it is forward-only and runs at once)"
        )


def lend_pools(kv: Any, lend: Callable[[Any, str], Any] = lend, name: str = "kv") -> list[Any]:
    """K and V of every level, one after another; None for V where one tensor holds both."""
    pools: list[Any] = []
    for number, level in enumerate(kv if isinstance(kv, list) else [kv]):
        where = f"{name}[{number}]" if isinstance(kv, list) else name
        if not isinstance(level, (tuple, list)):
            pools += (lend(level, where), None)
        elif len(level) == 2:
            pools += (lend(level[0], f"{where}: k"), lend(level[1], f"{where}: v"))
        else:
            raise ValueError(f"{where} has {len(level)} entries; expected a pair (k, v)")
    return pools


def lend_pool(kv: Any, lend: Callable[[Any, str], Any] = lend, name: str = "kv_pool") -> list[Any]:
    """The same of a single level."""
    pools = lend_pools(kv, lend, name)
    if len(pools) != 2:
        raise ValueError(f"{name} is a list of {len(pools) // 2} levels; expected one pair (k, v), a call for each level")
    return pools


def lend_integer(x: Any, name: str) -> int:
    """An integer of any kind, and no other number. Raises TypeError, naming the argument."""
    try:
        return operator.index(x)
    except TypeError:
        raise TypeError(f"{name} is {kind_of(x)}; expected an integer") from None


def make_output(x: Any, shape: tuple[int, ...] | None, dtype: str, name: str) -> tuple[Any, Any]:
    """What `like` makes, and that as the library takes it. Shape None: ``x`` has shape and dtype."""
    if type(x) is not _TorchTensor:
        made = like(x, tuple(x.shape) if shape is None else shape, dtype)
        return made, lend_output(made, name)
    if shape is None:
        # To name a format takes longer than to ask whether x has it.
        named = {} if x.is_contiguous() else {"memory_format": _torch.contiguous_format}
        made = _torch.empty_like(x, **named)
    else:
        made = like(x, shape, dtype)
    return made, made


def like(x: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """An uninitialised tensor of the kind of ``x``, where ``x`` is. For JAX one that `finished` converts."""
    if isinstance(x, _TorchTensor):
        return _torch.empty(shape, dtype=_torch_dtype(dtype), device=x.device)
    if _is_cupy(x):
        return _like_cupy(x, shape, dtype)
    if device_of(x) != "cpu":
        raise TypeError(
            f"out or lse is None and q is {kind_of(x)} on a GPU; expected a tensor to write: new ones are made for "
            "torch and CuPy"
        )
    return np.empty(shape, dtype=_NUMPY_DTYPES[dtype])


def finished(x: Any, result: Any) -> Any:
    """A result that `like` made for ``x``, as the caller's kind."""
    if type(x) is not _TorchTensor and _is_jax(x):
        jax = sys.modules["jax"]
        return jax.device_put(jax.numpy.asarray(result), next(iter(x.devices())))
    return result


def device_of(x: Any) -> str:
    """Where a tensor lies: "cpu" or "cuda:0", as `Attention` takes it. Pinned memory is the host's."""
    if isinstance(x, _TorchTensor):
        return str(x.device)
    if isinstance(x, np.ndarray) or not hasattr(x, "__dlpack_device__"):
        return "cpu"
    kind, ordinal = x.__dlpack_device__()
    return f"cuda:{ordinal}" if kind in (_CUDA, _CUDA_MANAGED) else "cpu"


def is_on_gpu(x: Any) -> bool:
    """Whether a tensor lies in a GPU's memory."""
    if isinstance(x, np.ndarray):
        return False
    return x.is_cuda if isinstance(x, _TorchTensor) else device_of(x) != "cpu"


def current_stream(device: str) -> int | None:
    """torch's current stream on a GPU; None where torch is not in use: the library knows which one then."""
    global _raw_stream
    if device == "cpu" or _torch is None:
        return None
    if _raw_stream is None:
        if not _torch.cuda.is_initialized():
            return None
        _raw_stream = _torch._C._cuda_getCurrentRawStream
    return _raw_stream(_ordinal_of(device)) or None


_ALIASES = {
    "bf16": "bfloat16",
    "half": "float16",
    "fp16": "float16",
    "float": "float32",
    "fp32": "float32",
    **{alias: "float8_e4m3fn" for alias in ("fp8", "fp8_e4m3", "fp8_e4m3fn", "float8_e4m3")},
    "fp8_e5m2": "float8_e5m2",
}


def plain(x: Any) -> Any:
    """What the library returned as Python's own dicts and lists, and numpy's arrays: what pickles."""
    if isinstance(x, FfiTensor):
        return np.from_dlpack(x).copy()
    if hasattr(x, "items"):
        return {str(name): plain(value) for name, value in x.items()}
    if isinstance(x, Sequence) and not isinstance(x, str):
        return [plain(value) for value in x]
    return str(x) if isinstance(x, str) else x


def restorable(x: Any) -> Any:
    """What `plain` made, as the library takes it."""
    if isinstance(x, np.ndarray):
        return lend(x, "an array of a pickle")
    if isinstance(x, dict):
        return {name: restorable(value) for name, value in x.items()}
    return [restorable(value) for value in x] if isinstance(x, list) else x


def dtype_name(dtype: Any, name: str = "dtype") -> str:
    """"float32" for that string, for "fp32", and for the dtype as numpy, torch, JAX and ml_dtypes have it."""
    if isinstance(dtype, str) or type(dtype).__module__ == "torch":
        found = str(dtype).removeprefix("torch.")
        return _ALIASES.get(found, found)
    try:
        if dtype is not None:  # which numpy takes for float64
            return np.dtype(dtype).name
    except TypeError:
        pass
    expected = "'float32', 'float16' or 'bfloat16'" if name == "dtype" else "'float8_e4m3fn', 'float8_e5m2', 'int8' or None"
    raise TypeError(f"{name} is {kind_of(dtype)}; expected {expected}")


def kind_of(x: Any) -> str:
    """What ``x`` is, for an error message."""
    if x is None:
        return "None"
    if isinstance(x, type):
        return f"the class {x.__name__}"
    word = type(x).__name__
    return f"{'an' if word[0] in 'aeiouAEIOU' else 'a'} {word}"


def _lend_other(x: Any, name: str) -> Any:
    if isinstance(x, np.ndarray):
        return _from_numpy(x, name)
    if isinstance(x, _TorchTensor):
        return _from_torch_subclass(x, name)
    if isinstance(x, FfiTensor):
        return x
    if hasattr(x, "__dlpack__"):
        lent = _imported(x, name, x)
        if _is_jax(x) and device_of(lent) != "cpu":
            # XLA's streams are its own: without a wait on the host nobody knows when such an array is there.
            raise TypeError(
                f"{name} is a JAX array on a GPU; expected a tensor of torch or CuPy there, or a host array"
            )
        return lent
    raise TypeError(f"{name} is a {type(x).__name__}; expected a tensor of torch, numpy or JAX")


def _from_numpy(x: np.ndarray, name: str) -> FfiTensor:
    viewed = _VIEWED.get(x.dtype)
    if viewed is not None:
        return _as_dtype(_from_numpy(x.view(viewed[0]), name), viewed[1])
    if x.flags.writeable:
        return _imported(x, name, x)
    try:
        capsule = x.__dlpack__(max_version=(1, 0))
    except TypeError:  # numpy before 2.1 exports no read-only array
        capsule = x.copy()
    except (BufferError, RuntimeError) as error:
        raise TypeError(f"{name} cannot be used: {error}") from None
    return _imported(x, name, capsule)


def _from_torch_subclass(x: Any, name: str) -> Any:
    if any(base.__name__ == "FakeTensor" for base in type(x).__mro__):
        raise TypeError(f"{name} is a FakeTensor, which holds no data")
    if x.layout is not _STRIDED or x.requires_grad or x.is_neg() or not (x.is_cpu or x.is_cuda):
        return _without_gradient(x, name)
    return x


def _imported(x: Any, name: str, exporter: Any) -> FfiTensor:
    try:
        return from_dlpack(exporter)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        refuse_tracer(x, name)
        kind = f"{type(x).__module__}.{type(x).__name__} of {getattr(x, 'dtype', 'unknown dtype')}"
        raise TypeError(f"{name} is a {kind}, which cannot be used: {error}") from None


def _without_gradient(x: Any, name: str) -> Any:
    """Returns a module's parameter as it is under no_grad; refuses what is no dense tensor of host or GPU."""
    argument = name.split()[-1]
    if x.layout is not _STRIDED:
        raise TypeError(f"{name} has layout {x.layout}; expected a dense tensor: pass {argument}.to_dense()")
    if not (x.is_cpu or x.is_cuda):
        raise ValueError(f"{name} lies on device '{x.device}'; expected 'cpu' or 'cuda'")
    if x.is_neg():
        raise ValueError(f"{name} has its negative bit set; pass {argument}.resolve_neg()")
    if _torch.is_grad_enabled():
        raise ValueError(
            f"{name} requires a gradient; Raddle is forward-only: pass {argument}.detach(), or call it under "
            "torch.no_grad()"
        )
    return x.detach()


def _is_jax(x: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.Array)


def _is_cupy(x: Any) -> bool:
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def _like_cupy(x: Any, shape: tuple[int, ...], dtype: str) -> Any:
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(x.device.id):
        return cupy.empty(shape, dtype=_NUMPY_DTYPES[dtype])
