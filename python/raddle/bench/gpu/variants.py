"""The variants of the cases: as Raddle's parts, and in plain fp64 for the check."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import raddle
from raddle.bench.gpu.cases import SOFT_CAP, WINDOW
from raddle.bench.workloads import DOCUMENTS, document_offsets

_SIGMOID_BIAS = -3.0
_THETA = 10000.0


def _sinks(heads: int) -> list[float]:
    return [math.sin(head) for head in range(heads)]


def documents(length: int) -> torch.Tensor:
    """Which of twelve documents each of so many tokens belongs to."""
    return torch.from_numpy(np.repeat(np.arange(DOCUMENTS), np.diff(document_offsets(length))))


#: Raddle's parts of each variant, for Hq heads of D elements.
PARTS: dict[str, Callable[[int, int], list[Any]]] = {
    "plain": lambda heads, dim: [],
    "causal": lambda heads, dim: [raddle.Causal()],
    "window": lambda heads, dim: [raddle.SlidingWindow(WINDOW), raddle.Causal()],
    # Wider than any batch: what the part itself costs, over the same keys.
    "wide window": lambda heads, dim: [raddle.SlidingWindow(1 << 24), raddle.Causal()],
    "softcap": lambda heads, dim: [raddle.SoftCap(SOFT_CAP), raddle.Causal()],
    "alibi": lambda heads, dim: [raddle.Alibi(raddle.alibi_slopes(heads)), raddle.Causal()],
    "sinks": lambda heads, dim: [raddle.Sinks(_sinks(heads)), raddle.Causal()],
    "sigmoid": lambda heads, dim: [raddle.Sigmoid(_SIGMOID_BIAS), raddle.Causal()],
    "rope": lambda heads, dim: [raddle.Rope(dim, _THETA), raddle.Causal()],
    "rope interleaved": lambda heads, dim: [raddle.Rope(dim, _THETA, interleaved=True), raddle.Causal()],
}

#: What FlashAttention-3 and 4 are told of those that they compute, causal masks apart.
FLASH_ATTENTION: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window_size": (WINDOW, 0)},
    "softcap": {"softcap": SOFT_CAP},
}


def angles(positions: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine [positions, dim / 2] of RoPE, in fp64."""
    frequency = _THETA ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim)
    turn = positions.double()[:, None] * frequency
    return turn.cos(), turn.sin()


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rows x [n, heads, D] turned by their angles [n, D / 2]."""
    cos, sin = cos[:, None], sin[:, None]
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def exact_row(variant: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_index: int) -> torch.Tensor:
    """O [Hq, D of v] of one query row q [Hq, D] over k, v [S, Hkv, D], all in fp64, in the order of the definition."""
    heads, dim = q.shape
    index = torch.arange(len(k), device=k.device)
    if variant.startswith("rope"):
        interleaved = variant == "rope interleaved"
        k = rotated(k, *angles(index, dim), interleaved)
        q = rotated(q[None], *angles(torch.tensor([q_index], device=k.device), dim), interleaved)[0]
    grouped = q.view(k.shape[1], -1, dim)
    logits = torch.einsum("hgd,shd->hgs", grouped, k).reshape(heads, -1) / math.sqrt(dim)
    if variant == "softcap":
        logits = SOFT_CAP * torch.tanh(logits / SOFT_CAP)
    if variant == "alibi":
        slopes = torch.tensor(raddle.alibi_slopes(heads), dtype=torch.float64, device=k.device)
        logits = logits + slopes[:, None] * (index - q_index)
    if variant != "plain":
        dropped = index > q_index
        if variant == "window":
            dropped = dropped | (index < q_index - WINDOW)
        if variant == "documents":
            document = documents(len(k)).to(k.device)
            dropped = dropped | (document != document[q_index])
        logits = logits.masked_fill(dropped, -math.inf)
    if variant == "sigmoid":
        weights = torch.sigmoid(logits + _SIGMOID_BIAS)
    elif variant == "sinks":
        sinks = torch.tensor(_sinks(heads), dtype=torch.float64, device=k.device)[:, None]
        weights = torch.softmax(torch.cat((logits, sinks), -1), -1)[:, :-1]
    else:
        weights = torch.softmax(logits, -1)
    return torch.einsum("hgs,shd->hgd", weights.view(*grouped.shape[:2], -1), v).reshape(heads, -1)
