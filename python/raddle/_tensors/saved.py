"""What pickles hold of a layout or a variant."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np
from tvm_ffi import Tensor as FfiTensor

from raddle._tensors.inputs import lend


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
