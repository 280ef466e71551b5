"""What an attention layer of a served model computes, as a spec. Engines' backends make these of their own layers."""

from __future__ import annotations

import dataclasses
from typing import Any

from raddle.spec import AttentionSpec
from raddle.variants import Alibi, Causal, Sinks, SlidingWindow, SoftCap


@dataclasses.dataclass(frozen=True)
class OwnParts:
    """Parts that a user gave a layer.

    Attributes:
        parts: score or mask functions, variants.
        replace: they are all that the layer computes; False: they are beside what the model asks for.
    """

    parts: tuple[Any, ...]
    replace: bool


@dataclasses.dataclass(frozen=True)
class LayerAttention:
    """What one layer computes.

    Attributes:
        window: tokens that a row sees, itself included; None: all before it.
        slopes: one number a query head.
        sinks: float32 [num_qo_heads] where the layer runs: kernels read them there in every run, and so in every replay.
        kv_dtype: of K and V, where they are stored in 8 bits, as `AttentionSpec` takes it; None: the queries' dtype.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    slopes: tuple[float, ...] | None = None
    sinks: Any = None
    kv_dtype: str | None = None
    own: OwnParts | None = None

    def with_parts(self, own: OwnParts | None) -> LayerAttention:
        """The layer with parts of a user's; None: as it is."""
        changes = {"window": None, "soft_cap": None, "slopes": None, "sinks": None} if own and own.replace else {}
        return dataclasses.replace(self, own=own, **changes)

    def planned_as(self) -> Any:
        """Equal for layers that one plan serves: they differ in values that a run may change."""
        present = (self.soft_cap is not None, self.slopes is not None, self.sinks is not None)
        heads = (self.num_qo_heads, self.num_kv_heads, self.head_dim)
        return (*heads, self.window, *present, self.kv_dtype, self.own and id(self.own))

    def values(self) -> dict[str, Any]:
        """Values of run members that a spec has, by their names."""
        found = {"softcap.cap": self.soft_cap, "alibi.slopes": self.slopes}
        return {name: value for name, value in found.items() if value is not None}

    def spec(self, dtype: Any) -> AttentionSpec:
        """What to compute, of queries in ``dtype``; each run gives its sinks."""
        parts: list[Any] = []
        if self.soft_cap is not None:
            parts.append(SoftCap(self.soft_cap))
        if self.slopes is not None:
            parts.append(Alibi(list(self.slopes)))
        if self.own is not None:
            parts.extend(self.own.parts)
        if self.sinks is not None:
            parts.append(Sinks([0.0] * self.num_qo_heads))
        if self.window is not None:
            parts.append(SlidingWindow(self.window - 1))
        if self.own is None or not self.own.replace:
            parts.append(Causal())
        heads = (self.num_qo_heads, self.num_kv_heads, self.head_dim)
        return AttentionSpec(*heads, dtype=dtype, variant=parts, scale=self.scale, kv_dtype=self.kv_dtype)
