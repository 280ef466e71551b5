"""From an expression to the struct of the variant contract, as C++ text.

Every node that is used twice becomes a local; the others are written in place (up to a depth that can be
read), in the order and with the operators that the Python code had, so that the bits are those of a
hand-written variant.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import numpy as np

from raddle.flex import bounds, spans
from raddle.flex.evaluate import order
from raddle.flex.graph import Node, Parameter

_MAX_DEPTH = 10  # of what is written in place

_interval_types = {"bool": "Truth", "int": "IntInterval", "long": "IntInterval", "float": "FloatInterval"}
_row = {"b": "r.request", "h": "r.q_head", "q": "r.q_pos", "kv": "c.kv_pos", "score": "s"}
_tile = {"b": "t.request", "h": "t.q_head", "q": "t.q_pos", "kv": "t.kv_pos"}
_infix = {"add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^"}
_compare = {"lt": "<", "le": "<=", "eq": "=="}
_interval_names = {"lt": "less", "le": "less_equal", "eq": "equal"}
_math = {"exp", "exp2", "tanh_approx", "sigmoid", "sin", "cos", "floor", "sqrt"}

_keywords = set(
    "alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t "
    "class compl concept const consteval constexpr constinit const_cast continue co_await co_return co_yield "
    "decltype default delete do double dynamic_cast else enum explicit export extern false float for friend "
    "goto if inline int long mutable namespace new noexcept not not_eq nullptr operator or or_eq private "
    "protected public register reinterpret_cast requires return short signed sizeof static static_assert "
    "static_cast struct switch template this thread_local throw true try typedef typeid typename union "
    "unsigned using virtual void volatile wchar_t while xor xor_eq".split()
)
_taken = _keywords | set(
    "r c s t s_scale i32 i64 u8 u32 Row Key Tile Tensor SpanTensor Coverage KvSpan Range Truth IntInterval FloatInterval math "
    "near_logits near_limit distance_slope traced interval raddle logits mask coverage kv_span row_span knows_spans query key keys value sink output scan min max hull both either "
    "native intersect everything compose is_empty int_min int_max bits_to_float to_float from_float round_up ceil_div cpu "
    "Scan Mix Member Variant Causal SlidingWindow SoftCap Sinks Sigmoid Rope Alibi AllOf AnyOf Leaf Composition".split()
)


def identifier(name: str, fallback: str) -> str:
    """``name`` as a C++ identifier that is no keyword."""
    name = re.sub(r"_+", "_", re.sub(r"\W", "_", name, flags=re.ASCII)).strip("_")
    if not name or name[0].isdigit():
        name = f"{fallback}_{name}".rstrip("_")
    if name.startswith("RADDLE_"):  # the engine's macros, which would replace it
        name = f"{fallback}_{name}"
    return name + "_mod" if name in _taken else name


class Members:
    """Names for what an expression captured, in the order of use."""

    def __init__(self, root: Node):
        self.names: dict[int, str] = {}
        self.payloads: dict[str, Any] = {}
        for node in order(root):
            if node.op == "load" or node.op == "param" and not node.payload.baked:
                self._add(node.payload)

    def _add(self, payload: Any) -> None:
        if id(payload) in self.names:
            return
        base = identifier(payload.hint, "captured")
        if re.fullmatch(r"[ti]\d+", base):  # the names of locals
            base += "_mod"
        name, n = base, 2
        while name in self.payloads:
            name, n = f"{base}_{n}", n + 1
        self.names[id(payload)], self.payloads[name] = name, payload


def number(x: bool | int | float) -> str:
    """A literal with the value's own bits in float32."""
    if isinstance(x, bool):
        return "true" if x else "false"
    if isinstance(x, int):
        return "int_min" if x == -(2**31) else str(x) if abs(x) < 2**31 else f"i64{{{x}}}"
    with np.errstate(over="ignore"):
        x = float(np.float32(x))
    if math.isnan(x):
        return "bits_to_float(0x7fc00000u)"
    if math.isinf(x):
        return "math::infinity" if x > 0 else "-math::infinity"
    text = repr(np.float32(x).item()) if x == int(x) and abs(x) < 1e6 else np.format_float_scientific(np.float32(x))
    return f"{text}f"


def _type(node: Node) -> str:
    if node.dtype in ("bool", "float"):
        return node.dtype
    return "i64" if node.is_wide else "i32"


class _Scalar:
    """One function body over scalars: locals in `lines`, what it computes of the roots by `text`, the first one as the
    result. `near`: of `near_logits`, whose score is not scaled yet."""

    def __init__(self, members: Members, *roots: Node, near: bool = False):
        self._members, self._names = members, {}
        self._near = near
        self.lines: list[str] = []
        self.reads: set[str] = set()
        uses: dict[int, int] = {}
        depth: dict[int, int] = {}
        nodes = list({id(node): node for root in roots for node in order(root)}.values())
        for root in roots if len(roots) > 1 else ():
            uses[id(root)] = uses.get(id(root), 0) + 1
        for node in nodes:
            for a in node.args:
                uses[id(a)] = uses.get(id(a), 0) + 1
        for node in nodes:
            depth[id(node)] = 1 + max((depth[id(a)] for a in node.args), default=0)
            if node.args and (uses.get(id(node), 0) > 1 or depth[id(node)] > _MAX_DEPTH):
                depth[id(node)] = 0
                text = self._write(node)
                self._names[id(node)] = f"t{len(self.lines)}"
                self.lines.append(f"const {_type(node)} {self._names[id(node)]} = {text};")
        self.result = self.text(roots[0]) if roots else ""

    def text(self, node: Node) -> str:
        return self._names.get(id(node)) or self._write(node)

    def operand(self, node: Node) -> str:
        """With parentheses where it is more than a name or a call."""
        text = self.text(node)
        return text if re.fullmatch(r"[\w.:]+", text) or _is_call(text) else f"({text})"

    def _write(self, node: Node) -> str:
        if node.args and (node.is_wide or any(a.is_wide for a in node.args)):
            return self._write_wide(node)
        op, args = node.op, node.args
        if op in _row:
            self.reads.add(_row[op][0])
            return "s_scale * s" if self._near and op == "score" else _row[op]
        if op == "const":
            return number(node.payload)
        if op == "param":
            return self._members.names.get(id(node.payload)) or number(
                int(node.payload.value) if node.dtype == "int" else float(node.payload.value)
            )
        if op == "load":
            return self._load(node)
        if op == "cast":
            if node.dtype in ("int", "long") and args[0].dtype == "float":
                return f"traced::to_int({self.text(args[0])})"
            if node.dtype in ("int", "long") and args[0].dtype != "bool":
                return self.text(args[0])
            return f"static_cast<{_type(node)}>({self.text(args[0])})"
        if op == "where":
            a, b, c = map(self.operand, args)
            return f"{a} ? {b} : {c}"
        if self._near and (cap := _cap_of(node)):
            self.reads.add("s")
            return f"native::near_soft_cap(s, s_scale, {self.text(cap)})"
        if op == "add" and node.dtype == "float":
            for product, other in (args, reversed(args)):
                if product.op == "mul" and id(product) not in self._names and not (self._near and _cap_of(product)):
                    operands = [*map(self.text, product.args), self.text(other)]
                    return f"native::product_sum({', '.join(operands)})"
        if op in _compare or op in _infix and (op in ("and", "or", "xor") or node.dtype == "float"):
            symbol = _compare.get(op) or _infix[op]
            return f"{self.operand(args[0])} {symbol} {self.operand(args[1])}"
        if op == "not":
            inner = args[0]
            if inner.op == "eq" and id(inner) not in self._names:
                return f"{self.operand(inner.args[0])} != {self.operand(inner.args[1])}"
            return ("!" if node.dtype == "bool" else "~") + self.operand(args[0])
        if op == "neg" and node.dtype == "float":
            return "-" + self.operand(args[0])
        if op in ("floor_div", "floor_mod") and node.dtype != "float" and args[1].op == "const" and args[1].payload > 0:
            return f"traced::{op}<{args[1].payload}>({self.text(args[0])})"
        if op == "tanh":
            ratio = args[0]
            if ratio.op == "div" and id(ratio) not in self._names:
                return f"native::tanh_ratio({', '.join(map(self.text, ratio.args))})"
            return f"native::tanh({self.text(ratio)})"
        space = "math" if op in _math or op == "abs" and node.dtype == "float" else "traced"
        return f"{space}::{op}({', '.join(map(self.text, args))})"

    def _write_wide(self, node: Node) -> str:
        """An operation with integers of 64 bits among its operands, or as its result."""
        op, args = node.op, node.args
        if op in _compare:
            return f"{self.operand(args[0])} {_compare[op]} {self.operand(args[1])}"
        if op == "cast" and args[0].dtype == "float":
            text = f"traced::to_long({self.text(args[0])})"
        elif op == "cast":
            return f"static_cast<{_type(node)}>({self.text(args[0])})"
        elif op == "where":
            condition, *both = map(self.operand, args)
            text = " : ".join(x if a.is_wide else f"i64{{{x}}}" for a, x in zip(args[1:], both))
            text = f"{condition} ? {text}"
        elif op in ("and", "or", "xor"):
            text = f"{self.operand(args[0])} {_infix[op]} {self.operand(args[1])}"
        elif op == "not":
            text = f"~{self.operand(args[0])}"
        else:
            wide = (self.text(a) if a.is_wide else f"i64{{{self.text(a)}}}" for a in args)
            text = f"traced::{op}({', '.join(wide)})"
        return text if node.is_wide else f"static_cast<i32>({text})"

    def indices(self, node: Node, count: int) -> list[str]:
        """The first indices of an element."""
        name = self._members.names[id(node.payload)]
        return [
            self.text(a) if is_nonnegative(a) else f"traced::wrap({self.text(a)}, {name}.extent[{d}])"
            for d, a in enumerate(node.args[:count])
        ]

    def _load(self, node: Node) -> str:
        text = f"traced::at({', '.join([self._members.names[id(node.payload)], *self.indices(node, len(node.args))])})"
        return f"{text} != 0" if node.dtype == "bool" else text


def _is_call(text: str) -> bool:
    """``name(...)`` whose first bracket closes at the end."""
    opened = re.match(r"[\w:<>]+\(", text)
    if not opened:
        return False
    depth = 0
    for i, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0 and letter == ")":
            return i == len(text) - 1
    return False


def is_nonnegative(node: Node) -> bool:
    """Whether an index cannot be negative, so that it need not be wrapped. Positions can: rows that stand
    before the first key of their request are counted from below 0."""
    op, args = node.op, node.args
    if node.bounds is not None and node.bounds[0] >= 0:
        return True
    if op == "const":
        return node.payload >= 0
    if op == "cast":
        return args[0].dtype == "bool"
    if op == "floor_mod":
        return args[1].op == "const" and args[1].payload > 0
    if op == "floor_div":
        return is_nonnegative(args[0]) and args[1].op == "const" and args[1].payload >= 0
    if op == "and":
        return any(map(is_nonnegative, args))
    if op in ("or", "xor", "minimum"):
        return all(map(is_nonnegative, args))
    if op == "maximum":
        return any(map(is_nonnegative, args))
    if op == "shift_right":
        return is_nonnegative(args[0])
    return op == "where" and all(map(is_nonnegative, args[1:]))


class _Body(NamedTuple):
    """Of a function: its locals, its result, and which of its parameters they read."""

    lines: list[str]
    reads: set[str]
    result: str


class _Intervals:
    """The same expression over the hulls of a tile."""

    def __init__(self, root: Node, members: Members):
        self._members = members
        self.names: dict[int, str] = {}
        self._steps = []
        for n, node in enumerate(order(root)):
            self._steps.append((f"i{n}", _interval_types[node.dtype], self._write(node)))
            self.names[id(node)] = f"i{n}"

    def body(self, result: str) -> _Body:
        """A function body of what the result needs."""
        needed = set(re.findall(r"\w+", result))
        lines: list[str] = []
        for name, kind, text in reversed(self._steps):
            if name in needed:
                lines.insert(0, f"const {kind} {name} = {text};")
                needed.update(re.findall(r"\w+", text))
        return _Body(lines, needed & {"t"}, result)

    def _write(self, node: Node) -> str:
        op = node.op
        args = [self.names[id(a)] for a in node.args]
        if op in _tile:
            return f"interval::of({_tile[op]})"
        if op == "const" and node.is_wide:
            return f"IntInterval{{{node.payload}, {node.payload}}}"
        if op == "const":
            return f"interval::of({number(node.payload)})"
        if op == "param":
            name = self._members.names.get(id(node.payload))
            return f"interval::of({name or number(node.payload.value)})"
        if op == "load":
            text = f"interval::at({self._members.names[id(node.payload)]}, {', '.join(args)})"
            zero = "interval::of(0)"
            return f"interval::logical_not(interval::equal({text}, {zero}))" if node.dtype == "bool" else text
        if any(a.is_wide for a in node.args) or node.is_wide:
            return self._write_wide(node, args)
        if op == "cast":
            if {node.dtype, node.args[0].dtype} <= {"int", "long"}:
                return args[0]
            return f"interval::to_{'int' if node.dtype == 'long' else node.dtype}({args[0]})"
        if len(args) == 2 and args[0] == args[1]:
            # One thing twice is no two independent things.
            if op == "mul":
                return f"interval::square({args[0]})"
            if op == "sub" and node.dtype == "int":
                return "interval::of(0)"
            if op in ("minimum", "maximum", "and", "or"):
                return args[0]
        if op in ("and", "or", "xor", "not"):
            return f"interval::{'logical' if node.dtype == 'bool' else 'bit'}_{op}({', '.join(args)})"
        return f"interval::{_interval_names.get(op, op)}({', '.join(args)})"


    def _write_wide(self, node: Node, args: list[str]) -> str:
        """Where 64 bits cannot overflow, their bounds; what is not known is what the expression can be at all."""
        op = node.op
        if op in _compare:
            return f"interval::{_interval_names[op]}({', '.join(args)})"
        if op == "cast" and node.dtype == "float":
            return f"interval::to_float({args[0]})"
        if op == "where" or op in ("minimum", "maximum"):
            return f"interval::{op}({', '.join(args)})"
        least, most = node.bounds
        if (least, most) != bounds.LONG:
            if op == "cast" and node.args[0].dtype == "long" and node.args[0].bounds == node.bounds:
                return args[0]
            if op in ("add", "sub", "mul", "neg"):
                return f"interval::wide_{op}({', '.join(args)})"
            if op == "floor_mod" and node.args[1].op == "const" and node.args[1].payload > 0:
                return f"interval::floor_mod({', '.join(args)})"
        return f"IntInterval{{{_bound(least)}, {_bound(most)}}}"


def _bound(x: int) -> str:
    return "-0x7fffffffffffffff - 1" if x == bounds.LONG[0] else str(x)


def described(root: Node, payloads: dict[str, Any]) -> list[dict[str, Any]]:
    """The expression as the library takes it: operations with their operands' places, the result last."""
    names = {id(payload): name for name, payload in payloads.items()}
    nodes = order(root)
    place = {id(node): n for n, node in enumerate(nodes)}
    found = []
    for node in nodes:
        dtype = "int" if node.dtype == "long" else node.dtype
        # Nothing is said of integers of 64 bits. A cast between widths that hold the value alike is none.
        is_wide = node.is_wide or any(a.is_wide for a in node.args)
        same = node.op == "cast" and dtype == "int" and node.args[0].dtype in ("int", "long")
        op = "unknown" if is_wide else "same" if same else node.op
        fields: dict[str, Any] = {"op": op, "dtype": dtype, "args": [place[id(a)] for a in node.args]}
        if id(node.payload) in names:
            fields["member"] = names[id(node.payload)]
        elif node.op in ("const", "param") and not is_wide:  # a parameter without a member is fixed in the code
            fields["op"] = "const"
            fields["value"] = float(node.payload.value if node.op == "param" else node.payload)
        found.append(fields)
    return found


def _cap_of(node: Node) -> Node | None:
    """c of ``c * tanh(score / c)``, a constant or a parameter."""
    if node.op != "mul":
        return None
    for cap, tanh in (node.args, reversed(node.args)):
        if cap.op in ("const", "param") and tanh.op == "tanh" and tanh.args[0].op == "div":
            score, below = tanh.args[0].args
            same = below is cap or below.op == cap.op == "const" and below.payload == cap.payload
            if score.op == "score" and same:
                return cap
    return None


def _soft_cap(root: Node) -> Node | None:
    """The cap of a score whose only tanh is that of a soft cap: `near_logits` may compute it."""
    nodes = order(root)
    caps = [cap for node in nodes if (cap := _cap_of(node))]
    return caps[0] if len(caps) == 1 == sum(node.op == "tanh" for node in nodes) else None


def _distance_slope(root: Node) -> tuple[Node, bool] | None:
    """a of ``score + a * (kv_idx - q_idx)``, or, with True, of ``score - a * (kv_idx - q_idx)``, where it depends
    neither on the key nor on the score."""
    if root.op not in ("add", "sub"):
        return None
    for score, product in (root.args, *([root.args[::-1]] if root.op == "add" else ())):
        if score.op != "score" or product.op != "mul":
            continue
        for slope, distance in (product.args, product.args[::-1]):
            while distance.op == "cast" and distance.dtype == "float":
                distance = distance.args[0]
            if distance.op != "sub" or distance.is_wide or {x.op for x in order(slope)} & {"kv", "score"}:
                continue
            ops = tuple(x.op for x in distance.args)
            if ops in (("kv", "q"), ("q", "kv")):
                falls = (ops == ("q", "kv")) != (root.op == "sub")
                return (slope.args[0], not falls) if slope.op == "neg" else (slope, falls)
    return None


def _spans(kept: spans.Spans, intervals: _Intervals, members: Members) -> list[str]:
    """knows_spans, kv_span and row_span of a mask that is bounds on kv_idx."""
    out: list[str] = []
    arrays = [members.names[id(each.load.payload)] if isinstance(each, spans.Search) else "" for each in kept.bounds]
    if ordered := " && ".join(f"{array}.order != 0" for array in dict.fromkeys(arrays) if array):
        out += ["", *_function("bool knows_spans()", _Body([], set(), ordered))]

    def of_interval(node: Node) -> str:
        return intervals.names[id(node)]

    of_tile = [
        each.of_tile(of_interval, array) if isinstance(each, spans.Search) else each.of_tile(of_interval)
        for each, array in zip(kept.bounds, arrays)
    ]
    tile = intervals.body(f"interval::span({', '.join(of_tile)})")
    if ordered:
        tile.lines.insert(0, "if (!knows_spans()) return KvSpan{everything, everything};")
    out += ["", *_function(f"KvSpan kv_span({_parameter('Tile', 't', tile.reads)})", tile)]

    conditions = [node for node, _ in kept.of_rows]
    scalar = _Scalar(members, *(node for each in kept.bounds for node in each.nodes()), *conditions)
    of_row = [each.of_row(scalar.text) for each in kept.bounds if isinstance(each, spans.Bound)]
    # What these leave is searched.
    left = f"RowKeys{{intersect(keys, interval::span({', '.join(of_row)}).pos), keys.guess}}" if of_row else "keys"
    of_row += [
        each.of_row(scalar.text, array, scalar.indices(each.load, len(each.load.args) - 1), left)
        for each, array in zip(kept.bounds, arrays)
        if isinstance(each, spans.Search)
    ]
    lines = list(scalar.lines)
    for node, holds in kept.of_rows:
        lines.append(f"if ({'!' if holds else ''}({scalar.text(node)})) return KvSpan{{everything, {{0, -1}}}};")
    row = _Body(lines, scalar.reads, f"interval::span({', '.join(of_row)})")
    keys = "const RowKeys& keys" if any(arrays) else "Range"
    return [*out, "", *_function(f"KvSpan row_span({_parameter('Row', 'r', row.reads)}, {keys})", row)]


def _function(head: str, body: Any) -> list[str]:
    lines = [f"    {line}" for line in body.lines]
    return [f"  RADDLE_FN {head} const {{", *lines, f"    return {body.result};", "  }"]


def _parameter(kind: str, name: str, reads: set[str]) -> str:
    return f"const {kind}& {name}" if name in reads else f"const {kind}&"


def member_type(payload: Any, is_mask: bool) -> str:
    """The C++ type of a member."""
    if isinstance(payload, Parameter):
        return "i32" if isinstance(payload.value, int) else "float"
    element = {"float32": "float", "int32": "i32", "uint8": "u8"}[payload.element]
    return f"{'SpanTensor' if is_mask else 'Tensor'}<const {element}, {payload.ndim}>"


def struct(name: str, root: Node, members: Members, is_mask: bool) -> str:
    """The variant's C++ text."""
    out = [f"struct {name} {{"]
    out += [f"  {member_type(payload, is_mask)} {member};" for member, payload in members.payloads.items()]
    out += [""] if members.payloads else []
    body = _Scalar(members, root)
    row_and_key = f"{_parameter('Row', 'r', body.reads)}, {_parameter('Key', 'c', body.reads)}"
    if is_mask:
        out += _function(f"bool mask({row_and_key})", body)
        intervals = _Intervals(root, members)
        covered = intervals.body(f"interval::coverage({intervals.names[id(root)]})")
        out += ["", *_function(f"Coverage coverage({_parameter('Tile', 't', covered.reads)})", covered)]
        if kept := spans.of(root):
            out += _spans(kept, intervals, members)
    else:
        score = "float s" if "s" in body.reads else "float"
        out += _function(f"float logits({score}, {row_and_key})", body)
        if cap := _soft_cap(root):
            near = _Scalar(members, root, near=True)
            out += ["", *_function(f"float near_logits({score}, float s_scale, {row_and_key})", near)]
            out += ["  RADDLE_FN float near_limit(float s_scale) const {"]
            out += [f"    return native::near_soft_cap_limit(s_scale, {near.text(cap)});", "  }"]
        if found := _distance_slope(root):
            slope, falls = found
            of_row = _Scalar(members, slope)
            of_row.result = f"-{of_row.operand(slope)}" if falls else of_row.text(slope)
            out += ["", *_function(f"float distance_slope({_parameter('Row', 'r', of_row.reads)})", of_row)]
    return "\n".join([*out, "};", ""])
