"""Runs a problem on Raddle, and compares with the reference."""

from __future__ import annotations

import dataclasses

import numpy as np
import raddle
from checks import within
from device_arrays import DeviceArray
from reference import Problem, Sigmoid, attention
from reference.variants import AllOf, AnyOf, Flex, one


def twin(x):
    """The raddle object of a reference layout or variant: same name, same arguments."""
    if isinstance(x, AllOf):
        return twin(x.masks[0]) & twin(x.masks[1])
    if isinstance(x, AnyOf):
        return twin(x.masks[0]) | twin(x.masks[1])
    if isinstance(x, Flex):
        return x.fn
    if isinstance(x, list):
        return [twin(each) for each in x]
    if not dataclasses.is_dataclass(x):
        return x
    given = {f.name: getattr(x, f.name) for f in dataclasses.fields(x) if f.init}
    arguments = {name: twin(value) for name, value in given.items() if value is not None}
    return getattr(raddle, type(x).__name__)(**arguments)


def spec_of(problem: Problem, **options) -> raddle.AttentionSpec:
    q, (k, v) = problem.q, problem.kv[0]
    levels = getattr(problem.layout, "levels", [problem.layout])
    head_axis = 1 if k.ndim == 4 and getattr(levels[0], "kv_layout", "NHD") == "HND" else -2
    return raddle.AttentionSpec(
        num_qo_heads=q.shape[1],
        num_kv_heads=k.shape[head_axis],
        head_dim=q.shape[2],
        head_dim_vo=v.shape[-1],
        dtype=str(q.dtype),
        variant=twin(problem.variant),
        scale=problem.scale,
        **options,
    )


class Engine:
    """Raddle on one device. On GPUs arrays go there before a run, and come back."""

    def __init__(self, device: str):
        self.device = device

    def attention(self, problem: Problem, **options) -> raddle.Attention:
        return raddle.Attention(spec_of(problem, **options), device=self.device)

    def run(self, problem: Problem, num_workers=None, schedule="auto", state=False, **options):
        """(O, LSE) as numpy arrays, into poisoned outputs. LSE is None for sums, which have none."""
        return self.run_on(self.attention(problem, **options), problem, num_workers, schedule, state)

    def run_on(self, attn, problem: Problem, num_workers=None, schedule="auto", state=False):
        plan = attn.plan(twin(problem.layout), num_workers=num_workers, schedule=schedule)
        return self.run_plan(attn, plan, problem, state=state)

    def run_plan(self, attn, plan, problem: Problem, state=False):
        rows, heads, _ = problem.q.shape
        has_lse = one(problem.variant, Sigmoid) is None
        kind = np.float32 if state else problem.q.dtype
        out = self.lend(np.full((rows, heads, problem.kv[0][1].shape[-1]), np.nan, kind))
        lse = self.lend(np.full((rows, heads), np.nan, np.float32)) if has_lse else None
        kv = [(self.lend(k), self.lend(v)) for k, v in problem.kv]
        attn.run(plan, self.lend(problem.q), kv[0] if len(kv) == 1 else kv, out=out, lse=lse, return_state=state)
        return self.back(out), None if lse is None else self.back(lse)

    def lend(self, array: np.ndarray):
        """The array on this device."""
        return array if self.device == "cpu" else DeviceArray(array, int(self.device[5:] or 0))

    def back(self, array) -> np.ndarray:
        return array if self.device == "cpu" else array.numpy()

    def check(self, problem: Problem, state=False, **how):
        """Runs the problem and holds every element against its budget; returns the worst error / budget."""
        out, lse = self.run(problem, state=state, **how)
        return within(attention(problem, state=state, rounded_weights=self.device != "cpu"), out, lse)
