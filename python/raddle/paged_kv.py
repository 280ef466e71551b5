"""Page tables."""

from __future__ import annotations

from typing import Any, NoReturn

from raddle import _keywords, _library
from raddle._layout import CROSSING, Layout
from raddle._tensors import is_on_gpu

_paged_kv = _library.function_in_order(
    "raddle.paged_kv",
    "qo_indptr page_indptr page_indices kv_len page_size kv_layout kv_begin qo_rows qo_pos discover_prefixes num_pages "
    "num_requests num_rows owner",
)
_page_table_to_bsr = _library.function("raddle.page_table_to_bsr")


class _Owner:
    """Keeps arrays alive that a layout borrows; to the library an object that it does not look into."""

    __slots__ = ("arrays",)

    def __init__(self, arrays: Any) -> None:
        self.arrays = arrays


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
        num_rows: at most how many query rows there are; None: what qo_indptr says. On a GPU, where the host does not
            know that, q and out of runs have as many rows, or max_qo_tokens of the reservation. Graphs of several sizes
            can share a reservation so: before a replay come updates with at most the num_rows of its capture.

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
        num_rows: int | None = None,
        **unknown: NoReturn,
    ) -> None:
        if unknown:
            _keywords.refuse("PagedKV", unknown, PagedKV.__init__)
        owner = _Owner((qo_indptr, page_indptr, page_indices, kv_len, num_requests)) if is_on_gpu(kv_len) else None
        # Once a batch: names, as _init takes them, or a tuple of all would cost as much as an array.
        if (
            qo_indptr.__class__ in CROSSING
            and page_indptr.__class__ in CROSSING
            and page_indices.__class__ in CROSSING
            and kv_len.__class__ in CROSSING
            and page_size.__class__ is int
            and kv_layout.__class__ is str
            and kv_begin.__class__ in CROSSING
            and qo_rows.__class__ in CROSSING
            and qo_pos.__class__ in CROSSING
            and discover_prefixes.__class__ in CROSSING
            and num_pages.__class__ in CROSSING
            and num_requests.__class__ in CROSSING
            and num_rows.__class__ in CROSSING
        ):
            try:
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
                    num_rows,
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
            num_rows=num_rows,
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
