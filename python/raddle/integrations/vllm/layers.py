"""Parts that users give layers of a model in vLLM, and vLLM's names of dtypes. Imports nothing of vLLM."""

from __future__ import annotations

import fnmatch
from typing import Any

from raddle.integrations.paged.layers import OwnParts

#: vLLM's names of what K and V are stored as in 8 bits.
STORED = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}

_own: list[tuple[str, OwnParts]] = []


def variant(layers: str, parts: Any, *, replace: bool = False) -> None:
    """Gives layers of a model in vLLM parts of your own: their attention as a Python function, or as variants.

    It is called in every process of vLLM, before the model is made: by a plugin of your own, or by the module or file that
    the environment variable RADDLE_VLLM_VARIANTS names.

    Args:
        layers: vLLM's names of the layers, as in "model.layers.*" or "model.layers.3.self_attn.attn"; ``*`` stands for
            any text. Of several calls that fit a layer, the last one counts.
        parts: a score or mask function of `raddle.flex`, a variant, or a list of them.
        replace: compute ``parts`` alone; False: beside what the model asks for: causal mask, window, soft cap, ALiBi,
            sinks. Masks are and-ed; score functions come after soft cap and ALiBi.

    Raises:
        TypeError: ``layers`` that is no text. Parts are checked, and functions traced, when the engine starts.

    Example:
        >>> def last_512_and_first_4(b, h, q_idx, kv_idx):
        ...     return (q_idx - kv_idx < 512) | (kv_idx < 4)
        >>> raddle.integrations.vllm.variant("model.layers.*", last_512_and_first_4)
    """
    if not isinstance(layers, str):
        raise TypeError(f"layers is a {type(layers).__name__}; expected text such as 'model.layers.*'")
    listed = parts if isinstance(parts, (list, tuple)) else (parts,)
    _own.append((layers, OwnParts(tuple(listed), replace)))


def own_parts(name: str) -> OwnParts | None:
    """What `variant` gave the layer of this name; None: nothing."""
    fits = [own for pattern, own in _own if fnmatch.fnmatchcase(name, pattern)]
    return fits[-1] if fits else None
