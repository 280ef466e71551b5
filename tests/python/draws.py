"""Random problems: every layout kind, every shipped variant, unused K and V poisoned with NaN.

`draw(rng, …)` makes one problem; what is not asked for is drawn. `covering(…)` picks combinations of factors such
that every pair of values occurs; `problems()` is the same as a hypothesis strategy.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import raddle
from hypothesis import strategies as st
from layout_draws import LAYOUTS, SHARED_ROWS, fill_scales
from reference import (
    Alibi,
    Causal,
    Llama31Scaling,
    PackedMask,
    Problem,
    Rope,
    RopeTables,
    Sigmoid,
    Sinks,
    SlidingWindow,
    SoftCap,
    YarnScaling,
    keys_of_rows,
)

DTYPES = ["float32", "float16", "bfloat16"]
KV_DTYPES = ["float8_e4m3fn", "float8_e5m2", "int8"]
SCALES = ["none", "tensor", "head", "token"]
HEAD_DIMS = [8, 24, 64, 72, 80, 128, 192, 256]
GROUPS = [1, 2, 3, 4, 7, 8, 16, 71]
WORKERS = [1, 2, 7, 132]
SCHEDULES = ["auto", "linear", "algorithm1", "one-per-request"]


STAND_IN: dict[str, str] = {}  # dtypes that the device under test does not have -> those drawn instead


def numpy_dtype(name: str) -> np.dtype:
    name = STAND_IN.get(name, name)
    return np.dtype(getattr(ml_dtypes, name, name))


def sinks(rng, num_heads):
    return Sinks(rng.normal(0.0, 3.0, num_heads).astype(np.float32))


def rotary_dim(rng, dim):
    return 2 * int(rng.integers(1, dim // 2 + 1))


@dataclass
class Place:
    """Where a drawn variant is to work."""

    rng: np.random.Generator
    heads: int
    dim: int
    requests: int | None  # None: rows of several share a level
    layout: object


def rope_llama31(at):
    return Rope(rotary_dim(at.rng, at.dim), 500000.0, Llama31Scaling(8.0, 1.0, 4.0, 64.0), offsets(at))


def rope_yarn(at):
    """As gpt-oss, DeepSeek, or with a temperature of its own."""
    ways = [{"truncate": False}, {"mscale": 1.0, "mscale_all_dim": 0.707}, {"attention_factor": 1.3, "beta_fast": 4.0}]
    yarn = YarnScaling(float(at.rng.choice([1.0, 4.0, 32.0])), 64.0, **ways[at.rng.integers(3)])
    return Rope(rotary_dim(at.rng, at.dim), 150000.0, yarn, int(at.rng.integers(0, 5000)), bool(at.rng.integers(2)))


def alibi(at):
    """The paper's slopes, or any, also of the other sign."""
    if at.rng.integers(2):
        return Alibi(np.float32(raddle.alibi_slopes(at.heads)))
    return Alibi(at.rng.normal(0.0, 0.1, at.heads).astype(np.float32))


def packed_mask(at, keep=0.7):
    """A random matrix of bits for every request."""
    qo_len, kv_len = np.diff(at.layout.qo_indptr), at.layout.request_kv_len()
    masks = [at.rng.random((int(qo), int(kv))) < keep for qo, kv in zip(qo_len, kv_len)]
    rows = [np.packbits(mask.ravel(), bitorder="little") for mask in masks]
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32)
    return PackedMask(np.concatenate([np.zeros(0, np.uint8), *rows]), indptr)


def rope_tables(at, interleaved=False):
    """Tables that just hold the positions of a layout: any angles, lengthened by up to a half."""
    every = [np.concatenate([keys.q_pos, keys.kv_pos]) for keys in keys_of_rows(at.layout)]
    every = np.concatenate([[0], *every]).astype(int)
    angle = at.rng.uniform(-np.pi, np.pi, (np.ptp(every) + 1, rotary_dim(at.rng, at.dim) // 2))
    size = at.rng.uniform(0.5, 1.5, angle.shape)
    cos, sin = (size * f(angle) for f in (np.cos, np.sin))
    return RopeTables(cos.astype(np.float32), sin.astype(np.float32), interleaved, -int(every.min()))


# name -> parts of a variant for a place
VARIANTS = {
    "plain": lambda at: [],
    "causal": lambda at: [Causal()],
    "window": lambda at: [SlidingWindow(int(at.rng.integers(0, 60)))],
    "band": lambda at: [SlidingWindow(*(int(x) for x in at.rng.integers(0, 40, 2)))],
    "softcap": lambda at: [SoftCap(float(at.rng.choice([2.0, 30.0])))],
    "alibi": lambda at: [alibi(at), Causal()],
    "alibi_capped": lambda at: [alibi(at), SoftCap(5.0), alibi(at)],
    "sinks": lambda at: [sinks(at.rng, at.heads)],
    "sigmoid": lambda at: [Sigmoid(float(at.rng.normal())), Causal()],
    "sigmoid_plain": lambda at: [Sigmoid(-1.0)],
    "sigmoid_first": lambda at: [Sigmoid(0.5), SoftCap(2.0), Causal()],  # weights of capped logits
    "rope": lambda at: [Rope(at.dim, 10000.0), Causal()],
    "rope_llama31": lambda at: [rope_llama31(at)],
    "rope_interleaved": lambda at: [Rope(rotary_dim(at.rng, at.dim), interleaved=True), Causal()],
    "rope_yarn": lambda at: [rope_yarn(at), Causal()],
    "rope_tables": lambda at: [rope_tables(at), Causal()],
    "rope_tables_interleaved": lambda at: [rope_tables(at, True)],
    "packed_mask": lambda at: [packed_mask(at)],
    "packed_or_window": lambda at: [packed_mask(at, 0.1) | SlidingWindow(20), Causal()],
    "gemma2": lambda at: [SoftCap(50.0), SlidingWindow(int(at.rng.integers(0, 80))), Causal()],
    "gpt_oss": lambda at: [sinks(at.rng, at.heads), SlidingWindow(int(at.rng.integers(0, 80))), Causal()],
    "either": lambda at: [(Causal() & SlidingWindow(9)) | SlidingWindow(3, 3)],
    "everything": lambda at: [
        Rope(at.dim, 500000.0, offset=1000000),
        SoftCap(20.0),
        sinks(at.rng, at.heads),
        Causal(),
        SlidingWindow(100),
    ],
}


def offsets(at):
    if at.requests is None:
        return int(at.rng.integers(0, 5000))
    return at.rng.integers(-50, 5000, at.requests).astype(np.int32)


def draw_lengths(rng, most=5) -> list[tuple[int, int]]:
    """(qo_len, kv_len) a request: decode, chunks, whole prompts, empty ones, and more rows than keys."""
    kinds = [
        lambda: (1, int(rng.integers(1, 400))),
        lambda: (int(rng.integers(2, 40)), int(rng.integers(40, 300))),
        lambda: (n := int(rng.integers(1, 70)), n),
        lambda: (int(rng.integers(0, 30)), int(rng.integers(0, 8))),
    ]
    return [kinds[rng.integers(len(kinds))]() for _ in range(rng.integers(1, most + 1))]


def draw(
    rng,
    layout="paged",
    variant="causal",
    dtype="float32",
    dim=64,
    dim_vo=None,
    group=2,
    num_kv_heads=None,
    lengths=None,
    peak=None,
    kv_dtype=None,
    scales=("none", "none"),
    latent=False,
    k_extends_v=False,
    **layout_options,
) -> Problem:
    """A problem. `peak` multiplies Q: 1 gives flat weights, 4 lets few keys dominate. `scales`: kinds for K and V.

    `latent`: V is a view of K's first columns, as in MLA. `k_extends_v`: K has the columns behind those of V, as where
    MLA has two caches.
    """
    dim_vo = dim_vo or dim
    num_kv_heads = num_kv_heads or (1 if group > 16 else int(rng.integers(1, 4)))
    lengths = draw_lengths(rng) if lengths is None else lengths
    kind = numpy_dtype(dtype)
    make, pools = LAYOUTS[layout]
    plan = make(rng, lengths, **layout_options)
    num_rows = int(plan.qo_indptr[-1])
    peak = peak if peak is not None else float(rng.choice([1.0, 4.0]))
    q = (peak * rng.standard_normal((num_rows, group * num_kv_heads, dim))).astype(kind)
    requests = None if layout in SHARED_ROWS else len(plan.qo_indptr) - 1
    place = Place(rng, group * num_kv_heads, dim, requests, plan)
    listed = VARIANTS[variant](place) if isinstance(variant, str) else variant
    k_columns = dim - dim_vo if k_extends_v else dim
    kv = pools(rng, plan, num_kv_heads, k_columns, dim_vo, numpy_dtype(kv_dtype) if kv_dtype else kind)
    if latent:
        kv = [(k, k[..., :dim_vo]) for k, _ in kv]
    levels = getattr(plan, "levels", [plan])
    each = [[fill_scales(rng, *at, how) for at in zip(levels, pair)] for pair, how in zip(zip(*kv), scales)]
    k_scale, v_scale = (x[0] if len(x) == 1 else x for x in each)
    return Problem(q, kv, plan, listed, k_scale=k_scale, v_scale=v_scale, k_extends_v=k_extends_v)


def covering(**factors) -> list[dict]:
    """Few combinations in which every pair of values of two factors occurs, greedily and always the same."""
    names = list(factors)
    rng = np.random.default_rng(0)
    missing = {
        (a, i, b, j)
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(factors[names[a]]))
        for j in range(len(factors[names[b]]))
    }
    rows = []
    while missing:
        a, i, b, j = min(missing)
        tries = [[int(rng.integers(len(factors[name]))) for name in names] for _ in range(30)]
        for row in tries:
            row[a], row[b] = i, j
        best = max(tries, key=lambda row: len(pairs_of(row) & missing))
        missing -= pairs_of(best)
        rows.append({name: factors[name][n] for name, n in zip(names, best)})
    return rows


def pairs_of(row) -> set:
    """(factor, value, factor, value), all as numbers."""
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(range(len(row)), 2)}


@st.composite
def problems(draw_from, layouts=tuple(LAYOUTS), variants=tuple(VARIANTS), dtypes=tuple(DTYPES)):
    lengths = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 200)), min_size=1, max_size=6)
    return draw(
        np.random.default_rng(draw_from(st.integers(0, 2**32 - 1))),
        layout=draw_from(st.sampled_from(layouts)),
        variant=draw_from(st.sampled_from(variants)),
        dtype=draw_from(st.sampled_from(dtypes)),
        dim=8 * draw_from(st.integers(1, 32)),
        group=draw_from(st.integers(1, 9)),
        num_kv_heads=draw_from(st.integers(1, 3)),
        lengths=draw_from(lengths),
    )
