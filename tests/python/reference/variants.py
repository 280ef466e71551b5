"""Variants as lists of parts, each with the formula it stands for. Shapes: q [R, H, D], k [N, H, D]."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


class Mask:
    """A mask keeps a pair when `keep` says so; masks join with & and |."""

    def keep(self, q_index, q_pos, kv_index, kv_pos):
        raise NotImplementedError

    def __and__(self, other):
        return AllOf([self, other])

    def __or__(self, other):
        return AnyOf([self, other])


@dataclass
class Causal(Mask):
    """A row sees itself and what came before it in the request."""

    def keep(self, q_index, q_pos, kv_index, kv_pos):
        return kv_index <= q_index


@dataclass
class SlidingWindow(Mask):
    """A row at position p keeps positions p - left … p + right; a negative bound is none."""

    left: int
    right: int = -1

    def keep(self, q_index, q_pos, kv_index, kv_pos):
        keep = np.ones(np.broadcast(q_pos, kv_pos).shape, bool)
        if self.left >= 0:
            keep &= kv_pos >= q_pos - self.left
        if self.right >= 0:
            keep &= kv_pos <= q_pos + self.right
        return keep


@dataclass
class AllOf(Mask):
    masks: list

    def keep(self, *place):
        return np.logical_and.reduce([mask.keep(*place) for mask in self.masks])


@dataclass
class AnyOf(Mask):
    masks: list

    def keep(self, *place):
        return np.logical_or.reduce([mask.keep(*place) for mask in self.masks])


@dataclass
class SoftCap:
    """s -> cap · tanh(s / cap)."""

    cap: float

    def logits(self, s):
        return self.cap * np.tanh(s / self.cap)


@dataclass
class Sinks:
    """A logit a query head in the softmax's denominator: a key without value."""

    logits: np.ndarray


@dataclass
class Sigmoid:
    """O = Σ sigmoid(s + bias) · v, a plain sum."""

    bias: float = 0.0

    def weight(self, s):
        with np.errstate(over="ignore"):
            return 1.0 / (1.0 + np.exp(-(s + self.bias)))


@dataclass
class Llama31Scaling:
    """Llama 3.1: low frequencies are divided by `factor`, high ones kept, those between interpolated."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: float = 8192.0

    def scale(self, frequency):
        turns = self.original_max_position * frequency / (2 * np.pi)  # over the original context
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        return frequency * (smooth + (1.0 - smooth) / self.factor)


@dataclass
class Rope:
    """Pairs (x[i], x[i + rotary_dim/2]) turn by the angle position · theta^(-2i / rotary_dim)."""

    rotary_dim: int
    theta: float = 10000.0
    scaling: Llama31Scaling | None = None
    offset: object = 0  # one for all, or one a request

    def frequencies(self):
        frequency = float(self.theta) ** (-np.arange(0, self.rotary_dim, 2) / self.rotary_dim)
        return frequency if self.scaling is None else self.scaling.scale(frequency)

    def rotate(self, x, pos, request):
        offset = np.ravel(self.offset)
        pos = np.asarray(pos, np.float64) + (offset[0] if len(offset) == 1 else offset[request])
        angle = (pos[:, None] * self.frequencies())[:, None, :]  # [rows, 1, rotary_dim / 2]
        half = self.rotary_dim // 2
        a, b = x[..., :half], x[..., half : 2 * half]
        turned = [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]
        return np.concatenate([*turned, x[..., 2 * half :]], axis=-1)


def parts(variant, kind) -> list:
    return [part for part in variant if isinstance(part, kind)]


def one(variant, kind):
    """The part of that kind, or None; a variant has at most one sink and one scan."""
    found = parts(variant, kind)
    assert len(found) <= 1, f"two of {kind.__name__}"
    return found[0] if found else None
