"""Runs a problem on Raddle, and compares with the reference."""

from __future__ import annotations

import dataclasses

import numpy as np
import raddle
import reference.budgets
import reference.exact
from checks import within
from device_arrays import DeviceArray
from raddle import _cuda
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
        kv_dtype=str(k.dtype) if k.dtype.itemsize == 1 else None,
        variant=twin(problem.variant),
        scale=problem.scale,
        k_extends_v=problem.k_extends_v,
        **options,
    )


def hold_to_budgets_of(device: str) -> None:
    """Lets kernels round weights where they do: on GPUs, and where CPUs multiply in bfloat16."""
    if device != "cpu":
        if any(gpu["target"] == "sm_90a" for gpu in _cuda.driver()["gpus"]):
            reference.budgets.TANH = 2.0**-16.9  # Hopper's instruction for it
        reference.exact.rounds_weights = lambda problem: True
        of_narrow = reference.exact.weight_dtype
        reference.exact.weight_dtype = lambda problem: str(problem.q.dtype) if _is_wide(problem) else of_narrow(problem)
    elif raddle.cpu_isa() in ("avx512_bf16", "amx"):
        reference.exact.rounds_weights = _in_bf16
        reference.exact.weight_dtype = lambda problem: str(problem.q.dtype)


def _is_wide(problem: Problem) -> bool:
    """Whether a GPU widens 8-bit K and V to the dtype of Q."""
    return problem.k_extends_v or max(problem.q.shape[-1], problem.kv[0][1].shape[-1]) > 256


def _in_bf16(problem: Problem) -> bool:
    """Whether some of a problem's queries are multiplied in bfloat16."""
    stored = ("bfloat16", "float8_e4m3fn") if raddle.cpu_isa() == "amx" else ("bfloat16",)
    return str(problem.q.dtype) == "bfloat16" and str(problem.kv[0][0].dtype) in stored


def in_units(x: np.ndarray) -> np.ndarray:
    """K or V of 8 bits with rows that are multiples of 16 bytes apart, as GPUs ask for; NaN lies between them."""
    if x.itemsize != 1 or not any(step % 16 for step in x.strides[:-1]):
        return x
    wide = np.full((*x.shape[:-1], -(-x.shape[-1] // 16) * 16), 0x7F, np.uint8).view(x.dtype)
    view = wide[..., : x.shape[-1]]
    view[...] = x
    return view


def is_view(k, v) -> bool:
    """Whether V is K's first columns."""
    return k.ctypes.data == v.ctypes.data and k.strides == v.strides


class OnDevice:
    """An attention on a GPU with the interface of one on the CPU: numpy arrays go there, and results come back."""

    def __init__(self, attention: raddle.Attention):
        self.attention, self.spec, self.plan = attention, attention.spec, attention.plan
        self.ordinal = int(attention.device.partition(":")[2])

    def lend(self, x):
        if isinstance(x, np.ndarray):
            return DeviceArray(in_units(x), self.ordinal)
        if isinstance(x, tuple) and is_view(*x):
            k = self.lend(x[0])
            return k, k.first_columns(x[1].shape[-1])
        return type(x)(map(self.lend, x)) if isinstance(x, (list, tuple)) else x

    def run(self, plan, q, kv, out=None, lse=None, return_lse=False, return_state=False, **options):
        spec, shape = self.spec, q.shape[: 2 if q.ndim == 4 else 1]
        wants_lse = return_lse or (return_state and self.attention._has_lse)
        if out is None:
            kind = np.float32 if return_state else q.dtype
            out = np.full((*shape, spec.num_qo_heads, spec.head_dim_vo), np.nan, kind)
        if lse is None and wants_lse:
            lse = np.full((*shape, spec.num_qo_heads), np.nan, np.float32)
        written = self.lend([out] if lse is None else [out, lse])
        there = dict(zip(("out", "lse"), written))
        there.update({name: self.lend(options.pop(name)) for name in ("k_scale", "v_scale") if name in options})
        self.attention.run(plan, self.lend(q), self.lend(kv), return_state=return_state, **there, **options)
        for host, device in zip((out, lse), written):
            host[...] = device.numpy()
        return (out, lse) if wants_lse else out


class Engine:
    """Raddle on one device."""

    def __init__(self, device: str):
        self.device = device
        self.row_unit = 1 if device == "cpu" else 8  # rows of 16-bit numbers are multiples of 16 bytes apart on GPUs

    def attention(self, problem: Problem, **options):
        attention = raddle.Attention(spec_of(problem, **options), device=self.device)
        return attention if self.device == "cpu" else OnDevice(attention)

    def run(self, problem: Problem, num_workers=None, schedule="auto", state=False, **options):
        """(O, LSE) as numpy arrays, into poisoned outputs. LSE is None for sums, which have none."""
        attn = self.attention(problem, **options)
        plan = attn.plan(twin(problem.layout), num_workers=num_workers, schedule=schedule)
        return self.run_plan(attn, plan, problem, state=state)

    def run_plan(self, attn, plan, problem: Problem, state=False):
        rows, heads, _ = problem.q.shape
        has_lse = one(problem.variant, Sigmoid) is None
        kind = np.float32 if state else problem.q.dtype
        out = np.full((rows, heads, problem.kv[0][1].shape[-1]), np.nan, kind)
        lse = np.full((rows, heads), np.nan, np.float32) if has_lse else None
        kv = problem.kv[0] if len(problem.kv) == 1 else problem.kv
        scales = {"k_scale": problem.k_scale, "v_scale": problem.v_scale}
        attn.run(plan, problem.q, kv, out=out, lse=lse, return_state=state, **scales)
        return out, lse

    def check(self, problem: Problem, state=False, **how):
        """Runs the problem and holds every element against its budget; returns the worst error / budget."""
        out, lse = self.run(problem, state=state, **how)
        return within(attention(problem, state=state), out, lse)
