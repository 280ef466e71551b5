"""Layouts and their one normal form: for every query row, which key lies where.

A level is a list of groups: rows of Q that share a list of keys. `keys_of_rows` joins the levels: rows of one
request that lie in the same group on every level become one `Keys`, the concatenation of those groups' keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Group:
    """Rows of Q and the keys that they share on one level."""

    rows: np.ndarray  # [R] rows of the ragged query tensor
    slot: np.ndarray  # [N] row of the level's K and V; -1 where the table has no page
    kv_index: np.ndarray  # [N] order in the request
    kv_pos: np.ndarray  # [N] position in the text
    keep: np.ndarray | None = None  # [R, N] mask bits


@dataclass
class Keys:
    """Rows of one request, and all their keys over all levels."""

    request: int
    qo_len: int  # of the request, also of rows that are not here
    kv_len: int
    rows: np.ndarray  # [R]
    q_index: np.ndarray  # [R]
    q_pos: np.ndarray  # [R]
    level: np.ndarray  # [N] the level of a key, which says in which K and V its slot lies
    slot: np.ndarray  # [N]
    kv_index: np.ndarray  # [N]
    kv_pos: np.ndarray  # [N]
    keep: np.ndarray  # [R, N]


@dataclass
class RaggedKV:
    """Request i's keys are rows kv_indptr[i] … kv_indptr[i + 1] of K and V [tokens, Hkv, D], or the kv_len[i] rows from
    kv_first[i] on, which count from kv_begin[i]."""

    qo_indptr: np.ndarray
    kv_indptr: np.ndarray | None
    qo_pos: np.ndarray | None = None
    kv_first: np.ndarray | None = None
    kv_len: np.ndarray | None = None
    kv_begin: np.ndarray | None = None

    def groups(self) -> list[Group]:
        result = []
        for i in range(len(self.qo_indptr) - 1):
            first, length = self._keys(i)
            slot = first + np.arange(length)
            index = np.arange(length) + (0 if self.kv_begin is None else self.kv_begin[i])
            result.append(Group(np.arange(self.qo_indptr[i], self.qo_indptr[i + 1]), slot, index, index))
        return result

    def _keys(self, i: int) -> tuple[int, int]:
        """Row of the first key, and keys."""
        if self.kv_indptr is None:
            return self.kv_first[i], self.kv_len[i]
        return self.kv_indptr[i], self.kv_indptr[i + 1] - self.kv_indptr[i]

    def request_kv_len(self) -> np.ndarray:
        """Keys of each request, those before kv_begin included."""
        lengths = np.array([self._keys(i)[1] for i in range(len(self.qo_indptr) - 1)], int)
        return lengths if self.kv_begin is None else lengths + self.kv_begin


@dataclass
class PagedKV:
    """Key j of request i is row j % page_size of page page_indices[page_indptr[i] + j // page_size]."""

    qo_indptr: np.ndarray
    page_indptr: np.ndarray | None  # None: page_indices is a padded table [requests, width]
    page_indices: np.ndarray
    kv_len: np.ndarray
    page_size: int
    kv_layout: str = "NHD"
    kv_begin: np.ndarray | None = None
    qo_rows: np.ndarray | None = None
    qo_pos: np.ndarray | None = None
    discover_prefixes: int = 0  # changes no result

    def pages(self, i: int) -> np.ndarray:
        if self.page_indptr is None:
            return np.asarray(self.page_indices[i])
        return np.asarray(self.page_indices[self.page_indptr[i] : self.page_indptr[i + 1]])

    def groups(self) -> list[Group]:
        result = []
        for i in range(len(self.qo_indptr) - 1):
            rows = np.arange(self.qo_indptr[i], self.qo_indptr[i + 1])
            if self.qo_rows is not None:
                rows = np.asarray(self.qo_rows)[rows]
            j = np.arange(self.kv_len[i])
            page = self.pages(i)[j // self.page_size].astype(np.int64)
            slot = np.where(page < 0, -1, page * self.page_size + j % self.page_size)
            index = j + (0 if self.kv_begin is None else self.kv_begin[i])
            result.append(Group(rows, slot, index, index))
        return result

    def request_kv_len(self) -> np.ndarray:
        return np.asarray(self.kv_len)


@dataclass
class TokenTree:
    """Row n of request i is key kv_len - qo_len + n, a node: it sees what was before the tree, itself, its ancestors.

    Rows and nodes lie at the tokens before the tree plus their depth.
    """

    qo_indptr: np.ndarray
    page_indptr: np.ndarray
    page_indices: np.ndarray
    kv_len: np.ndarray
    page_size: int
    kv_layout: str = "NHD"
    parents: np.ndarray | None = None
    qo_pos: np.ndarray | None = field(init=False)

    def __post_init__(self):
        context = np.asarray(self.kv_len) - np.diff(self.qo_indptr)
        depth = [seen.sum(1) - 1 for seen in self.masks()]
        self.qo_pos = np.concatenate([np.zeros(0, int), *(c + d for c, d in zip(context, depth))])

    def masks(self) -> list[np.ndarray]:
        """Which nodes a row sees [qo_len, qo_len], a request."""
        result = []
        for begin, end in zip(self.qo_indptr[:-1], self.qo_indptr[1:]):
            seen = np.eye(end - begin, dtype=bool)
            for node, parent in enumerate(self.parents[begin:end]):
                if parent >= 0:
                    seen[node] |= seen[parent]
            result.append(seen)
        return result

    def groups(self) -> list[Group]:
        table = PagedKV(self.qo_indptr, self.page_indptr, self.page_indices, self.kv_len, self.page_size)
        result = table.groups()
        for group, seen in zip(result, self.masks()):
            context = len(group.slot) - len(group.rows)
            group.kv_pos = np.concatenate([np.arange(context), self.qo_pos[group.rows]])
            group.keep = np.hstack([np.ones((len(group.rows), context), bool), seen])
        return result

    def request_kv_len(self) -> np.ndarray:
        return np.asarray(self.kv_len)


@dataclass
class BlockSparse:
    """A BSR matrix: rows of Q in blocks of Br, slots of K and V in blocks of Bc.

    Row block b keeps the block columns indices[indptr[b]] … indices[indptr[b + 1] - 1]. The key in column c has
    index and position c; columns from kv_len on are none. With explicit blocks, entry e holds block_count[e] keys,
    which lie from row block_first[e] of its block on, have positions from block_pos[e] on, and are counted in
    list order.
    """

    Br: int
    Bc: int
    indptr: np.ndarray
    indices: np.ndarray
    qo_indptr: np.ndarray | None = None  # None: one request of num_rows rows
    kv_len: np.ndarray | None = None  # None: num_cols for every request
    num_rows: int | None = None
    num_cols: int | None = None
    mask_bits: np.ndarray | None = None  # bits [blocks, Br, Bc], LSB first, packed without padding
    block_pos: np.ndarray | None = None
    block_first: np.ndarray | None = None
    block_count: np.ndarray | None = None
    qo_pos: np.ndarray | None = None

    def __post_init__(self):
        if self.qo_indptr is None:
            self.qo_indptr = np.array([0, self.num_rows])

    def groups(self) -> list[Group]:
        num_rows = self.qo_indptr[-1]
        kv_len = self.request_kv_len()[request_of_rows(self)]
        blocks = len(self.indices)
        offsets = np.arange(self.Bc)
        bits = np.ones((blocks, self.Br, self.Bc), bool)
        if self.mask_bits is not None:
            flat = np.unpackbits(self.mask_bits, count=bits.size, bitorder="little")
            bits = flat.astype(bool).reshape(bits.shape)
        result = []
        for b in range(len(self.indptr) - 1):
            entries = np.arange(self.indptr[b], self.indptr[b + 1])
            rows = np.arange(b * self.Br, min((b + 1) * self.Br, num_rows))
            column = np.asarray(self.indices)[entries, None] * self.Bc + offsets
            keep = bits[entries].transpose(1, 0, 2)[: len(rows)]  # [R, entries, Bc]
            if self.block_pos is None:
                slot = index = pos = column
                inside = column < kv_len[rows].max()
            else:
                count = np.asarray(self.block_count)[entries]
                inside = offsets < count[:, None]
                slot = column + np.asarray(self.block_first)[entries, None]
                pos = np.asarray(self.block_pos)[entries, None] + offsets
                index = (np.cumsum(count) - count)[:, None] + offsets
            result.append(Group(rows, slot[inside], index[inside], pos[inside], keep[:, inside]))
        return result

    def request_kv_len(self) -> np.ndarray:
        if self.kv_len is not None:
            return np.asarray(self.kv_len)
        return np.full(len(self.qo_indptr) - 1, self.num_cols)


@dataclass
class Cascade:
    """Levels over the same query rows, disjoint in keys. The last level's groups are the requests."""

    levels: list
    qo_pos: np.ndarray | None = field(init=False)
    qo_indptr: np.ndarray = field(init=False)

    def __post_init__(self):
        self.qo_indptr = self.levels[-1].qo_indptr
        self.qo_pos = self.levels[-1].qo_pos

    def request_kv_len(self) -> np.ndarray:
        total = np.zeros(len(self.qo_indptr) - 1, np.int64)
        request = request_of_rows(self)
        for level in self.levels:
            for group in level.groups():
                total[np.unique(request[group.rows])] += len(group.slot)
        return total


def request_of_rows(layout) -> np.ndarray:
    return np.repeat(np.arange(len(layout.qo_indptr) - 1), np.diff(layout.qo_indptr))


def keys_of_rows(layout) -> list[Keys]:
    """The normal form: each query row is in exactly one entry."""
    levels = [level.groups() for level in getattr(layout, "levels", [layout])]
    qo_indptr = np.asarray(layout.qo_indptr)
    kv_len = layout.request_kv_len()
    request = request_of_rows(layout)
    num_rows = len(request)
    q_index = kv_len[request] - np.diff(qo_indptr)[request] + np.arange(num_rows) - qo_indptr[request]
    q_pos = q_index if layout.qo_pos is None else np.asarray(layout.qo_pos)

    # Which group holds a row on each level (-1: none), and at which place.
    group_of = np.full((len(levels), num_rows), -1)
    place = np.zeros((len(levels), num_rows), np.int64)
    for n, groups in enumerate(levels):
        for g, group in enumerate(groups):
            group_of[n, group.rows] = g
            place[n, group.rows] = np.arange(len(group.rows))

    result = []
    kinds, kind_of = np.unique(np.vstack([group_of, request]), axis=1, return_inverse=True)
    for number, kind in enumerate(kinds.T):
        rows = np.flatnonzero(kind_of.ravel() == number)
        held = [(n, levels[n][g]) for n, g in enumerate(kind[:-1]) if g >= 0]
        result.append(
            Keys(
                request=int(kind[-1]),
                qo_len=int(np.diff(qo_indptr)[kind[-1]]),
                kv_len=int(kv_len[kind[-1]]),
                rows=rows,
                q_index=q_index[rows],
                q_pos=q_pos[rows],
                level=join([np.full(len(group.slot), n) for n, group in held]),
                slot=join([group.slot for _, group in held]),
                kv_index=join([group.kv_index for _, group in held]),
                kv_pos=join([group.kv_pos for _, group in held]),
                keep=np.hstack([no_keys(rows)] + [bits_of(group, place[n, rows]) for n, group in held]),
            )
        )
    return result


def join(arrays: list) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *arrays])


def no_keys(rows) -> np.ndarray:
    return np.zeros((len(rows), 0), bool)


def bits_of(group: Group, places: np.ndarray) -> np.ndarray:
    """Mask bits of some rows of a group."""
    if group.keep is None:
        return np.ones((len(places), len(group.slot)), bool)
    return group.keep[places]
