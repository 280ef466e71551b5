"""A pool of KV pages: which are free, which requests hold the others, and which keys of a request lie where.

::

    pool = raddle.PagePool(num_pages=4096, page_size=16)
    requests = [pool.add(), pool.add()]
    grown = pool.append(requests, [40, 17])                    # room for two prompts, or for neither
    layout = pool.layout(requests, qo_len=[40, 17])            # a PagedKV: append_kv, plan and run take it
    samples = pool.fork(requests[0], 3)                        # three more requests with the keys of the first
    grown = pool.append(samples, 1)
    raddle.copy_pages(kv_pool, grown.from_pages, grown.to_pages)   # pages that they shared and write to now

Pages are numbers; K and V are the caller's tensors [pages, page_size, Hkv, D] of as many layers as there are, and the
pool never touches them. A page has a reference of every request with keys on it, of the `RadixCache` that caches it,
and those that the caller holds; it is free when it has none.

Any thread may call anything at any time: others see all of a call or nothing. ValueError and TypeError name the
argument that is wrong, and then nothing has changed.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import numpy as np
import tvm_ffi

from raddle import _library
from raddle._tensors import dtype_name, lend_index, lend_indices, lend_integer
from raddle.paged_kv import PagedKV

_make = _library.function("raddle.page_pool")
_counts = _library.function("raddle.page_pool.counts")
_references = _library.function("raddle.page_pool.references")
_allocate = _library.function("raddle.page_pool.allocate")
_retain = _library.function("raddle.page_pool.retain")
_release = _library.function("raddle.page_pool.release")
_add = _library.function("raddle.page_pool.add")
_fork = _library.function("raddle.page_pool.fork")
_append = _library.function("raddle.page_pool.append")
_truncate = _library.function("raddle.page_pool.truncate")
_replace = _library.function("raddle.page_pool.replace")
_finish = _library.function("raddle.page_pool.finish")
_kv_len = _library.function("raddle.page_pool.kv_len")
_pages = _library.function("raddle.page_pool.pages")
_tables = _library.function("raddle.page_pool.tables")
_layout = _library.function_in_order("raddle.pool_layout", "pool requests qo_len kv_layout discover_prefixes")


class Appended(NamedTuple):
    """What `PagePool.append` did."""

    missing: int  #: free pages too few; above 0, nothing has changed
    from_pages: np.ndarray  #: int32; pages to copy before new keys are written, as `copy_pages` takes them …
    to_pages: np.ndarray  #: … and where to


class PageTables(NamedTuple):
    """Requests' pages as `PagedKV` takes them, int32."""

    page_indptr: np.ndarray  #: [requests + 1]
    page_indices: np.ndarray  #: pages of the requests, one list after another
    kv_len: np.ndarray  #: [requests]


@tvm_ffi.register_object("raddle.PagePool")
class PagePool(_library.Handle):
    """Pages 0 … num_pages - 1 of page_size keys each, all free at first.

    Args:
        num_pages: 1 to 2^27.
        page_size: keys of a page, at least 1.

    A request is an int, never used again once it is finished. Where an argument is ``requests``, it is a list or an
    array of them, each named once.

    Raises:
        ValueError: sizes out of range; of every method: a request or a page that is not there.
        TypeError: of every method, arguments that are no integers.

    Example:
        >>> pool = raddle.PagePool(num_pages=64, page_size=16)
        >>> requests = [pool.add(), pool.add()]
        >>> pool.append(requests, [40, 17]).missing
        0
        >>> pool.layout(requests, qo_len=[40, 17])
        PagedKV(2 requests, 57 rows)
        >>> pool
        PagePool(64 pages of 16: 5 used, 0 shared, 2 requests)
    """

    def __init__(self, num_pages: int, page_size: int = 16) -> None:
        self.__move_handle_from__(_make(num_pages=num_pages, page_size=page_size))

    # What there is

    @property
    def num_pages(self) -> int:
        """used + free."""
        return _counts(self)["num_pages"]

    @property
    def page_size(self) -> int:
        """Keys of a page."""
        return _counts(self)["page_size"]

    @property
    def used(self) -> int:
        """Pages with a reference."""
        return _counts(self)["used"]

    @property
    def free(self) -> int:
        """Pages without a reference."""
        return _counts(self)["free"]

    @property
    def shared(self) -> int:
        """Pages of at least two references."""
        return _counts(self)["shared"]

    @property
    def num_requests(self) -> int:
        """Requests that are not finished."""
        return _counts(self)["num_requests"]

    def references(self, pages: Any) -> np.ndarray:
        """Returns how many references each of ``pages`` has, int32. Raises ValueError for a page that is not there."""
        return _array(_references(pool=self, pages=lend_index(pages, "pages")))

    # Pages in the caller's own hands

    def allocate(self, count: int) -> np.ndarray | None:
        """Takes free pages for the caller.

        Args:
            count: how many.

        Returns:
            Pages, int32, with a reference of the caller each; None where there are fewer.

        Raises:
            ValueError: a negative count.
        """
        pages = _allocate(pool=self, count=count)
        return None if pages is None else _array(pages)

    def retain(self, pages: Any) -> None:
        """Takes one more reference of the caller to each of ``pages``. Raises ValueError for a free page."""
        _retain(pool=self, pages=lend_index(pages, "pages"))

    def release(self, pages: Any) -> np.ndarray:
        """Gives back one reference of the caller to each of ``pages``.

        Returns:
            The pages that are free now, int32.

        Raises:
            ValueError: a page of which the caller has no reference (any more), whatever other references it has.
        """
        return _array(_release(pool=self, pages=lend_index(pages, "pages")))

    # Requests

    def add(self, pages: Any = None, kv_len: int | None = None) -> int:
        """Begins a request.

        Args:
            pages: where its first keys lie already: what `RadixCache.match` found; None: it has no keys.
            kv_len: how many keys; None: as many as the pages hold. Less fill a part of the last page, which is copied
                when the request writes to it.

        Returns:
            The request's number.

        Raises:
            ValueError: a free page, or a kv_len that does not end on the last page.
        """
        return _add(pool=self, pages=None if pages is None else lend_index(pages, "pages"), kv_len=kv_len)

    def fork(self, request: int, count: int = 1) -> list[int]:
        """Begins ``count`` requests with the keys of ``request``, on the same pages (parallel sampling).

        They share the last page, too, even if it is partly filled: a request that appends to it gets a copy first (see
        `append`).

        Returns:
            The new requests.

        Raises:
            ValueError: a request that is not there, or a negative count.
        """
        return _array(_fork(pool=self, request=lend_integer(request, "request"), count=count)).tolist()

    def append(self, requests: Any, counts: Any) -> Appended:
        """Makes room for ``counts[i]`` more keys (or ``counts``, of all) of each request: for all of them, or for none.

        Where pages are too few, ``missing`` says how many, and nothing has changed: evict so many (`RadixCache.evict`)
        or wait. Else copy ``from_pages`` to ``to_pages`` (`copy_pages`, of every layer) before the new keys are
        written: partial pages that other requests hold, too. The last request that holds such a page keeps it.

        Returns:
            `Appended`.

        Raises:
            ValueError: a request that is not there or named twice, or counts that are negative or too few.
        """
        requests = lend_index(requests, "requests")
        counts = lend_index(_each(counts, requests, "counts"), "counts")
        done = _append(pool=self, requests=requests, counts=counts)
        return Appended(done["missing"], _array(done["from_pages"]), _array(done["to_pages"]))

    def truncate(self, requests: Any, kv_len: Any) -> np.ndarray:
        """Drops each request's keys from ``kv_len[i]`` on: drafts that were not accepted (`accept_tree` returns kv_len).

        Returns:
            The pages that are free now, int32.

        Raises:
            ValueError: a length above the request's own.
        """
        return _array(_truncate(pool=self, **lend_indices(requests=requests, kv_len=kv_len)))

    def replace(self, request: int, pages: Any) -> np.ndarray:
        """Puts pages that hold the same keys in the place of the request's first ones, full ones all.

        For duplicates of what a `RadixCache` has: ``pool.replace(request, cache.insert(…, lock=True).pages)``.

        Returns:
            The pages that are free now, int32.

        Raises:
            ValueError: a free page, or more pages than the request has full ones.
        """
        return _array(_replace(pool=self, request=lend_integer(request, "request"), pages=lend_index(pages, "pages")))

    def finish(self, requests: Any) -> np.ndarray:
        """Ends requests.

        Returns:
            The pages that are free now, int32.

        Raises:
            ValueError: a request that is not there or named twice.
        """
        return _array(_finish(pool=self, requests=lend_index(requests, "requests")))

    def kv_len(self, request: int) -> int:
        """Returns how many keys a request has. Raises ValueError for one that is not there."""
        return _kv_len(pool=self, request=lend_integer(request, "request"))

    def pages(self, request: int) -> np.ndarray:
        """Returns a request's pages, int32, in the order of its keys. Raises ValueError for one that is not there."""
        return _array(_pages(pool=self, request=lend_integer(request, "request")))

    def tables(self, requests: Any) -> PageTables:
        """Returns pages and lengths of requests, `PageTables`, for layouts that you make yourself.

        Raises:
            ValueError: a request that is not there or named twice.
        """
        tables = _tables(pool=self, requests=lend_index(requests, "requests"))
        return PageTables(*(_array(tables[name]) for name in PageTables._fields))

    def layout(
        self, requests: Any, qo_len: Any = 1, kv_layout: str = "NHD", discover_prefixes: bool | int = False
    ) -> PagedKV:
        """The page table of a step in which request i has ``qo_len[i]`` query rows (or ``qo_len``, all of them).

        Their keys are the request's last ones: `append` made room for them.

        Args:
            requests: the batch, in the order of its query rows.
            qo_len: query rows of each request, or one number for all.
            kv_layout, discover_prefixes: same as in `PagedKV`.

        Returns:
            A `PagedKV`.

        Raises:
            ValueError: a request that is not there or named twice, or more rows than it has keys.
        """
        requests = lend_index(requests, "requests")
        layout = PagedKV.__new__(PagedKV)
        qo_len = lend_index(_each(qo_len, requests, "qo_len"), "qo_len")
        for name, value in (("self", self), ("kv_layout", kv_layout), ("discover_prefixes", discover_prefixes)):
            _library.refuse_unmade(value, name)
            if hasattr(value, "__dlpack__"):
                raise TypeError(f"{name} is an array; expected {'NHD or HND' if name == 'kv_layout' else 'a bool or an int'}")
        layout.__init_handle_by_constructor__(_layout, self, requests, qo_len, kv_layout, discover_prefixes)
        return layout

    def make_kv(
        self,
        num_kv_heads: int,
        head_dim: int,
        dtype: Any = "bfloat16",
        head_dim_vo: int | None = None,
        kv_layout: str = "NHD",
    ) -> tuple[np.ndarray, np.ndarray]:
        """Zeroed host memory for the K and V of one layer on the pool's pages.

        In huge pages where Linux grants them (numpy asks for them; `raddle doctor` says whether it does).

        Args:
            num_kv_heads, head_dim: of K.
            dtype: a name, or numpy's or torch's dtype; bfloat16 and float8 are those of ml_dtypes.
            head_dim_vo: of V; None: head_dim.
            kv_layout: "NHD" or "HND", as in `PagedKV`.

        Returns:
            (k, v): arrays of numpy, [pages, page_size, Hkv, D] (NHD).

        Raises:
            ValueError: an unknown kv_layout.
            TypeError: an unknown dtype.
        """
        import ml_dtypes  # numpy knows bfloat16 by its dtypes

        if kv_layout not in ("NHD", "HND"):
            raise ValueError(f"kv_layout is '{kv_layout}'; expected 'NHD' or 'HND'")
        name = dtype_name(dtype)
        rows = (self.page_size, num_kv_heads) if kv_layout == "NHD" else (num_kv_heads, self.page_size)
        element = np.dtype(getattr(ml_dtypes, name, name))
        dims = head_dim, head_dim if head_dim_vo is None else head_dim_vo
        k, v = (np.zeros((self.num_pages, *rows, dim), element) for dim in dims)
        return k, v

    def _text(self) -> str:
        counts = _counts(self)
        return (
            f"PagePool({counts['num_pages']} pages of {counts['page_size']}: {counts['used']} used, "
            f"{counts['shared']} shared, {counts['num_requests']} requests)"
        )


_INT_MAX = 2**31 - 1


def _array(tensor: Any) -> np.ndarray:
    return np.from_dlpack(tensor)


def _each(values: int | Sequence[int] | np.ndarray, requests: Any, name: str) -> Any:
    """One number stands for all requests."""
    if not isinstance(values, (int, np.integer)):
        return values
    if abs(int(values)) > _INT_MAX:
        raise ValueError(f"{name} is {values}; expected at most {_INT_MAX}")
    return np.full(requests.shape[:1], values)
