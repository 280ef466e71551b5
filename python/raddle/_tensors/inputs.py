"""Tensors that the library reads, as it takes them."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from tvm_ffi import Tensor as FfiTensor
from tvm_ffi import from_dlpack

from raddle import _library
from raddle._tensors.dtypes import VIEWED
from raddle._tensors.kinds import TorchTensor, device_of, is_jax, kind_of, refuse_tracer, torch

_as_dtype = _library.function("raddle.as_dtype")

_STRIDED = torch.strided if torch is not None else None


def lend(x: Any, name: str = "a tensor") -> Any:
    """An input or output tensor as the library takes it; errors speak of it as ``name``."""
    if type(x) is TorchTensor:
        if x.layout is not _STRIDED or x.requires_grad or x.is_neg() or not (x.is_cpu or x.is_cuda):
            return _without_gradient(x, name)
        return x
    return _lend_other(x, name)


def lend_unasked(x: Any, name: str) -> Any:
    """`lend` for a call of every layer, which does not ask what DLPack itself refuses in a torch tensor.

    DLPack raises a RuntimeError that names no tensor; callers catch it and have `lend` name it.
    """
    if type(x) is not TorchTensor or x.requires_grad or x.is_neg():
        return lend(x, name)
    return x


def lend_index(x: Any, name: str) -> Any:
    """An array of integers: as `lend`, and lists of integers too."""
    if isinstance(x, (list, tuple)):
        # Without a dtype, so that 0.5 is an error and not 0; numpy has no better guess for no entries.
        try:
            x = np.asarray(x) if len(x) else np.zeros(0, np.int64)
        except ValueError:
            raise ValueError(f"{name} has rows of unequal length; expected equal ones: pad with -1") from None
    return lend(x, name)


def lend_indices(**arrays: Any) -> dict[str, Any]:
    """Each as `lend_index` lends it, under their names; None stays None."""
    return {name: None if x is None else lend_index(x, name) for name, x in arrays.items()}


def lend_integer(x: Any, name: str) -> int:
    """An integer of any kind, and no other number. Raises TypeError, naming the argument."""
    try:
        return operator.index(x)
    except TypeError:
        raise TypeError(f"{name} is {kind_of(x)}; expected an integer") from None


def lend_flag(x: Any, name: str) -> bool:
    """Whether ``x`` counts as true. Raises TypeError for what does not tell, naming the argument."""
    if x.__class__ is bool:
        return bool(x)
    _library.refuse_unmade(x, name)
    try:
        return bool(x)
    except Exception:  # numpy's of two elements is a ValueError, torch's a RuntimeError
        raise TypeError(f"{name} is {kind_of(x)}; expected True or False") from None


def host_array(x: Any, name: str) -> np.ndarray:
    """What a tensor of any library, or a list, holds. Raises TypeError where it holds nothing that the host can read."""
    try:
        return np.asarray(x.detach().cpu().resolve_conj().resolve_neg() if isinstance(x, TorchTensor) else x)
    except (RuntimeError, TypeError, OverflowError, BufferError) as error:
        why = str(error).partition("\n")[0]
        raise TypeError(f"{name} is {kind_of(x)} that cannot be used: {why}") from None
    except ValueError as error:  # rows of unequal length
        raise ValueError(f"{name} is {kind_of(x)} that cannot be used: {error}") from None


def _lend_other(x: Any, name: str) -> Any:
    if isinstance(x, np.ndarray):
        return _from_numpy(x, name)
    if isinstance(x, TorchTensor):
        return _from_torch_subclass(x, name)
    if isinstance(x, FfiTensor):
        return x
    if hasattr(x, "__dlpack__"):
        lent = _imported(x, name, x)
        if is_jax(x) and device_of(lent) != "cpu":
            # XLA's streams are its own: without a wait on the host the library cannot tell when such an array is ready.
            raise TypeError(
                f"{name} is a JAX array on a GPU; expected a tensor of torch or CuPy there, or a host array"
            )
        return lent
    raise TypeError(f"{name} is a {type(x).__name__}; expected a tensor of torch, numpy or JAX")


def _from_numpy(x: np.ndarray, name: str) -> FfiTensor:
    viewed = VIEWED.get(x.dtype)
    if viewed is not None:
        return _as_dtype(tensor=_from_numpy(x.view(viewed[0]), name), dtype=viewed[1])
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
    if torch.is_grad_enabled():
        raise ValueError(
            f"{name} requires a gradient; Raddle is forward-only: pass {argument}.detach(), or call it under "
            "torch.no_grad()"
        )
    return x.detach()
