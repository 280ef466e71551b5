"""The stream on which a call runs."""

from __future__ import annotations

import functools
from typing import Callable

from raddle._tensors.kinds import torch

_raw_stream: Callable[[int], int] | None = None  # torch's, once it has opened a GPU


@functools.lru_cache(maxsize=None)
def _ordinal_of(device: str) -> int:
    return int(device.removeprefix("cuda:"))


def current_stream(device: str) -> int | None:
    """torch's current stream on a GPU; None where torch is not in use: the library knows which one then."""
    global _raw_stream
    if device == "cpu" or torch is None:
        return None
    if _raw_stream is None:
        if not torch.cuda.is_initialized():
            return None
        _raw_stream = torch._C._cuda_getCurrentRawStream
    return _raw_stream(_ordinal_of(device)) or None
