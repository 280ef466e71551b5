"""An attack on the public API: calls with hostile arguments, problems between guard pages, and threads, each in a fork.

``python tests/python/attack.py --seconds 1800`` (``make fuzz``) runs until the time is over and prints its figures; a
problem prints the seed that repeats it. `test_attack.py` runs a part of it with every session's seed.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import inspect
import mmap
import os
import pickle
import resource
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from typing import Any, Callable, Iterator

import numpy as np
import raddle
from raddle import flex

#: What a call may raise. Errors of a device that is not there are RuntimeErrors with its name.
EXPECTED = (ValueError, TypeError, MemoryError, raddle.CompileError)
CALLS_AT_ONCE, SECONDS_AT_ONCE, MOST_MEMORY = 100, 120, 16 << 30
NOT_CALLED = {"support_matrix", "last_busy_us"}  # minutes of work; no arguments


# --- arguments ----------------------------------------------------------------------------------


def hostile(rng: np.random.Generator) -> Any:
    """Something that no argument should be, or that few should."""
    numbers = [0, 1, -1, 2, 7, 2**31 - 1, -(2**31), 2**31, 2**63 - 1, -(2**63), 2**63, 2**64, 0.5, -0.0, np.nan, np.inf]
    others = [None, True, "", "x", "NHD", "\0", "RADDLE_FN", b"", b"\xff", [], (), {}, [[]], [None], {"": 0}, {1: 2}, ...]
    made = [
        lambda: object(),
        lambda: int,
        lambda: (lambda *given: given),
        lambda: raddle.Plan.__new__(raddle.Plan),
        lambda: raddle.Layout(),
        lambda: np.zeros(int(rng.integers(0, 4)), np.dtype(str(rng.choice(["i4", "i8", "u1", "f4", "f8", "c8", ">i4", "?"])))),
        lambda: np.zeros(tuple(rng.integers(0, 4, int(rng.integers(0, 6)))), np.float32),
        lambda: np.array([object()]),
        lambda: np.broadcast_to(np.float32(1), (2**20, 2, 16)),
        lambda: np.lib.stride_tricks.as_strided(np.zeros(64, np.float32), (3, 4, 16), (4, 4, 4)),
        lambda: np.full(3, rng.choice([-1, -(2**31), 2**31 - 1]), np.int32),
        lambda: np.array([0, 2**62, 2**63 - 1]),
        lambda: [1, 2**70],
        lambda: [raddle.Causal.__new__(raddle.Causal)],
        lambda: np.float64(3),
        lambda: np.datetime64("2020"),
        lambda: range(3),
        lambda: iter([1, 2]),
        lambda: memoryview(b"abc"),
    ]
    kind = rng.integers(3)
    if kind == 0:
        return numbers[rng.integers(len(numbers))]
    return others[rng.integers(len(others))] if kind == 1 else made[rng.integers(len(made))]()


class Surroundings:
    """Valid objects, of which calls change some: every fork has its own."""

    def __init__(self) -> None:
        self.spec = raddle.AttentionSpec(4, 2, 16, dtype="float32", variant=raddle.Causal())
        self.attn = raddle.Attention(self.spec)
        self.paged = raddle.PagedKV([0, 1, 3], None, [[1, 4], [2, -1]], [20, 5], page_size=16)
        self.ragged = raddle.RaggedKV([0, 3], [0, 9])
        self.plan = self.attn.plan(self.paged)
        self.reservation = self.attn.reserve(raddle.Maxima(4, 8, 256))
        self.reservation.update(self.paged)
        self.pool = raddle.PagePool(16)
        self.requests = [self.pool.add(), self.pool.add()]
        self.pool.append(self.requests, [20, 5])
        self.cache = raddle.RadixCache(self.pool)
        k, v, q = (np.ones(shape, np.float32) for shape in ((6, 16, 2, 16), (6, 16, 2, 16), (3, 4, 16)))
        rows, state, lse = np.ones((3, 2, 16), np.float32), np.ones((3, 4, 16), np.float32), np.ones((3, 4), np.float32)
        #: Right values of arguments, by name.
        self.right = {
            "spec": self.spec, "plan": self.plan, "layout": self.paged, "layouts": [self.ragged], "levels": [self.paged],
            "kv": (k, v), "kv_pool": (k, v), "q": q, "k": rows, "v": rows, "k_new": rows, "v_new": rows, "attn": self.attn,
            "maxima": raddle.Maxima(4, 8, 256), "reservations": [self.reservation], "pool": self.pool, "request": 0,
            "requests": self.requests, "counts": [1, 1], "count": 1, "pages": [1, 2], "kv_len": [20, 5], "num_pages": 8,
            "page_size": 16, "qo_indptr": [0, 1, 3], "kv_indptr": [0, 4, 9], "page_indptr": None, "left": 4, "cap": 30.0,
            "page_indices": [[1, 4], [2, 0]], "tokens": [1, 2, 3], "o_a": state, "o_b": state, "lse_a": lse, "lse_b": lse,
            "o": state[None], "lse": lse[None], "summary": np.ones((6, 2, 2, 16), np.float32), "parents": [-1, -1, 0],
            "accepted": [0, 0], "from_pages": [1], "to_pages": [3], "num_heads": 4, "rotary_dim": 16, "mask_mod": _mask,
            "slopes": [1.0] * 4, "logits": [0.0] * 4, "Br": 1, "Bc": 16, "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16,
            "dtype": "float32", "indptr": [0, 1], "indices": [0], "query": q[None], "key": rows[None], "value": rows[None],
            "B": None, "H": None, "Q_LEN": 8, "KV_LEN": 8, "score_mod": _score,
        }  # fmt: skip

    def calls(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """All functions and methods of the public API, by name."""
        for module in (raddle, flex):
            for name in module.__all__:
                found = getattr(module, name)
                if callable(found) and name not in NOT_CALLED:
                    yield name, found
        for thing in (self.attn, self.plan, self.paged, self.reservation, self.pool, self.cache, raddle.Causal()):
            for name in dir(thing):
                if not name.startswith("_") and callable(getattr(thing, name, None)) and name not in NOT_CALLED:
                    yield f"{type(thing).__name__}.{name}", getattr(thing, name)


def _mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def _score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * 2.0


def call_hostile(around: Surroundings, seed: int) -> str | None:
    """One call with some arguments right and some hostile. Returns what is wrong with its answer, if anything."""
    rng = np.random.default_rng(seed)
    calls = list(around.calls())
    name, function = calls[rng.integers(len(calls))]
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    given: dict[str, Any] = {}
    for each in parameters:
        if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) or each.kind is each.POSITIONAL_ONLY:
            continue
        needed = each.default is each.empty
        if needed or rng.random() < 0.3:
            right = needed and rng.random() < 0.6 and each.name in around.right
            given[each.name] = around.right[each.name] if right else hostile(rng)
    try:
        function(**given)
    except EXPECTED:
        return None
    except RuntimeError as error:
        return None if "CUDA" in str(error) or "cuda" in str(error) else _said(name, given, error)
    except Exception as error:
        return _said(name, given, error)
    return None


def _said(name: str, given: dict[str, Any], error: Exception) -> str:
    return f"{name}({', '.join(f'{k}={v!r:.40}' for k, v in given.items())}): {type(error).__name__}: {str(error):.100}"


# --- problems between guard pages ----------------------------------------------------------------


def guarded(x: np.ndarray, at_end: bool) -> np.ndarray:
    """A copy that begins, or ends, at a page that no access may touch."""
    page = mmap.PAGESIZE
    size = -(-max(x.nbytes, 1) // page) * page
    memory = mmap.mmap(-1, size + 2 * page)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for where in (base, base + page + size):
        if libc.mprotect(ctypes.c_void_p(where), page, mmap.PROT_NONE if hasattr(mmap, "PROT_NONE") else 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    # numpy's rows need no alignment beyond their elements'.
    first = page + (size - x.nbytes if at_end else 0)
    copy = np.frombuffer(memory, np.uint8, x.nbytes, first).view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def problem(seed: int) -> tuple[Any, ...]:
    """Attention, plan and tensors of a drawn batch."""
    rng = np.random.default_rng(seed)
    group, heads, dim, page = (int(rng.choice(x)) for x in ((1, 2, 4), (1, 2, 3), (8, 16, 64, 72), (1, 3, 16)))
    qo_len = rng.integers(0, 20, int(rng.integers(1, 5)))
    kv_len = qo_len + rng.integers(0, 70, len(qo_len))
    pages = -(-kv_len // page)
    total = max(int(pages.sum()), 1)
    indices = rng.permutation(total)[: int(pages.sum())].astype(np.int32)
    starts = [np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (qo_len, pages)]
    variant = [[], [raddle.Causal()], [raddle.SoftCap(20.0), raddle.Causal()], [raddle.SlidingWindow(9, 3)]]
    spec = raddle.AttentionSpec(group * heads, heads, dim, dtype="float32", variant=variant[int(rng.integers(4))])
    attn = raddle.Attention(spec)
    layout = raddle.PagedKV(starts[0], starts[1], indices, kv_len.astype(np.int32), page_size=page)
    q = rng.standard_normal((int(qo_len.sum()), group * heads, dim), np.float32)
    k, v = rng.standard_normal((2, total, page, heads, dim), np.float32)
    return attn, attn.plan(layout, num_workers=int(rng.integers(1, 9))), q, k, v


def run_guarded(seed: int) -> str | None:
    """A run whose every tensor ends, then begins, at a page that faults; the same bits are expected."""
    attn, plan, q, k, v = problem(seed)
    expected = attn.run(plan, q, (k, v), return_lse=True)
    for at_end in (True, False):
        q1, k1, v1 = (guarded(x, at_end) for x in (q, k, v))
        out, lse = (guarded(np.full_like(x, np.nan), at_end) for x in expected)
        attn.run(plan, q1, (k1, v1), out=out, lse=lse)
        if not (np.array_equal(out, expected[0]) and np.array_equal(lse, expected[1])):
            return f"guarded({seed}): other bits between guard pages"
    return None


def run_in_threads(seed: int) -> str | None:
    """One plan run by eight threads at once, with a plan made meanwhile; the same bits are expected."""
    attn, plan, q, k, v = problem(seed)
    expected, wrong = attn.run(plan, q, (k, v)), []

    def work() -> None:
        for _ in range(4):
            if not np.array_equal(attn.run(plan, q, (k, v)), expected):
                wrong.append(seed)

    workers = [threading.Thread(target=work) for _ in range(8)]
    for each in workers:
        each.start()
    problem(seed + 1)
    for each in workers:
        each.join()
    return f"threads({seed}): other bits" if wrong else None


# --- forks ---------------------------------------------------------------------------------------


def attack(seed: int) -> tuple[Counter[str], list[str]]:
    """A fork's share: hostile calls, guarded problems, threads. Returns how many of each, and what went wrong."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _work(seed, writing)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    status = os.waitpid(child, 0)[1]
    counts: Counter[str] = Counter(forks=1)
    found = []
    last = None
    lines = data.split(b"\n\0\n")
    for line in lines[:-1]:
        kind, item, wrong = pickle.loads(line)
        if wrong is None:
            counts[kind] += 1
            last = kind, item
        elif wrong:
            found.append(f"seed {seed}, {kind} {item}: {wrong}")
    if status:
        how = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit status {status >> 8}"
        found.append(f"seed {seed}: {how} in {last}")
    return counts, found


def _work(seed: int, writing: int) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(SECONDS_AT_ONCE)
    faulthandler.disable()  # under pytest it would print what is found
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)

    def say(*what: Any) -> None:
        os.write(writing, pickle.dumps(what) + b"\n\0\n")

    around = Surroundings()
    kinds = [("calls", lambda n: call_hostile(around, n))] * CALLS_AT_ONCE
    kinds += [("guarded", run_guarded)] * 10 + [("threads", run_in_threads)]
    for number, (kind, step) in enumerate(kinds):
        item = seed * 1000 + number
        say(kind, item, None)  # before it runs, so that a crash has a name
        try:
            wrong = step(item)
        except BaseException as error:
            wrong = f"{type(error).__name__}: {str(error):.200}"
        if wrong:
            say(kind, item, wrong)


def run_for(seconds: float, seed: int) -> tuple[Counter[str], list[str]]:
    """Forks one after another until the time is over."""
    counts, found = Counter[str](), []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        more, wrong = attack(seed)
        counts.update(more)
        found += wrong
        seed += 1
    return counts, found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    counts, found = run_for(given.seconds, given.seed)
    print(", ".join(f"{n} {kind}" for kind, n in counts.items()))
    kinds = Counter(each.split("(")[0].rpartition(" ")[2] + each.rpartition("): ")[2][:60] for each in found)
    for each in {each.rpartition("): ")[2][:50]: each for each in found}.values():
        print("  ", each)
    print(f"{len(found)} wrong")
    sys.exit(bool(found))
