"""Layouts: which query rows attend to which keys, and where those lie.

A layout checks its arrays, copies them, and is immutable; one layout serves any number of plans. Index
arrays are int32 or int64, of numpy, torch (CPU) or a list; int32 numpy arrays are fastest. All constructors
raise ValueError for bad values and TypeError for bad dtypes, naming the argument, what was found and
what was expected.

The formats are those of the FlashInfer paper, section 3.1 (block-sparse KV cache and composable formats).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Sequence

import tvm_ffi

from raddle import _keywords, _library
from raddle._tensors import is_on_gpu, kind_of, lend, lend_index, lend_indices, plain, restorable
from raddle.variants import members

if TYPE_CHECKING:
    from raddle.radix_cache import Inserted, Match, RadixCache

_ragged_kv = _library.function("raddle.ragged_kv")
_paged_kv = _library.function("raddle.paged_kv")
_block_sparse = _library.function("raddle.block_sparse")
_block_sparse_from_mask = _library.function("raddle.block_sparse_from_mask")
_page_table_to_bsr = _library.function("raddle.page_table_to_bsr")
_cascade = _library.function("raddle.cascade")
_share_prefixes = _library.function("raddle.share_prefixes")
_layout_info = _library.function("raddle.layout_info")
_state = _library.function("raddle.layout.state")
_restore = _library.function("raddle.layout.restore")


class _Owner:
    """Keeps arrays alive that a layout borrows; to the library an object that it does not look into."""

    __slots__ = ("arrays",)

    def __init__(self, arrays: Any) -> None:
        self.arrays = arrays


@tvm_ffi.register_object("raddle.Layout")
class Layout(_library.Handle):
    """What attends to what: immutable, and made by its subclasses."""

    __slots__ = ("_reason",)

    def explain(self) -> str:
        """Returns why it is as it is, where Raddle chose it (`Cascade.from_page_tables`, `from_radix`); else ""."""
        return getattr(self, "_reason", "")

    def _init(self, make: Any, **args: Any) -> None:
        """Makes the object of arguments in the order in which ``make`` takes them."""
        try:
            return self.__init_handle_by_constructor__(make, *args.values())
        except (BufferError, TypeError, RuntimeError):
            # Lists and read-only arrays do not cross as they are. Converting every argument costs more
            # than planning a small batch, so it is done only when needed.
            pass
        self.__init_handle_by_constructor__(make, *(_converted(x, name) for name, x in args.items()))

    @property
    def num_requests(self) -> int:
        """Requests of the batch; for a page table on a GPU the entries of kv_len."""
        return _layout_info(self)["num_requests"]

    @property
    def num_rows(self) -> int | None:
        """Rows of the query tensor; None where only a GPU knows."""
        return _layout_info(self).get("num_rows")

    @property
    def num_levels(self) -> int:
        """Levels; 1 but for a cascade, and 2 where prefixes are discovered."""
        return _layout_info(self)["num_levels"]

    def __reduce__(self) -> Any:
        return _restored, (type(self), plain(_state(self)), self._extras())

    def _extras(self) -> dict[str, Any]:
        """What the object has beside the layout."""
        return {"_reason": self._reason} if hasattr(self, "_reason") else {}

    def _text(self) -> str:
        info = _layout_info(self)
        rest = f"on {info['device']}" if "device" in info else f"{info['num_rows']} rows"
        return f"{type(self).__name__}({info['num_requests']} requests, {rest})"


def _restored(kind: type[Layout], state: dict[str, Any], extras: dict[str, Any]) -> Layout:
    layout = kind.__new__(kind)
    layout.__init_handle_by_constructor__(_restore, restorable(state))
    for name, value in extras.items():
        setattr(layout, name, value)
    return layout


class RaggedKV(Layout):
    """K and V as ragged tensors [tokens, Hkv, D]: request i's keys are rows kv_indptr[i] … kv_indptr[i + 1].

    Args:
        qo_indptr: [requests + 1] first row of each request in the query tensor.
        kv_indptr: [requests + 1] first row of each request in K and V.
        qo_pos: [rows] positions of the query rows in the text; None: their index,
            ``kv_len - qo_len + r`` for row r of a request.

    Raises:
        ValueError: offsets that do not ascend from 0, or arrays of lengths that do not fit together.
        TypeError: arrays that are neither int32 nor int64.

    Example:
        >>> raddle.RaggedKV(qo_indptr=[0, 3, 4], kv_indptr=[0, 3, 50])      # a prompt of 3, one row over 47 keys
        RaggedKV(2 requests, 4 rows)
    """

    @_keywords.answered("RaggedKV")
    def __init__(self, qo_indptr: Any, kv_indptr: Any, qo_pos: Any = None) -> None:
        self._init(_ragged_kv, qo_indptr=qo_indptr, kv_indptr=kv_indptr, qo_pos=qo_pos)


class PagedKV(Layout):
    """A page table: key j of request i is row ``j % page_size`` of page ``pages[j // page_size]`` of its list.

    Args:
        qo_indptr: [requests + 1] first row of each request in the query tensor.
        page_indptr: [requests + 1] first entry of each request in page_indices; None: page_indices is
            a padded block table.
        page_indices: [entries] page numbers, or a block table [requests, max_pages]. Entries past a
            request's length are never read and may be stale. A page may be -1 where masks keep no key of the tiles
            of keys that it lies in (64 or 128 keys a tile).
        kv_len: [requests] keys of each request, those of its query rows included.
        page_size: rows of a page.
        kv_layout: "NHD" for pools [pages, page_size, Hkv, D], "HND" for [pages, Hkv, page_size, D].
        kv_begin: [requests] index of the first key: the keys that earlier levels of a `Cascade` hold.
            None: 0, or in a cascade what earlier levels hold.
        qo_rows: [qo_indptr[-1]] the query rows of the groups, where they are not adjacent. For levels of a
            `Cascade` whose groups are not requests: a shared prefix.
        qo_pos: [rows] positions of the query rows in the text; None: their index,
            ``kv_len - qo_len + r`` for row r of a request.
        discover_prefixes: True makes leading pages that requests have in common a level of a `Cascade`, read once
            for all of them; a number is the least number of tokens that makes one (True: 512). The layout has two
            levels then, whatever the batch, and `append_kv` takes one without. Not with kv_begin or qo_rows.
        num_pages: pages of the pools. Page tables on a GPU are checked against it there; None: their entries are
            used as they are.
        num_requests: [1] on the same GPU, how many of the requests there are; None: all. The arrays' other entries
            may then hold anything.

    The page table may lie on a GPU, all of it: qo_indptr, page_indptr or None, page_indices and kv_len, int32, the
    lists contiguous and the rows of a block table any stride apart. The layout borrows these arrays and knows only
    their shapes. A `Reservation` made with ``device_lengths=True`` plans with it, on the GPU: see
    `Reservation.update`. There is no kv_begin, qo_rows and qo_pos then.

    Raises:
        ValueError: offsets that do not ascend, lengths that need more pages than are listed, a page that is negative
            without being -1, an unknown kv_layout, or options that exclude each other.
        TypeError: arrays that are neither int32 nor int64.

    Example:
        >>> raddle.PagedKV([0, 1, 2], [0, 3, 5], [7, 2, 5, 0, 1], kv_len=[40, 17], page_size=16)
        PagedKV(2 requests, 2 rows)
        >>> raddle.PagedKV([0, 1, 2], None, [[7, 2, 5], [0, 1, -1]], kv_len=[40, 17], page_size=16)
        PagedKV(2 requests, 2 rows)
    """

    def __init__(
        self,
        qo_indptr: Any,
        page_indptr: Any = None,
        page_indices: Any = None,
        kv_len: Any = None,
        page_size: int = 16,
        kv_layout: str = "NHD",
        kv_begin: Any = None,
        qo_rows: Any = None,
        qo_pos: Any = None,
        discover_prefixes: bool | int = False,
        num_pages: int | None = None,
        num_requests: Any = None,
        **unknown: NoReturn,
    ) -> None:
        if unknown:
            _keywords.refuse("PagedKV", unknown, PagedKV.__init__)
        owner = _Owner((qo_indptr, page_indptr, page_indices, kv_len, num_requests)) if is_on_gpu(kv_len) else None
        try:
            # The hot path of serving: names, as _init takes them, or a tuple of all would cost as much as an array.
            return self.__init_handle_by_constructor__(
                _paged_kv,
                qo_indptr,
                page_indptr,
                page_indices,
                kv_len,
                page_size,
                kv_layout,
                kv_begin,
                qo_rows,
                qo_pos,
                discover_prefixes,
                num_pages,
                num_requests,
                owner,
            )
        except (BufferError, TypeError, RuntimeError):
            pass
        self._init(
            _paged_kv,
            qo_indptr=qo_indptr,
            page_indptr=page_indptr,
            page_indices=page_indices,
            kv_len=kv_len,
            page_size=page_size,
            kv_layout=kv_layout,
            kv_begin=kv_begin,
            qo_rows=qo_rows,
            qo_pos=qo_pos,
            discover_prefixes=discover_prefixes,
            num_pages=num_pages,
            num_requests=num_requests,
            owner=owner,
        )

    def to_block_sparse(self) -> Layout:
        """The same attention as a block-sparse matrix: Br = 1, Bc = page_size, a row block a query row.

        K and V are given as for the page table, in its `kv_layout`.

        Returns:
            A layout of one level.

        Raises:
            ValueError: a page table with qo_rows.
        """
        return _page_table_to_bsr(self)


class BlockSparse(Layout):
    """A block-sparse row matrix (BSR) over the rows of Q and the slots of K and V.

    Row block b holds query rows ``b * Br …`` and keeps block columns ``indices[indptr[b]: indptr[b + 1]]``.
    K and V are [slots, Hkv, D] or [blocks, Bc, Hkv, D]. The key in column c has index and position c.

    Args:
        Br, Bc: rows and columns of a block.
        indptr: [ceil(rows / Br) + 1] first entry of each row block.
        indices: [entries] block columns.
        qo_indptr: [requests + 1] first row of each request; None: one request of num_rows rows.
        kv_len: [requests] keys of each request; None: num_cols. Columns from there on are no keys.
        num_rows: rows of Q; needed without qo_indptr.
        num_cols: slots of K and V that count; a last block may be cut short by it. None: no bound.
        mask_bits: [entries, Br, Bc] bits packed into uint8, least significant first, without padding
            (``numpy.packbits(bits, bitorder="little")``); None: blocks are full.
        block_pos, block_first, block_count: [entries] explicit blocks, all three or none: the position
            of the block's first key, the row of the block where it lies, and how many keys there are. Keys then
            count in list order.
        kv_begin: [row blocks] as in `PagedKV`.
        qo_pos: [rows] as in `PagedKV`.

    Raises:
        ValueError: sizes, offsets or columns that do not fit together, or a part of the explicit blocks alone.
        TypeError: arrays of another dtype.

    Example:
        >>> layout = raddle.BlockSparse(2, 2, indptr=[0, 2, 3], indices=[0, 2, 1], num_rows=4, num_cols=6)
        >>> layout.num_rows, layout.num_levels
        (4, 1)
    """

    def __init__(
        self,
        Br: int,
        Bc: int,
        indptr: Any,
        indices: Any,
        qo_indptr: Any = None,
        kv_len: Any = None,
        num_rows: int | None = None,
        num_cols: int | None = None,
        mask_bits: Any = None,
        block_pos: Any = None,
        block_first: Any = None,
        block_count: Any = None,
        kv_begin: Any = None,
        qo_pos: Any = None,
    ) -> None:
        self._init(
            _block_sparse,
            Br=Br,
            Bc=Bc,
            indptr=indptr,
            indices=indices,
            qo_indptr=qo_indptr,
            kv_len=kv_len,
            num_rows=num_rows,
            num_cols=num_cols,
            mask_bits=mask_bits,
            block_pos=block_pos,
            block_first=block_first,
            block_count=block_count,
            kv_begin=kv_begin,
            qo_pos=qo_pos,
        )

    @classmethod
    def from_dense_mask(cls, mask: Any, Br: int, Bc: int, qo_indptr: Any = None) -> BlockSparse:
        """The blocks of a boolean mask that keep anything, with bits where partial.

        Args:
            mask: [rows, cols] bool, True = keep.
            Br, Bc: rows and columns of a block.
            qo_indptr: [requests + 1] first row of each request; None: all rows are one request's.

        Returns:
            A `BlockSparse`.

        Raises:
            ValueError: a mask that is no matrix, or qo_indptr that does not end at its rows.
            TypeError: a mask of another dtype.
        """
        layout = cls.__new__(cls)
        layout._init(_block_sparse_from_mask, mask=mask, Br=Br, Bc=Bc, qo_indptr=qo_indptr)
        return layout


class Cascade(Layout):
    """Composable formats: levels over the same query rows, disjoint in keys, composed into one result.

    Args:
        levels: layouts of one level each, in the order of their keys: shared prefixes first. Each row
            lies in at most one group of a level. The last level's groups are the requests, in order, and hold
            every row. A request's kv_len is the sum over the levels that hold it.

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

    def __init__(self, levels: Sequence[Layout]) -> None:
        if not isinstance(levels, (list, tuple)):
            raise TypeError(f"levels is {kind_of(levels)}; expected a list of layouts, shared prefixes first")
        self.__init_handle_by_constructor__(_cascade, *levels)

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
            qo_indptr, page_indptr, page_indices, kv_len, page_size, kv_layout, qo_pos: as of `PagedKV`, on the host.
            num_workers, schedule, params: as of `Attention.plan`, of the plan that will be made.

        ``discover_prefixes`` of `PagedKV` is the form for lengths that only a GPU knows: one level, found without costs.

        Returns:
            A `Cascade`, or the `PagedKV` of the same arguments where sharing does not pay, or where the spec refuses
            shared keys; ``explain()`` of either says why.

        Raises:
            ValueError: a page table that `PagedKV` refuses, or options that `Attention.plan` refuses.
            TypeError: arrays that are neither int32 nor int64.
        """
        *table, positions = lend_indices(
            qo_indptr=qo_indptr, page_indptr=page_indptr, page_indices=page_indices, kv_len=kv_len, qo_pos=qo_pos
        )
        options = num_workers, schedule, members(params)
        chosen = _share_prefixes(attn, *table, page_size, kv_layout, positions, *options)
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
            qo_indptr, kv_layout, qo_pos: as of `PagedKV`, on the host.
            num_workers, schedule, params: as of `Attention.plan`, of the plan that will be made.

        New keys are appended with `PagePool.layout`, a single level.

        Returns:
            What `from_page_tables` returns.

        Raises:
            ValueError: as of `from_page_tables` and `RadixCache.tables`.
            TypeError: a cache that is none.
        """
        from raddle.radix_cache import RadixCache  # whose pool makes layouts

        if not isinstance(cache, RadixCache):
            raise TypeError(f"cache is {kind_of(cache)}; expected a RadixCache")
        tables, page_size = cache.tables(requests, matches), cache.pool.page_size
        if len(qo_indptr) != len(tables.page_indptr):
            raise ValueError(
                f"qo_indptr has {len(qo_indptr)} entries; expected {len(tables.page_indptr)}, one more than requests"
            )
        options = dict(num_workers=num_workers, schedule=schedule, params=params)
        return Cascade.from_page_tables(attn, qo_indptr, *tables, page_size, kv_layout, qo_pos, **options)


def _converted(x: Any, name: str) -> Any:
    if isinstance(x, (list, tuple)):
        return lend_index(x, name)
    return lend(x, name) if hasattr(x, "__dlpack__") else x
