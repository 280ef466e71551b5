"""Python functions written for PyTorch's FlexAttention, as variants of our contract.

    def alibi(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    AttentionSpec(32, 8, 128, variant=[as_variant(alibi), Causal()])

The function runs once, over symbolic values, and what it did becomes C++ (FlexAttention: Dong et al. 2024,
section 3). ``b`` is the request, ``h`` the query head, ``q_idx`` and ``kv_idx`` positions in the text, ``score``
the scaled logit. ints are int32 and wrap, floats are float32, integer division has Python's floor meaning
(x // 0 and x % 0 are 0), and negative indices count from the end. An array that is too short for what a batch indexes
is refused when the batch is planned; where that cannot be known, indices out of range are clamped. Numbers
that the function captures become members of the variant, arrays captured tensors: copies of their present
contents. torch is not needed; its functions are understood if the function uses them.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, Callable

import numpy as np

from raddle import _library
from raddle._tensors import kind_of
from raddle.flex import codegen, errors, evaluate, foreign, ops, random, reads, vector_functions  # noqa: F401: is met
from raddle.flex._arrays import num_arguments
from raddle.flex.capture import Capture, lent_array, member_array
from raddle.flex.errors import TraceError
from raddle.flex.expr import Value, lift
from raddle.flex.graph import Graph, Node, Parameter
from raddle.flex.reads import At, Reads
from raddle.flex.rebuild import Rebuilder
from raddle.variants import Tensor, Variant

__all__ = ["TraceError", "Traced", "as_variant", "trace_mask", "trace_score"]

_check_indices = _library.function("raddle.variant.check_indices")

_shipped = frozenset(
    "causal window softcap sinks sigmoid rope alibi all_of any_of packed_mask custom_mask yarn shipped contract stages "
    "parts traced composition".split()
)


class Trace:
    """What a function became: the same for every function of its code that captures values of the same kinds.

    Attributes:
        name: of the variant and its struct.
        source: C++ text that defines ``struct <name>``.
        params: each member's type, as `raddle.Variant` takes it.
        expr: the root of the expression.
        is_mask: a mask_mod; else a score_mod.
        indexes: whether it indexes captured arrays.
    """

    def __init__(self, name: str, root: Node, is_mask: bool, reads: Reads) -> None:
        members = codegen.Members(root)
        self.payloads: dict[str, Any] = members.payloads
        self.name, self.expr, self.is_mask, self.reads = name, root, is_mask, reads
        self.source = codegen.struct(name, root, members, is_mask)
        self.params = {member: _param_type(payload) for member, payload in self.payloads.items()}
        self.indexes = any(node.op == "load" for node in evaluate.order(root))
        self._variant: Variant | None = None
        self._renamed: dict[str, Trace] = {}
        self.number: int | None = None  # of a trace that a compiled graph has

    def of(self, fn: Any) -> Traced | None:
        """The function, if this is what it becomes, with what it captures now."""
        values = self.reads.again(fn)
        if values is None:
            return None
        found = {}
        for member, payload in self.payloads.items():
            found[member] = payload.original if payload.read is None else values[payload.read + 1]
        return Traced(self, found)

    def renamed(self, name: str) -> Trace:
        """The same under another name."""
        if name not in self._renamed:
            self._renamed[name] = Trace(name, self.expr, self.is_mask, self.reads)
        return self._renamed[name]

    @property
    def variant(self) -> Variant:
        """Without values. It knows what the function's indices are computed from, so that a captured array that is too
        short for a batch is refused when the batch is planned."""
        if self._variant is None:
            nodes = codegen.described(self.expr, self.payloads) if self.indexes else []
            self._variant = Variant._of_expression(self.name, self.source, self.params, nodes)
        return self._variant


class Traced:
    """A traced function with the values that it captures."""

    __slots__ = ("trace", "captured", "_values")

    def __init__(self, trace: Trace, captured: dict[str, Any]) -> None:
        self.trace, self.captured = trace, captured
        self._values: dict[str, Any] | None = None

    name = property(lambda self: self.trace.name)
    source = property(lambda self: self.trace.source)
    params = property(lambda self: self.trace.params)
    expr = property(lambda self: self.trace.expr)
    is_mask = property(lambda self: self.trace.is_mask)

    @property
    def values(self) -> dict[str, Any]:
        """Each member's value: int, float, or a float32, int32 or uint8 array, a copy."""
        if self._values is None:
            held = {int: int, float: float}
            self._values = {
                name: held[kind](x) if kind in held else member_array(x, name)
                for (name, x), kind in zip(self.captured.items(), self.params.values())
            }
        return self._values

    def lent(self) -> dict[str, Any]:
        """Each member's value as the library takes it: arrays where they lie, if it can read them there."""
        captured, types = self.captured, self.trace.params
        return {name: x if types[name] in (int, float) else lent_array(x, name) for name, x in captured.items()}

    def renamed(self, name: str) -> Traced:
        """The same under another name."""
        return Traced(self.trace.renamed(name), self.captured)

    def variant(self) -> Variant:
        """The function as a `raddle.Variant` with its members' values, which are copied."""
        return self.trace.variant(**self.lent())

    def check_indices(self, shape: tuple[int, int, int, int]) -> None:
        """Raises ValueError where a captured array is too short for sequences of (B, H, Q_LEN, KV_LEN)."""
        if self.trace.indexes:
            _check_indices(variant=self.variant(), **dict(zip(("B", "H", "Q_LEN", "KV_LEN"), shape)))

    def evaluate(
        self, b: Any, h: Any, q_idx: Any, kv_idx: Any, score: Any = None, values: dict[str, Any] | None = None
    ) -> np.ndarray:
        """The function elementwise in numpy: int32 and float32 as in the kernel, broadcast.

        ``values`` replaces members by name. Returns bools for a mask, float32 for a score.
        """
        leaves = {"b": b, "h": h, "q": q_idx, "kv": kv_idx, "score": 0.0 if score is None else score}
        given = {id(self.trace.payloads[name]): x for name, x in {**self.values, **(values or {})}.items()}
        result = evaluate.evaluate(self.expr, leaves, values=given)
        shape = np.broadcast_shapes(*(np.shape(x) for x in leaves.values()))
        return np.broadcast_to(result, shape)


def trace_score(fn: Callable[..., Any]) -> Traced:
    """Traces ``fn(score, b, h, q_idx, kv_idx) -> score``. Raises TraceError with the line that cannot be traced."""
    return _trace(fn, ("score", "b", "h", "q", "kv"), is_mask=False)


def trace_mask(fn: Callable[..., Any]) -> Traced:
    """Traces ``fn(b, h, q_idx, kv_idx) -> keep``. Raises TraceError with the line that cannot be traced."""
    return _trace(fn, ("b", "h", "q", "kv"), is_mask=True)


def traced_before(fn: Callable[..., Any], is_mask: bool) -> Traced | None:
    """The function as it was traced, with what it captures now; None where it has to be traced."""
    return _traces.find(fn, is_mask)


def as_variant(fn: Callable[..., Any]) -> Variant:
    """A `raddle.Variant` of a score_mod (5 arguments) or a mask_mod (4 arguments)."""
    return (trace_score(fn) if takes_score(fn) else trace_mask(fn)).variant()


def takes_score(fn: Callable[..., Any]) -> bool:
    """True for a score_mod, False for a mask_mod, by the number of positional arguments without a default."""
    count = num_arguments(fn)
    if count is None:
        raise TraceError(f"{fn!r:.60} does not tell its parameters; expected a function written in Python")
    if count not in (4, 5):
        raise errors.refuse_in(
            getattr(fn, "__code__", None),
            f"the function takes {count} positional arguments",
            "expected 5 (score, b, h, q_idx, kv_idx) or 4 (b, h, q_idx, kv_idx)",
        )
    return count == 5


class _Traces:
    """What functions became, by their code: a function is traced again only where it captures other kinds of values."""

    MOST_CODES, MOST_OF_CODE = 512, 8

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_code: dict[Any, tuple[Any, list[Trace]]] = {}

    def find(self, fn: Any, is_mask: bool) -> Traced | None:
        code, name = _code_of(fn)
        _, traces = self._by_code.get((id(code), name, is_mask), (None, ()))
        for trace in traces:
            found = trace.of(fn)
            if found is not None:
                return found
        return None

    def keep(self, fn: Any, trace: Trace) -> None:
        code, name = _code_of(fn)
        with self._lock:
            _, traces = self._by_code.pop((id(code), name, trace.is_mask), (None, []))
            while len(self._by_code) >= self.MOST_CODES:
                del self._by_code[next(iter(self._by_code))]  # the oldest
            self._by_code[id(code), name, trace.is_mask] = code, [trace, *traces][: self.MOST_OF_CODE]


_traces = _Traces()


def _code_of(fn: Any) -> tuple[Any, Any]:
    """The code of a function, a method, a partial, or the type of another object that is called; and its name."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__code__", None) or type(fn), getattr(fn, "__name__", None)


def _trace(fn: Callable[..., Any], leaves: tuple[str, ...], is_mask: bool) -> Traced:
    found = _traces.find(fn, is_mask)
    if found is not None:
        return found
    if not callable(fn):
        raise TraceError(f"{fn!r:.60} is no function; expected a mask_mod or score_mod")
    graph = Graph(Reads())
    try:
        root = _run(fn, leaves, is_mask, graph)
    except Exception:  # noqa: BLE001: where Python needs numbers, they are constants of this variant
        graph = Graph(Reads(), numbers_as_parameters=False)
        try:
            root = _run(fn, leaves, is_mask, graph)
        except Exception as error:  # noqa: BLE001
            raise errors.wrap(error, dir(ops)) from error.__cause__
    for parameter in graph.parameters:
        if parameter.baked:
            graph.reads.hold(parameter.read, parameter.value)
    trace = Trace(variant_name(fn), root, is_mask, graph.reads)
    originals = {name: getattr(x, "original", None) for name, x in trace.payloads.items()}
    captured = {name: x.value if isinstance(x, Parameter) else originals[name] for name, x in trace.payloads.items()}
    if graph.reads.repeatable:
        for array in graph.captures.values():
            array.forget()
        graph.captures.clear()
        _traces.keep(fn, trace)
    return Traced(trace, captured)


def _run(fn: Callable[..., Any], leaves: tuple[str, ...], is_mask: bool, graph: Graph) -> Node:
    arguments = [Value(graph, graph.node(leaf, "float" if leaf == "score" else "int")) for leaf in leaves]
    rebuilt = Rebuilder(graph).callable(fn, At(reads.root, None))
    with foreign.tensors_indexed(graph), random.refused():
        result = rebuilt(*arguments)
    code = getattr(fn, "__code__", None)
    if result is None:
        expected = "bool" if is_mask else "score"
        raise errors.refuse_in(code, "the function returns None", f"expected a {expected}: is `return` missing?")
    try:
        node = lift(graph, result)
    except TraceError:
        found = "an array" if isinstance(result, Capture) else kind_of(result)
        raise errors.refuse_in(
            code, f"the function returns {found}", f"expected one {'bool' if is_mask else 'score'}"
        ) from None
    if is_mask and node.dtype != "bool":
        raise errors.refuse_in(
            code, f"the mask is {'a float' if node.dtype == 'float' else 'an int'}",
            "expected a bool; compare it, for example with > 0 or != 0",
        )
    return graph.cast(node, "bool" if is_mask else "float")


def variant_name(fn: Callable[..., Any]) -> str:
    """The function's name as a C++ identifier that no shipped variant has."""
    inner = fn
    while hasattr(inner, "func"):
        inner = inner.func
    name = codegen.identifier(getattr(inner, "__name__", type(inner).__name__), "mod")
    return name + "_mod" if name in _shipped else name


def _param_type(payload: Any) -> Any:
    if isinstance(payload, Parameter):
        return int if isinstance(payload.value, int) else float
    return Tensor[(payload.element, *(None,) * payload.ndim)]
