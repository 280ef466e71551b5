"""Context parallelism: the keys of a batch lie on several processes, each of which attends to its own.

A process computes the state of every query row over the keys that it holds. The states are exchanged by
``torch.distributed``, each process composes those of its share of the rows, and all receive the result: what one process
with all keys would compute, within rounding (FlashInfer paper, section 2.2: states compose in any order).

    spans = raddle.parallel.spans(kv_len, num_ranks=4, page_size=16)[rank]    # which keys this process holds
    layout = raddle.parallel.layout([PagedKV(..., kv_begin=spans[:, 0, 0]), PagedKV(..., kv_begin=spans[:, 1, 0])],
                                    qo_indptr, kv_len)
    attention = raddle.parallel.ContextParallel(raddle.Attention(spec))
    out = attention.run(attention.plan(layout), q, [pool, pool])
"""

from __future__ import annotations

import datetime
import time
from typing import Any, Sequence

import numpy as np

from raddle import functional
from raddle._layout import Layout
from raddle._tensors import host_array, kind_of, lend_integer
from raddle.attention import Attention
from raddle.cascade import Cascade
from raddle.paged_kv import PagedKV
from raddle.plans import Plan
from raddle.variants import Sigmoid

__all__ = ["ContextParallel", "RankLost", "layout", "spans"]

#: Seconds for which a process whose exchange failed waits for the others to say that they are there.
_ROLL_CALL = 10.0

_MOST_RANKS, _INT_MAX = 1 << 20, 2**31 - 1


def spans(kv_len: Any, num_ranks: int, page_size: int = 1) -> Any:
    """Which keys of each request a process holds: two spans, so that causal prefill is balanced.

    A request's keys are cut into 2 · num_ranks chunks of whole pages, and process r gets chunks r and
    2 · num_ranks − 1 − r: an early one, which many rows attend to, with a late one. Short requests leave processes
    without keys; request i begins with process i, so that not all of them fall to the first. Keys that are generated
    later belong to the process with a request's last chunk, whose second span grows.

    Args:
        kv_len: [requests] keys of each request.
        num_ranks: how many processes there are.
        page_size: every span begins at a multiple of it.

    Returns:
        An int32 array [num_ranks, requests, 2, 2]: begin and end of the two spans, the second after the first.

    Raises:
        ValueError: a negative length, or num_ranks or page_size below 1.

    Example:
        >>> raddle.parallel.spans([64], num_ranks=2, page_size=16).tolist()
        [[[[0, 16], [48, 64]]], [[[16, 32], [32, 48]]]]
    """
    num_ranks, page_size = lend_integer(num_ranks, "num_ranks"), lend_integer(page_size, "page_size")
    for name, value, most in (("num_ranks", num_ranks, _MOST_RANKS), ("page_size", page_size, _INT_MAX)):
        if not 1 <= value <= most:
            raise ValueError(f"{name} is {value}; expected at least 1, at most {most}")
    lengths = _lengths(kv_len)
    chunks = 2 * num_ranks
    pages = -(-lengths // page_size)
    sizes = -(-pages // chunks) * page_size
    ranks, requests = np.arange(num_ranks)[:, None], np.arange(lengths.size)[None]
    early = (ranks - requests) % num_ranks
    chosen = np.stack([early, chunks - 1 - early], axis=-1)
    begins = np.minimum(chosen * sizes[:, None], lengths[:, None])
    ends = np.minimum(begins + sizes[:, None], lengths[:, None])
    return np.stack([begins, ends], axis=-1).astype(np.int32)


def layout(levels: Sequence[Layout], qo_indptr: Any, kv_len: Any) -> Layout:
    """The layout of this process: some of the keys, and all query rows, at their places in the whole text.

    Args:
        levels: one layout for each span of keys, in their order, with ``kv_begin`` (`PagedKV`): at most 7, with the
            groups of ``qo_indptr``.
        qo_indptr: [requests + 1] first row of each request.
        kv_len: [requests] keys of each request on all processes.

    Returns:
        A `Cascade`, whose last level holds no keys: it says where each text ends.

    Raises:
        ValueError: spans that overlap, or end after kv_len.

    Example:
        >>> early = raddle.PagedKV([0, 4], [0, 2], [3, 1], [32], page_size=16, kv_begin=[0])
        >>> late = raddle.PagedKV([0, 4], [0, 1], [0], [12], page_size=16, kv_begin=[96])
        >>> raddle.parallel.layout([early, late], [0, 4], kv_len=[108])
        Cascade(1 requests, 4 rows)
    """
    if not isinstance(levels, (list, tuple)):
        raise TypeError(f"levels is {kind_of(levels)}; expected a list of layouts")
    lengths = _lengths(kv_len).astype(np.int32)
    none = np.zeros(lengths.size + 1, np.int32)
    empty = np.zeros(0, np.int32), np.zeros_like(lengths)
    end = PagedKV(qo_indptr, none, *empty, page_size=1, kv_begin=lengths)
    return Cascade([*levels, end], allow_gaps=True)


def _lengths(kv_len: Any) -> np.ndarray:
    """kv_len as int64. Raises TypeError for what are no integers, ValueError for what are no lengths of requests."""
    lengths = host_array(kv_len, "kv_len")
    if lengths.size == 0 and lengths.dtype.kind == "f":
        lengths = lengths.astype(np.int64)  # numpy's guess for an empty list
    if lengths.dtype.kind not in "iu":
        raise TypeError(f"kv_len is {kind_of(kv_len)} of {lengths.dtype}; expected integers")
    if lengths.ndim != 1 or ((lengths < 0) | (lengths > _INT_MAX)).any():
        raise ValueError(f"kv_len is {kv_len!s:.200}; expected one length for each request, 0 to {_INT_MAX}")
    return lengths.astype(np.int64)


class RankLost(RuntimeError):
    """Some processes of a group did not take part in an exchange: they ended, or are stuck."""


class ContextParallel:
    """Attention over keys that lie on the processes of a group.

    Args:
        attention: what each process computes, on its own device.
        group: a process group of ``torch.distributed`` (gloo for CPUs, NCCL for GPUs); None: all processes. A group of
            the same processes is made of it, so that every one of them must come here.
        timeout: seconds after which an exchange that not all processes take part in fails.

    Raises:
        ValueError: an attention whose states have no LSE (`Sigmoid`), or a timeout that is not positive.
        RuntimeError: ``torch.distributed`` is not initialised.

    All processes call `run` with the same rows and plans of the same batch, in the same order; q lies on each.

    Example:
        >>> import tempfile, torch.distributed as dist
        >>> dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
        >>> attention = raddle.Attention(raddle.AttentionSpec(4, 2, 64, dtype="float32"))
        >>> together = raddle.parallel.ContextParallel(attention)
        >>> together.num_ranks
        1
        >>> dist.destroy_process_group()
    """

    def __init__(self, attention: Attention, group: Any = None, timeout: float = 60.0) -> None:
        import torch.distributed as dist

        if not timeout > 0:
            raise ValueError(f"timeout is {timeout}; expected seconds above 0")
        if any(isinstance(part, Sigmoid) for part in attention.spec.variant or ()):
            raise ValueError("attention has a Sigmoid, whose states are sums without LSE; expected a softmax")
        if not dist.is_initialized():
            raise RuntimeError("torch.distributed is not initialised; call torch.distributed.init_process_group first")
        self.attention = attention
        ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        self._group = dist.new_group(ranks, timeout=datetime.timedelta(seconds=timeout))
        self._ranks = ranks

    @property
    def rank(self) -> int:
        """The number of this process in the group."""
        return self._group.rank()

    @property
    def num_ranks(self) -> int:
        """How many processes the group has."""
        return len(self._ranks)

    def plan(self, layout: Layout, **options: Any) -> Plan:
        """A plan of this process's part of a batch.

        Args:
            layout: what `raddle.parallel.layout` made.
            options: same as in `Attention.plan`.

        Returns:
            A plan, for `run`.

        Raises:
            ValueError: as `Attention.plan`.
        """
        return self.attention.plan(layout, **options)

    def run(self, plan: Plan, q: Any, kv: Sequence[Any], *, return_lse: bool = False, **options: Any) -> Any:
        """Attention of all rows over the keys of all processes.

        Args:
            plan: of this process.
            q: [rows, Hq, head_dim], a tensor of torch, with equal values on every process.
            kv: K and V of this process, one entry a level that `layout` was given.
            return_lse: return (out, lse), too; lse is natural, [rows, Hq] float32.
            options: scale, params, k_scale and v_scale, as in `Attention.run`.

        Returns:
            out [rows, Hq, head_dim_vo] of q's dtype, with equal bits on every process; or (out, lse).

        Raises:
            RankLost: a process ended or is stuck: names it, on all others, after at most the timeout. The group cannot be
                used any more.
        """
        import torch

        o, lse = self.attention.run(plan, q, [*kv, self._no_keys(kv[-1])], return_state=True, **options)
        rows, heads, dim = o.shape
        share = -(-rows // self.num_ranks)
        states = o.new_zeros(self.num_ranks * share, heads, dim + 1)
        states[:rows, :, :dim] = o
        states[:rows, :, dim] = lse
        mine = torch.empty_like(states)
        self._exchange("all_to_all_single", mine, states)
        mine = mine.view(self.num_ranks, share, heads, dim + 1)
        parts = mine[..., :dim].contiguous(), mine[..., dim].contiguous()
        composed, total = functional.merge_states(*parts, finish=self.attention.spec)
        out = self._gathered(composed.to(q.dtype))[:rows]
        return (out, self._gathered(total)[:rows]) if return_lse else out

    def _no_keys(self, like: Any) -> Any:
        """K and V of the layout's last level, from which nothing is read."""
        spec, like = self.attention.spec, like[0] if isinstance(like, (tuple, list)) else like
        dims = spec.head_dim, spec.head_dim_vo
        return tuple(like.new_zeros(1, 1, spec.num_kv_heads, dim) for dim in dims)

    def _gathered(self, share: Any) -> Any:
        """The shares of all processes, one after another."""
        whole = share.new_empty(self.num_ranks * share.shape[0], *share.shape[1:])
        self._exchange("all_gather_into_tensor", whole, share)
        return whole

    def _exchange(self, name: str, to: Any, of: Any) -> None:
        import torch.distributed as dist

        try:
            getattr(dist, name)(to, of, group=self._group)
        except RuntimeError as error:
            raise RankLost(self._missing()) from error

    def _missing(self) -> str:
        """Asks all processes by way of the store that connected them, which outlives a broken group."""
        import torch.distributed as dist

        store = dist.PrefixStore(f"raddle/{self._group.group_name}", dist.distributed_c10d._get_default_store())
        keys = [str(rank) for rank in range(self.num_ranks)]
        missing = list(range(self.num_ranks))
        end = time.monotonic() + _ROLL_CALL
        try:
            store.set(keys[self.rank], "here")
            while missing and time.monotonic() < end:
                missing = [rank for rank in missing if not store.check([keys[rank]])]
                time.sleep(0.05)
        except RuntimeError:
            return "the process that holds the store of torch.distributed, by default rank 0, ended; the others stop"
        lost = ", ".join(str(self._ranks[rank]) for rank in missing)
        of = f"of {self.num_ranks} processes that attend together"
        return f"rank {lost} {of} ended or is stuck" if missing else f"the network between them failed, {of}"
