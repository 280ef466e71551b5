"""Variants as lists of parts, each with the formula it stands for. Shapes: q [R, H, D], k [N, H, D]."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import numpy as np


class Mask:
    """A mask keeps a pair when `keep` says so; masks join with & and |."""

    def keep(self, q_index, q_pos, kv_index, kv_pos):
        raise NotImplementedError

    def pairs(self, keys):
        """Which pairs of the rows and keys of one request are kept [R, N]."""
        return self.keep(keys.q_index[:, None], keys.q_pos[:, None], keys.kv_index[None], keys.kv_pos[None])

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

    def pairs(self, keys):
        return np.logical_and.reduce([mask.pairs(keys) for mask in self.masks])


@dataclass
class AnyOf(Mask):
    masks: list

    def pairs(self, keys):
        return np.logical_or.reduce([mask.pairs(keys) for mask in self.masks])


@dataclass
class PackedMask(Mask):
    """Request i keeps (row, kv_index) by bit row · kv_len + kv_index from byte indptr[i] on, lowest bit first."""

    bits: np.ndarray
    indptr: np.ndarray

    def pairs(self, keys):
        own = self.bits[self.indptr[keys.request] : self.indptr[keys.request + 1]]
        matrix = np.unpackbits(own, bitorder="little")[: keys.qo_len * keys.kv_len].astype(bool)
        row = keys.q_index - (keys.kv_len - keys.qo_len)
        return matrix.reshape(keys.qo_len, keys.kv_len)[row[:, None], keys.kv_index[None]]


@dataclass
class SoftCap:
    """s -> cap · tanh(s / cap)."""

    cap: float

    def logits(self, s, keys):
        return self.cap * np.tanh(s / self.cap)


@dataclass
class Alibi:
    """s -> s + slope · (kv_pos - q_pos), a slope a query head."""

    slopes: np.ndarray

    def logits(self, s, keys):
        return s + self.bias(s, keys)

    def bias(self, s, keys):
        slopes = np.asarray(self.slopes, np.float64).reshape(*s.shape[:2], 1, 1)
        return slopes * (keys.kv_pos[None, :] - keys.q_pos[:, None])


@dataclass
class Flex:
    """A score mod (5 arguments) or a mask mod (4) of the user's: the function itself, called on float64 arrays."""

    fn: object
    error: float = 0.0  # what the engine may add to a score beside roundings: an approximation's own error

    @property
    def is_mask(self):
        return len(inspect.signature(self.fn).parameters) == 4

    def place(self, keys, heads):
        """b, h, q_idx and kv_idx, which broadcast to [Hkv, G, R, N]."""
        h = np.arange(heads[0] * heads[1]).reshape(*heads, 1, 1)
        return np.int64(keys.request), h, keys.q_pos[:, None], keys.kv_pos[None, :]

    def keep(self, keys, heads):
        return np.asarray(self.fn(*self.place(keys, heads)), bool)

    def logits(self, s, keys):
        return self.fn(s, *self.place(keys, s.shape[:2]))

    def moved(self, s, delta, keys):
        """How far a score may be off if its argument is off by `delta`: by the function's own slope there."""
        exact = self.logits(s, keys)
        with np.errstate(invalid="ignore"):  # -inf stays where it is
            moves = [np.abs(self.logits(s + t * delta, keys) - exact) for t in (-1.0, -0.5, 0.5, 1.0)]
        return np.nan_to_num(np.maximum.reduce(moves), nan=0.0) + self.error


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
class LinearScaling:
    """All frequencies are divided by `factor`."""

    factor: float

    magnitude = 1.0

    def scale(self, frequency, theta=None):
        return frequency / self.factor


@dataclass
class Llama31Scaling:
    """Llama 3.1: low frequencies are divided by `factor`, high ones kept, those between interpolated."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: float = 8192.0

    magnitude = 1.0

    def scale(self, frequency, theta=None):
        turns = self.original_max_position * frequency / (2 * np.pi)  # over the original context
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        return frequency * (smooth + (1.0 - smooth) / self.factor)


@dataclass
class YarnScaling:
    """YaRN: pairs that turn slowly are divided by `factor`; cosine and sine are multiplied by `magnitude`."""

    factor: float
    original_max_position: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def scale(self, frequency, theta):
        half = len(frequency)
        # The pairs that make beta_fast and beta_slow turns over the original context: L theta^(-i/half) = 2 pi beta.
        radians = 2 * np.pi * np.array([self.beta_fast, self.beta_slow])
        first, last = half * np.log(self.original_max_position / radians) / np.log(theta)
        if self.truncate:
            first, last = np.floor(first), np.ceil(last)
        first = max(first, 0.0)
        last = max(first, min(last, 2 * half - 1.0))
        slowed = np.clip((np.arange(half) - first) / (last - first or 0.001), 0.0, 1.0)
        return frequency * (1.0 - slowed) + frequency / self.factor * slowed

    @property
    def magnitude(self):
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is None:
            return 1.0 + 0.1 * np.log(self.factor)
        above, below = (1.0 + 0.1 * m * np.log(self.factor) for m in (self.mscale, self.mscale_all_dim))
        return above / below


class Rotation:
    """Turns pairs of elements of Q and K: (x[i], x[i + n/2]) of the first n, or (x[2i], x[2i + 1])."""

    def pairs(self, x):
        """First and second elements of the pairs, and what does not rotate."""
        n = self.rotary_dim
        if self.interleaved:
            return x[..., 0:n:2], x[..., 1:n:2], x[..., n:]
        return x[..., : n // 2], x[..., n // 2 : n], x[..., n:]

    def unpaired(self, a, b, rest):
        n = self.rotary_dim
        turned = np.stack([a, b], axis=-1 if self.interleaved else -2)
        return np.concatenate([turned.reshape(*a.shape[:-1], n), rest], axis=-1)

    def place(self, pos, request):
        """Position plus offset, which is one for all, or one a request."""
        offset = np.ravel(self.offset)
        return np.asarray(pos, np.int64) + int(offset[0] if len(offset) == 1 else offset[request])

    def rotate(self, x, pos, request):
        cos, sin = (t[:, None, :] for t in self.cos_sin(self.place(pos, request)))  # [rows, 1, rotary_dim / 2]
        a, b, rest = self.pairs(x)
        return self.unpaired(a * cos - b * sin, b * cos + a * sin, rest)


@dataclass
class Rope(Rotation):
    """A pair turns by the angle position · theta^(-2i / rotary_dim)."""

    rotary_dim: int
    theta: float = 10000.0
    scaling: LinearScaling | Llama31Scaling | YarnScaling | None = None
    offset: object = 0  # one for all, or one a request
    interleaved: bool = False

    def frequencies(self):
        frequency = float(self.theta) ** (-np.arange(0, self.rotary_dim, 2) / self.rotary_dim)
        return frequency if self.scaling is None else self.scaling.scale(frequency, self.theta)

    def cos_sin(self, place):
        angle = place[:, None].astype(np.float64) * self.frequencies()
        magnitude = 1.0 if self.scaling is None else self.scaling.magnitude
        return magnitude * np.cos(angle), magnitude * np.sin(angle)


@dataclass
class RopeTables(Rotation):
    """Rows of tables are the cosines and sines of positions."""

    cos: np.ndarray
    sin: np.ndarray
    interleaved: bool = False
    offset: object = 0

    @property
    def rotary_dim(self):
        return 2 * self.cos.shape[1]

    def cos_sin(self, place):
        assert (place >= 0).all(), "a position before the table"
        return self.cos[place].astype(np.float64), self.sin[place].astype(np.float64)


def parts(variant, kind) -> list:
    return [part for part in variant if isinstance(part, kind)]


def logits_parts(variant) -> list:
    """The parts that change a score, in written order."""
    return [part for part in parts(variant, (SoftCap, Alibi, Flex)) if not (isinstance(part, Flex) and part.is_mask)]


def one(variant, kind):
    """The part of that kind, or None; a variant has at most one sink and one scan."""
    found = parts(variant, kind)
    assert len(found) <= 1, f"two of {kind.__name__}"
    return found[0] if found else None
