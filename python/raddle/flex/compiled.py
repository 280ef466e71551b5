"""`flex_attention` and `create_block_mask` under torch.compile: an operator that it does not look into.

torch.compile cannot hold a function of Python in a graph. What the function captures it can: the trace, made when the
graph is compiled, is a constant of it, and torch.compile itself reads the captured values by a function that is written
from the trace's `Reads`. So they are inputs of the graph; other values compile nothing, and where Python needed a
number torch.compile guards it. A `BlockMask` that comes from outside has a number, as plans have.
"""

from __future__ import annotations

import sys
import types
from typing import Any, Callable

import torch
from torch.fx.experimental.symbolic_shapes import has_static_value

from raddle.flex import reads
from raddle.flex.described import PLACEHOLDERS, cell, default, describe, forget, stand_in
from raddle.flex.trace import Trace, Traced, trace_mask, trace_score
from raddle.flex.traced_mask import TracedMask, of_torch

_traces: dict[int, Trace] = {}  # of compiled graphs: as long as the process, since graphs have their numbers alone


# Where torch.compile finds the functions that read: a module of their own, which it can import.
_readers = sys.modules["raddle.flex._readers"] = types.ModuleType("raddle.flex._readers")


def _number_of(fn: Callable[..., Any], is_mask: bool) -> int:
    """The number of a function's trace; torch.compile runs through this."""
    number = _number_of_described(describe(fn, False), is_mask, False)
    if number == 0:  # Python needs a number that the graph computes: for another one it compiles again
        number = _number_of_described(describe(fn, True), is_mask, True)
    return number


@torch._dynamo.assume_constant_result
def _number_of_described(description: Any, is_mask: bool, with_numbers: bool) -> int:
    """0 where the trace depends on a placeholder."""
    try:
        trace = _trace_of(stand_in(description), is_mask)
    except Exception:
        if with_numbers or "number" not in repr(description):
            raise
        return 0
    finally:
        forget()
    if not with_numbers and "number" in repr(description) and trace.reads.holds_any(PLACEHOLDERS):
        return 0
    return trace.number


def _read(fn: Callable[..., Any], number: int) -> Any:
    return getattr(_readers, f"read{number}")(fn)


def _trace_of(fn: Callable[..., Any], is_mask: bool) -> Trace:
    trace = (trace_mask if is_mask else trace_score)(fn).trace
    if trace.number is None:
        number = len(_traces) + 1
        _write_reader(trace, number, fn)
        trace.number, _traces[number] = number, trace
    return trace


def _write_reader(trace: Trace, number: int, fn: Callable[..., Any]) -> None:
    """Defines a function that reads what the trace captures: (tensors, ints, floats) in the order of its members."""
    if not trace.reads.repeatable:
        raise TypeError(
            f"{trace.name} captures what cannot be read again, which torch.compile would have to; expected numbers, "
            "tensors, functions, and lists, dicts or objects of them"
        )
    scope: dict[str, Any] = {}
    lines = [f"def read{number}(v0):"]
    values = trace.reads.again(fn)
    for n, each in enumerate(trace.reads.listed(), start=1):
        lines += [f"    {line}" for line in _lines(n, *_by_module(*each, values), f"_{number}", scope)]
    lists: dict[str, list[str]] = {"tensors": [], "ints": [], "floats": []}
    for payload, kind in zip(trace.payloads.values(), trace.params.values()):
        if payload.read is not None:
            lists[_list_of(trace, payload, kind)].append(f"v{trace.reads.number_behind(payload.read) + 1}")
    lists["floats"] = [f"as_tensor({name})" for name in lists["floats"]]
    returned = (f"[{', '.join(names)}]" for names in lists.values())
    lines.append(f"    return {', '.join(returned)}")
    vars(_readers).update(scope)
    exec("\n".join(lines), vars(_readers))  # noqa: S102: of our own text


def _by_module(find: Any, where: Any, check: Any, expected: Any, values: Any) -> tuple[Any, Any, Any, Any]:
    """A read of a global as one of its module: torch.compile does not know globals of a function that is made inside."""
    if find is reads.one:
        inner, at, read = where
        return find, (*_by_module(inner, at, None, None, values)[:2], read), check, expected
    if find is reads.global_ and values is not None:
        scope = values[where[0] + 1].__globals__
        module = sys.modules.get(scope.get("__name__"))
        if module is not None and vars(module) is scope:
            return _of_module, (module, where[1]), check, expected
    return find, where, check, expected


def _of_module(values: Any, where: tuple[types.ModuleType, str]) -> Any:
    return getattr(*where)


def _list_of(trace: Trace, payload: Any, kind: Any) -> str:
    """In which list a member's value crosses; a number that was an array of one element as that."""
    if kind not in (int, float) or trace.reads.is_of_array(payload.read):
        return "tensors"
    return "ints" if kind is int else "floats"


def _lines(
    n: int, find: Any, where: Any, check: Any, expected: Any, of: str, scope: dict[str, Any]
) -> list[str]:
    """Python that makes ``v<n>`` the value of a read. ``of`` tells the names of this function's constants apart."""
    v = lambda read: f"v{read + 1}"  # noqa: E731
    if find is reads.one:
        inner, at, read = where
        return [*_lines(n, inner, at, reads.always, None, of, scope), f"if v{n} is not {v(read)}: fail()"]
    if find is reads.root:
        line = f"v{n} = v0"
    elif find is reads.itself or find is reads.number:
        line = f"v{n} = {v(where)}"
    elif find is reads.cell:
        line = f"v{n} = cell({v(where[0])}, {where[1]})"
    elif find is reads.global_:
        line = f"v{n} = {v(where[0])}.__globals__[{where[1]!r}]"
    elif find is _of_module:
        scope[f"m{n}{of}"] = where[0]
        line = f"v{n} = m{n}{of}.{where[1]}"
    elif find is reads.default:
        line = f"v{n} = default({v(where[0])}, {where[1]!r})"
    elif find is reads.entry:
        scope[f"k{n}{of}"] = where[1]
        line = f"v{n} = {v(where[0])}[k{n}{of}]"
    elif find is reads.attribute:
        line = f"v{n} = {v(where[0])}.{where[1]}"
    elif find is reads.method_of_type:
        line = f"v{n} = type({v(where[0])}).{where[1]}"
    elif find is reads.computed:
        function, args, kwargs = where
        scope[f"f{n}{of}"] = function
        given = [_given(f"a{n}{of}_{i}", x, scope) for i, x in enumerate(args)]
        given += [f"{name}={_given(f'a{n}{of}_{name}', x, scope)}" for name, x in kwargs.items()]
        line = f"v{n} = f{n}{of}({', '.join(given)})"
    else:
        raise TypeError("a captured value is found in a way that torch.compile does not know")
    if check is reads.is_constant and isinstance(expected, (bool, int, float, str, type(None))):
        scope[f"c{n}{of}"] = expected
        return [line, f"if v{n} != c{n}{of}: fail()"]
    return [line]


def _given(name: str, x: Any, scope: dict[str, Any]) -> str:
    if type(x) is reads.Of:
        return f"v{x.read + 1}"
    if type(x) in (list, tuple):
        inner = "".join(_given(f"{name}_{i}", y, scope) + ", " for i, y in enumerate(x))
        return f"[{inner}]" if type(x) is list else f"({inner})"
    scope[name] = x
    return name


def _fail() -> None:
    raise RuntimeError("a captured value is not what it was when the function was traced")


vars(_readers).update(fail=_fail, cell=cell, default=default)


def create_block_mask(mask_mod: Any, shape: Any, block_size: Any) -> TracedMask:
    """`create_block_mask` while it is compiled."""
    made = TracedMask(mask_mod, shape, (block_size, block_size) if isinstance(block_size, int) else block_size)
    made.find_kinds = _kinds_of
    return made


def _kinds_of(mask: TracedMask) -> torch.Tensor:
    """Blocks as they are before another mask function is set: they stay."""
    number = _number_of(mask.mask_mod, True)
    return torch.ops.raddle.kinds_of_blocks(number, *_read(mask.mask_mod, number), *mask.shape, *mask.BLOCK_SIZE)


def flex_attention(
    query: Any, key: Any, value: Any, score_mod: Any, block_mask: Any, scale: Any, enable_gqa: bool, wants_lse: bool
) -> tuple[Any, Any]:
    """`flex_attention` while it is compiled: (out, lse)."""
    nothing: Any = ([], [], [])
    score, score_captures, mask, mask_captures, given = 0, nothing, 0, nothing, 0
    if score_mod is not None:
        score = _number_of(score_mod, False)
        score_captures = _read(score_mod, score)
    if block_mask is not None and not isinstance(block_mask, TracedMask) and not hasattr(block_mask, "number"):
        block_mask = of_torch(block_mask)
    if isinstance(block_mask, TracedMask):
        mask_mod = block_mask.whole()
        mask = _number_of(mask_mod, True)
        mask_captures = _read(mask_mod, mask)
    elif block_mask is not None:
        given = block_mask.number
    changing = None
    if isinstance(scale, torch.Tensor):
        scale, changing = None, scale
    elif scale is not None and not has_static_value(scale):
        scale, changing = None, _as_tensor(scale)
    return torch.ops.raddle.flex_attention(
        query, key, value, score, *score_captures, mask, *mask_captures, given, scale, changing, enable_gqa, wants_lse,
        torch.is_grad_enabled(),
    )  # fmt: skip


def _as_tensor(number: Any) -> torch.Tensor:
    """A number of the graph: an operator's float would be a constant of it; a factor of a tensor is none."""
    return torch.ones((), dtype=torch.float64, device="cpu") * number


vars(_readers).update(as_tensor=_as_tensor)


def traced(number: int, tensors: list[Any], ints: list[int], floats: list[Any]) -> Traced | None:
    """The trace of a compiled graph, with the values that the graph passes on."""
    if number == 0:
        return None
    trace, found = _traces[number], {}
    rest = {"tensors": iter(tensors), "ints": iter(ints), "floats": iter(floats)}
    for (member, payload), kind in zip(trace.payloads.items(), trace.params.values()):
        if payload.read is None:
            found[member] = payload.original
        else:
            value = next(rest[_list_of(trace, payload, kind)])
            found[member] = kind(value) if kind in (int, float) else value
    return Traced(trace, found)


def _tags() -> tuple[Any, ...]:
    # The output's strides follow the query's: what compiles a graph must hand over those of which it knows the output.
    strides = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
    # It plans where lengths or masks are new, which no CUDA graph can hold: torch captures what lies around it.
    by_itself = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()
    return (strides, torch.Tag.pt2_compliant_tag, *by_itself)


def define_kinds(evaluate: Callable[..., Any]) -> None:
    """Registers the operator of blocks' kinds; ``evaluate(traced, shape, size)`` computes them."""

    def run(mask, tensors, ints, floats, B, H, Q_LEN, KV_LEN, height, width):  # type: ignore
        return evaluate(traced(mask, tensors, ints, floats), (B, H, Q_LEN, KV_LEN), (height, width))

    def shape(mask, tensors, ints, floats, B, H, Q_LEN, KV_LEN, height, width):  # type: ignore
        return torch.empty((B, H, -(-Q_LEN // height), -(-KV_LEN // width)), dtype=torch.uint8, device="cpu")

    name, sizes = "raddle::kinds_of_blocks", ", ".join(f"SymInt {n}" for n in "B H Q_LEN KV_LEN height width".split())
    torch.library.define(name, f"(int mask, Tensor[] tensors, SymInt[] ints, Tensor[] floats, {sizes}) -> Tensor")
    torch.library.impl(name, "CompositeExplicitAutograd", run)
    torch.library.register_fake(name, shape)


def define(attend: Callable[..., Any], like: Callable[..., Any]) -> None:
    """Registers the operator. ``attend``: what it computes; ``like``: an output as eager calls lay it out."""

    def run(q, k, v, score, st, si, sf, mask, mt, mi, mf, given, scale, changing, gqa, lse, with_grad):  # type: ignore
        scale = scale if changing is None else float(changing)
        with torch.set_grad_enabled(with_grad):
            mods = traced(score, st, si, sf), traced(mask, mt, mi, mf)
            out, lse = attend(q, k, v, *mods, given, scale, gqa, lse)
        return out, q.new_empty(0, dtype=torch.float32) if lse is None else lse

    def shapes(q, k, v, *rest):  # type: ignore
        shape = q.shape[:3] if rest[-2] else (0,)
        return like(q, (*q.shape[:3], v.shape[3])), q.new_empty(shape, dtype=torch.float32)

    name = "raddle::flex_attention"
    captures = "int {0}, Tensor[] {0}_tensors, SymInt[] {0}_ints, Tensor[] {0}_floats"
    torch.library.define(
        name,
        f"(Tensor q, Tensor k, Tensor v, {captures.format('score')}, {captures.format('mask')}, SymInt block_mask, "
        "float? scale, Tensor? changing_scale, bool enable_gqa, bool wants_lse, bool with_grad) -> (Tensor, Tensor)",
        tags=_tags(),
    )
    torch.library.impl(name, "CompositeExplicitAutograd", run)
    torch.library.register_fake(name, shapes)
