"""Variants of the user's own, in C++: every part of the contract, composed, fused, and bound to values."""

from __future__ import annotations

import numpy as np
import pytest
import raddle
from checks import within
from draws import draw_lengths
from engine import twin
from layout_draws import LAYOUTS
from reference import Exact, budgets
from reference.exact import softmax
from small import attention, paged, refuses
from test_flex_bits import compute, draw_problem, same_bits

HQ, HKV, DIM = 4, 2, 16
U32 = budgets.U32
LOGITS = "RADDLE_FN float logits(float s, const Row& r, const Key& c) const"
MASK = "RADDLE_FN bool mask(const Row& r, const Key& c) const"
REST = "RADDLE_FN KvSpan kv_span(const Tile& t) const", "RADDLE_FN Coverage coverage(const Tile& t) const"


def vec(part, place="Row"):
    return f"template <class Vec> RADDLE_FN void {part}(Vec& x, const {place}& at) const"


def variant(name, body, **params):
    return raddle.Variant(name, f"struct {name} {{\n{body}\n}};", params)


F, I = float, int  # noqa: E741
T = raddle.Tensor
NORM = "const float f = 1.0f / math::sqrt(x.sum([](float e) { return e * e; }) / float(x.size()) + eps);"
V = {
    "norm": variant(
        "QkNorm",
        f"float eps; Tensor<const float, 1> w;\n"
        f"{vec('query')} {{ {NORM} x.map([&](float e, i32 i) {{ return e * f * w.data[i]; }}); }}\n"
        f"{vec('key', 'Key')} {{ {NORM} x.map([&](float e, i32) {{ return e * f; }}); }}",
        eps=F,
        w=T[None],
    ),
    "value": variant(
        "ValueScale",
        f"Tensor<const float, 1> by;\n{vec('value', 'Key')}"
        "{ const float f = by.data[at.kv_head]; x.map([=](float e, i32) { return e * f; }); }",
        by=T["Hkv"],
    ),
    "alibi": variant(
        "Alibi1",
        f"Tensor<const float, 1> slope;\n{LOGITS} {{ return s + slope.data[r.q_head] * float(c.kv_pos - r.q_pos); }}",
        slope=T["Hq"],
    ),
    "table": variant(
        "Table2",
        f"Tensor<const float, 2> bias;\n{LOGITS} {{ return s + bias.data[c.kv_head * bias.extent[1]"
        " + c.kv_index % bias.extent[1]]; }",
        bias=T["Hkv", None],
    ),
    "cube": variant(
        "Cube3",
        f"Tensor<const float, 3> bias; Tensor<const float, 1> by;\n{LOGITS} {{\n"
        "  const i32 n = bias.extent[1], m = bias.extent[2];\n"
        "  return s * by.data[by.extent[0] == 1 ? 0 : r.request]\n"
        "       + bias.data[(r.q_head * n + r.q_index % n) * m + c.kv_index % m]; }",
        bias=T["Hq", None, None],
        by=T["requests"],
    ),
    "integers": variant(
        "Integers",
        "Tensor<const i32, 1> a; Tensor<const u8, 2> b; Tensor<const u32, 1> d; i32 shift;\n"
        f"{LOGITS} {{ return s + float(a.data[c.kv_index % a.extent[0]] + b.data[r.q_head * b.extent[1] + 1])\n"
        "  + float((d.data[0] >> shift) & 7u); }",
        a=T[int, None],
        b=T[bool, "Hq", None],
        d=T["uint32", None],
        shift=I,
    ),
    "sink": variant(
        "Sink1", "float base;\nRADDLE_FN float sink(const Row& r) const { return base - r.q_head; }", base=F
    ),
    "gate": variant(
        "Gate",
        "float at; template <class Vec> RADDLE_FN void output(Vec& o, const Row&, float lse) const\n"
        "{ const float g = math::sigmoid(lse - at); o.map([=](float e, i32) { return e * g; }); }",
        at=F,
    ),
    "chunk": variant(  # of its own chunk only; kv_span and coverage through a function of its own
        "Chunk",
        f"i32 size;\nRADDLE_FN i32 of(i32 i) const {{ return i / size; }}\n"
        f"{MASK} {{ return of(r.q_index) == of(c.kv_index); }}\n"
        f"{REST[0]}\n{{ return KvSpan{{{{of(t.q_index.first) * size, (of(t.q_index.last) + 1) * size - 1}},"
        " everything}; }\n"
        f"{REST[1]} {{ const bool one = of(t.q_index.first) == of(t.q_index.last);\n"
        "  if (of(t.kv_index.last) < of(t.q_index.first) || of(t.kv_index.first) > of(t.q_index.last))"
        " return Coverage::empty;\n"
        "  return one && of(t.kv_index.first) == of(t.q_index.first) && of(t.kv_index.last) == of(t.q_index.first)\n"
        "    ? Coverage::full : Coverage::partial; }\n"
        "RADDLE_FN KvSpan row_span(const Row& r, Range) const\n"
        "{ return KvSpan{{of(r.q_index) * size, (of(r.q_index) + 1) * size - 1}, everything}; }",
        size=I,
    ),
    "doc": variant(  # documents by an array whose hull decides whole tiles; 1'000 holds no character literal
        "Doc",
        "SpanTensor<const i32, 1> id; float unused;\n"
        "RADDLE_FN i32 at(i32 i) const { return id.data[max(0, min(i, max(1'000, id.extent[0]) - 1))]; }\n"
        f"{MASK} {{ return at(r.q_index) == at(c.kv_index); }}\n"
        f"{LOGITS} {{ return s * unused; }}",
        id=T[int, None],
        unused=F,
    ),
}
SLOPES = np.float32([0.5, 0.25, 0.1, 0.05])
IDS = np.repeat(np.arange(200, dtype=np.int32), 6)


def values(rng, requests):
    return {
        "norm": {"eps": 1e-3, "w": rng.uniform(0.5, 2, DIM).astype(np.float32)},
        "value": {"by": [0.5, -3.0]},
        "alibi": {"slope": SLOPES},
        "table": {"bias": rng.standard_normal((HKV, 5)).astype(np.float32)},
        "cube": {
            "bias": rng.standard_normal((HQ, 3, 7)).astype(np.float32),
            "by": rng.uniform(0.5, 1.5, requests).astype(np.float32),
        },
        "integers": {
            "a": np.arange(-2, 3, dtype=np.int32),
            "b": rng.integers(0, 2, (HQ, 3)).astype(bool),
            "d": np.uint32([0xC0000000]),
            "shift": 29,
        },
        "sink": {"base": 1.25},
        "gate": {"at": 2.0},
        "chunk": {"size": 24},
        "doc": {"id": IDS, "unused": 1.5},
    }


class Meaning:
    """The same formulas in float64. q [R, Hq, D], k and v [N, Hq, D], logits [Hq, R, N]; r and c hold indices."""

    def __init__(self, name, m):
        self.name, self.m = name, {key: np.asarray(x, np.float64) for key, x in m.items()}

    def qkv(self, q, k, v):
        m = self.m
        if self.name == "norm":
            root = [np.sqrt((x**2).mean(-1, keepdims=True) + m["eps"]) for x in (q, k)]
            return q / root[0] * m["w"], k / root[1], v
        if self.name == "value":
            return q, k, v * np.repeat(m["by"], HQ // HKV)[:, None]
        return q, k, v

    def logits(self, s, request, i, j):
        m, head = self.m, np.arange(HQ)[:, None, None]
        if self.name == "alibi":
            return s + m["slope"][head] * (j - i)
        if self.name == "table":
            return s + m["bias"][head // (HQ // HKV), j % m["bias"].shape[1]]
        if self.name == "cube":
            return s * m["by"][request] + m["bias"][head, i % 3, j % 7]
        if self.name == "integers":
            a = m["a"]
            return s + a[j % len(a)] + m["b"][head, 1] + ((int(m["d"][0]) >> int(m["shift"])) & 7)
        if self.name == "doc":
            return s * m["unused"]
        return s

    def keep(self, i, j):
        if self.name == "chunk":
            return i // self.m["size"] == j // self.m["size"]
        if self.name == "doc":
            return self.m["id"][i] == self.m["id"][j]
        return np.ones(np.broadcast(i, j).shape, bool)


def reference(q, k, v, qo, kv, parts):
    """Exact results of ragged requests and their budgets."""
    exact = Exact(*(np.zeros((len(q), HQ, *more)) for more in ((DIM,), (), (DIM,), ())))
    by_name = {part.name: part for part in parts}
    for n in range(len(qo) - 1):
        rows, keys = slice(qo[n], qo[n + 1]), slice(kv[n], kv[n + 1])
        x = [a.astype(np.float64) for a in (q[rows], k[keys].repeat(HQ // HKV, 1), v[keys].repeat(HQ // HKV, 1))]
        for part in parts:
            x = part.qkv(*x)
        a, b, w = (each.swapaxes(0, 1) for each in x)
        j = np.arange(b.shape[1])[None]
        i = (np.arange(a.shape[1]) + b.shape[1] - a.shape[1])[:, None]
        s = a @ b.swapaxes(1, 2) / np.sqrt(DIM)
        # A dot product, and transforms of Q and K: a sum over the head, a root, products.
        size = np.abs(a) @ np.abs(b).swapaxes(1, 2) / np.sqrt(DIM)
        delta = (budgets.accumulated(DIM) + (2.0 * DIM + 20.0 if "norm" in by_name else 0.0)) * U32 * size
        for part in parts:
            after = part.logits(s, n, i, j)
            # Products with what is captured, and a sum: its terms are at most |before| + |after| large.
            delta = delta * 1.5 + 6.0 * U32 * (np.abs(s) + np.abs(after) + 1.0)
            s = after
        keep = np.logical_and.reduce([part.keep(i, j) for part in parts])
        s = np.where(keep, s, -np.inf)
        delta = np.minimum(delta + budgets.exp_error(s), 300.0)
        sink = (by_name["sink"].m["base"] - np.arange(HQ))[:, None] if "sink" in by_name else None
        out, lse, budget, lse_budget = finish(s, sink, w, delta)
        if "gate" in by_name:
            g = 1 / (1 + np.exp(by_name["gate"].m["at"] - lse))[..., None]
            budget = g * (budget + np.abs(out) * (lse_budget[..., None] + 16 * U32 * (1 + np.abs(lse[..., None]))))
            out = out * g
        targets = exact.out, exact.lse, exact.out_budget, exact.lse_budget
        for target, found in zip(targets, (out, lse, budget, lse_budget)):
            target[rows] = found.swapaxes(0, 1)
    return exact


def finish(s, sink, v, delta):
    s, delta = s[:, None], delta[:, None]  # every head is a KV head here
    p, lse, p_sink = softmax(s, None if sink is None else sink[:, None])
    out = p[:, 0] @ v
    budget, lse_budget = budgets.of_softmax(p, p_sink, v, delta, out[:, None], lse, "float32")
    budget = budget[:, 0] + 4.0 * U32 * (p[:, 0] @ np.abs(v))  # a transform of V
    return out, lse[:, 0], budget, lse_budget[:, 0]


COMPOSITIONS = [
    *([name] for name in V),
    ["norm", "value", "cube", "alibi", "chunk", "sink", "gate"],
    ["table", "doc", "integers", "chunk", "table"],
]


@pytest.mark.parametrize("names", COMPOSITIONS, ids="-".join)
def test_every_part(rng, names):
    check(rng, names)


@pytest.mark.every_isa
def test_every_part_on_every_isa(rng):
    check(rng, ["norm", "value", "alibi", "integers", "chunk", "sink", "gate"], fuse=True)


def check(rng, names, fuse=False):
    qo_len = np.array([1, 7, 40, 3])
    kv_len = np.array([200, 90, 40, 50])
    qo, kv = (np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (qo_len, kv_len))
    q = rng.standard_normal((qo[-1], HQ, DIM)).astype(np.float32)
    k, v = (rng.standard_normal((kv[-1], HKV, DIM)).astype(np.float32) for _ in "kv")
    bound = values(rng, len(qo_len))
    spec = raddle.AttentionSpec(
        HQ, HKV, DIM, dtype="float32", variant=[V[name](**bound[name]) for name in names], fuse=fuse
    )
    attn = raddle.Attention(spec)
    out, lse = np.full(q.shape, np.nan, np.float32), np.full(q.shape[:2], np.nan, np.float32)
    workers = int(rng.choice([1, 3, 20]))
    attn.run(attn.plan(raddle.RaggedKV(qo, kv), num_workers=workers), q, (k, v), out=out, lse=lse)
    within(reference(q, k, v, qo, kv, [Meaning(name, bound[name]) for name in names]), out, lse)


FLASH_SIGMOID = raddle.Variant(
    "FlashSigmoid",
    """
struct FlashSigmoid {
  static constexpr Scan scan = Scan::sum;
  float bias;
  RADDLE_FN float logits(float s, const Row&, const Key&) const { return math::sigmoid(s + bias); }
};""",
    params={"bias": float},
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_flash_sigmoid_has_the_bits_of_the_shipped_one(rng, dtype):
    problem = draw_problem(rng, "paged", dtype)
    q, (kv,), layout = problem
    found = []
    for variant in (FLASH_SIGMOID(bias=-1.5), raddle.Sigmoid(-1.5)):
        heads = q.shape[1], kv[0].shape[-2], q.shape[2]
        spec = raddle.AttentionSpec(*heads, dtype=dtype, variant=[variant, raddle.Causal()])
        attn = raddle.Attention(spec)
        found.append(attn.run(attn.plan(layout), q, kv))
    same_bits(found[:1], found[1:])


TEXT_MASK = f"struct mask_mod {{ i32 n; {MASK} {{ return %s; }} }};"
EVENS = raddle.Variant("mask_mod", TEXT_MASK % "(c.kv_index + n) % 2 == 0", {"n": int})
NEAR = raddle.Variant("mask_mod", TEXT_MASK % "r.q_index - c.kv_index <= n", {"n": int})
FUSED = {
    "logits": lambda: [raddle.SoftCap(20.0), V["alibi"](slope=SLOPES), raddle.SoftCap(9.0)],
    "masks": lambda: [raddle.Causal(), (V["chunk"](size=30) & EVENS(n=1)) | raddle.SlidingWindow(5, 2)],
    "nested": lambda: [(raddle.Causal() | (NEAR(n=7) & EVENS(n=0))) & (EVENS(n=1) | raddle.SlidingWindow(40))],
    "one name": lambda: [EVENS(n=0), NEAR(n=20), V["alibi"](slope=SLOPES), V["alibi"](slope=2 * SLOPES)],
    "sum": lambda: [FLASH_SIGMOID(bias=-2.0), raddle.Causal()],
    "sum last": lambda: [raddle.SoftCap(5.0), V["value"](by=[2.0, 0.25]), raddle.Sigmoid(0.5), EVENS(n=0)],
    "sink": lambda: [raddle.Rope(16, offset=7), V["sink"](base=0.5), raddle.SlidingWindow(64), V["gate"](at=1.0)],
    "everything": lambda: [
        V["norm"](eps=1e-3, w=np.linspace(1, 2, 64, dtype=np.float32)),
        raddle.Rope(32, 500000.0),
        raddle.SoftCap(30.0),
        raddle.Sinks([0.0, 1.0, -2.0, 3.0]),
        raddle.Causal() & V["doc"](id=IDS, unused=1.0),
        V["gate"](at=0.0),
    ],
}


@pytest.mark.every_isa
@pytest.mark.parametrize("name", FUSED)
def test_fused_gives_the_bits_of_the_list(rng, name):
    has_lse = not name.startswith("sum")
    for layout in ("ragged", "paged", "cascade"):
        make, pools = LAYOUTS[layout]
        plan = make(rng, draw_lengths(rng))
        q = rng.standard_normal((int(plan.qo_indptr[-1]), 4, 64)).astype(np.float32)
        kv = pools(rng, plan, 2, 64, 64, np.dtype(np.float32))
        kv = kv[0] if len(kv) == 1 else kv
        found = []
        for fuse in (False, True):
            spec = raddle.AttentionSpec(4, 2, 64, dtype="float32", variant=FUSED[name](), fuse=fuse)
            attn = raddle.Attention(spec)
            out = np.full(q.shape, np.nan, np.float32)
            lse = np.full(q.shape[:2], np.nan, np.float32) if has_lse else None
            attn.run(attn.plan(twin(plan), num_workers=3), q, kv, out=out, lse=lse)
            found.append((out, lse) if has_lse else (out,))
        same_bits(*found)


def test_written_order_is_kept(rng):
    problems = [draw_problem(rng) for _ in range(4)]  # one alone may have a key a row, or none
    double = variant("Double", f"{LOGITS} {{ return 2.0f * s; }}")
    first, last = [double(), raddle.SoftCap(1.0)], [raddle.SoftCap(1.0), double()]
    found = [(compute(first, problem), compute(last, problem)) for problem in problems]
    assert any(not np.array_equal(one[0], other[0]) for one, other in found)
    for problem, each in zip(problems, found):
        for order, listed in zip((first, last), each):
            same_bits(listed, compute(order, problem, fuse=True))


def test_plan_members_and_run_members(rng):
    problem = draw_problem(rng)
    q, kv, layout = problem
    heads = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": q.shape[2], "dtype": "float32"}

    def made(*variant, fuse=False):
        return raddle.Attention(raddle.AttentionSpec(**heads, variant=list(variant), fuse=fuse))

    for fuse in (False, True):
        doc, chunk = V["doc"](id=IDS, unused=1.0), V["chunk"](size=24)
        attn = made(doc, chunk, V["table"](bias=np.ones((2, 5), np.float32)), fuse=fuse)
        number = raddle.cache.num_compiled()
        plan = attn.plan(layout)
        for member, value in (("Doc.id", IDS), ("Chunk.size", 3)):
            with refuses(ValueError, member, "plan member"):
                attn.run(plan, q, kv, params={member: value})
        for member, value in (("Doc.unused", 2.0), ("Table2.bias", np.ones((2, 3), np.float32))):
            with refuses(ValueError, member, "run member"):
                attn.plan(layout, params={member: value})
        # Other values, and arrays of other lengths.
        longer, other = np.repeat(IDS, 2), rng.standard_normal((2, 11)).astype(np.float32)
        plan = attn.plan(layout, params={"Doc.id": longer, "Chunk.size": 50})
        found = attn.run(plan, q, kv, params={"Doc.unused": 0.5, "Table2.bias": other}, return_lse=True)
        assert raddle.cache.num_compiled() == number
        again = made(V["doc"](id=longer, unused=0.5), V["chunk"](size=50), V["table"](bias=other), fuse=fuse)
        same_bits(found, again.run(again.plan(layout), q, kv, return_lse=True))
        assert raddle.cache.num_compiled() == number


def qkv(problem):
    return problem["q"], (problem["k"], problem["v"])


@pytest.mark.parametrize(
    "body",
    [
        f"i32 n; {MASK} noexcept {{ return c.kv_index < n; }}",
        f"i32 n; RADDLE_FN auto mask(const Row& r, const Key& c) const -> bool {{ return c.kv_index < n; }}",
        "i32 n; RADDLE_FN bool h(i32 i) const { return g(i) < 0; }\nRADDLE_FN i32 g(i32 i) const { return i - n; }\n"
        f"{MASK} {{ return 1'0 > 9 && h(c.kv_index); }}",
        f"#define LIMIT n\ni32 n;\n{MASK} {{ return c.kv_index < LIMIT; }}",
        f"i32 n; // mask\n{MASK} {{ /* {{ */ return c.kv_index < n; }}",
    ],
)
def test_plan_members_are_found(small_problem, body):
    attn = attention(variant=[variant("Limit", body, n=int)(n=3)])
    with refuses(ValueError, "Limit.n", "plan member"):
        attn.run(attn.plan(paged()), *qkv(small_problem), params={"Limit.n": 1})


def test_run_members_are_not_taken_for_plan_members(small_problem):
    body = f"float by; {LOGITS} {{ return s * by; }} // mask(by)\n{MASK} {{ return c.kv_index >= 0; }} /* by */"
    attn = attention(variant=[variant("Mixed", body, by=float)(by=3.0)])
    plan = attn.plan(paged())
    assert np.isfinite(attn.run(plan, *qkv(small_problem), params={"Mixed.by": 1.0})).all()


@pytest.mark.parametrize("name", ["both", "Leaf", "cpu", "Composition"])
def test_names_of_the_engine_are_free(rng, name):
    source = f"struct {name} {{ RADDLE_FN bool mask(const Row& r, const Key& c) const {{ return c.kv_pos <= r.q_pos; }} }};"
    problem = draw_problem(rng)
    shipped = compute([raddle.Causal(), raddle.SoftCap(5.0)], problem)
    for fuse in (False, True):
        same_bits(compute([raddle.Variant(name, source), raddle.SoftCap(5.0)], problem, fuse=fuse), shipped)
