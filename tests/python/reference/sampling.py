"""Sampling in fp64: which token a random number stands for, and by how much it could have been another."""

from __future__ import annotations

import numpy as np

MASK = 0xFFFFFFFF


def philox(key: int, counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox 4x32-10, as its paper defines it (Salmon et al. 2011)."""
    k0, k1 = key & MASK, key >> 32 & MASK
    c0, c1, c2, c3 = counter
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & MASK, (first >> 32) ^ c3 ^ k1, first & MASK
        k0, k1 = k0 + 0x9E3779B9 & MASK, k1 + 0xBB67AE85 & MASK
    return c0, c1, c2, c3


def uniform(seed: int, offset: int) -> float:
    """The number of [0, 1) that a row is drawn by."""
    low, high, *_ = philox(seed, (offset & MASK, offset >> 32 & MASK, 0, 0))
    return (high << 32 | low) / 2.0**64


def penalised(logits, counts, repetition=1.0, presence=0.0, frequency=0.0):
    x = np.asarray(logits, np.float64).copy()
    there = counts != 0
    x[there] = np.where(x[there] > 0, x[there] / repetition, x[there] * repetition)
    made = counts > 0
    x[made] -= presence + frequency * counts[made]
    return x


def distribution(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The probability of each token of one row, 0 of those that a filter takes away."""
    x = np.asarray(logits, np.float64)
    p = np.exp((x - x.max()) / temperature)
    order = np.argsort(-x, kind="stable")  # equal logits by index
    if 0 < top_k < len(order):
        order = order[:top_k]
    if top_p < 1:
        share = np.cumsum(p[order]) / p[order].sum()
        order = order[: int(np.searchsorted(share, top_p)) + 1]
    order = order[p[order] >= min_p * p.max()]
    kept = np.zeros_like(p)
    kept[order] = p[order]
    return kept / kept.sum()


def agrees(token: int, u: float, probability: np.ndarray, slack: float = 2e-6) -> bool:
    """Whether ``u`` stands for the token in the order of the indices, up to the rounding of weights in fp32."""
    end = np.cumsum(probability)
    return bool(probability[token] > 0 and end[token] - probability[token] - slack <= u <= end[token] + slack)
