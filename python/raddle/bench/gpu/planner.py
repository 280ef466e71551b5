"""Planning on the GPU, through reservations whose lengths and page tables lie there; and what prefix discovery saves.

Its rows belong to the section "plan".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import raddle
from raddle.bench import results, timing
from raddle.bench.gpu.host import host_us
from raddle.bench.gpu.problem import DTYPE
from raddle.bench.timing import GpuClock

_HEADS = 32, 8, 128
_PAGE_SIZE = 16
_MIN_PREFIX = 1024


def measure(section: str, rounds: int, device: str = "cuda") -> list[results.Row]:
    """All figures."""
    attn = raddle.Attention(raddle.AttentionSpec(*_HEADS, variant=[raddle.Causal()]), device=device)
    clock = GpuClock(device)
    decode, found = "update on the GPU, B256 decode", "update on the GPU, 64 rows of 600 pages, prefixes found"
    parts: dict[str, Callable[[], list[results.Row]]] = {
        decode: lambda: _updates(section, decode, attn, clock, rounds, prefixes=False, bar_us=10.0),
        found: lambda: _updates(section, found, attn, clock, rounds, prefixes=True, bar_us=None),
        "decode, prefix found": lambda: _shared_decode(section, attn, clock, rounds),
    }
    return results.of_parts(section, parts)


def _decode(attn: Any, lengths: torch.Tensor, shared: int, min_prefix: int) -> tuple[Any, Any, int]:
    """A reservation and a layout of one row a request, of whose pages the first ``shared`` are everybody's, and how
    many pages there are."""
    requests, width = len(lengths), -(-int(lengths.max()) // _PAGE_SIZE)
    own = width - shared
    table = torch.arange(width, dtype=torch.int32).repeat(requests, 1)
    table[:, shared:] += own * torch.arange(requests, dtype=torch.int32)[:, None]
    qo_indptr = torch.arange(requests + 1, dtype=torch.int32)
    there = (x.to(attn.device) for x in (qo_indptr, table, lengths.to(torch.int32)))
    qo_indptr, table, lengths = there
    maxima = raddle.Maxima(
        max_requests=requests,
        max_qo_tokens=requests,
        max_kv_tokens=requests * width * _PAGE_SIZE,
        max_levels=2 if min_prefix else 1,
        max_qo_len=1,
        page_size=_PAGE_SIZE,
    )
    reservation = attn.reserve(maxima, device_lengths=True)
    options = {"page_size": _PAGE_SIZE, "discover_prefixes": min_prefix}
    return reservation, raddle.PagedKV(qo_indptr, None, table, lengths, **options), shared + own * requests


def _updates(
    section: str, name: str, attn: Any, clock: GpuClock, rounds: int, prefixes: bool, bar_us: float | None
) -> list[results.Row]:
    """Time of `update` on the GPU, whose cache has forgotten the batch, as it has after a model's layers."""
    torch.manual_seed(0)
    lengths = torch.randint(9500, 9601, (64,)) if prefixes else torch.randint(1024, 2049, (256,))
    reservation, layout, _ = _decode(attn, lengths, 512 if prefixes else 0, _MIN_PREFIX if prefixes else 0)
    times = clock.rounds({name: lambda _: reservation.update(layout)}, rounds)
    us = timing.median(times[name])
    reservation.check()
    enqueued = host_us(lambda: reservation.update(layout), 40 * rounds)
    host = results.figure(section, f"{name}: until enqueued", enqueued, "us")
    return [results.figure(section, name, us, "us", bar_us), host]


def _shared_decode(section: str, attn: Any, clock: GpuClock, rounds: int) -> list[results.Row]:
    """`run` of requests that share 8,192 tokens in pages known only to the GPU, with discovery and without."""
    requests, shared, own = 64, 8192, 256
    lengths = torch.full((requests,), shared + own)
    hq, hkv, dim = _HEADS
    q = torch.randn(requests, hq, dim, dtype=DTYPE, device=attn.device)
    out = {name: torch.empty_like(q) for name in ("found", "not looked for")}
    kv: tuple[torch.Tensor, ...] = ()
    calls = {}
    for name, min_prefix in (("found", _MIN_PREFIX), ("not looked for", 0)):
        reservation, layout, pages = _decode(attn, lengths, shared // _PAGE_SIZE, min_prefix)
        kv = kv or tuple(torch.randn(pages, _PAGE_SIZE, hkv, dim, dtype=DTYPE, device=attn.device) for _ in "kv")
        reservation.update(layout)
        reservation.check()

        def run(_: int, reservation: Any = reservation, name: str = name) -> None:
            attn.run(reservation, q, kv, out=out[name])

        calls[name] = run
        run(0)
    off = (out["found"].float() - out["not looked for"].float()).abs().max()
    if not off < 0.02 * out["found"].float().abs().max():
        raise RuntimeError(f"outputs with and without discovered prefixes differ by {off}")

    times = clock.rounds(calls, rounds)
    medians = {name: timing.median(each) for name, each in times.items()}
    share = timing.median([a / b for a, b in zip(times["found"], times["not looked for"])])
    workload = f"decode, {requests} share {shared} + {own}, prefix"
    rows = [results.figure(section, f"{workload} {name}", us, "us") for name, us in medians.items()]
    return [*rows, results.figure(section, f"{workload} found: share", share, "of the time", 1 / 3)]
