"""Random layouts of given lengths, and K and V for them: NaN everywhere but in the rows that are keys."""

from __future__ import annotations

import numpy as np
from reference import BlockSparse, Cascade, PagedKV, RaggedKV, TokenTree


def indptr(lengths) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32)


def fill(rng, level, pool):
    """Random values in the rows of one pool that `level` uses as keys."""
    slots = np.unique(np.concatenate([group.slot for group in level.groups()] or [np.zeros(0, np.int64)]))
    slots = slots[slots >= 0]
    if pool.ndim == 3:
        pool[slots] = drawn(rng, (len(slots), *pool.shape[1:]), pool.dtype)
        return
    pages = pool.swapaxes(1, 2) if getattr(level, "kv_layout", "NHD") == "HND" else pool
    values = drawn(rng, (len(slots), *pages.shape[2:]), pages.dtype)
    pages[slots // pages.shape[1], slots % pages.shape[1]] = values


def fill_scales(rng, level, pool, kind):
    """Scales of one pool: one for all, one a head, or one a token and head, with NaN where there is no key."""
    hnd = pool.ndim == 4 and getattr(level, "kv_layout", "NHD") == "HND"
    heads = pool.shape[1] if hnd else pool.shape[-2]
    if kind == "none":
        return None
    if kind == "tensor":
        return float(np.float32(np.exp(rng.normal())))
    if kind == "head":
        return np.exp(rng.standard_normal(heads)).astype(np.float32)
    scale = poisoned((*pool.shape[:-1], 1), np.float32)
    fill(rng, level, scale)
    return np.exp(scale[..., 0])


def drawn(rng, shape, kind) -> np.ndarray:
    """Normal numbers; of integers three times as large, so that they differ."""
    values = rng.standard_normal(shape)
    return np.rint(3.0 * values) if np.dtype(kind).kind == "i" else values


def poisoned(shape, kind) -> np.ndarray:
    """What must not be read: NaN, or the one integer that is never made."""
    return np.full(shape, -128 if np.dtype(kind).kind == "i" else np.nan, kind)


def slots_of(level) -> int:
    return max((int(group.slot.max(initial=-1)) for group in level.groups()), default=-1) + 1


# --- ragged -----------------------------------------------------------------------------------


def ragged(rng, lengths):
    return RaggedKV(indptr([n for n, _ in lengths]), indptr([n for _, n in lengths]))


def ragged_rows(rng, lengths):
    """Keys anywhere: gaps between requests, some of which share keys, counted from anywhere."""
    kv_len = np.array([n for _, n in lengths], np.int32)
    ends = np.cumsum(kv_len + rng.integers(0, 40, len(lengths)))
    first = rng.permutation(ends - kv_len) if len(set(kv_len)) == 1 else ends - kv_len
    if len(lengths) > 1 and rng.random() < 0.3:
        first[0] = first[1]
    begin = rng.integers(0, 50, len(lengths)) if rng.random() < 0.7 else None
    return RaggedKV(indptr([n for n, _ in lengths]), None, None, first, kv_len, begin)


def ragged_pools(rng, plan, heads, dim, dim_vo, kind):
    tokens = slots_of(plan) + int(rng.integers(0, 3)) if plan.kv_indptr is None else int(plan.kv_indptr[-1])
    k, v = poisoned((tokens, heads, dim), kind), poisoned((tokens, heads, dim_vo), kind)
    fill(rng, plan, k), fill(rng, plan, v)
    return [(k, v)]


# --- pages ------------------------------------------------------------------------------------


def paged(rng, lengths, page_size=None, kv_layout="NHD", **more):
    """Pages shuffled over a pool with spare ones."""
    page_size = page_size or int(rng.choice([1, 3, 7, 16, 64]))
    counts = [-(-kv // page_size) for _, kv in lengths]
    pages = rng.permutation(sum(counts) + 3)[: sum(counts)].astype(np.int32)
    kv_len = np.array([kv for _, kv in lengths], np.int32)
    return PagedKV(indptr([n for n, _ in lengths]), indptr(counts), pages, kv_len, page_size, kv_layout, **more)


def shared_prefixes(rng, lengths, page_size=None, **more):
    """Some requests' page lists begin alike; `discover_prefixes` makes a level of that."""
    size = page_size or int(rng.choice([1, 3, 16]))
    plan = paged(rng, lengths, page_size=size, discover_prefixes=int(rng.integers(1, 2 * size + 1)), **more)
    common = int(rng.integers(1, 8))
    first = plan.pages(int(np.argmax(plan.kv_len))).copy()
    for i, (qo, kv) in enumerate(lengths):
        # Appended keys are a request's own, as are pages that others would read beyond its length.
        pages = min(common, len(first), max(0, kv - qo) // size)
        if rng.random() < 0.7 and qo <= kv:
            plan.pages(i)[:pages] = first[:pages]
    return plan


def padded_table(rng, lengths, **more):
    """The same as rows of a block table, stale past a row's length."""
    csr = paged(rng, lengths, **more)
    width = int(np.diff(csr.page_indptr).max(initial=0)) + 2
    table = rng.choice([-1, -7, 2**31 - 1], (len(lengths), width)).astype(np.int32)
    for i in range(len(lengths)):
        table[i, : len(csr.pages(i))] = csr.pages(i)
    return PagedKV(csr.qo_indptr, None, table, csr.kv_len, csr.page_size, csr.kv_layout)


def positioned(rng, lengths, **more):
    """Positions of the query rows of their own: a tree of drafts, say."""
    pos = [kv - qo + rng.integers(-5, 6, qo) for qo, kv in lengths]
    return paged(rng, lengths, qo_pos=np.concatenate(pos).astype(np.int32), **more)


def token_tree(rng, lengths, **more):
    """Each request's rows are a tree, or several, of its newest keys."""
    lengths = [(min(qo, kv), kv) for qo, kv in lengths]
    csr = paged(rng, lengths, **more)
    parents = [rng.integers(-1, n) if n else -1 for qo, _ in lengths for n in range(qo)]
    return TokenTree(*list(vars(csr).values())[:6], parents=np.array(parents, np.int32))


def paged_pools(rng, plan, heads, dim, dim_vo, kind, interleaved=False):
    size, order = plan.page_size, plan.kv_layout
    pages = -(-slots_of(plan) // size) + 2
    page = (size, heads) if order == "NHD" else (heads, size)
    if interleaved and dim == dim_vo:
        both = poisoned((pages, 2, *page, dim), kind)
        k, v = both[:, 0], both[:, 1]
    else:
        k, v = poisoned((pages, *page, dim), kind), poisoned((pages, *page, dim_vo), kind)
    fill(rng, plan, k), fill(rng, plan, v)
    return [(k, v)]


# --- block-sparse matrices --------------------------------------------------------------------


def block_sparse(rng, lengths, bits=False, Br=None, Bc=None):
    """All requests read columns 0 … of one K and V; each row block keeps a random set of block columns.

    Row blocks of several rows may hold rows of several requests, which then have the same kv_len.
    """
    Br, Bc = Br or int(rng.choice([1, 1, 2, 3, 5])), Bc or int(rng.choice([1, 2, 5, 16, 32]))
    num_cols = max(kv for _, kv in lengths)
    kv_len = np.array([kv if Br == 1 else num_cols for _, kv in lengths], np.int32)
    qo_indptr = indptr([qo for qo, _ in lengths])
    row_kv_len = np.repeat(kv_len, np.diff(qo_indptr))[::Br]
    kept = rng.random((len(row_kv_len), -(-num_cols // Bc))) < 0.6
    kept &= np.arange(kept.shape[1]) * Bc < row_kv_len[:, None]
    indices = np.nonzero(kept)[1].astype(np.int32)
    mask_bits = np.packbits(rng.random(len(indices) * Br * Bc) < 0.7, bitorder="little") if bits else None
    return BlockSparse(Br, Bc, indptr(kept.sum(1)), indices, qo_indptr, kv_len, mask_bits=mask_bits)


def explicit_blocks(rng, lengths):
    """Parts of blocks in any order of slots, with gaps between positions: a rolling cache, selected pages."""
    lengths = [(1, kv) if qo else (0, kv) for qo, kv in lengths]
    Bc = int(rng.choice([4, 16]))
    pos, first, count, per_row = [], [], [], []
    for qo, kv in lengths:
        at, left, blocks = 0, kv, 0
        while left and qo:
            n = int(min(left, rng.integers(1, Bc + 1)))
            at += int(rng.integers(0, 5))
            pos.append(at), count.append(n), first.append(int(rng.integers(0, Bc - n + 1)))
            at, left, blocks = at + n, left - n, blocks + 1
        per_row += [blocks] if qo else []
    arrays = {name: np.array(x, np.int32) for name, x in zip(("pos", "first", "count"), (pos, first, count))}
    return BlockSparse(
        Br=1,
        Bc=Bc,
        indptr=indptr(per_row),
        indices=rng.permutation(len(pos) + 2)[: len(pos)].astype(np.int32),
        qo_indptr=indptr([qo for qo, _ in lengths]),
        kv_len=np.array([kv for _, kv in lengths], np.int32),
        **{f"block_{name}": x for name, x in arrays.items()},
    )


def block_pools(rng, plan, heads, dim, dim_vo, kind):
    slots = -(-slots_of(plan) // plan.Bc) * plan.Bc
    k, v = poisoned((slots, heads, dim), kind), poisoned((slots, heads, dim_vo), kind)
    fill(rng, plan, k), fill(rng, plan, v)
    return [(k, v)]


# --- composable formats -----------------------------------------------------------------------


def cascade(rng, lengths, **more):
    """Half of the requests, not adjacent ones, share a prefix; all have pages of their own."""
    lengths = [(qo, kv) for qo, kv in lengths]
    sharing = np.flatnonzero(rng.random(len(lengths)) < 0.6)
    return cascade_of(rng, lengths, sharing, int(rng.integers(1, 90)), **more)


def cascade_of(rng, lengths, sharing, prefix_len, **more):
    """The requests with these numbers share a prefix of that many keys; all have pages of their own."""
    qo_indptr = indptr([qo for qo, _ in lengths])
    rows = [np.arange(qo_indptr[i], qo_indptr[i + 1], dtype=np.int32) for i in sharing]
    rows = np.concatenate(rows or [np.zeros(0, np.int32)]).astype(np.int32)
    prefix = paged(rng, [(len(rows), prefix_len)], **more)
    prefix.qo_rows = rows
    begin = np.zeros(len(lengths), np.int32)
    begin[sharing] = prefix_len
    return Cascade([prefix, paged(rng, lengths, kv_begin=begin, **more)])


def cascade_pools(rng, plan, heads, dim, dim_vo, kind):
    return [paged_pools(rng, level, heads, dim, dim_vo, kind)[0] for level in plan.levels]


# kind -> how to draw the layout, and how to draw K and V for it
LAYOUTS = {
    "ragged": (ragged, ragged_pools),
    "ragged_rows": (ragged_rows, ragged_pools),
    "paged": (paged, paged_pools),
    "paged_hnd": (lambda rng, n, **o: paged(rng, n, kv_layout="HND", **o), paged_pools),
    "paged_interleaved": (paged, lambda *a: paged_pools(*a, interleaved=True)),
    "paged_table": (padded_table, paged_pools),
    "paged_positions": (positioned, paged_pools),
    "paged_prefixes": (shared_prefixes, paged_pools),
    "token_tree": (token_tree, paged_pools),
    "bsr": (block_sparse, block_pools),
    "bsr_bits": (lambda rng, n, **o: block_sparse(rng, n, bits=True, **o), block_pools),
    "bsr_blocks": (explicit_blocks, block_pools),
    "cascade": (cascade, cascade_pools),
}
# Groups of rows that need not be requests: what differs between requests cannot enter a key there.
SHARED_ROWS = {"bsr", "bsr_bits", "bsr_blocks", "cascade", "paged_prefixes"}
