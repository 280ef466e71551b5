"""A cache of prefixes over a `PagePool`: which pages hold the keys of a sequence's longest known prefix.

::

    cache = raddle.RadixCache(pool)
    found = cache.match(tokens[:-1], lock=True)        # at least one token is computed, for its logits
    request = pool.add(found.pages)                    # its first found.num_tokens keys are there
    ...                                                # append, plan and run the others
    cache.insert(tokens, pool.pages(request))          # for requests that come later
    pool.finish([request])
    cache.unlock(found.node)

The cache holds a reference to its pages, so they outlive their requests. Where `PagePool.append` says that pages are
missing, `RadixCache.evict` gives back those that were used longest ago and are not locked. What is shared are whole
pages.

Any thread may call anything at any time: others see all of a call or nothing. Between a match that does not lock and
``pool.add`` another thread may evict the pages, so lock where there are several. ValueError and TypeError name the
argument that is wrong, and then nothing has changed.

Source: RadixAttention, Zheng et al. 2023, arXiv 2312.07104, section 3.
"""

from __future__ import annotations

from typing import Any, Iterator, NamedTuple, Sequence, Union

import numpy as np
import tvm_ffi

from raddle import _library
from raddle._tensors import kind_of, lend_index, lend_indices, lend_integer
from raddle.page_pool import PagePool, PageTables

_make = _library.function("raddle.radix_cache")
_pool = _library.function("raddle.radix_cache.pool")
_match = _library.function("raddle.radix_cache.match")
_insert = _library.function("raddle.radix_cache.insert")
_lock = _library.function("raddle.radix_cache.lock")
_unlock = _library.function("raddle.radix_cache.unlock")
_evict = _library.function("raddle.radix_cache.evict")
_counts = _library.function("raddle.radix_cache.counts")
_nodes = _library.function("raddle.radix_cache.nodes")
_entry = _library.function("raddle.radix_cache.entry")

ExtraKey = Union[None, int, str, bytes]


class Match(NamedTuple):
    """The longest cached prefix of a sequence."""

    num_tokens: int  #: whole pages of them
    pages: np.ndarray  #: int32, num_tokens / page_size: what `PagePool.add` and `PagedKV` take
    node: int  #: where it ends, for `RadixCache.lock` and `RadixCache.unlock`


class Inserted(NamedTuple):
    """What `RadixCache.insert` did."""

    num_tokens: int  #: in the cache now: the sequence's whole pages
    num_cached: int  #: of these there before
    pages: np.ndarray  #: int32, the pages that hold them: up to num_cached those that were there
    node: int  #: where it ends, for `RadixCache.lock` and `RadixCache.unlock`


class CacheCounts(NamedTuple):
    """How much there is in a `RadixCache`."""

    nodes: int  #: edges of the tree
    tokens: int  #: that are cached
    pages: int  #: that hold them
    locked_pages: int  #: of these: they cannot be evicted
    memory_bytes: int  #: of the tree, on the host


class CacheEntry(NamedTuple):
    """One edge of the tree."""

    node: int  #: its number
    parent: int  #: the node that it continues; -1: none
    extra_key: ExtraKey  #: what separates it from others
    tokens: np.ndarray  #: int64
    pages: np.ndarray  #: int32
    locks: int  #: of it, and of what continues it


@tvm_ffi.register_object("raddle.RadixCache")
class RadixCache(_library.Handle):
    """A radix tree over token ids, whose edges are pages of ``pool``.

    Args:
        pool: whose pages are cached. The cache shares it, and gives all its pages back at its end.
        token_bits: 32 or 64, in which ids are kept.

    Tokens are [n] int32 or int64, or a list, from 0 to the largest of token_bits. ``extra_key`` (an int, a str or
    bytes: an adapter's, a tenant's, an image's) separates sharing: sequences with different ones have nothing in common.

    Raises:
        ValueError: token_bits other than 32 and 64; from every method: tokens out of range, or pages that are free.
        TypeError: ``pool`` is not a `PagePool`; from every method: an extra_key of another type.

    Example:
        >>> pool = raddle.PagePool(num_pages=64, page_size=16)
        >>> cache, tokens = raddle.RadixCache(pool), list(range(50))
        >>> request = pool.add()
        >>> _ = pool.append([request], [50])
        >>> cache.insert(tokens, pool.pages(request)).num_tokens      # whole pages
        48
        >>> cache.match(tokens[:40] + [7, 8, 9]).num_tokens
        32
    """

    def __init__(self, pool: PagePool, token_bits: int = 32) -> None:
        self.__move_handle_from__(_make(pool=pool, token_bits=token_bits))

    @property
    def pool(self) -> PagePool:
        """Whose pages are cached."""
        return _pool(self)

    def match(self, tokens: Any, extra_key: ExtraKey = None, *, lock: bool = False, touch: bool = True) -> Match:
        """Finds the longest cached prefix of ``tokens``.

        Args:
            tokens: [n] ids of a sequence.
            extra_key: as they were inserted with.
            lock: keep the prefix until `unlock`, as for a request that runs.
            touch: it is the most recently used one then; False changes nothing, for callers that only ask how much
                there is, and its node cannot be locked.

        Returns:
            `Match`.

        Raises:
            ValueError: tokens out of range, or lock without touch.
        """
        key = _bytes(extra_key)
        found = _match(cache=self, tokens=lend_index(tokens, "tokens"), extra_key=key, lock=lock, touch=touch)
        return Match(found["num_tokens"], np.from_dlpack(found["pages"]), found["node"])

    def insert(self, tokens: Any, pages: Any, extra_key: ExtraKey = None, *, lock: bool = False) -> Inserted:
        """Caches the whole pages of a sequence.

        What was there before keeps its pages; the caller's then are duplicates (`PagePool.replace`). The others get a
        reference of the cache. All of it is the most recently used.

        Args:
            tokens: [n] ids of the sequence.
            pages: a request's, on which their keys lie, at least as many.
            extra_key: what separates it from others.
            lock: keep it until `unlock`.

        Returns:
            `Inserted`.

        Raises:
            ValueError: tokens out of range, too few pages, or a free page.
        """
        done = _insert(cache=self, **lend_indices(tokens=tokens, pages=pages), extra_key=_bytes(extra_key), lock=lock)
        return Inserted(done["num_tokens"], done["num_cached"], np.from_dlpack(done["pages"]), done["node"])

    def lock(self, node: int) -> None:
        """Keeps the prefix that ends at a match's node; locks of one prefix add up.

        Raises:
            ValueError: a node that is evicted.
        """
        _lock(cache=self, node=lend_integer(node, "node"))

    def unlock(self, node: int) -> None:
        """The end of a use: one lock less; where it was the last, the prefix is the most recently used one.

        Raises:
            ValueError: a node without a lock.
        """
        _unlock(cache=self, node=lend_integer(node, "node"))

    def tables(self, requests: Any, matches: Sequence[Match | Inserted | None]) -> PageTables:
        """As `PagePool.tables`, of requests that hold prefixes here: cached tokens lie on the cache's pages.

        What was cached before a request was inserted (``Inserted.num_cached``) is read from the cache's pages, so
        requests that computed one prefix at the same time have it in common, with or without `PagePool.replace`. All
        other pages of a match are the request's own first ones.

        Args:
            requests: of the pool.
            matches: for each request the `Match` or `Inserted` of its first tokens, locked as long as the tables are
                used; None: it has none.

        Returns:
            `PageTables`.

        Raises:
            ValueError: a match that is evicted or not locked, is another cache's or another request's, or has more
                tokens than its request has keys.
            TypeError: matches that are no list.
        """
        if not isinstance(matches, (list, tuple)):
            raise TypeError(f"matches is {kind_of(matches)}; expected a list, one a request")
        tables, page_size = self.pool.tables(requests), self.pool.page_size
        if len(matches) != len(tables.kv_len):
            raise ValueError(f"matches has {len(matches)} entries; expected {len(tables.kv_len)}, one a request")
        known: set[tuple[int, int]] = set()  # samples of a prompt share its match
        for i, (match, kv_len) in enumerate(zip(matches, tables.kv_len.tolist())):
            if match is not None:
                self._check(match, f"matches[{i}]", page_size, kv_len, known)
        # Of all requests at once: a step has no time for hundreds of small arrays.
        held = [i for i, match in enumerate(matches) if match is not None]
        if not held:
            return tables
        pages = np.concatenate([matches[i].pages for i in held])
        counts = [len(matches[i].pages) for i in held]
        cached = np.repeat([getattr(matches[i], "num_cached", 0) // page_size for i in held], counts)
        first = np.repeat(tables.page_indptr[held], counts)
        index = np.arange(len(pages)) - np.repeat(np.cumsum(counts) - counts, counts)
        indices = tables.page_indices.copy()
        own = indices[first + index]
        wrong = np.flatnonzero((own != pages) & (index >= cached))
        if len(wrong):
            at, of = wrong[0], np.searchsorted(np.cumsum(counts), wrong[0], side="right")
            raise ValueError(
                f"matches[{held[of]}].pages[{index[at]}] is {pages[at]}; expected the request's own, {own[at]}: a "
                "match of its first tokens, on whose pages they lie"
            )
        indices[first + index] = pages
        return tables._replace(page_indices=indices)

    def evict(self, num_pages: int) -> np.ndarray:
        """Drops unlocked pages until ``num_pages`` have become free, or none is left.

        The least recently used go first, of a prefix its last page. Pages that requests still hold do not become free.

        Returns:
            The pages that have become free, int32.

        Raises:
            ValueError: a negative number.
        """
        return np.from_dlpack(_evict(cache=self, num_pages=num_pages))

    def counts(self) -> CacheCounts:
        """Returns how much there is, `CacheCounts`."""
        counts = _counts(self)
        return CacheCounts(*(counts[name] for name in CacheCounts._fields))

    def __iter__(self) -> Iterator[CacheEntry]:
        """All edges, in no particular order; those evicted meanwhile are left out."""
        for node in np.from_dlpack(_nodes(self)).tolist():
            try:
                entry = _entry(cache=self, node=node)
            except ValueError:
                continue
            tokens, pages = (np.from_dlpack(entry[name]) for name in ("tokens", "pages"))
            yield CacheEntry(node, entry["parent"], _key(entry["extra_key"]), tokens, pages, entry["locks"])

    def _check(self, match: Any, name: str, page_size: int, kv_len: int, known: set[tuple[int, int]]) -> None:
        """Refuses a match that is not locked, not of this cache, or longer than its request; adds it to ``known``."""
        if not isinstance(match, (Match, Inserted)):
            raise TypeError(f"{name} is {kind_of(match)}; expected a Match, an Inserted or None")
        tokens, pages, node = match.num_tokens, match.pages, match.node
        if tokens != len(pages) * page_size:
            raise ValueError(f"{name} has {tokens} tokens on {len(pages)} pages; expected {page_size} a page")
        if tokens > kv_len:
            raise ValueError(f"{name} has {tokens} tokens; expected at most the request's kv_len, {kv_len}")
        if tokens == 0 or (node, pages[-1]) in known:
            return
        try:
            entry = _entry(cache=self, node=node)
        except ValueError as error:
            raise ValueError(f"{name}.{error}") from None
        if np.from_dlpack(entry["pages"])[-1] != pages[-1]:
            raise ValueError(f"{name} ends on page {pages[-1]}, its node {node} on another; expected one of this cache")
        if entry["locks"] == 0:
            raise ValueError(f"{name}.node is {node}, which is not locked; expected a lock until the last run")
        known.add((node, pages[-1]))

    def _text(self) -> str:
        counts = self.counts()
        return f"RadixCache({counts.tokens} tokens, {counts.pages} pages, {counts.locked_pages} of them locked)"


def _bytes(key: ExtraKey) -> bytes:
    """A key as the library compares it: 1, "1" and b"1" are three keys."""
    if key is None:
        return b""
    if isinstance(key, bytes):
        return b"b" + key
    if isinstance(key, str):
        return b"s" + key.encode()
    if isinstance(key, (int, np.integer)):
        return b"i%d" % key
    raise TypeError(f"extra_key is {kind_of(key)}; expected an int, a str, bytes or None")


def _key(key: bytes) -> ExtraKey:
    kind, rest = key[:1], key[1:]
    return {b"": lambda: None, b"b": lambda: rest, b"s": rest.decode, b"i": lambda: int(rest)}[kind]()
