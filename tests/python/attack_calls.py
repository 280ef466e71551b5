"""Calls of the public API with arguments of which some are right, some damaged and some hostile."""

from __future__ import annotations

import inspect
import itertools
from types import ModuleType
from typing import Any, Callable, Iterator

import numpy as np
import raddle
import torch
from raddle import flex, mla, parallel
from raddle.compat import flash_attn_interface, flashinfer
from raddle.flex import masks, mods
from raddle.integrations.paged import layers, plans

#: What a call may raise. Errors of a device that is not there are RuntimeErrors with its name.
EXPECTED = (ValueError, TypeError, MemoryError, raddle.CompileError)
#: What is called as another library's function may raise that library's kinds of errors, and torch's.
OF_OTHERS = (*EXPECTED, RuntimeError, KeyError, IndexError, AttributeError, NotImplementedError, OverflowError, AssertionError)
#: Minutes of work; no arguments; what would change this process for all that follows.
NOT_CALLED = {"support_matrix", "last_busy_us", "install", "ContextParallel", "variant", "noop_mask"}
OTHERS = (flash_attn_interface, flashinfer)


# --- arguments ----------------------------------------------------------------------------------


class Raising:
    """Raises whatever is asked of it."""

    def refuse(self, *given: Any) -> Any:
        raise ValueError("a hostile object")

    __len__ = __getitem__ = __iter__ = __index__ = __int__ = __float__ = __bool__ = __array__ = __dlpack__ = refuse
    __dlpack_device__ = __eq__ = __lt__ = __add__ = __mul__ = refuse
    __hash__ = None  # type: ignore[assignment]


def functions() -> list[Callable[..., Any]]:
    """What may be given where a function of raddle.flex is expected."""

    def deep(x: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        for n in range(3000):
            x = x + q_idx * n
        return x

    def deep_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        kept = q_idx >= kv_idx
        for n in range(1500):
            kept = kept | (q_idx == kv_idx + n)
        return kept

    captured = np.arange(7, dtype=np.float32)
    return [
        deep,
        deep_mask,
        lambda *given: given,
        lambda score, b, h, q_idx, kv_idx: None,
        lambda b, h, q_idx, kv_idx: "kept",
        lambda b, h, q_idx, kv_idx: q_idx // 0 == 0,
        lambda b, h, q_idx, kv_idx: captured[kv_idx] > 0,
        lambda b, h, q_idx, kv_idx: True if q_idx > kv_idx else False,
        lambda score, b, h, q_idx, kv_idx: score + captured[q_idx],
        lambda score, b, h, q_idx, kv_idx: score / 0.0,
    ]


def hostile(rng: np.random.Generator) -> Any:
    """Something that no argument should be, or that few should."""
    numbers = [0, 1, -1, 2, 7, 2**31 - 1, -(2**31), 2**31, 2**63 - 1, -(2**63), 2**63, 2**64, 0.5, -0.0, np.nan, np.inf]
    others = [None, True, "", "x", "NHD", "\0", "RADDLE_FN", b"", b"\xff", [], (), {}, [[]], [None], {"": 0}, {1: 2}, ...]
    others += ["\ud800", "x" * 10**6, 10**400, -(10**400), {"softcap.cap": 1.0}, [[[]]], ((), ()), range(2**62)]
    made = [
        lambda: object(),
        lambda: Raising(),
        lambda: [Raising()],
        lambda: int,
        lambda: functions()[rng.integers(10)],
        lambda: raddle.Plan.__new__(raddle.Plan),
        lambda: raddle.Layout(),
        lambda: np.zeros(int(rng.integers(0, 4)), np.dtype(str(rng.choice(["i4", "i8", "u1", "f4", "f8", "c8", ">i4", "?"])))),
        lambda: np.zeros(tuple(rng.integers(0, 4, int(rng.integers(0, 6)))), np.float32),
        lambda: np.array([object()]),
        lambda: np.zeros(3, [("a", "f4"), ("b", "i4")]),
        lambda: np.array(["a", "b"]),
        lambda: np.broadcast_to(np.float32(1), (2**20, 2, 16)),
        lambda: np.lib.stride_tricks.as_strided(np.zeros(64, np.float32), (3, 4, 16), (4, 4, 4)),
        lambda: np.full(3, rng.choice([-1, -(2**31), 2**31 - 1]), np.int32),
        lambda: np.array([0, 2**62, 2**63 - 1]),
        lambda: torch.zeros(2, 3, dtype=[torch.float32, torch.bfloat16, torch.complex64, torch.bool][rng.integers(4)]),
        lambda: torch.zeros(3, device="meta"),
        lambda: torch.ones(3, 4, 16, requires_grad=True),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.empty(0, 4, 16),
        lambda: torch.ones(3, 4, 16).expand(5, 3, 4, 16),
        lambda: torch.ones(3, dtype=torch.complex64).conj(),
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


def damaged(rng: np.random.Generator, x: Any) -> Any:
    """Something like a right argument: an array of another shape, dtype, order or value, a list with such an entry."""
    if isinstance(x, (tuple, list)) and len(x):
        at = int(rng.integers(len(x)))
        changed = [*x]
        changed[at] = damaged(rng, x[at])
        return [lambda: type(x)(changed) if type(x) in (tuple, list) else changed, lambda: x[:at], lambda: [*x, x[at]]][
            rng.integers(3)
        ]()
    if isinstance(x, torch.Tensor):
        if not x.ndim:
            return x
        changed = damaged_array(rng, x.numpy())
        native = changed.dtype.isnative and all(step % changed.itemsize == 0 for step in changed.strides)
        return torch.from_numpy(changed) if native and min(changed.strides, default=0) >= 0 else x[..., None]
    if isinstance(x, np.ndarray) and x.ndim:
        return damaged_array(rng, x)
    if isinstance(x, (int, float)) and not isinstance(x, bool):
        return [-x, x + 1, x * 2**31, x - 0.5, x * 10**9, x // 2][rng.integers(6)]
    return hostile(rng)


def damaged_array(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    at = tuple(int(rng.integers(n)) for n in x.shape) if x.size else None
    value = rng.choice([-1.0, -2.0, 2**31 - 1.0, -(2.0**31), 7.0, 0.0, np.nan, np.inf])

    def changed() -> np.ndarray:
        y = x.copy()
        if at is not None:
            with np.errstate(invalid="ignore"):
                y[at] = np.array(value).astype(x.dtype)
        return y

    def read_only() -> np.ndarray:
        y = x.copy()
        y.flags.writeable = False
        return y

    def unaligned() -> np.ndarray:
        return np.ndarray(x.shape, x.dtype, np.zeros(x.nbytes + 1, np.uint8), 1)

    axis = int(rng.integers(x.ndim))
    kinds = [
        changed,
        changed,
        changed,
        read_only,
        unaligned,
        lambda: np.swapaxes(x, axis, -1),
        lambda: x[::-1],
        lambda: x[..., ::-1],
        lambda: x[..., ::2],
        lambda: x[1:],
        lambda: x[None],
        lambda: x[..., None],
        lambda: np.repeat(x, 2, axis),
        lambda: np.asfortranarray(x),
        lambda: np.broadcast_to(x[:1], x.shape),
        lambda: x.astype(np.float16),
        lambda: x.astype(np.float64),
        lambda: x.astype(">f4"),
        lambda: np.zeros((0, *x.shape[1:]), x.dtype),
    ]
    with np.errstate(all="ignore"):
        return kinds[rng.integers(len(kinds))]()


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
        self.match = self.cache.insert(list(range(20)), self.pool.pages(self.requests[0]), lock=True)
        self.block_mask = flex.create_block_mask(_mask, None, None, 3, 9, BLOCK_SIZE=4)
        self.right = self.arguments()
        self.of_others = self.arguments_of_others()
        self.methods = [*self.own_methods(), *self.others_methods()]

    def arguments(self) -> dict[str, Any]:
        """Right values of arguments, by name."""
        k, v, q = (np.ones(shape, np.float32) for shape in ((6, 16, 2, 16), (6, 16, 2, 16), (3, 4, 16)))
        rows, state, lse = np.ones((3, 2, 16), np.float32), np.ones((3, 4, 16), np.float32), np.ones((3, 4), np.float32)
        return {
            "spec": self.spec, "plan": self.plan, "layout": self.paged, "layouts": [self.ragged], "levels": [self.paged],
            "kv": (k, v), "kv_pool": (k, v), "q": q, "k": rows, "v": rows, "k_new": rows, "v_new": rows, "attn": self.attn,
            "maxima": raddle.Maxima(4, 8, 256), "reservations": [self.reservation], "pool": self.pool, "request": 0,
            "requests": self.requests, "counts": [1, 1], "count": 1, "pages": [1, 2], "kv_len": [20, 5], "num_pages": 8,
            "page_size": 16, "qo_indptr": [0, 1, 3], "kv_indptr": [0, 4, 9], "page_indptr": None, "left": 4, "cap": 30.0,
            "page_indices": [[1, 4], [2, 0]], "tokens": [1, 2, 3], "o_a": state, "o_b": state, "lse_a": lse, "lse_b": lse,
            "o": state[None], "lse": lse, "summary": np.ones((6, 2, 2, 16), np.float32), "parents": [-1, -1, 0],
            "accepted": [0, 0], "from_pages": [1], "to_pages": [3], "num_heads": 4, "rotary_dim": 16, "mask_mod": _mask,
            "slopes": [1.0] * 4, "logits": [0.0] * 4, "Br": 1, "Bc": 16, "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16,
            "dtype": "float32", "indptr": [0, 1], "indices": [0], "query": q[None].swapaxes(1, 2), "B": None, "H": None,
            "key": np.ones((1, 2, 9, 16), np.float32), "value": np.ones((1, 2, 9, 16), np.float32), "Q_LEN": 3, "KV_LEN": 9,
            "score_mod": _score, "block_mask": self.block_mask, "enable_gqa": True, "qo_pos": [19, 3, 4], "matches": [self.match,
            None], "node": self.match.node, "extra_key": "x", "out": np.zeros_like(q), "params": {"window.left": 4},
            "cos": np.ones((30, 8), np.float32), "sin": np.ones((30, 8), np.float32), "qo_len": [1, 2], "scale": 0.25,
            "rope": raddle.Rope(16), "num_workers": 3, "masks": [np.ones((1, 20), bool), np.ones((2, 5), bool)],
            "num_ranks": 2, "mask_mods": [_mask], "document_id": [0, 0, 1], "window": 4, "offset": 2, "prefix_length": 3,
            "discover_prefixes": 16, "device": "cpu", "schedule": "linear", "layer": layers.LayerAttention(4, 2, 16, 0.25),
            "limits": plans.Limits(4, 8, 256, 16, 8), "cache": np.ones((6, 16, 1, 576), np.float32),
        }  # fmt: skip

    def arguments_of_others(self) -> dict[str, Any]:
        """The same for functions of other libraries: tensors of torch."""
        ints = lambda *x: torch.tensor(x, dtype=torch.int32)  # noqa: E731
        q, k = torch.ones(3, 4, 16), torch.ones(9, 2, 16)
        pool = torch.ones(6, 16, 2, 16)
        return {
            "q": q, "k": k, "v": k, "cu_seqlens_q": ints(0, 1, 3), "cu_seqlens_k": ints(0, 4, 9), "max_seqlen_q": 2,
            "max_seqlen_k": 5, "k_cache": pool, "v_cache": pool.clone(), "cache_seqlens": ints(20, 5), "causal": True,
            "page_table": ints(1, 4, 2, 3).view(2, 2), "float_workspace_buffer": torch.zeros(64, dtype=torch.uint8),
            "paged_kv_cache": torch.ones(6, 2, 16, 2, 16), "indptr": ints(0, 2, 3), "indices": ints(1, 4, 2),
            "last_page_len": ints(4, 5), "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "page_size": 16,
            "qo_indptr": ints(0, 1, 3), "paged_kv_indptr": ints(0, 2, 3), "paged_kv_indices": ints(1, 4, 2),
            "paged_kv_last_page_len": ints(4, 5), "head_dim_qk": 16, "kv_indptr": ints(0, 4, 9), "v_a": q, "s_a": q[..., 0],
            "v_b": q, "s_b": q[..., 0], "s": q[None, ..., 0], "s_other": q[..., 0], "v_other": q, "x": torch.ones(9) > 0,
            "q_data_type": torch.float32, "append_key": k[:3], "append_value": k[:3], "batch_indices": ints(0, 1, 1),
            "positions": ints(3, 3, 4), "kv_last_page_len": ints(4, 5), "append_indptr": ints(0, 1, 3), "seq_lens": ints(20, 5),
            "kv_indices": ints(1, 4, 2), "nnz": 3, "M": 4, "N": 4, "R": 2, "C": 2,
        }  # fmt: skip

    def own_methods(self) -> list[tuple[str, Callable[..., Any]]]:
        things = (self.attn, self.plan, self.paged, self.reservation, self.pool, self.cache, self.block_mask, raddle.Causal())
        return [method for thing in things for method in _methods(thing)]

    def others_methods(self) -> list[tuple[str, Callable[..., Any]]]:
        buffer = torch.zeros(64, dtype=torch.uint8)
        made = [getattr(flashinfer, name) for name in flashinfer.__all__ if name.endswith("Wrapper")]
        one = [kind(buffer) for kind in made if "Cascade" not in kind.__name__ and "CUDAGraph" not in kind.__name__]
        return [("compat." + name, method) for thing in one for name, method in _methods(thing)]

    def calls(self) -> Iterator[tuple[str, Callable[..., Any], bool]]:
        """All functions and methods of the public API, by name; whether they are another library's."""
        for module in (raddle, flex, masks, mods, mla, parallel):
            for name in _names(module):
                yield name, getattr(module, name), False
        for thing in (layers.LayerAttention, plans.LayerPlans, plans.plans_of, plans.Limits):
            yield thing.__name__, thing, True
        for module in OTHERS:
            for name in _names(module):
                yield "compat." + name, getattr(module, name), True
        for name, method in self.methods:
            yield name, method, name.startswith("compat.")


def _names(module: ModuleType) -> list[str]:
    listed = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    within = "raddle" if hasattr(module, "__all__") else module.__name__
    own = lambda name: getattr(getattr(module, name), "__module__", "").startswith(within)  # noqa: E731
    return [name for name in listed if callable(getattr(module, name)) and name not in NOT_CALLED and own(name)]


def _methods(thing: Any) -> list[tuple[str, Callable[..., Any]]]:
    kind = type(thing)
    named = [name for name in dir(kind) if not name.startswith("_") and name not in NOT_CALLED]
    # tvm-ffi's own ask about handles.
    named = [name for name in named if name not in ("same_as", "is_", "id_")]
    return [(f"{kind.__name__}.{name}", getattr(thing, name)) for name in named if callable(getattr(kind, name))]


def _mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def _score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * 2.0


# --- a call -------------------------------------------------------------------------------------


def draw_arguments(rng: np.random.Generator, right: dict[str, Any], function: Callable[..., Any]) -> dict[str, Any] | None:
    """Arguments by name; None where a function does not tell its own."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    given: dict[str, Any] = {}
    # In half of the calls one argument alone is wrong, so that what is behind the first check is reached, too.
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    alone = int(rng.integers(len(named))) if named and rng.random() < 0.5 else None
    for n, each in enumerate(named):
        needed = each.default is each.empty
        known = each.name in right
        if not (needed or n == alone or rng.random() < 0.3):
            continue
        chance = rng.random()
        if known and (chance < 0.6 if alone is None else n != alone):
            given[each.name] = right[each.name]
        elif known and chance < 0.8:
            given[each.name] = damaged(rng, right[each.name])
        elif needed or alone is None or n == alone:
            given[each.name] = hostile(rng)
    return given


def call_hostile(around: Surroundings, seed: int) -> str | None:
    """One call. Returns what is wrong with its answer, if anything."""
    rng = np.random.default_rng(seed)
    calls = list(around.calls())
    name, function, others = calls[rng.integers(len(calls))]
    given = draw_arguments(rng, {**around.right, **around.of_others} if others else around.right, function)
    if given is None:
        return None
    counted = pool_counts(around.pool)
    try:
        function(**given)
        return None
    except OF_OTHERS if others else EXPECTED:
        pass
    except RuntimeError as error:
        if "cuda" not in str(error).lower():
            return said(name, given, error)
    except Exception as error:
        return said(name, given, error)
    if name.startswith("PagePool.") and pool_counts(around.pool) != counted:
        return said(name, given, ValueError("it was refused, and changed the pool"))
    return None


def pool_counts(pool: raddle.PagePool) -> tuple[int, ...]:
    return pool.used, pool.free, pool.shared, pool.num_requests


def said(name: str, given: dict[str, Any], error: Exception) -> str:
    def shown(x: Any) -> str:
        try:
            return f"{x!r:.40}"
        except Exception:
            return f"a {type(x).__name__}"

    try:
        text = f"{error!s:.200}"
    except Exception as unreadable:  # as of bytes that are no text
        text = f"a message that cannot be read ({unreadable!r:.80})"
    return f"{name}({', '.join(f'{k}={shown(v)}' for k, v in given.items())}): {type(error).__name__}: {text}"


def all_names(around: Surroundings) -> list[str]:
    return list(itertools.chain(name for name, _, _ in around.calls()))
