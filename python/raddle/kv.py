"""The KV cache: appending keys and values, copying pages, choosing pages by summaries, accepting drafts.

A page table (`PagedKV`) says where keys lie. ``kv_pool`` is everywhere a pair (k_pool, v_pool), or one tensor with
K and V in dimension 1; pools are [pages, page_size, Hkv, D] (NHD) or [pages, Hkv, page_size, D] (HND), as the layout
says.

Tensors lie together, on the host or on one GPU. Layouts and index arrays are the host's, slot mappings of `append_kv` lie
with the tensors; to a GPU they go up with the call, which runs on the caller's current stream and waits for nothing; a
stream that captures a graph is refused, but for slot mappings.
Everything is checked before anything is written: ValueError or TypeError name the argument.

Pools may be quantised, of float8_e4m3fn, float8_e5m2 or int8, with scales as `Attention.run` takes them; what only
moves keys takes uint8 views, too.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from raddle import _library
from raddle._keywords import answered
from raddle._tensors import (
    dtype_name,
    finished,
    kind_of,
    lend,
    lend_flag,
    lend_index,
    lend_indices,
    lend_integer,
    lend_output,
    lend_pool,
    lend_scale,
    like,
)
from raddle.layouts import Layout, PagedKV
from raddle.variants import Variant

_append_kv = _library.function_in_order(
    "raddle.append_kv", "layout kv_dtype k_new v_new kv_pool_k kv_pool_v k_scale v_scale rope"
)
_append_slots = _library.function_in_order(
    "raddle.append_slots", "slots kv_layout kv_dtype k_new v_new kv_pool_k kv_pool_v k_scale v_scale"
)
_copy_pages = _library.function("raddle.copy_pages")
_summarize_pages = _library.function("raddle.summarize_pages")
_select_pages = _library.function("raddle.select_pages")
_selected_layout = _library.function("raddle.selected_layout")
_heads_of_pool = _library.function("raddle.heads_of_pool")
_accept_tree = _library.function("raddle.accept_tree")


@answered("append_kv")
def append_kv(
    layout: Any,
    kv_pool: Any,
    k_new: Any,
    v_new: Any,
    rope: Variant | None = None,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_dtype: Any = None,
    kv_layout: str | None = None,
) -> None:
    """Writes new keys and values into their pages: row r of request i becomes its key ``kv_len - qo_len + r``.

    Args:
        layout: the page table (`PagedKV`) of the step that follows: kv_len counts the new keys, qo_indptr has a row for
            each. Or a slot mapping, int32 or int64 where the pools lie: row r goes to slot ``s % page_size`` of page
            ``s // page_size``, with s its entry r; nowhere, where that is negative. Rows beyond its end are padding. On
            a GPU it is read when the kernel runs: a stream that captures a graph may take the call, once a call before
            has compiled the kernel. Rows whose slot lies outside of the pools are skipped there; of two rows for one
            slot, either may stay.
        kv_pool: written. With a slot mapping, or pages of one token, also [slots, Hkv, D].
        k_new, v_new: [rows, Hkv, D], or [rows, Hkv · D], in the pool's dtype, or, where that has 8 bits, one of 16 or 32 bits.
        rope: a variant that changes keys and at most queries (`Rope`, `RopeTables`, one of your own); its key part
            is applied on the way, in fp32 and rounded once, at the row's position: the layout's qo_pos, or the
            key's index. D is then a multiple of 8, at most 256. Attention over this cache must not turn keys again.
        k_scale, v_scale: what rows are divided by, in fp32, where they are quantised on the way: a number, or float32
            [Hkv], one a head; None: 1. The quotient is rounded once, to the nearest, and what is too large becomes the
            largest finite number (448, 57344). Tensors of one a token and head, beside the pool, are written: each row
            and head gets ``max |x|`` over the largest finite number, at least 2⁻¹²⁶. D is as with rope.
        kv_dtype: "float8_e4m3fn", "float8_e5m2" or "int8": what pools that are given as uint8 hold.
        kv_layout: "NHD" or "HND", of pools beside a slot mapping; None: "NHD". A page table has its own.

    Slots that no row goes to keep what they hold.

    Raises:
        ValueError: shapes or pages that do not fit, two rows that a page table sends to one slot, rope with a slot
            mapping, or a page table with a GPU's stream that captures a graph.
        TypeError: a dtype that is not the pool's.

    Example:
        >>> k_pool, v_pool = np.zeros((2, 4, 16, 2, 64), np.float32)
        >>> layout = raddle.PagedKV([0, 3], None, [[2, 0]], [20], page_size=16)      # keys 17, 18 and 19 are new
        >>> raddle.append_kv(layout, (k_pool, v_pool), *np.ones((2, 3, 2, 64), np.float32))
        >>> k_pool[0, :5, 0, 0].tolist()
        [0.0, 1.0, 1.0, 1.0, 0.0]
    """
    k_pool, v_pool = lend_pool(kv_pool, lend_output)
    k_new, v_new = lend(k_new, "k_new"), lend(v_new, "v_new")
    k_scale, v_scale = _written(k_scale, "k_scale"), _written(v_scale, "v_scale")
    for name, value in (("layout", layout), ("kv_layout", kv_layout), ("rope", rope)):
        _library.refuse_unmade(value, name)
    if not hasattr(layout, "__dlpack__") and not isinstance(layout, (list, tuple)):
        if kv_layout is not None:
            raise ValueError(f"kv_layout is '{kv_layout}'; expected None beside a page table, which has its own")
        try:
            _append_kv(layout, _kv_dtype(kv_dtype), k_new, v_new, k_pool, v_pool, k_scale, v_scale, rope)
        except (BufferError, RuntimeError) as error:
            _library.refuse_arrays(error, rope=rope)
        return
    if rope is not None:
        raise ValueError("rope is given with a slot mapping; expected a page table, which knows the rows' positions")
    slots, kv_layout, kv_dtype = lend_index(layout, "slots"), kv_layout or "NHD", _kv_dtype(kv_dtype)
    _append_slots(slots, kv_layout, kv_dtype, k_new, v_new, k_pool, v_pool, k_scale, v_scale)


def _kv_dtype(dtype: Any) -> str | None:
    return None if dtype is None else dtype_name(dtype, "kv_dtype")


def _written(scale: Any, name: str) -> Any:
    """A scale whose tensor is written where it has one a token."""
    return lend_output(scale, name) if getattr(scale, "ndim", 0) > 1 else lend_scale(scale, name)


def copy_pages(
    kv_pool: Any, from_pages: Any, to_pages: Any, to: Any = None, *, scales: Any = None, to_scales: Any = None
) -> None:
    """Copies page ``from_pages[i]`` of a pool to page ``to_pages[i]`` of that pool or of another one, for all i at once.

    Args:
        kv_pool: K and V that are read, [pages, …] of 2 to 4 dimensions each. A summary [pages, 2, Hkv, D] is one, too.
        from_pages, to_pages: [copies] int32 or int64.
        to: K and V that are written, alike but for their number of pages; None: kv_pool.
        scales: (k_scale, v_scale), one a token and head beside the pool, float32: copied along. None: none.
        to_scales: those of ``to``; None: ``scales``.

    Raises:
        ValueError: a page outside of its pool, one that is written twice, or one both read and written.
        TypeError: pools of different dtypes.

    Example:
        >>> pool = np.zeros((4, 2, 16, 2, 64), np.float32)
        >>> pool[1] = 7.0
        >>> raddle.copy_pages(pool, from_pages=[1], to_pages=[3])
        >>> float(pool[3, 0, 0, 0, 0])
        7.0
    """
    to_k, to_v = lend_pool(kv_pool, lend_output) if to is None else lend_pool(to, lend_output, "to")
    k, v = lend_pool(kv_pool)
    k_scale, v_scale = _pair(scales, "scales")
    to_k_scale, to_v_scale = _pair(scales if to is None else to_scales, "to_scales")
    source = dict(kv_pool_k=k, kv_pool_v=v, from_k_scale=k_scale, from_v_scale=v_scale)
    target = dict(to_k=to_k, to_v=to_v, to_k_scale=to_k_scale, to_v_scale=to_v_scale)
    _copy_pages(**source, **target, **lend_indices(from_pages=from_pages, to_pages=to_pages))


def _pair(scales: Any, name: str) -> tuple[Any, Any]:
    if scales is None:
        return None, None
    if not isinstance(scales, (tuple, list)) or len(scales) != 2:
        raise ValueError(f"{name} is {kind_of(scales)}; expected a pair (k_scale, v_scale)")
    return tuple(_written(x, f"{name}[{n}]") for n, x in enumerate(scales))


def summarize_pages(
    layout: PagedKV,
    kv_pool: Any,
    summary: Any = None,
    new_only: bool = False,
    *,
    k_scale: Any = None,
    kv_dtype: Any = None,
) -> Any:
    """The elementwise minimum and maximum of each page's keys, by which Quest bounds its logits.

    Args:
        layout: the page table whose pages are summarised; slots past a request's kv_len do not count.
        kv_pool: K is read, as attention meets it: turned already where there is RoPE (``append_kv(rope=…)``).
        summary: [pages, 2, Hkv, D] in K's dtype, written: minimum, then maximum. Pages that the layout does not list
            are left alone. None: a new tensor, whose other pages hold anything. For quantised K it is given, in the
            dtype of queries: it holds values, rounded once.
        new_only: only pages that hold rows of this batch, as after `append_kv` of a step.
        k_scale: of quantised K, as `Attention.run` takes it; None: 1.
        kv_dtype: "float8_e4m3fn", "float8_e5m2" or "int8": what a pool that is given as uint8 holds.

    D is a multiple of 8, at most 256. Source: Tang et al. 2024, arXiv 2406.10774, section 3.3.

    Returns:
        summary.

    Raises:
        ValueError: requests that share a page and disagree on its number of keys; quantised K without a summary.
        TypeError: a summary of another dtype.

    Example:
        >>> pool = np.ones((4, 2, 16, 2, 64), np.float32)
        >>> layout = raddle.PagedKV([0, 1], None, [[2, 0]], [20], page_size=16)
        >>> raddle.summarize_pages(layout, pool).shape
        (4, 2, 2, 64)
    """
    k_pool, v_pool = lend_pool(kv_pool)
    pools = dict(layout=layout, kv_pool_k=k_pool, kv_pool_v=v_pool)
    given = dict(**pools, kv_dtype=_kv_dtype(kv_dtype), k_scale=lend_scale(k_scale, "k_scale"), new_only=new_only)
    if summary is not None:
        _summarize_pages(**given, summary=lend_output(summary, "summary"))
        return summary
    pair = kv_pool[0] if isinstance(kv_pool, list) else kv_pool
    if not isinstance(pair, (tuple, list)) and pair.ndim < 2:
        raise ValueError(f"kv_pool has {pair.ndim} dimensions; expected K and V in dimension 1: [pages, 2, …]")
    k = pair[0] if isinstance(pair, (tuple, list)) else pair[:, 0]
    dtype = str(k.dtype).rpartition(".")[2]
    if kv_dtype is not None or dtype == "int8" or dtype.startswith("float8"):
        raise ValueError("summary is None; expected a tensor in the dtype of queries, where K is quantised")
    heads = _heads_of_pool(**pools)
    made = like(k, (k.shape[0], 2, heads, k.shape[-1]), dtype)
    _summarize_pages(**given, summary=lend_output(made, "summary"))
    return finished(k, made)


class SelectedPages(NamedTuple):
    """Pages of each request, in the order of the request: int32 [requests, num_pages], or [requests, Hkv, num_pages].

    The three are what `BlockSparse` takes as indices, block_pos and block_count (block_first is 0).
    """

    pages: Any  #: page numbers; -1 after the last
    pos: Any  #: position of the page's first key; 0 where there is no page
    count: Any  #: keys of the page; 0 where there is none

    def layout(self, layout: PagedKV) -> Layout:
        """A block-sparse layout in which each row of ``layout``'s requests sees its request's selected pages.

        Rows keep their positions and keys theirs; indices count the selected keys. K and V are given as for ``layout``.

        Args:
            layout: the page table of the selection.

        Returns:
            A layout of one level.

        Raises:
            ValueError: a selection per head, which one layout cannot hold; a request of several rows that lacks a page
                of its own rows: causal masks go by index.
        """
        arrays = lend_indices(**self._asdict())
        if (ndim := len(np.shape(self.pages))) != 2:
            raise ValueError(
                f"pages has {ndim} dimensions; expected 2 [requests, num_pages]: a layout has one list for all heads"
            )
        selected: Layout = _selected_layout(layout=layout, **arrays)
        return selected


def select_pages(
    layout: PagedKV,
    q: Any,
    summary: Any,
    num_pages: int,
    *,
    per_head: bool = False,
    keep_last: bool = True,
    out: SelectedPages | None = None,
) -> SelectedPages:
    """The pages of each request that may hold the largest logits (Quest).

    A page's score for a query head is ``Σ_d max(q_d · min_d, q_d · max_d)``, which no q·k of the page exceeds; scores
    are fp32. A page counts with its largest score over the request's rows and query heads. Of equal scores earlier
    pages win.

    Args:
        layout: the page table of this step.
        q: [rows, Hq, D] in the summary's dtype, as attention meets it: turned already where there is RoPE.
        summary: [pages, 2, Hkv, D] as `summarize_pages` gives it; Hkv divides Hq.
        num_pages: pages of a request to keep, at least 1; a request that has fewer keeps all of them.
        per_head: choose for each KV head by its own query heads, instead of one list for all heads of a request.
        keep_last: a request's last page, which is being written, is kept whatever its score.
        out: contiguous int32 tensors where q lies, to write; None: new ones of q's kind.

    Source: Tang et al. 2024, arXiv 2406.10774, section 3.3, algorithm 1.

    Returns:
        `SelectedPages`; its ``layout(layout)`` is what to plan.

    Raises:
        ValueError: shapes that do not fit together, or num_pages below 1.
        TypeError: a q of another dtype than the summary's.

    Example:
        >>> pool = np.random.default_rng(0).standard_normal((8, 2, 16, 2, 64)).astype(np.float32)
        >>> layout = raddle.PagedKV([0, 1], None, [[2, 0, 5, 7]], [60], page_size=16)
        >>> q, summary = np.ones((1, 8, 64), np.float32), raddle.summarize_pages(layout, pool)
        >>> chosen = raddle.select_pages(layout, q, summary, num_pages=2)
        >>> chosen.pages.shape, chosen.layout(layout).num_rows
        ((1, 2), 1)
    """
    _check_layout(layout)
    num_pages, per_head = lend_integer(num_pages, "num_pages"), lend_flag(per_head, "per_head")
    if out is not None and not isinstance(out, SelectedPages):
        raise TypeError(f"out is {kind_of(out)}; expected a raddle.SelectedPages")
    tensors = {"q": lend(q, "q"), "summary": lend(summary, "summary")}
    options = dict(num_pages=num_pages, per_head=per_head, keep_last=keep_last)
    lists = (layout.num_requests, summary.shape[2]) if per_head and summary.ndim == 4 else (layout.num_requests,)
    shape = (*lists, max(int(num_pages), 0))
    made = SelectedPages(*(like(q, (math.prod(shape),), "int32") for _ in range(3))) if out is None else out
    written = {name: lend_output(x, name) for name, x in made._asdict().items()}
    _select_pages(layout=layout, **tensors, **options, **written)
    return SelectedPages(*(finished(q, x).reshape(shape) for x in made)) if out is None else out


def _check_layout(layout: Any) -> None:
    _library.refuse_unmade(layout, "layout")
    if not isinstance(layout, Layout):
        raise TypeError(f"layout is {kind_of(layout)}; expected a raddle.PagedKV")


def accept_tree(layout: PagedKV, kv_pool: Any, parents: Any, accepted: Any, *, scales: Any = None) -> Any:
    """Keeps the accepted path of each request's tree of drafted tokens: its rows of K and V become the next keys.

    The trees' nodes are the rows of the batch that verified them, in order: node n of request i was appended as key
    ``kv_len - qo_len + n``. Rows on the path from a root to the last accepted node move to the front, root first; what
    comes after them is no longer a key.

    Args:
        layout: the page table of the batch that verified the trees.
        kv_pool: written.
        parents: [rows] int32 or int64: each node's parent, an earlier node of its request, or -1 for a root, as in
            `raddle.flex.masks.tree`.
        accepted: [requests] the last accepted node of each request; -1: none.
        scales: (k_scale, v_scale), one a token and head beside the pool, float32: they move along. None: none.

    Keys that RoPE has turned stay right where their position was their depth (the layout's qo_pos). Trees as in
    SpecInfer (arXiv 2305.09781), section 4.2.

    Returns:
        The requests' numbers of keys afterwards, int32 [requests], a new tensor of accepted's kind, on the host.

    Raises:
        ValueError: parents that are no tree, a node outside of its tree, or a page that is not there.
        TypeError: arrays that are neither int32 nor int64.

    Example:
        >>> pool = np.ones((4, 2, 16, 2, 64), np.float32)
        >>> layout = raddle.PagedKV([0, 4], None, [[2, 0]], [24], page_size=16)     # 20 keys, then a tree of 4 nodes
        >>> parents, accepted = np.array([-1, 0, 0, 2], np.int32), np.array([3], np.int32)
        >>> raddle.accept_tree(layout, pool, parents, accepted).tolist()            # nodes 0, 2 and 3 stay
        [23]
    """
    _check_layout(layout)
    k_pool, v_pool = lend_pool(kv_pool, lend_output)
    k_scale, v_scale = _pair(scales, "scales")
    pools = dict(kv_pool_k=k_pool, kv_pool_v=v_pool, k_scale=k_scale, v_scale=v_scale)
    trees = lend_indices(parents=parents, accepted=accepted)
    kv_len = like(accepted, (layout.num_requests,), "int32")
    _accept_tree(layout=layout, **pools, **trees, kv_len=lend(kv_len, "kv_len"))
    return finished(accepted, kv_len)
