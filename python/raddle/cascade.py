"""Composable formats: several layouts over the same query rows."""

from __future__ import annotations

from typing import Any, Sequence

from raddle import _library
from raddle._layout import Layout
from raddle._tensors import kind_of, lend_flag, lend_indices
from raddle.paged_kv import PagedKV
from raddle.radix_cache import Inserted, Match, RadixCache
from raddle.variants import members

_cascade = _library.function("raddle.cascade")
_share_prefixes = _library.function("raddle.share_prefixes")


class Cascade(Layout):
    """Composable formats: levels over the same query rows, disjoint in keys, composed into one result.

    Args:
        levels: layouts of one level each, in the order of their keys: shared prefixes first. Each row
            lies in at most one group of a level. The last level's groups are the requests, in order, and hold
            every row. A request's kv_len is the sum over the levels that hold it.
        allow_gaps: a level's kv_begin may come after the end of the level before: the keys between them lie elsewhere,
            such as on another machine (`raddle.parallel`). They are not read, and count in positions and lengths.

    A cascade is planned as one problem and run by one call (FlashInfer paper, section 3.1.2).

    Raises:
        ValueError: levels of different rows, or a row in two groups of a level.
        TypeError: what is no list of layouts.

    Example:
        >>> prefix = raddle.PagedKV([0, 2], [0, 2], [6, 7], [32], page_size=16)         # of both rows
        >>> own = raddle.PagedKV([0, 1, 2], [0, 1, 2], [0, 1], [9, 4], page_size=16)
        >>> raddle.Cascade([prefix, own])
        Cascade(2 requests, 2 rows)
    """

    def __init__(self, levels: Sequence[Layout], allow_gaps: bool = False) -> None:
        if not isinstance(levels, (list, tuple)):
            raise TypeError(f"levels is {kind_of(levels)}; expected a list of layouts, shared prefixes first")
        self.__move_handle_from__(_cascade(lend_flag(allow_gaps, "allow_gaps"), *levels))

    @staticmethod
    def from_page_tables(
        attn: Any,
        qo_indptr: Any,
        page_indptr: Any = None,
        page_indices: Any = None,
        kv_len: Any = None,
        page_size: int = 16,
        kv_layout: str = "NHD",
        qo_pos: Any = None,
        *,
        num_workers: int | None = None,
        schedule: str = "auto",
        params: dict[str, Any] | None = None,
    ) -> Layout:
        """The levels that read each page once for the requests that share it, where that pays.

        Requests share the leading pages that their tables have in common: full ones, before the keys of their own
        query rows. They may share at several depths: a system prompt by all, a block of examples by some, a
        conversation by a few. Each run of pages becomes a group of a level, with the rows of all its requests fused
        into tiles, or is read by each; what costs least is decided with the planner's costs of ``attn``, its masks
        included. Takes time linear in the entries of the page tables.

        Args:
            attn: the `Attention` that will run it.
            qo_indptr, page_indptr, page_indices, kv_len, page_size, kv_layout, qo_pos: same as in `PagedKV`, on the
                host.
            num_workers, schedule, params: same as in `Attention.plan`, for the plan that will be made.

        ``discover_prefixes`` of `PagedKV` is the form for lengths that only a GPU knows: one level, found without costs.

        Returns:
            A `Cascade`, or the `PagedKV` of the same arguments where sharing does not pay, or where the spec refuses
            shared keys; ``explain()`` of either says why.

        Raises:
            ValueError: a page table that `PagedKV` refuses, or options that `Attention.plan` refuses.
            TypeError: arrays that are neither int32 nor int64.
        """
        arrays = lend_indices(
            qo_indptr=qo_indptr, page_indptr=page_indptr, page_indices=page_indices, kv_len=kv_len, qo_pos=qo_pos
        )
        options = dict(num_workers=num_workers, schedule=schedule, params=members(params))
        chosen = _share_prefixes(attention=attn, **arrays, page_size=page_size, kv_layout=kv_layout, **options)
        layout = chosen["layout"]
        kind = Cascade if layout.num_levels > 1 else PagedKV
        result = kind.__new__(kind)
        result.__move_handle_from__(layout)
        result._reason = str(chosen["reason"])
        return result

    @staticmethod
    def from_radix(
        attn: Any,
        cache: RadixCache,
        requests: Any,
        matches: Sequence[Match | Inserted | None],
        qo_indptr: Any,
        kv_layout: str = "NHD",
        qo_pos: Any = None,
        *,
        num_workers: int | None = None,
        schedule: str = "auto",
        params: dict[str, Any] | None = None,
    ) -> Layout:
        """`from_page_tables` for requests that hold prefixes in a `RadixCache`: of what `RadixCache.tables` returns.

        Args:
            attn: the `Attention` that will run it.
            cache: whose pool the requests are of. Page size, pages and lengths are the pool's.
            requests: [requests] of ``cache.pool``, in the batch's order; `PagePool.append` has made room for the keys
                of their query rows.
            matches: for each request the `Match` or `Inserted` of its first tokens, locked until the layout's last
                run; None: it has none. Samples of a prompt (`PagePool.fork`) have the same one.
            qo_indptr, kv_layout, qo_pos: same as in `PagedKV`, on the host.
            num_workers, schedule, params: same as in `Attention.plan`, for the plan that will be made.

        New keys are appended with `PagePool.layout`, a single level.

        Returns:
            What `from_page_tables` returns.

        Raises:
            ValueError: same as in `from_page_tables` and `RadixCache.tables`.
            TypeError: ``cache`` is not a `RadixCache`.
        """
        if not isinstance(cache, RadixCache):
            raise TypeError(f"cache is {kind_of(cache)}; expected a RadixCache")
        tables, page_size = cache.tables(requests, matches), cache.pool.page_size
        if len(qo_indptr) != len(tables.page_indptr):
            raise ValueError(
                f"qo_indptr has {len(qo_indptr)} entries; expected {len(tables.page_indptr)}, one more than requests"
            )
        options = dict(num_workers=num_workers, schedule=schedule, params=params)
        return Cascade.from_page_tables(attn, qo_indptr, *tables, page_size, kv_layout, qo_pos, **options)
