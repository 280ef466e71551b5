"""What a serving engine pays on the host: `plan` from call to return, and what Python adds to `run`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import raddle
from raddle import _library, flex
from raddle.bench import timing
from raddle.bench.batch import indptr
from raddle.bench.results import Measured

_from_page_tables = raddle.Cascade.from_page_tables
_run_cpp = _library.function("raddle.bench_run_cpp")

WORKERS = 132
PAGE_SIZE = 16
#: Different batches in turn, lest a planner that is asked the same again and again learns the branches.
_BATCHES = 16
#: Calls of `run` in a row that are timed as one, so that reading the clock doesn't count.
_CALLS = 100


def plan_cost(requests: int, bar_us: float, rounds: int) -> Measured:
    """Median time of ``attn.plan(raddle.PagedKV(…))`` for a decode batch with lengths of U(1024, 2048)."""
    attention = raddle.Attention(
        raddle.AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128, variant=[raddle.Causal()])
    )
    us = timing.median(timing.repeated(planning(attention, batches(requests), num_workers=WORKERS), rounds))
    return Measured(f"plan, {requests} requests, {WORKERS} workers, layout included", us, us, "us", bar_us)


def planning(attention: raddle.Attention, batches: Sequence[Any], **options: Any) -> Callable[[], None]:
    """A call that plans the next of the batches, its layout included."""
    turns = itertools.cycle(batches)

    def plan() -> None:
        attention.plan(raddle.PagedKV(*next(turns), page_size=PAGE_SIZE), **options)

    return plan


def prefix_cost(rounds: int) -> list[Measured]:
    """Time of ``raddle.Cascade.from_page_tables``, which is linear in the entries of the table.

    Of four times the requests, or the pages a request, it may take nine times as long: more than caches explain.
    """
    attention = raddle.Attention(raddle.AttentionSpec(4, 2, 32, dtype="float32", variant=[raddle.Causal()]))
    shapes = ((200, 200), (800, 200), (200, 800))
    us = {}
    for requests, pages in shapes:
        table = np.tile(np.arange(pages, dtype=np.int32), (requests, 1))
        table[:, pages // 2 :] += np.arange(requests, dtype=np.int32)[:, None] * pages
        kv_len = np.full(requests, PAGE_SIZE * pages)
        arguments = attention, np.arange(requests + 1), None, table, kv_len, PAGE_SIZE
        us[requests, pages] = timing.median(timing.repeated(lambda a=arguments: _from_page_tables(*a), rounds))
    base = us[shapes[0]]
    first, *more = (f"prefixes found, {requests} requests of {pages} pages" for requests, pages in shapes)
    return [
        Measured(first, base, base, "us"),
        *(Measured(f"{name}, over the first", us[at], us[at] / base, "x", 9.0) for name, at in zip(more, shapes[1:])),
    ]


def run_overhead(bar_us: float, rounds: int) -> list[Measured]:
    """The host's time for a `run` with ``out=`` on torch tensors, and what of it `Attention::run` in C++ does not take.

    The batch is so small that its arithmetic takes no time and one thread does it; both are timed in turn, and the
    difference is the median of the rounds' differences. The bar is that of either.
    """
    spec = raddle.AttentionSpec(num_qo_heads=1, num_kv_heads=1, head_dim=8, variant=[raddle.Causal()])
    attention = raddle.Attention(spec)
    one = np.array([1], np.int32)
    ends = np.array([0, 1], np.int32)
    plan = attention.plan(raddle.PagedKV(ends, ends, one - 1, one, page_size=PAGE_SIZE), num_workers=1)
    q, out = (torch.zeros(1, 1, 8, dtype=torch.bfloat16) for _ in range(2))
    pools = tuple(torch.zeros(1, PAGE_SIZE, 1, 8, dtype=torch.bfloat16) for _ in "kv")

    def run() -> None:
        for _ in range(_CALLS):
            attention.run(plan, q, pools, out=out)

    python, cpp = [], []
    for _ in range(rounds):
        python.append(timing.repeated(run, 1)[0] / _CALLS)
        cpp.append(_run_cpp(attention=attention, plan=plan, q=q, out=out, kv_k=pools[0], kv_v=pools[1], repeat=_CALLS))
    extra = timing.median([a - b for a, b in zip(python, cpp)])
    call = timing.median(python)
    return [
        Measured("run from C++, one key", timing.median(cpp), timing.median(cpp), "us"),
        Measured("run from Python on torch tensors, one key", call, call, "us", bar_us),
        Measured("run, what Python adds", extra, extra, "us", bar_us),
    ]


def flex_cost(bar_us: float, bar_above_us: float, rounds: int) -> list[Measured]:
    """A decode by ``flex_attention``, one row with a soft cap and a document mask in Python, and what of it a plan and a
    run of the same spec do not take. One thread computes; the difference is the median of the rounds' differences."""
    heads, kv_heads, dim, tokens = 8, 2, 64, 256
    document = torch.arange(tokens) // 32

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return document[q_idx + (tokens - 1)] == document[kv_idx]

    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return 30.0 * torch.tanh(s / 30.0)

    q = torch.ones(1, heads, 1, dim)
    k, v = (torch.ones(1, kv_heads, tokens, dim) for _ in "kv")
    block_mask = flex.create_block_mask(mask, None, None, 1, tokens)
    spec = raddle.AttentionSpec(heads, kv_heads, dim, dtype="float32", variant=[score, mask])
    attention, one = raddle.Attention(spec), np.array([0], np.int32)
    layout = raddle.PagedKV([0, 1], None, one[:, None], one + tokens, tokens, "HND", qo_pos=one)
    rows, out = q[:, :, 0], torch.empty(1, heads, dim)

    def call() -> None:
        for _ in range(_CALLS):
            flex.flex_attention(q, k, v, score_mod=score, block_mask=block_mask, enable_gqa=True)

    def plan_and_run() -> None:
        for _ in range(_CALLS):
            attention.run(attention.plan(layout), rows, (k, v), out=out)

    call()
    whole, base = [], []
    for _ in range(rounds):
        whole.append(timing.repeated(call, 1)[0] / _CALLS)
        base.append(timing.repeated(plan_and_run, 1)[0] / _CALLS)
    us, above = timing.median(whole), timing.median([a - b for a, b in zip(whole, base)])
    name = "flex_attention, one row, soft cap, documents"
    return [Measured(name, us, us, "us", bar_us), Measured(f"{name}, above plan and run", above, above, "us", bar_above_us)]


def batches(requests: int) -> list[tuple[np.ndarray, ...]]:
    """Decodes, always the same ones."""
    rng = np.random.default_rng(0)
    return [batch(rng, requests) for _ in range(_BATCHES)]


def batch(rng: np.random.Generator, requests: int) -> tuple[np.ndarray, ...]:
    """(qo_indptr, page_indptr, page_indices, kv_len), int32, pages shuffled."""
    kv_len = rng.integers(1024, 2049, requests).astype(np.int32)
    page_indptr = indptr(-(-kv_len // PAGE_SIZE))
    page_indices = rng.permutation(page_indptr[-1]).astype(np.int32)
    return np.arange(requests + 1, dtype=np.int32), page_indptr, page_indices, kv_len
