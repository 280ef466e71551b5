"""Raddle on a GPU, planned once and run on the caller's stream; and RoPE as a pass of its own before it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import raddle
from raddle import flex
from raddle.bench.engines import RADDLE, Engine, Makers
from raddle.bench.gpu.cases import Case
from raddle.bench.gpu.problem import Problem
from raddle.bench.gpu.variants import PARTS, angles, rotated


@contextlib.contextmanager
def asking_for(backend: str) -> Iterator[None]:
    """Attentions that are made meanwhile ask for this family of kernels; empty: for whatever they asked for before."""
    before = os.environ.get("RADDLE_BACKEND")
    if backend:
        os.environ["RADDLE_BACKEND"] = backend
    try:
        yield
    finally:
        if backend:
            os.environ.pop("RADDLE_BACKEND")
        if before is not None:
            os.environ["RADDLE_BACKEND"] = before


def attention(case: Case, device: Any) -> raddle.Attention:
    hq, hkv, dim = case.heads
    types = {"dtype": "bfloat16", "kv_dtype": case.kv_dtype or None}
    spec = raddle.AttentionSpec(hq, hkv, dim, case.dim_vo, variant=PARTS[case.variant](hq, dim), **types)
    return raddle.Attention(spec, device=str(device))


def layout(problem: Problem, case: Case) -> raddle.Layout:
    p = problem
    if case.form == "ragged":
        return raddle.RaggedKV(p.qo_indptr, p.kv_indptr)
    if case.form == "blocks":
        ends = np.array([0, len(p.kept_blocks)], np.int32)
        return raddle.BlockSparse(1, case.page_size, ends, p.kept_blocks, qo_indptr=p.qo_indptr, kv_len=p.kv_len)
    if case.form == "paged":
        return raddle.PagedKV(p.qo_indptr, p.page_indptr, p.page_indices, p.kv_len, page_size=case.page_size)
    ends = np.array([0, case.num_rows], np.int32)
    pages = np.array([0, len(p.prefix_pages)], np.int32)
    shared = np.array([case.prefix], np.int32)
    first = raddle.PagedKV(ends, pages, p.prefix_pages, shared, page_size=case.page_size)
    own = raddle.PagedKV(p.qo_indptr, p.own_indptr, p.own_pages, p.kv_len - case.prefix, page_size=case.page_size)
    return raddle.Cascade([first, own])


def contestants(problem: Problem, case: Case) -> Makers:
    yield RADDLE, lambda: _flex(problem, case) if case.is_call else _prepared(problem, case)
    for backend in case.backends:
        yield f"{RADDLE} {backend}", lambda backend=backend: _prepared(problem, case, backend)
    if case.variant == "rope" and case.peers:
        yield "rotation + raddle", lambda: _rotation(problem, case)


def _prepared(problem: Problem, case: Case, backend: str = "") -> Engine:
    with asking_for(backend):
        attn = attention(case, problem.device)
    plan = attn.plan(layout(problem, case))
    kv: Any = (problem.k, problem.v)
    if case.form == "cascade":
        kv = [kv, kv]
    out = problem.empty()
    scales = {"k_scale": problem.k_scale, "v_scale": problem.v_scale} if case.kv_dtype else {}

    def watched(before: Callable[[], Any]) -> raddle.timeline.Marks:
        timeline = raddle.Timeline(plan, attn.device)
        before()
        attn.run(plan, problem.q, kv, out=out, timeline=timeline, **scales)
        return timeline.read()

    call = lambda _: attn.run(plan, problem.q, kv, out=out, **scales)  # noqa: E731
    # Of several contestants, the first one's timelines are written.
    is_watched = plan.marks_timelines and not backend
    return Engine(f"{RADDLE} {backend}".strip(), call, out, watched=watched if is_watched else None)


def _flex(problem: Problem, case: Case) -> Engine:
    """Calls of `raddle.flex` by Python functions, as FlexAttention's users write them."""
    from raddle.bench.peers import flex as peer

    (k, v), rows = problem.dense, case.qo_len[0]
    keeps, score = peer.mask_mod(case, problem.device), peer.score_mod(case, problem.device)
    mask = flex.create_block_mask(keeps, None, None, rows, k.shape[2], device=str(k.device))
    options = {"score_mod": score, "block_mask": mask, "enable_gqa": case.group_size > 1}
    call = lambda _: flex.flex_attention(problem.dense_q, k, v, **options)  # noqa: E731
    return Engine(RADDLE, call, rows=lambda out: out.transpose(1, 2).reshape(problem.q.shape))


def _rotation(problem: Problem, case: Case) -> Engine:
    """Rotates Q and the pages of K by a compiled pass of PyTorch, then attends without RoPE."""
    plain = Case(**{**case.__dict__, "variant": "causal"})
    attn, out = attention(plain, problem.device), problem.empty()
    plan = attn.plan(layout(problem, plain))
    page, dim = case.page_size, case.heads[2]
    position = torch.zeros(problem.num_pages, page, dtype=torch.int64, device=problem.device)
    for request, length in enumerate(case.kv_len):
        begin, end = (int(problem.page_indptr[n]) for n in (request, request + 1))
        own = problem.on_device("page_indices")[begin:end].long()
        position[own] = torch.arange(len(own) * page, device=problem.device).view(-1, page)
    last = torch.from_numpy(problem.kv_len - 1).to(problem.device)
    turns_k = [x.float() for x in angles(position.flatten(), dim)]
    turns_q = [x.float() for x in angles(last, dim)]
    turn = torch.compile(lambda x, cos, sin: rotated(x.float(), cos, sin).to(x.dtype), dynamic=True)

    def call(_: int) -> Any:
        k = turn(problem.k.flatten(0, 1), *turns_k).view_as(problem.k)
        return attn.run(plan, turn(problem.q, *turns_q), (k, problem.v), out=out)

    return Engine("rotation + raddle", call, out)
