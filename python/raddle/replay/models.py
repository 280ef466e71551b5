"""The attention of some models: heads, and what each layer's variant is made of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import raddle


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of the whole head, half-split, with Llama 3.1's frequency scaling or without."""

    theta: float
    scaled: bool = False


@dataclass(frozen=True)
class LayerKind:
    """A causal layer's variant. Layers of one kind share an ``Attention`` and its plans."""

    window: int | None = None
    """Tokens that a row sees, itself included."""
    soft_cap: float | None = None
    sinks: bool = False
    rope: Rope | None = None


@dataclass(frozen=True)
class Model:
    """Heads, and the kinds of layers, which take turns."""

    name: str
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    kinds: tuple[LayerKind, ...] = (LayerKind(),)
    dtype: str = "bfloat16"
    rope: Rope | None = None
    """What ``--rope`` fuses into Q and K."""

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "float32" else 2

    def kind(self, layer: int) -> LayerKind:
        return self.kinds[layer % len(self.kinds)]

    def with_kinds(self, **changes: Any) -> Model:
        """The model with the given fields of every kind changed."""
        return replace(self, kinds=tuple(replace(kind, **changes) for kind in self.kinds))

    def kv_bytes(self, keys: int) -> int:
        """Size of so many keys and their values in one layer's pool."""
        return keys * 2 * self.num_kv_heads * self.head_dim * self.itemsize

    def flops(self, pairs: int) -> int:
        """Of Q·Kᵀ and P·V for so many pairs of a query row and a key that it sees."""
        return pairs * 4 * self.num_qo_heads * self.head_dim


MODELS = {
    "llama-3.1-8b": Model("llama-3.1-8b", 32, 8, 128, rope=Rope(500000.0, scaled=True)),
    "gemma-2-9b": Model(
        "gemma-2-9b",
        16,
        8,
        256,
        (LayerKind(window=4096, soft_cap=50.0), LayerKind(soft_cap=50.0)),
        rope=Rope(10000.0),
    ),
    # Its RoPE is YaRN's, which Raddle does not ship.
    "gpt-oss-20b": Model(
        "gpt-oss-20b", 64, 8, 64, (LayerKind(window=128, sinks=True), LayerKind(sinks=True))
    ),
}


def spec(model: Model, kind: LayerKind, sinks: Any = None) -> raddle.AttentionSpec:
    """The spec of a kind of layers. Sinks differ from layer to layer: without `sinks`, each run gives them."""
    variant: list[Any] = []
    if kind.rope:
        scaling = raddle.Llama31Scaling() if kind.rope.scaled else None
        variant.append(raddle.Rope(model.head_dim, theta=kind.rope.theta, scaling=scaling))
    if kind.soft_cap:
        variant.append(raddle.SoftCap(kind.soft_cap))
    if kind.sinks:
        variant.append(raddle.Sinks([0.0] * model.num_qo_heads if sinks is None else sinks))
    variant.append(raddle.Causal())
    if kind.window:
        variant.append(raddle.SlidingWindow(kind.window - 1))
    return raddle.AttentionSpec(
        num_qo_heads=model.num_qo_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=model.dtype,
        variant=variant,
    )


def reference(model: Model, layer: int, seed: int, rounds_weights: bool = False) -> dict[str, Any]:
    """The same layer for the fp64 reference (src/replay/verify.h, LayerSpec)."""
    kind = model.kind(layer)
    return {
        "seed": seed,
        "layer": layer,
        "num_qo_heads": model.num_qo_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "dtype": model.dtype,
        "scale": model.scale,
        "window_left": kind.window - 1 if kind.window else -1,
        "soft_cap": kind.soft_cap or 0.0,
        "sinks": kind.sinks,
        "rotary_dim": model.head_dim if kind.rope else 0,
        "rope_theta": kind.rope.theta if kind.rope else 1.0,
        "rope_scaled": bool(kind.rope and kind.rope.scaled),
        "rounds_weights": rounds_weights,
    }
