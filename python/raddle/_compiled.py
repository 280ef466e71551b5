"""What torch.compile sees of Raddle: operators (`_torch_op`), where this torch has what they need."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["compiled", "is_traced", "numbered"]

# tvm_ffi imports torch where it is installed, so it is known now whether there is one.
_torch = sys.modules.get("torch")

# torch.compile of older ones falls back to running Raddle's calls as they are, outside its graphs.
if hasattr(_torch, "compiler") and hasattr(_torch.library, "register_fake"):
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
        x.number = 0
        return x
