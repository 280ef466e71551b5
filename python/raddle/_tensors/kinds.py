"""Which framework a tensor is of, where it lies, and what to call it in an error."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

# tvm_ffi imports torch where it is installed, so it is known now whether there is one.
torch = sys.modules.get("torch")
TorchTensor = torch.Tensor if torch is not None else type("NoTorch", (), {})

_CUDA, _CUDA_MANAGED = 2, 13  # DLPack's numbers


def is_jax(x: Any) -> bool:
    """Whether ``x`` is an array of JAX."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.Array)


def is_cupy(x: Any) -> bool:
    """Whether ``x`` is an array of CuPy."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def device_of(x: Any) -> str:
    """Where a tensor lies: "cpu" or "cuda:0", as `Attention` takes it. Pinned memory is the host's."""
    if isinstance(x, TorchTensor):
        return str(x.device)
    if isinstance(x, np.ndarray) or not hasattr(x, "__dlpack_device__"):
        return "cpu"
    kind, ordinal = x.__dlpack_device__()
    return f"cuda:{ordinal}" if kind in (_CUDA, _CUDA_MANAGED) else "cpu"


def is_on_gpu(x: Any) -> bool:
    """Whether a tensor lies in a GPU's memory."""
    if isinstance(x, np.ndarray):
        return False
    return x.is_cuda if isinstance(x, TorchTensor) else device_of(x) != "cpu"


def kind_of(x: Any) -> str:
    """What ``x`` is, for an error message."""
    if x is None:
        return "None"
    if isinstance(x, type):
        return f"the class {x.__name__}"
    word = type(x).__name__
    return f"{'an' if word[0] in 'aeiouAEIOU' else 'a'} {word}"


def refuse_tracer(x: Any, name: str) -> None:
    """Raises TypeError for what stands for a JAX array while a function is traced."""
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"{name} is a JAX tracer, which holds no values: expected an array; call Raddle outside jit, vmap and "
            "grad, between jitted functions (it is forward-only and runs at once)"
        )
