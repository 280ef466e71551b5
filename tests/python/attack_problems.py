"""Problems between guard pages: drawn layouts, variants and dtypes, states, and requests that are served together."""

from __future__ import annotations

import ctypes
import mmap
import threading
from typing import Any

import draws
import numpy as np
import raddle
from engine import spec_of, twin
from raddle.flex import masks, mods
from reference import Sigmoid
from reference.variants import one


def guarded(x: Any, at_end: bool) -> Any:
    """A copy, of the same strides, that begins or ends at a page that no access may touch; what is no array, as it is."""
    if isinstance(x, (list, tuple)):
        return type(x)(guarded(each, at_end) for each in x)
    if not isinstance(x, np.ndarray):
        return x
    page = mmap.PAGESIZE
    used = sum((n - 1) * step for n, step in zip(x.shape, x.strides)) + x.itemsize if x.size else 0
    size = -(-max(used, 1) // page) * page
    memory = mmap.mmap(-1, size + 2 * page)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for where in (base, base + page + size):
        if libc.mprotect(ctypes.c_void_p(where), page, mmap.PROT_NONE if hasattr(mmap, "PROT_NONE") else 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    # numpy's rows need no alignment beyond their elements'.
    first = page + (size - used if at_end else 0)
    np.frombuffer(memory, np.uint8, used, first)[...] = 0xFF  # NaN between rows
    copy = np.ndarray(x.shape, x.dtype, memory, first, x.strides)
    copy[...] = x
    return copy


FUNCTIONS = [
    [mods.softcap(20.0), masks.causal()],
    [masks.sliding_window(9)],
    [masks.prefix_lm(11)],
]


def problem(seed: int) -> Any:
    """A drawn problem, as of the tests of kernels: unused K and V are NaN."""
    rng = np.random.default_rng(seed)
    pick = lambda x: x[int(rng.integers(len(x)))]  # noqa: E731
    quantized = rng.random() < 0.2
    layout = pick(list(draws.LAYOUTS))
    drawn = draws.draw(
        rng,
        layout=layout,
        variant=pick(list(draws.VARIANTS)),
        dtype=pick(draws.DTYPES),
        dim=pick([8, 16, 24, 64, 72, 128]),
        dim_vo=pick([None, None, 16, 40]) if layout != "paged_interleaved" else None,
        group=pick([1, 2, 3, 4, 7]),
        lengths=draws.draw_lengths(rng, 4),
        kv_dtype=pick(draws.KV_DTYPES) if quantized else None,
        scales=(pick(draws.SCALES), pick(draws.SCALES)) if quantized else ("none", "none"),
    )
    return rng, drawn


def planned(rng: np.random.Generator, drawn: Any) -> tuple[Any, Any]:
    """Attention and plan of a problem."""
    attn = raddle.Attention(spec_of(drawn))
    schedule = draws.SCHEDULES[int(rng.integers(len(draws.SCHEDULES)))]
    return attn, attn.plan(twin(drawn.layout), num_workers=int(rng.integers(1, 9)), schedule=schedule)


def run(attn: Any, plan: Any, drawn: Any, **how: Any) -> Any:
    kv = drawn.kv[0] if len(drawn.kv) == 1 else drawn.kv
    return attn.run(plan, drawn.q, kv, **{"k_scale": drawn.k_scale, "v_scale": drawn.v_scale, **how})


def run_guarded(seed: int) -> str | None:
    """A run whose every tensor ends, then begins, at a page that faults; the same bits are expected."""
    rng, drawn = problem(seed)
    attn, plan = planned(rng, drawn)
    has_lse = one(drawn.variant, Sigmoid) is None
    found = run(attn, plan, drawn, return_lse=has_lse)
    expected = found if has_lse else (found,)
    if any(np.isnan(np.asarray(x, np.float32)).any() for x in expected):
        return f"guarded({seed}): NaN of slots that nothing reads"
    for at_end in (True, False):
        out = guarded(tuple(np.full_like(x, np.nan) for x in expected), at_end)
        kv = guarded(drawn.kv, at_end)
        scales = {"k_scale": guarded(drawn.k_scale, at_end), "v_scale": guarded(drawn.v_scale, at_end)}
        written = dict(zip(("out", "lse"), out))
        attn.run(plan, guarded(drawn.q, at_end), kv[0] if len(kv) == 1 else kv, **written, **scales)
        if not all(same_bits(x, y) for x, y in zip(out, expected)):
            return f"guarded({seed}): other bits between guard pages"
    return None


def same_bits(x: np.ndarray, y: np.ndarray) -> bool:
    return np.ascontiguousarray(x).tobytes() == np.ascontiguousarray(y).tobytes()


def run_traced(seed: int) -> str | None:
    """Functions of raddle.flex, compiled and in parts, between guard pages; the same bits are expected."""
    rng = np.random.default_rng(seed)
    rows, keys = int(rng.integers(1, 40)), int(rng.integers(1, 90))
    spec = raddle.AttentionSpec(4, 2, 16, dtype="float32", variant=FUNCTIONS[int(rng.integers(len(FUNCTIONS)))])
    attn = raddle.Attention(spec)
    plan = attn.plan(raddle.RaggedKV([0, rows], [0, keys]), num_workers=int(rng.integers(1, 9)))
    q, k, v = (rng.standard_normal((n, h, 16), np.float32) for n, h in ((rows, 4), (keys, 2), (keys, 2)))
    expected = attn.run(plan, q, (k, v), return_lse=True)
    for at_end in (True, False):
        out, lse = guarded(tuple(np.full_like(x, np.nan) for x in expected), at_end)
        attn.run(plan, guarded(q, at_end), guarded((k, v), at_end), out=out, lse=lse)
        if not (same_bits(out, expected[0]) and same_bits(lse, expected[1])):
            return f"traced({seed}): other bits between guard pages"
    return None


def merge_guarded(seed: int) -> str | None:
    """States of parts of the keys, merged, are the state of all of them; between guard pages."""
    rng = np.random.default_rng(seed)
    rows, keys, parts = int(rng.integers(1, 30)), int(rng.integers(0, 60)), int(rng.integers(1, 5))
    dim = int(rng.choice([8, 16, 24]))
    attn = raddle.Attention(raddle.AttentionSpec(4, 2, dim, dtype="float32"))
    q = rng.standard_normal((rows, 4, dim), np.float32)
    k, v = rng.standard_normal((2, keys, 2, dim), np.float32)

    def state(begin: int, end: int) -> Any:
        plan = attn.plan(raddle.RaggedKV([0, rows], [0, end - begin]))
        return attn.run(plan, q, (k[begin:end], v[begin:end]), return_state=True)

    cuts = [0, *np.sort(rng.integers(0, keys + 1, parts - 1)).tolist(), keys]
    states = [state(*cut) for cut in zip(cuts, cuts[1:])]
    for at_end in (True, False):
        listed = guarded(tuple(np.stack(x) for x in zip(*states)), at_end)
        out = guarded((np.full_like(q, np.nan), np.full(q.shape[:2], np.nan, np.float32)), at_end)
        raddle.merge_states(*listed, out=out)
        for found, expected in zip(out, state(0, keys)):
            if not np.allclose(found, expected, 1e-4, 1e-5):
                return f"merged({seed}): another state than of all keys at once"
    return None


def run_in_threads(seed: int) -> str | None:
    """One plan run by eight threads at once, with a plan made meanwhile; the same bits are expected."""
    rng, drawn = problem(seed)
    attn, plan = planned(rng, drawn)
    expected, wrong = run(attn, plan, drawn), []

    def work() -> None:
        for _ in range(4):
            if not same_bits(run(attn, plan, drawn), expected):
                wrong.append(seed)

    workers = [threading.Thread(target=work) for _ in range(8)]
    for each in workers:
        each.start()
    planned(*problem(seed + 1))
    for each in workers:
        each.join()
    return f"threads({seed}): other bits" if wrong else None
