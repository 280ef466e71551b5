"""`Attention.run` and `raddle.attention` under torch.compile: operators that it does not look into.

A graph cannot hold attentions and plans, so they have numbers, which the compiled code passes on. Those of plans and
reservations become arguments of the graph when they change for the first time: a new plan a step compiles nothing.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Callable, TypeVar

import torch

from raddle._tensors import shape_of_out, shape_of_rows

T = TypeVar("T")

# Scales of K and V cross with the parameters, whose names have a dot.
_SCALES = "k_scale", "v_scale"

# Numbers 0 and 1 would be compiled as constants, each time anew.
_numbers = itertools.count(2)
# Not a WeakValueDictionary: a step's plan would pay 0.4 us for a callback that never runs in time to matter.
_numbered: dict[int, weakref.ref[Any]] = {}
_LEAST_SWEPT = 1024
_sweep_at = _LEAST_SWEPT


def number(x: T) -> T:
    """Gives an attention, plan or reservation its number."""
    x.number = found = next(_numbers)
    _numbered[found] = weakref.ref(x)
    if len(_numbered) >= _sweep_at:
        _sweep()
    return x


def _sweep() -> None:
    """Forgets the numbers of what is gone, so seldom that a number's share of it is nothing."""
    global _sweep_at
    for key, ref in list(_numbered.items()):
        if ref() is None:
            _numbered.pop(key, None)
    _sweep_at = max(_LEAST_SWEPT, 2 * len(_numbered))


def object_of(number: int, what: str) -> Any:
    """Raises RuntimeError where what a compiled graph names by its number is gone."""
    ref = _numbered.get(number)
    found = None if ref is None else ref()
    if found is None:
        raise RuntimeError(f"{what} of a compiled graph is gone; expected one that is kept as long as the graph runs")
    return found


def run(
    attention: Any,
    plan: Any,
    q: Any,
    kv: Any,
    out: Any,
    lse: Any,
    return_lse: bool,
    return_state: bool,
    zero_unused_rows: bool,
    scale: float | None,
    scales: tuple[Any, Any],
    params: dict[str, Any] | None,
    timeline: Any,
) -> Any:
    """`Attention.run` while it is traced."""
    if timeline is not None:
        raise TypeError("timeline is given under torch.compile; expected None: run outside of it to see what each worker did")
    spec = attention.spec
    wants_lse = return_lse or (return_state and attention._has_lse)
    if out is None:
        shape = shape_of_out(q, spec.num_qo_heads, attention._dim_vo)
        out = q.new_empty(shape, dtype=torch.float32) if return_state else q.new_empty(shape)
    if lse is None and wants_lse:
        lse = q.new_empty((*shape_of_rows(q), spec.num_qo_heads), dtype=torch.float32)
    pools: list[Any] = []
    counts: list[int] = []  # tensors of each level: K and V, or one that holds both
    for level in kv if isinstance(kv, list) else [kv]:
        level = level if isinstance(level, (tuple, list)) else (level,)
        counts.append(len(level))
        pools.extend(level)
    tensors: dict[str, Any] = {}
    values: dict[str, float] = {}
    for name, given in zip(_SCALES, scales):
        for nth, value in enumerate(given if isinstance(given, list) else [given]):
            key = f"{name}[{nth}]" if isinstance(given, list) else name
            if isinstance(value, torch.Tensor):
                tensors[key] = value
            elif value is not None:
                values[key] = float(value)
    for name, value in (params or {}).items():
        if isinstance(value, (torch.Tensor, list, tuple)):
            tensors[name] = value if isinstance(value, torch.Tensor) else torch.tensor(value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            values[name] = float(value)
        else:
            raise TypeError(f"params['{name}'] under torch.compile; expected a number, a list of numbers or a tensor")
    names = "\n".join([*tensors, *values])
    changing = list(tensors.values()), list(values.values())
    numbers = attention.number, plan.number
    with_grad = torch.is_grad_enabled()  # inside of an operator it never is
    flags = return_state, zero_unused_rows
    torch.ops.raddle.run(*numbers, q, pools, counts, out, lse, *flags, scale, names, *changing, with_grad)
    return (out, lse) if wants_lse else out


def attention(q: Any, k: Any, v: Any, causal: bool, variant: Any, scale: Any, return_lse: bool) -> Any:
    """`raddle.attention` while it is traced."""
    if not (isinstance(variant, (tuple, list)) and len(variant) == 0):
        raise TypeError("variant of raddle.attention under torch.compile; expected none: make an Attention and a plan")
    out, lse = torch.ops.raddle.attention(q, k, v, causal, scale, return_lse, torch.is_grad_enabled())
    return (out, lse) if return_lse else out


def _run(
    attention: int,
    plan: int,
    q: Any,
    pools: list[Any],
    counts: list[int],
    out: Any,
    lse: Any,
    return_state: bool,
    zero_unused_rows: bool,
    scale: float | None,
    names: str,
    tensors: list[Any],
    values: list[float],
    with_grad: bool = False,
) -> None:
    rest = iter(pools)
    levels = [tuple(itertools.islice(rest, count)) if count != 1 else next(rest) for count in counts]
    params = dict(zip(names.split("\n"), [*tensors, *values])) if names else {}
    scales = {name: _scale_of(params, name, len(levels)) for name in _SCALES}
    with torch.set_grad_enabled(with_grad):  # where gradients are wanted, tensors that require one are refused
        object_of(attention, "the attention").run(
            object_of(plan, "the plan"),
            q,
            levels[0] if len(levels) == 1 else levels,
            out=out,
            lse=lse,
            return_state=return_state,
            zero_unused_rows=zero_unused_rows,
            scale=scale,
            params=params or None,
            **scales,
        )


def _scale_of(params: dict[str, Any], name: str, num_levels: int) -> Any:
    """Takes a scale out of the parameters that it crossed with: one, or those of levels, of which some have none."""
    if name in params:
        return params.pop(name)
    by_level = {int(key[len(name) + 1 : -1]): key for key in params if key.startswith(f"{name}[")}
    return [params.pop(by_level[n]) if n in by_level else None for n in range(num_levels)] if by_level else None


def _shapes_of_attention(
    q: Any, k: Any, v: Any, causal: bool, scale: Any, return_lse: bool, with_grad: bool = False
) -> tuple[Any, Any]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(q.shape[:-1] if return_lse else (0,), dtype=torch.float32)


def _define(name: str, schema: str, body: Callable[..., Any], shapes: Callable[..., Any]) -> None:
    torch.library.define(name, schema)
    torch.library.impl(name, "CompositeExplicitAutograd", body)
    torch.library.register_fake(name, shapes)


_define(
    "raddle::run",
    "(SymInt attention, SymInt plan, Tensor q, Tensor[] pools, int[] counts, Tensor(a!) out, Tensor(b!)? lse, "
    "bool return_state, bool zero_unused_rows, float? scale, str names, Tensor[] tensors, float[] values, "
    "bool with_grad=False) -> ()",
    _run,
    lambda *args: None,
)


def define_attention(eager: Callable[..., Any]) -> None:
    """Registers the operator of `raddle.attention`, which is ``eager``, called with tensors."""

    def run_eager(
        q: Any, k: Any, v: Any, causal: bool, scale: float | None, return_lse: bool, with_grad: bool = False
    ) -> tuple[Any, Any]:
        layout = "BSHD" if q.ndim == 4 else None
        with torch.set_grad_enabled(with_grad):
            result = eager(q, k, v, causal=causal, scale=scale, return_lse=return_lse, layout=layout)
        return result if return_lse else (result, q.new_empty(0, dtype=torch.float32))

    _define(
        "raddle::attention",
        "(Tensor q, Tensor k, Tensor v, bool causal, float? scale, bool return_lse, bool with_grad=False) -> "
        "(Tensor, Tensor)",
        run_eager,
        _shapes_of_attention,
    )
