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

from dataclasses import dataclass
from typing import Any, Callable

import numpy as np

from raddle import _library
from raddle._tensors import kind_of
from raddle.flex import codegen, errors, evaluate, foreign, ops, random
from raddle.flex._arrays import num_arguments
from raddle.flex.capture import Capture
from raddle.flex.errors import TraceError
from raddle.flex.expr import Value, lift
from raddle.flex.graph import Graph, Node
from raddle.flex.rebuild import Rebuilder
from raddle.variants import Tensor, Variant

__all__ = ["TraceError", "Traced", "as_variant", "trace_mask", "trace_score"]

_check_indices = _library.function("raddle.variant.check_indices")

_shipped = frozenset(
    "causal window softcap sinks sigmoid rope alibi all_of any_of packed_mask custom_mask yarn shipped contract stages "
    "parts traced composition".split()
)


@dataclass(frozen=True, eq=False)
class Traced:
    """A traced function.

    Attributes:
        name: of the variant and its struct.
        source: C++ text that defines ``struct <name>``.
        params: each member's type, as `raddle.Variant` takes it.
        values: each member's present value: int, float, or a float32, int32 or uint8 array.
        expr: the root of the expression.
        is_mask: a mask_mod; else a score_mod.
    """

    name: str
    source: str
    params: dict[str, Any]
    values: dict[str, Any]
    expr: Node
    is_mask: bool
    _payloads: dict[str, Any]

    def variant(self) -> Variant:
        """The function as a `raddle.Variant` with its members' values.

        It knows what the function's indices are computed from, so that a captured array that is too short for a batch
        is refused when the batch is planned.
        """
        indexes = any(node.op == "load" for node in evaluate.order(self.expr))
        nodes = codegen.described(self.expr, self._payloads) if indexes else []
        return Variant._of_expression(self.name, self.source, self.params, nodes)(**self.values)

    def check_indices(self, shape: tuple[int, int, int, int]) -> None:
        """Raises ValueError where a captured array is too short for sequences of (B, H, Q_LEN, KV_LEN)."""
        if any(node.op == "load" for node in evaluate.order(self.expr)):
            _check_indices(variant=self.variant(), **dict(zip(("B", "H", "Q_LEN", "KV_LEN"), shape)))

    def evaluate(
        self, b: Any, h: Any, q_idx: Any, kv_idx: Any, score: Any = None, values: dict[str, Any] | None = None
    ) -> np.ndarray:
        """The function elementwise in numpy: int32 and float32 as in the kernel, broadcast.

        ``values`` replaces members by name. Returns bools for a mask, float32 for a score.
        """
        leaves = {"b": b, "h": h, "q": q_idx, "kv": kv_idx, "score": 0.0 if score is None else score}
        given = {id(self._payloads[name]): x for name, x in (values or {}).items()}
        result = evaluate.evaluate(self.expr, leaves, values=given)
        shape = np.broadcast_shapes(*(np.shape(x) for x in leaves.values()))
        return np.broadcast_to(result, shape)


def trace_score(fn: Callable[..., Any]) -> Traced:
    """Traces ``fn(score, b, h, q_idx, kv_idx) -> score``. Raises TraceError with the line that cannot be traced."""
    return _trace(fn, ("score", "b", "h", "q", "kv"), is_mask=False)


def trace_mask(fn: Callable[..., Any]) -> Traced:
    """Traces ``fn(b, h, q_idx, kv_idx) -> keep``. Raises TraceError with the line that cannot be traced."""
    return _trace(fn, ("b", "h", "q", "kv"), is_mask=True)


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


def _trace(fn: Callable[..., Any], leaves: tuple[str, ...], is_mask: bool) -> Traced:
    if not callable(fn):
        raise TraceError(f"{fn!r:.60} is no function; expected a mask_mod or score_mod")
    try:
        root = _run(fn, leaves, is_mask, Graph())
    except Exception:  # noqa: BLE001: where Python needs numbers, they are constants of this variant
        try:
            root = _run(fn, leaves, is_mask, Graph(numbers_as_parameters=False))
        except Exception as error:  # noqa: BLE001
            raise errors.wrap(error, dir(ops)) from error.__cause__
    members = codegen.Members(root)
    name = variant_name(fn)
    return Traced(
        name=name,
        source=codegen.struct(name, root, members, is_mask),
        params={member: _param_type(payload) for member, payload in members.payloads.items()},
        values={m: p.array if hasattr(p, "array") else p.value for m, p in members.payloads.items()},
        expr=root,
        is_mask=is_mask,
        _payloads=members.payloads,
    )


def _run(fn: Callable[..., Any], leaves: tuple[str, ...], is_mask: bool, graph: Graph) -> Node:
    arguments = [Value(graph, graph.node(leaf, "float" if leaf == "score" else "int")) for leaf in leaves]
    rebuilt = Rebuilder(graph).callable(fn)
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
    if not hasattr(payload, "array"):
        return int if isinstance(payload.value, int) else float
    return Tensor[(payload.array.dtype.name, *(None,) * payload.array.ndim)]
