"""What a serving step costs the host when it runs on a GPU: `plan`, `run`, and a step of 32 layers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import raddle
from raddle import flex
from raddle.bench import plan_cost, results, timing
from raddle.bench.batch import indptr
from raddle.bench.engines import first_line
from raddle.bench.gpu.problem import DTYPE

SECTION = "plan"
_HEADS = 32, 8, 128
_CALLS = 100  #: calls in a row, well within what a stream's queue takes
_LAYERS = 32


def measure(families: tuple[str, ...], rounds: int, device: str = "cuda") -> list[results.Row]:
    """All figures."""
    attn = raddle.Attention(raddle.AttentionSpec(*_HEADS, variant=[raddle.Causal()]), device=device)
    # Its kernel of long queries is compiled in the background, beside which all below takes longer: this waits for it.
    # (One worker, since plans of more may have another kernel compiled, for clusters.)
    attn.plan(raddle.RaggedKV([0, 512], [0, 512]), num_workers=1)
    parts: dict[str, Callable[[], list[results.Row]]] = {
        "plan B16": lambda: _plan(attn, 16, 15.0, rounds, families, device),
        "plan B256": lambda: _plan(attn, 256, 60.0, rounds, families, device),
        "run": lambda: _run(attn, rounds, device),
        "flex call": lambda: _flex(rounds, device),
        f"{_LAYERS} layers, eager, B16": lambda: _step(attn, rounds, device),
    }
    return results.of_parts(SECTION, parts)


def host_us(call: Callable[[], object], rounds: int) -> float:
    """Median microseconds of a call on the host; the GPU is idle before each."""
    return timing.median(timing.repeated(call, rounds, torch.cuda.synchronize))


def per_call(call: Callable[[], object], rounds: int) -> float:
    """The same of one call of many in a row."""

    def many() -> None:
        for _ in range(_CALLS):
            call()

    return host_us(many, 4 * rounds) / _CALLS


def _plan(
    attn: Any, requests: int, bar_us: float, rounds: int, families: tuple[str, ...], device: str
) -> list[results.Row]:
    """`plan` of a decode batch from host arrays, its layout included; FlashInfer's from its tensors."""
    drawn = plan_cost.batches(requests)
    us = host_us(plan_cost.planning(attn, drawn), 40 * rounds)
    rows = [results.figure(SECTION, f"plan B{requests}", us, "us", bar_us)]
    if "flashinfer" in families:
        try:
            theirs = _flashinfer_plan(drawn, rounds, device)
        except Exception as error:  # noqa: BLE001: a peer's failure is not Raddle's
            rows.append(results.failed(SECTION, f"plan B{requests}", "flashinfer", first_line(error)))
            return rows
        rows[0]["ratios"] = {"flashinfer": theirs / us}
        rows.append({**results.figure(SECTION, f"plan B{requests}", theirs, "us"), "engine": "flashinfer"})
    return rows


def _flashinfer_plan(drawn: list[Any], rounds: int, device: str) -> float:
    import flashinfer

    workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    tables = []
    for _, page_indptr, page_indices, kv_len in drawn:
        last = (kv_len - 1) % plan_cost.PAGE_SIZE + 1
        # Its own documentation advises offsets and last lengths on the host.
        host = torch.from_numpy(page_indptr), torch.from_numpy(last)
        tables.append((host[0], torch.from_numpy(page_indices).to(device), host[1]))
    batches = itertools.cycle(tables)
    types = {"q_data_type": DTYPE, "kv_data_type": DTYPE}
    return host_us(lambda: wrapper.plan(*next(batches), *_HEADS, plan_cost.PAGE_SIZE, **types), 20 * rounds)


def _tensors(requests: int, length: int, device: str) -> tuple[Any, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    page = plan_cost.PAGE_SIZE
    pages = requests * length // page
    table = np.random.default_rng(0).permutation(pages).astype(np.int32)
    lengths = np.full(requests, length, np.int32)
    layout = raddle.PagedKV(indptr([1] * requests), indptr([length // page] * requests), table, lengths, page_size=page)
    hq, hkv, dim = _HEADS
    q = torch.randn(requests, hq, dim, dtype=DTYPE, device=device)
    k, v = (torch.randn(pages, page, hkv, dim, dtype=DTYPE, device=device) for _ in range(2))
    return layout, q, (k, v)


def _run(attn: Any, rounds: int, device: str) -> list[results.Row]:
    """Host time of one `run` of many in a row, each so small that the GPU never falls behind for long."""
    layout, q, kv = _tensors(1, 16, device)
    plan, out = attn.plan(layout), torch.empty_like(q)

    given = per_call(lambda: attn.run(plan, q, kv, out=out), rounds)
    made = per_call(lambda: attn.run(plan, q, kv), rounds)
    return [results.figure(SECTION, "run out=", given, "us", 10.0), results.figure(SECTION, "run", made, "us", 10.0)]


def _flex(rounds: int, device: str) -> list[results.Row]:
    """The same of a call of `raddle.flex` with a block mask and a score, which it has seen before."""
    q, k, v = (torch.randn(1, 16, 64, 128, dtype=DTYPE, device=device) for _ in range(3))
    mask = flex.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 64, 64, device=device)
    capped = flex.mods.softcap(30.0)
    us = per_call(lambda: flex.flex_attention(q, k, v, capped, mask), rounds)
    return [results.figure(SECTION, "flex call", us, "us", 50.0)]


def _step(attn: Any, rounds: int, device: str) -> list[results.Row]:
    """Plan once, run 32 layers, each with pools of its own: is the GPU busy longer than the host?"""
    layout, q, _ = _tensors(16, 1024, device)
    pools = [_tensors(16, 1024, device)[2] for _ in range(_LAYERS)]
    out = torch.empty_like(q)
    host, both = [], []
    for step in range(-1, 4 * rounds):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        plan = attn.plan(layout)
        for kv in pools:
            attn.run(plan, q, kv, out=out)
        enqueued = time.perf_counter_ns()
        torch.cuda.synchronize()
        if step >= 0:
            host.append((enqueued - start) / 1e3)
            both.append((time.perf_counter_ns() - start) / 1e3)
    name = f"{_LAYERS} layers, eager, B16"
    share = timing.median([a / b for a, b in zip(host, both)])
    return [
        results.figure(SECTION, f"{name}: until enqueued", timing.median(host), "us"),
        results.figure(SECTION, f"{name}: until done", timing.median(both), "us"),
        # A host that is done well before the GPU does not bound the step.
        results.figure(SECTION, f"{name}: host's share", share, "of the step", 0.9),
    ]
