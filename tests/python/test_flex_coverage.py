"""Coverage of traced masks by brute force: Empty tiles keep no pair, Full ones all, and the usual masks are tight."""

from __future__ import annotations

import numpy as np
import pytest

import flex_draws as draws
from flex_compiled import Compiled
from raddle.flex import ops
from raddle.flex.trace import trace_mask

EMPTY, PARTIAL, FULL = range(3)
LENGTH = 64


def make_masks(rng):
    """Masks by name; those in `TIGHT` answer exactly."""
    window, left, step, image = (int(rng.integers(1, n)) for n in (20, 9, 5, 9))
    doc = np.repeat(np.arange(LENGTH), rng.integers(1, 16, LENGTH))[:LENGTH]
    prefix_len = rng.integers(0, 40, 3)
    is_global = rng.integers(0, 9, LENGTH) == 0
    head_window = rng.integers(1, 30, 8)
    starts = np.sort(rng.integers(0, LENGTH, (3, LENGTH)), axis=1)
    weight = np.sort(rng.standard_normal(LENGTH))
    half = window * 0.5 + 0.25
    falling = doc[::-1].copy()
    shuffled_doc = np.concatenate([np.sort(rng.permutation(doc)[:-1])[::-1], [LENGTH]])
    is_text = np.arange(LENGTH) < rng.integers(1, LENGTH, (3, 1))
    limit = rng.integers(0, 9, LENGTH)
    image_of = np.sort(rng.integers(0, 9, (LENGTH, LENGTH)), axis=1)

    def causal(b, h, q, kv):
        return q >= kv

    def sliding(b, h, q, kv):
        return (q >= kv) & (q - kv <= window)

    def two_sided(b, h, q, kv):
        return abs(q - kv) <= window

    def prefix(b, h, q, kv):
        return (kv < prefix_len[b]) | (kv <= q)

    def prefix_constant(b, h, q, kv):
        return (kv < 11) | (kv <= q)

    def document(b, h, q, kv):
        return doc[q] == doc[kv]

    def causal_document(b, h, q, kv):
        return (doc[q] == doc[kv]) & (q >= kv)

    def dilated(b, h, q, kv):
        return (abs(q - kv) <= window) & ((q - kv) % step == 0)

    def natten(b, h, q, kv):
        return (abs(q // image - kv // image) <= 1) & (abs(q % image - kv % image) <= 2)

    def natten_tiled(b, h, q, kv):
        x, y, u, v = q >> 3, q & 7, kv >> 3, kv & 7
        return (abs(x - u) <= 2) & (abs(y - v) <= 3)

    def morton(b, h, q, kv):
        def coordinate(i, shift):
            i = i >> shift
            return (i & 1) | ((i >> 1) & 2) | ((i >> 2) & 4)

        return (abs(coordinate(q, 0) - coordinate(kv, 0)) <= 2) & (abs(coordinate(q, 1) - coordinate(kv, 1)) <= 2)

    def longformer(b, h, q, kv):
        return two_sided(b, h, q, kv) | is_global[q] | is_global[kv]

    def strided_global(b, h, q, kv):
        return sliding(b, h, q, kv) | (kv % 16 == 0)

    def by_head(b, h, q, kv):
        return q - kv < head_window[h]

    def by_request(b, h, q, kv):
        return kv >= starts[b, q]

    def sinks_and_window(b, h, q, kv):
        return ((kv < left) | (q - kv <= window)) & (q >= kv)

    def floats(b, h, q, kv):
        return (q / 2 - kv * 0.5 < half) & (weight[kv] < ops.exp(weight[q])) | (ops.sqrt(kv + 1.0) > 7.5)

    def rounded(b, h, q, kv):
        return ops.floor(q / 8) == ops.cast(kv / 8, "int32")

    def choice(b, h, q, kv):
        return kv <= ops.where(h < 4, q, q - window)

    def squares(b, h, q, kv):
        d = q - kv
        return (d * d < window * window) & (d - d == 0)

    def never(b, h, q, kv):
        return (q < kv) & (q >= kv + window)

    def clipped(b, h, q, kv):
        """Not one of two conditions; a key's distance the other way round; a condition on heads alone."""
        return ~((kv > q) | (kv - q < -window)) & (h != 5) & (left <= kv.long())

    def negated(b, h, q, kv):
        return ~(doc[q] != doc[kv]) & ~(kv > q)

    def falling_document(b, h, q, kv):
        return (falling[q] == falling[kv]) & (q >= kv)

    def shuffled_document(b, h, q, kv):
        return (shuffled_doc[q] == shuffled_doc[kv]) & (q >= kv)

    def padded(b, h, q, kv):
        return is_text[b, kv] & (q >= kv)

    def padding(b, h, q, kv):
        return ~is_text[b, kv]

    def begun(b, h, q, kv):
        return (starts[b, kv] <= q) & (2 < starts[b, kv])

    def rest(b, h, q, kv):
        return ~(limit[q] >= doc[kv]) & ~(falling[kv].long() < limit[q] - 3)

    def by_two_keys(b, h, q, kv):
        return image_of[kv, kv] == doc[q]

    def mixed(b, h, q, kv):
        return (q > kv) * 1.5 + ops.cast(h > 3, "int32") * (b == 1) - abs(-weight[q]) % 0.7 > (q <= kv) & (kv > 9)

    def long_chain(b, h, q, kv):
        for i in range(400):
            q = q ^ (kv + i)
        return q > 20

    def wrapping(b, h, q, kv):
        return (q - 1000) * 3000000 > kv

    return [value for value in locals().values() if callable(value) and value is not rng]


TIGHT = {"causal_mod", "sliding", "two_sided", "prefix", "prefix_constant", "document", "causal_document", "negated"}

#: Each row keeps an interval of keys, and `kv_span` tells it.
SPANS = {"causal_mod", "sliding", "two_sided", "by_head", "by_request", "choice", "clipped"}
#: Rows do because an array is in order, as their source says that it has to be.
SPANS |= (ORDERED := {"document", "causal_document", "negated", "falling_document", "padded", "padding", "begun", "rest"})
#: Here it is in none.
UNORDERED = {"shuffled_document"}


def draw_tiles(rng, n):
    """[n, 4, 2] hulls of b, h, q_idx and kv_idx: one request and all heads, as the planner asks, or any."""
    tiles = np.zeros((n, 4, 2), np.int32)
    for tile, plain in zip(tiles, rng.random(n) < 0.7):
        b, q, kv = (rng.integers(0, k) for k in (3, LENGTH, LENGTH))
        tile[0] = (b, b) if plain else np.sort(rng.integers(0, 3, 2))
        tile[1] = (0, 7) if plain else np.sort(rng.integers(0, 8, 2))
        tile[2] = q, min(q + rng.integers(0, 16), LENGTH - 1)
        tile[3] = kv, min(kv + rng.integers(0, 16), LENGTH - 1)
    return tiles


def kept(traced, tile):
    """What the mask keeps of a tile, pair by pair."""
    axes = [np.arange(first, last + 1) for first, last in tile]
    return traced.evaluate(*np.meshgrid(*axes, indexing="ij", sparse=True))


def check(compiled, i, tiles):
    """Raises where coverage is wrong; the share of tiles whose answer is exact."""
    traced, exact = compiled.traced[i], []
    for tile, coverage in zip(tiles, compiled.cover(i, tiles)):
        keep = kept(traced, tile)
        truth = EMPTY if not keep.any() else FULL if keep.all() else PARTIAL
        assert coverage in (PARTIAL, truth), f"{tile.tolist()}: {coverage}, not {truth}\n{traced.source}"
        exact.append(coverage == truth)
    return np.mean(exact)


@pytest.fixture(scope="module")
def masks(request, tmp_path_factory):
    rng = np.random.default_rng(request.config.option.seed)
    return Compiled(tmp_path_factory.mktemp("masks"), [trace_mask(fn) for fn in make_masks(rng)])


def test_masks_are_covered_and_the_usual_ones_tightly(masks, rng):
    tiles = draw_tiles(rng, 150)
    for i, traced in enumerate(masks.traced):
        exact = check(masks, i, tiles[tiles[:, 0, 0] == tiles[:, 0, 1]] if traced.name in TIGHT else tiles)
        assert exact == 1 or traced.name not in TIGHT, (traced.name, exact)


def test_spans_bound_what_is_kept(masks, rng):
    """No key outside of a tile's span is kept; a row keeps all of its span or, by a condition on rows, nothing."""
    tiles = draw_tiles(rng, 100)
    tiles[:, 3] = 0, LENGTH - 1
    rows = tiles.copy()
    rows[..., 1] = rows[..., 0]
    rows[:, 3] = 0, LENGTH - 1
    keys = np.arange(LENGTH)
    for i, traced in enumerate(masks.traced):
        # What "wrapping" multiplies may leave int32: its bound is everything.
        assert ("kv_span" in traced.source) == (traced.name in SPANS | UNORDERED | {"wrapping"}), traced.source
        assert ("knows_spans" in traced.source) == (traced.name in ORDERED | UNORDERED), traced.source
        for some, is_row in ((tiles, False), (rows, True)):
            for tile, (first, last) in zip(some, masks.span(i, some)):
                keep = kept(traced, tile)
                inside = (keys >= first) & (keys <= last)
                assert not keep[..., ~inside].any(), (tile.tolist(), first, last, traced.source)
                assert (first, last) == (-(2**31), 2**31 - 1) or traced.name not in UNORDERED
                if is_row and traced.name in SPANS:
                    assert keep[..., inside].all() or not keep.any(), (tile.tolist(), first, last, traced.source)


def test_spans_of_rows_are_exact(masks, rng):
    """Of any interval of keys."""
    rows = draw_tiles(rng, 200)
    rows[:, :3, 1] = rows[:, :3, 0]
    for i, traced in enumerate(masks.traced):
        assert ("row_span" in traced.source) == ("kv_span" in traced.source)
        for row, (first, last) in zip(rows, masks.row_span(i, rows)):
            if traced.name not in SPANS:
                assert (first, last) == (-(2**31), 2**31 - 1) or traced.name == "wrapping"
                continue
            keys = np.arange(row[3, 0], row[3, 1] + 1)
            keep = kept(traced, row).ravel()
            assert ((keys >= first) & (keys <= last) == keep).all(), (row.tolist(), first, last, traced.source)


def test_spans_of_nodes_that_are_used_often():
    """Each node is looked at once, however many ways lead to it."""

    def shared(b, h, q, kv):
        limit, keep = q, q >= kv
        for _ in range(60):
            limit = limit ^ (limit >> 1)
            keep = keep & (keep | (b < 0))
        return keep & (kv <= limit) & (kv < 40)

    def deep(b, h, q, kv):
        keep = q >= kv
        for i in range(2000):
            keep = keep & (q - kv < 3000 - i)
        return keep

    assert "kv_span" not in trace_mask(shared).source  # "or" is among its conditions
    assert "kv_span" in trace_mask(deep).source


def test_a_limit_that_64_bits_may_not_add_is_no_bound():
    def wide(b, h, q, kv):
        return kv - q <= (q.long() * 73856093) * 83492791

    def long(b, h, q, kv):
        return kv - q <= q.long() * 73856093

    assert "kv_span" not in trace_mask(wide).source
    assert "kv_span" in trace_mask(long).source


def test_usual_names_are_the_masks_that_were_drawn(masks):
    assert TIGHT | SPANS | UNORDERED <= {traced.name for traced in masks.traced}


def test_single_pairs_are_exact(masks, rng):
    """On a tile of one pair intervals are points: only float approximations and overflow may be unsure."""
    at = draws.draw_points(rng, 200)
    at[:, 2:] = np.maximum(at[:, 2:], 0)
    for i, traced in enumerate(masks.traced):
        coverage = masks.cover(i, np.stack([at, at], axis=2))
        expected = np.where(masks.run(i, at, np.zeros(len(at))), FULL, EMPTY)
        if traced.name in ("floats", "wrapping"):
            assert traced.name == "wrapping" or np.mean(coverage == PARTIAL) < 0.05
            coverage = np.where(coverage == PARTIAL, expected, coverage)
        np.testing.assert_array_equal(coverage, expected, traced.source)


def test_random_masks_are_covered(rng, tmp_path):
    arrays = draws.draw_arrays(rng)
    compiled = Compiled(tmp_path, [trace_mask(draws.draw_mask(rng, arrays, depth=3)) for _ in range(40)])
    tiles = draw_tiles(rng, 40)
    tiles[::5, 2] -= 6  # rows before the first key
    for i in range(40):
        check(compiled, i, tiles)


def test_coverage_reads_no_more_than_the_scalar_function(masks, rng):
    """Hulls that reach far outside of captured arrays are clamped."""
    far = np.array([[[0, 0], [0, 7], [-(2**31), 2**31 - 1], [-5, 2**31 - 1]]])
    for i, traced in enumerate(masks.traced):
        if traced.name not in ("never", "rounded"):
            assert masks.cover(i, far)[0] == PARTIAL, traced.source
