"""PyTorch on the instruction set that Raddle is limited to, so that both show what a smaller machine would."""

from __future__ import annotations

import os
from typing import Optional

#: What ATen, oneDNN and MKL read when they first compute something; and, by Raddle's name of an instruction set, theirs.
_VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
_NAMES = {
    "generic": ("default", "SSE41", "SSE4_2"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512_CORE", "AVX512"),
    "avx512_bf16": ("avx512", "AVX512_CORE_BF16", "AVX512"),
}


def limit_torch() -> None:
    """Limits torch, in this process and its children, to ``RADDLE_CPU_ISA``; call it before torch computes anything."""
    names = _NAMES.get(os.environ.get("RADDLE_CPU_ISA", ""))
    if names:
        os.environ.update(zip(_VARIABLES, names))


def torch_limit() -> Optional[str]:
    """The instruction set that torch is limited to, by Raddle's name; None where it chose its own.

    That is also so where torch was used before `limit_torch`: ATen then says that it runs on another.
    """
    isa = os.environ.get("RADDLE_CPU_ISA", "")
    return isa if isa in _NAMES and _torch_isa() == _NAMES[isa][0] else None


def torch_described() -> str:
    """What torch runs on, for a table's head."""
    wanted, limit = os.environ.get("RADDLE_CPU_ISA", ""), torch_limit()
    if limit:
        return f"limited to {limit}"
    late = f": it was used before it could be limited to {wanted}" if wanted in _NAMES else ""
    return f"on {_torch_isa()}{late}"


def _torch_isa() -> str:
    import torch

    return str(torch.backends.cpu.get_cpu_capability()).lower()
