"""PyTorch's FlexAttention, compiled for each shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import raddle
from raddle.bench.engines import Engine, Makers
from raddle.bench.gpu import variants
from raddle.bench.gpu.cases import SOFT_CAP, WINDOW, Case
from raddle.bench.gpu.problem import Problem

# One compiled function a shape, all kept: by default, the ninth shape would run uncompiled.
for _limit in ("recompile_limit", "cache_size_limit"):
    if hasattr(torch._dynamo.config, _limit):
        setattr(torch._dynamo.config, _limit, 1000)

Mod = Callable[..., Any]


def compiled(
    q: torch.Tensor,
    pools: Sequence[tuple[torch.Tensor, torch.Tensor]],
    mask: Optional[Mod] = None,
    score: Optional[Mod] = None,
) -> Callable[[int], torch.Tensor]:
    """A call on q [B, Hq, rows, D] and the step's one of the pools, each k and v [B, Hkv, S, D]."""
    keys = pools[0][0]
    options: dict[str, Any] = {"enable_gqa": q.shape[1] > keys.shape[1], "score_mod": score}
    if mask is not None:
        options["block_mask"] = create_block_mask(mask, None, None, q.shape[2], keys.shape[2], device=str(q.device))
    function = torch.compile(flex_attention, dynamic=False)

    def call(step: int) -> torch.Tensor:
        with torch.no_grad():
            return function(q, *pools[step % len(pools)], **options)

    return call


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def window(width: int) -> Mod:
    """Causal, and no key further than ``width`` back."""
    return lambda b, h, q, k: (q >= k) & (q - k <= width)


def softcap(cap: float) -> Mod:
    return lambda score, b, h, q, k: cap * torch.tanh(score / cap)


def _alibi(heads: int, device: Any) -> Mod:
    slopes = torch.tensor(raddle.alibi_slopes(heads), device=device)
    return lambda score, b, h, q, k: score + slopes[h] * (k - q)


def documents(length: int, device: Any) -> Mod:
    """Causal, within documents."""
    document = variants.documents(length).to(device)
    return lambda b, h, q, k: (document[q] == document[k]) & (q >= k)


def mask_mod(case: Case, device: Any) -> Mod:
    if case.variant == "documents":
        return documents(case.kv_len[0], device)
    return window(WINDOW) if case.variant == "window" else causal


def score_mod(case: Case, device: Any) -> Optional[Mod]:
    if case.variant == "softcap":
        return softcap(SOFT_CAP)
    return _alibi(case.heads[0], device) if case.variant == "alibi" else None


def contestants(problem: Problem, case: Case, name: str) -> Makers:
    if case.variant in ("causal", "softcap", "alibi", "window", "documents"):
        yield name, lambda: _prepared(problem, case, name)


def _prepared(problem: Problem, case: Case, name: str) -> Engine:
    mask = None if case.is_decode else mask_mod(case, problem.device)
    call = compiled(problem.dense_q, [problem.dense], mask, score_mod(case, problem.device))
    return Engine(name, call, rows=lambda out: out.transpose(1, 2).reshape(problem.q.shape))
