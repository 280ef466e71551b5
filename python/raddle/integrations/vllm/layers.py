"""What an attention layer of vLLM computes, as a spec. Imports nothing of vLLM."""

from __future__ import annotations

import dataclasses
import fnmatch
from typing import Any

from raddle.spec import AttentionSpec
from raddle.variants import Alibi, Causal, Sinks, SlidingWindow, SoftCap

#: vLLM's names of what K and V are stored as.
_STORED = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


@dataclasses.dataclass(frozen=True)
class OwnParts:
    """Parts that a user gave layers by `variant`."""

    parts: tuple[Any, ...]
    replace: bool


@dataclasses.dataclass(frozen=True)
class LayerAttention:
    """What one layer computes.

    Attributes:
        window: tokens that a row sees, itself included; None: all before it.
        slopes, sinks: one number a query head.
        stored: vLLM's kv_cache_dtype.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    slopes: tuple[float, ...] | None = None
    sinks: tuple[float, ...] | None = None
    stored: str = "auto"
    own: OwnParts | None = None

    def named(self, name: str) -> LayerAttention:
        """The same layer with the parts that `variant` has for its name."""
        own = own_parts(name)
        changes = {"window": None, "soft_cap": None, "slopes": None, "sinks": None} if own and own.replace else {}
        return dataclasses.replace(self, own=own, **changes)

    def planned_as(self) -> Any:
        """Equal for layers that one plan serves: they differ in values that a run may change."""
        present = (self.soft_cap is not None, self.slopes is not None, self.sinks is not None)
        heads = (self.num_qo_heads, self.num_kv_heads, self.head_dim)
        return (*heads, self.window, *present, self.is_quantized and self.stored, self.own and id(self.own))

    @property
    def is_quantized(self) -> bool:
        return self.stored in _STORED

    def values(self) -> dict[str, Any]:
        """Values of run members, by their names."""
        found = {"softcap.cap": self.soft_cap, "alibi.slopes": self.slopes, "sinks.logit": self.sinks}
        return {name: value for name, value in found.items() if value is not None}

    def spec(self, dtype: Any) -> AttentionSpec:
        """What to compute, of queries in ``dtype``."""
        parts: list[Any] = []
        if self.soft_cap is not None:
            parts.append(SoftCap(self.soft_cap))
        if self.slopes is not None:
            parts.append(Alibi(list(self.slopes)))
        if self.own is not None:
            parts.extend(self.own.parts)
        if self.sinks is not None:
            parts.append(Sinks(list(self.sinks)))
        if self.window is not None:
            parts.append(SlidingWindow(self.window - 1))
        if self.own is None or not self.own.replace:
            parts.append(Causal())
        heads = (self.num_qo_heads, self.num_kv_heads, self.head_dim)
        stored = _STORED.get(self.stored)
        return AttentionSpec(*heads, dtype=dtype, variant=parts, scale=self.scale, kv_dtype=stored)


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
