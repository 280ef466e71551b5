"""PyTorch's FlexAttention, compiled for each shape."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import raddle
from raddle.bench.gpu.cases import SOFT_CAP, WINDOW, Case
from raddle.bench.gpu.engines import Contestant, Makers
from raddle.bench.gpu.problem import Problem

# One compiled function a shape, all kept: by default, the ninth shape would run uncompiled.
for _limit in ("recompile_limit", "cache_size_limit"):
    if hasattr(torch._dynamo.config, _limit):
        setattr(torch._dynamo.config, _limit, 1000)


def _causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def _window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q - k <= WINDOW)


def _softcap(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return SOFT_CAP * torch.tanh(score / SOFT_CAP)


def _score_mod(case: Case, device: Any) -> Any:
    if case.variant == "softcap":
        return _softcap
    if case.variant != "alibi":
        return None
    slopes = torch.tensor(raddle.alibi_slopes(case.heads[0]), device=device)
    return lambda score, b, h, q, k: score + slopes[h] * (k - q)


def contestants(problem: Problem, case: Case, name: str) -> Makers:
    if case.variant in ("causal", "softcap", "alibi", "window"):
        yield name, lambda: _prepared(problem, case, name)


def _prepared(problem: Problem, case: Case, name: str) -> Contestant:
    q, (k, v) = problem.dense_q, problem.dense
    options: dict[str, Any] = {"enable_gqa": case.group_size > 1, "score_mod": _score_mod(case, problem.device)}
    if not case.is_decode:
        mask = _window if case.variant == "window" else _causal
        length = case.kv_len[0]
        options["block_mask"] = create_block_mask(mask, None, None, length, length, device=str(problem.device))
    compiled = torch.compile(flex_attention, dynamic=False)
    return Contestant(
        name, lambda: compiled(q, k, v, **options), rows=lambda out: out.transpose(1, 2).reshape(problem.q.shape)
    )
