"""Endless texts in constant memory: attention sinks and a recent window over a rolling cache (StreamingLLM).

::

    cache = raddle.RollingCache(pool)
    requests = [cache.add(num_sinks=4, window=1020) for _ in range(2)]
    step = cache.append(requests, [300, 17])           # chunks of prompts, then 1 token a step
    raddle.append_kv(step.pages, kv, k, v)             # K as it is: not turned
    out = attn.run(attn.plan(step.layout), q, kv)      # of a spec with raddle.Rope and raddle.Causal
    cache.finish(requests)

A request keeps its first num_sinks tokens and its last ``window`` ones, whatever their number was. Positions count what
is kept, 0, 1, 2, …, so they change with every step: the cache holds K unturned, and RoPE fused into attention turns Q
and K by the positions of the step. Nothing is moved or rewritten; a new token takes the slot of the oldest one.

Source: Xiao et al. 2023, arXiv 2309.17453, section 3.2 (rolling KV cache with attention sinks).
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np

from raddle._tensors import kind_of, lend_index
from raddle.layouts import BlockSparse, PagedKV
from raddle.page_pool import PagePool


class RollingStep(NamedTuple):
    """One step of a batch: what `RollingCache.append` returns."""

    pages: PagedKV  #: where the new rows go, for `append_kv`; a request whose slots begin anew is two of its entries
    layout: BlockSparse  #: what they attend to, for `Attention.plan`


class _Request:
    """What is kept of one text. Slots count over its pages: the sinks', then the window's, a ring."""

    __slots__ = ("num_sinks", "window", "pages", "num_tokens")

    def __init__(self, num_sinks: int, window: int, pages: np.ndarray) -> None:
        self.num_sinks, self.window, self.pages, self.num_tokens = num_sinks, window, pages, 0


class RollingCache:
    """Requests that keep attention sinks and a recent window, on pages of ``pool``.

    Args:
        pool: whose pages are taken. Other requests may be on it, too. Pools of K and V are NHD:
            [pages, page_size, Hkv, D].

    A request is an int, never used again. Where an argument is ``requests``, it is a list or an array of them, each
    named once. One thread at a time.

    Raises:
        TypeError: ``pool`` is not a `PagePool`; from every method: arguments that are not integers.
        ValueError: from every method: a request that is not there. Nothing has changed then.

    Example:
        >>> cache = raddle.RollingCache(raddle.PagePool(num_pages=8, page_size=16))
        >>> request = cache.add(num_sinks=4, window=60)
        >>> for count in (50, 40, 1):
        ...     step = cache.append([request], count)
        >>> cache.num_tokens(request), cache.kv_len(request)
        (91, 64)
    """

    def __init__(self, pool: PagePool) -> None:
        if not isinstance(pool, PagePool):
            raise TypeError(f"pool is {kind_of(pool)}; expected a PagePool")
        self._pool = pool
        self._page_size = pool.page_size
        self._requests: dict[int, _Request] = {}
        self._numbers = itertools.count()

    @property
    def pool(self) -> PagePool:
        """Whose pages are taken."""
        return self._pool

    @property
    def num_requests(self) -> int:
        """Requests that are not finished."""
        return len(self._requests)

    def add(self, num_sinks: int = 4, window: int = 1020) -> int | None:
        """Begins a request without tokens, with all the pages that it will ever have.

        Args:
            num_sinks: first tokens of the text that are always kept; 0: a plain rolling window.
            window: last tokens that are kept, at least 1, the newest included.

        It takes ``ceil((num_sinks + window) / page_size)`` pages, to the last slot.

        Returns:
            The request's number; None where there are too few free pages.

        Raises:
            ValueError: numbers out of range, or more pages than the pool has.
            TypeError: numbers that are no ints.
        """
        for name, value, least in (("num_sinks", num_sinks, 0), ("window", window, 1)):
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
                raise TypeError(f"{name} is {kind_of(value)}; expected an int")
            if value < least:
                raise ValueError(f"{name} is {value}; expected at least {least}")
        num_pages = -(-int(num_sinks + window) // self._page_size)
        if num_pages > self._pool.num_pages:
            raise ValueError(
                f"num_sinks and window are {num_sinks} and {window}, {num_pages} pages of {self._page_size}; "
                f"expected at most {self._pool.num_pages}, the pool's"
            )
        pages = self._pool.allocate(num_pages)
        if pages is None:
            return None
        request = next(self._numbers)
        self._requests[request] = _Request(int(num_sinks), int(window), pages)
        return request

    def num_tokens(self, request: int) -> int:
        """Returns how many tokens a request has had, dropped ones included. Raises ValueError for an unknown one."""
        return self._find(request).num_tokens

    def kv_len(self, request: int) -> int:
        """Returns how many keys a request has: its tokens, but never more than num_sinks + window.

        Raises:
            ValueError: a request that is not there.
        """
        found = self._find(request)
        return min(found.num_tokens, found.num_sinks + found.window)

    def pages(self, request: int) -> np.ndarray:
        """Returns a request's pages, int32: the same from its first token to its last.

        Raises:
            ValueError: a request that is not there.
        """
        return self._find(request).pages.copy()

    def append(self, requests: Any, counts: Any = 1) -> RollingStep:
        """Takes in ``counts[i]`` new tokens (or ``counts``, of all) of each request, its query rows of this step.

        The oldest tokens are dropped first, so that after the step a request keeps at most num_sinks + window tokens,
        the new ones included. Of these a row sees itself and what came before it, by `Causal`: the first of n rows sees
        a window of ``window - n + 1`` tokens, so chunks of a prompt should be well below the window. A chunk has at
        most ``window`` tokens, and those of the sinks that are not there yet.

        Of the layout's row blocks each lists its request's pages. They have as many rows as divide all counts: chunks
        of one length, or decoding steps, read a page once a request, but a chunk in a step with decoding requests once
        a row. So plan chunks apart from decoding.

        Write K without RoPE: `append_kv` of ``pages`` without its ``rope``, which would turn K by its slot.

        Returns:
            `RollingStep`.

        Raises:
            ValueError: a chunk that is too long, a negative count, or a request that is not there or named twice.
        """
        found = self._find_once(_integers(requests, "requests").tolist())
        counts = _counts(counts, found)
        lists = _Lists([request.pages for request in found], self._page_size)
        sinks, window, before = (
            np.array([getattr(request, name) for request in found], np.int64)
            for name in ("num_sinks", "window", "num_tokens")
        )
        step = RollingStep(
            _new_slots(lists, sinks, window, before, counts), _kept_slots(lists, sinks, window, before + counts, counts)
        )
        for request, count in zip(found, counts.tolist()):
            request.num_tokens += count
        return step

    def finish(self, requests: Any) -> np.ndarray:
        """Ends requests.

        Returns:
            The pages that are free now, int32.

        Raises:
            ValueError: a request that is not there or named twice.
        """
        requests = _integers(requests, "requests").tolist()
        pages = [request.pages for request in self._find_once(requests)]
        for request in requests:
            del self._requests[request]
        return self._pool.release(_joined(pages))

    def __repr__(self) -> str:
        return f"RollingCache({self.num_requests} requests on {self._pool!r})"

    def _find(self, request: int, name: str = "request") -> _Request:
        if request not in self._requests:
            raise ValueError(f"{name} is {request}; expected a request of this cache that is not finished")
        return self._requests[request]

    def _find_once(self, requests: list[int]) -> list[_Request]:
        """The requests of a call that names each once."""
        found = {}
        for i, request in enumerate(requests):
            if request in found:
                raise ValueError(f"requests[{i}] is {request} again; expected each once")
            found[request] = self._find(request, f"requests[{i}]")
        return list(found.values())


class _Lists:
    """The pages of a step's requests, one list after another."""

    def __init__(self, lists: list[np.ndarray], page_size: int) -> None:
        self.pages, self.first, self.page_size = _joined(lists), _indptr([len(each) for each in lists]), page_size

    def of_runs(self, request: np.ndarray, begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The pages on which runs of slots lie, none of them empty: where each run's begin, and which they are."""
        first = begin // self.page_size
        count = (end - 1) // self.page_size - first + 1
        indptr = _indptr(count)
        return indptr, self.pages[np.arange(indptr[-1]) + np.repeat(self.first[request] + first - indptr[:-1], count)]


def _new_slots(lists: _Lists, sinks: Any, window: Any, before: Any, counts: Any) -> PagedKV:
    """The page table of the new rows: those up to the end of the ring are an entry, those from its start another."""
    end_of_ring = sinks + window
    begin = np.where(before < end_of_ring, before, sinks + (before - sinks) % window)
    rows = np.minimum(counts, end_of_ring - begin)
    runs = np.stack([begin, sinks], 1).ravel()
    rows = np.stack([rows, counts - rows], 1).ravel()
    used = np.flatnonzero(rows)
    runs, rows = runs[used], rows[used]
    # Pages before the first new row are left out, so keys count from that row's page.
    page_indptr, page_indices = lists.of_runs(used // 2, runs, runs + rows)
    kv_len = (runs % lists.page_size + rows).astype(np.int32)
    return PagedKV(_indptr(rows), page_indptr, page_indices, kv_len, lists.page_size)


def _kept_slots(lists: _Lists, sinks: Any, window: Any, tokens: Any, counts: Any) -> BlockSparse:
    """Sinks, then the window from its oldest token on: at most three runs of slots, cut at pages."""
    kept = np.minimum(tokens, sinks + window)
    oldest = np.where(tokens > kept, sinks + (tokens - sinks) % window, sinks)
    rolled = oldest > sinks
    begin = np.stack([np.zeros_like(sinks), oldest, sinks], 1)
    end = np.stack([np.where(rolled, sinks, kept), np.where(rolled, kept, oldest), oldest], 1)

    # A list for each row block, which lies within one request.
    block_rows = max(int(np.gcd.reduce(counts, initial=0)), 1)
    request = np.repeat(np.arange(len(kept)), counts // block_rows)
    begin, end = begin[request].ravel(), end[request].ravel()
    used = np.flatnonzero(end > begin)
    begin, end, block = begin[used], end[used], used // 3
    entry, indices = lists.of_runs(request[block], begin, end)
    # A run's pages are full but for its first and last.
    first, count = np.zeros(len(indices), np.int32), np.full(len(indices), lists.page_size, np.int32)
    first[entry[:-1]] = begin % lists.page_size
    count[entry[1:] - 1] = (end - 1) % lists.page_size + 1
    count -= first
    indptr = entry[np.searchsorted(block, np.arange(len(request) + 1))]
    keys_before = _indptr(count)[:-1]
    return BlockSparse(
        block_rows,
        lists.page_size,
        indptr,
        indices,
        qo_indptr=_indptr(counts),
        kv_len=kept.astype(np.int32),
        block_pos=keys_before - np.repeat(keys_before[indptr[:-1]], np.diff(indptr)),
        block_first=first,
        block_count=count,
    )


def _counts(counts: Any, found: list[_Request]) -> np.ndarray:
    """New tokens of each request, checked."""
    if isinstance(counts, (int, np.integer)):
        counts = np.full(len(found), counts)
    counts = _integers(counts, "counts")
    if len(counts) != len(found):
        raise ValueError(f"counts has {len(counts)} entries; expected {len(found)}, one a request")
    for i, (count, request) in enumerate(zip(counts.tolist(), found)):
        most = request.window + max(request.num_sinks - request.num_tokens, 0)
        if count < 0:
            raise ValueError(f"counts[{i}] is {count}; expected at least 0")
        if count > most:
            raise ValueError(
                f"counts[{i}] is {count}; expected at most {most}, the window and the sinks that are not there yet: "
                "append a prompt in chunks"
            )
    return counts


def _integers(x: Any, name: str) -> np.ndarray:
    array = np.from_dlpack(lend_index(x, name))
    if array.dtype.kind != "i":
        raise TypeError(f"{name} is {array.dtype}; expected int32 or int64")
    if array.ndim != 1:
        raise ValueError(f"{name} has {array.ndim} dimensions; expected 1")
    return array.astype(np.int64)


def _indptr(lengths: Any) -> np.ndarray:
    result = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=result[1:])
    return result


def _joined(lists: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int32), *lists])
