"""Layouts of the Python package: which arrays they accept, and what they refuse by which name."""

import numpy as np
import pytest
import raddle
import torch
from small import PAGED, attention, ints, paged, refuses, run


def test_index_arrays_of_any_kind_mean_the_same(small_problem):
    def lists(x):
        return x.tolist()

    def read_only(x):
        x = x.copy()
        x.flags.writeable = False
        return x

    def strided(x):
        return np.repeat(x, 2)[::2]

    kinds = [lists, read_only, strided, lambda x: x.astype(np.int64), lambda x: tuple(x.tolist())]
    kinds += [torch.from_numpy]
    expected = run(**small_problem)
    for kind in kinds:
        arrays = {name: kind(x) if isinstance(x, np.ndarray) else x for name, x in PAGED.items()}
        np.testing.assert_array_equal(run(**small_problem, layout=raddle.PagedKV(**arrays)), expected)


def test_a_block_table_is_a_page_table(small_problem):
    table = ints(1, 4, -1, 2, -9, 2**31 - 1).reshape(2, 3)
    layout = paged(page_indptr=None, page_indices=table)
    np.testing.assert_array_equal(run(**small_problem, layout=layout), run(**small_problem))
    rows_of_a_larger_table = np.concatenate([table, table], axis=1)[:, :3]
    layout = paged(page_indptr=None, page_indices=rows_of_a_larger_table)
    np.testing.assert_array_equal(run(**small_problem, layout=layout), run(**small_problem))


def test_a_page_table_as_a_block_sparse_matrix(small_problem):
    np.testing.assert_array_equal(run(**small_problem, layout=paged().to_block_sparse()), run(**small_problem))


def test_a_dense_mask(rng, small_problem):
    mask = rng.random((3, 50)) < 0.4
    mask[:, 7] = True
    k, v = small_problem["k"].reshape(-1, 2, 16)[:50], small_problem["v"].reshape(-1, 2, 16)[:50]
    layout = raddle.BlockSparse.from_dense_mask(mask, 2, 16)
    assert isinstance(layout, raddle.BlockSparse) and layout.num_rows == 3
    out = run(small_problem["q"], k, v, layout=layout)
    for row in range(3):
        kept = np.flatnonzero(mask[row])
        alone = raddle.RaggedKV([0, 1], [0, len(kept)])
        expected = run(small_problem["q"][row : row + 1], k[kept], v[kept], layout=alone)
        np.testing.assert_allclose(out[row], expected[0], atol=1e-6)


def test_keys_of_ragged_rows_anywhere(rng):
    """Padded on the left, in the memory of a cache [B, Hkv, L, D], whose heads overlap as ragged rows; and shared."""
    k, v = rng.standard_normal((2, 2, 2, 40, 16)).astype(np.float32)
    begin, rows = ints(0, 33), np.arange(3) * 2
    q = rng.standard_normal((4, 4, 16)).astype(np.float32)

    def ragged(x):
        return torch.from_numpy(x).as_strided((120, 2, 16), (16, 640, 1))

    layout = raddle.RaggedKV(rows, kv_first=[0, 80 + 33], kv_len=40 - begin, kv_begin=begin)
    out = run(q, ragged(k), ragged(v), layout=layout)
    for request, first in enumerate(begin):
        own = slice(2 * request, 2 * request + 2)
        keys, values = (x[request, :, first:].swapaxes(0, 1) for x in (k, v))
        alone = raddle.RaggedKV([0, 2], [0, 40 - first], qo_pos=[38 - first, 39 - first])
        np.testing.assert_allclose(out[own], run(q[own], keys, values, layout=alone), atol=1e-6)
    both = raddle.RaggedKV(rows, kv_first=[80, 80], kv_len=[40, 40])
    shared = run(np.concatenate([q[:2], q[:2]]), ragged(k), ragged(v), layout=both)
    np.testing.assert_array_equal(shared[:2], shared[2:])


@pytest.mark.parametrize(
    "given, error, words",
    [
        ({}, TypeError, ["kv_indptr is missing", "kv_first and kv_len"]),
        ({"kv_len": [3, 4]}, TypeError, ["kv_indptr is missing", "kv_first and kv_len"]),
        ({"kv_indptr": [0, 3, 7], "kv_len": [3, 4]}, ValueError, ["kv_indptr is given with kv_first or kv_len"]),
        ({"kv_first": [0, 3], "kv_len": [3]}, ValueError, ["kv_len has 1", "2"]),
        ({"kv_first": [0, -3], "kv_len": [3, 4]}, ValueError, ["kv_first[1] is -3", "at least 0"]),
        ({"kv_first": [0, 3], "kv_len": [3, -4]}, ValueError, ["kv_len[1] is -4", "at least 0"]),
        ({"kv_first": [0, 2**31 - 2], "kv_len": [3, 4]}, ValueError, ["kv_first and kv_len", "row 2147483649"]),
        ({"kv_indptr": [0, 3, 7], "kv_begin": [1]}, ValueError, ["kv_begin has 1", "2"]),
        ({"kv_indptr": [0, 3, 7], "kv_begin": [1, -1]}, ValueError, ["kv_begin[1] is -1"]),
    ],
)
def test_where_ragged_keys_cannot_be(given, error, words):
    with refuses(error, *words):
        raddle.RaggedKV([0, 1, 2], **given)


def test_ragged_keys_beyond_their_tensor(small_problem):
    q, k = small_problem["q"], np.zeros((10, 2, 16), np.float32)
    with refuses(ValueError, "10"):
        run(q, k, k, layout=raddle.RaggedKV([0, 1, 3], kv_first=[0, 8], kv_len=[3, 3]))


def test_what_a_layout_says_of_itself():
    cascade = raddle.Cascade([raddle.PagedKV([0, 3], [0, 1], [0], [16]), paged()])
    assert (cascade.num_requests, cascade.num_rows, cascade.num_levels) == (2, 3, 2)
    assert "2 requests" in repr(cascade)


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"qo_indptr": None}, TypeError, ["qo_indptr"]),
        ({"qo_indptr": ints(1, 2, 3)}, ValueError, ["qo_indptr[0] is 1", "expected 0"]),
        ({"qo_indptr": ints(0, 3, 1)}, ValueError, ["qo_indptr[2] is 1 after 3"]),
        ({"qo_indptr": ints()}, ValueError, ["qo_indptr has 0 entries"]),
        ({"qo_indptr": PAGED["qo_indptr"].astype(np.float32)}, TypeError, ["qo_indptr", "float32", "int32"]),
        ({"qo_indptr": [0, 0.5, 1]}, TypeError, ["qo_indptr", "float64", "int32"]),
        ({"qo_indptr": "012"}, TypeError, ["qo_indptr", "string"]),
        ({"qo_indptr": PAGED["qo_indptr"].reshape(1, 3)}, ValueError, ["qo_indptr", "2 dimensions"]),
        ({"page_indptr": ints(0, 2)}, ValueError, ["page_indptr has 2 entries", "expected 3"]),
        ({"page_indptr": ints(0, 2, 4)}, ValueError, ["page_indices has 3 entries", "4"]),
        ({"page_indptr": ints(0, 1, 3)}, ValueError, ["page_indptr[0]..[1] lists 1 pages", "kv_len[0] = 20", "needs 2"]),
        ({"page_indptr": None}, ValueError, ["page_indices has 1 dimensions", "page_indptr is not given"]),
        ({"page_indices": None}, TypeError, ["page_indices"]),
        ({"page_indices": ints(1, 4, -2)}, ValueError, ["page_indices holds -2"]),
        ({"page_indices": np.array([1, 4, 2**40])}, ValueError, ["page_indices[2] is 1099511627776"]),
        ({"page_indices": PAGED["page_indices"].astype(np.int16)}, TypeError, ["page_indices", "int16"]),
        ({"kv_len": ints(20)}, ValueError, ["kv_len has 1 entries", "expected 2"]),
        ({"kv_len": ints(20, -5)}, ValueError, ["kv_len[1] is -5"]),
        ({"page_size": 0}, ValueError, ["page_size is 0"]),
        ({"page_size": 1.5}, TypeError, ["page_size", "float"]),
        ({"kv_layout": "DNH"}, ValueError, ["kv_layout is 'DNH'", "NHD"]),
        ({"kv_begin": ints(0, -1)}, ValueError, ["kv_begin[1] is -1"]),
        ({"qo_pos": ints(0, 1)}, ValueError, ["qo_pos has 2 entries", "expected 3"]),
        ({"qo_rows": ints(0, 1, -1)}, ValueError, ["qo_rows[2] is -1"]),
    ],
)
def test_bad_page_tables(changes, error, words):
    with refuses(error, *words):
        paged(**changes)


def test_bad_block_tables():
    with refuses(ValueError, "page_indices has 1 rows", "expected 2"):
        paged(page_indptr=None, page_indices=ints(1, 4).reshape(1, 2))
    with refuses(ValueError, "page_indices has 1 columns", "kv_len[0] = 20", "needs 2"):
        paged(page_indptr=None, page_indices=ints(1, 4).reshape(2, 1))


BSR = {"Br": 2, "Bc": 4, "indptr": ints(0, 2, 3), "indices": ints(0, 2, 1), "num_rows": 3, "num_cols": 10}


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"Br": 0}, ValueError, ["Br is 0"]),
        ({"Bc": -4}, ValueError, ["Bc is -4"]),
        ({"num_rows": None}, ValueError, ["num_rows is missing", "qo_indptr"]),
        ({"num_rows": 5}, ValueError, ["indptr has 3 entries", "expected 4"]),
        ({"qo_indptr": ints(0, 4)}, ValueError, ["num_rows is 3", "expected 4"]),
        ({"indices": ints(0, 2)}, ValueError, ["indices has 2 entries", "expected 3"]),
        ({"indices": ints(0, 0, 1)}, ValueError, ["indices", "block 0 twice", "row block 0"]),
        ({"indices": ints(0, 3, 1)}, ValueError, ["indices[1] is 3", "10 columns"]),
        ({"indices": ints(0, -1, 1)}, ValueError, ["indices[1] is -1"]),
        ({"kv_len": ints(11)}, ValueError, ["kv_len[0] is 11", "num_cols"]),
        ({"kv_len": ints(8)}, ValueError, ["indices[1] is 2", "8 columns"]),
        ({"mask_bits": np.zeros(2, np.uint8)}, ValueError, ["mask_bits has 2 bytes", "expected 3"]),
        ({"mask_bits": np.zeros(3, np.int32)}, TypeError, ["mask_bits", "int32"]),
        ({"block_pos": ints(0, 1, 2)}, ValueError, ["block_pos, block_first and block_count: 1"]),
        ({"kv_begin": ints(0)}, ValueError, ["kv_begin has 1 entries", "expected 2"]),
    ],
)
def test_bad_block_sparse_matrices(changes, error, words):
    with refuses(error, *words):
        raddle.BlockSparse(**{**BSR, **changes})


def test_bad_explicit_blocks():
    blocks = {"block_pos": ints(0, 4, 0), "block_first": ints(0, 1, 0), "block_count": ints(4, 4, 2)}
    with refuses(ValueError, "block_first[1] = 1 and block_count[1] = 4", "4 rows"):
        raddle.BlockSparse(**BSR, **blocks)
    blocks["block_count"] = ints(4, 1, 2)
    with refuses(ValueError, "block_count adds up to 5", "kv_len[0] is 4"):
        raddle.BlockSparse(**BSR, **blocks, kv_len=ints(4))
    with refuses(ValueError, "block_pos has 2 entries", "expected 3"):
        raddle.BlockSparse(**BSR, **{**blocks, "block_pos": ints(0, 4)})


def test_bad_masks():
    with refuses(TypeError, "mask", "float32"):
        raddle.BlockSparse.from_dense_mask(np.ones((2, 2), np.float32), 1, 1)
    with refuses(ValueError, "mask has 1 dimensions"):
        raddle.BlockSparse.from_dense_mask(np.ones(2, bool), 1, 1)
    with refuses(ValueError, "mask is not contiguous"):
        raddle.BlockSparse.from_dense_mask(np.ones((2, 3), bool).T, 1, 1)
    with refuses(ValueError, "Bc is 0"):
        raddle.BlockSparse.from_dense_mask(np.ones((2, 3), bool), 1, 0)


def test_bad_cascades():
    def prefix(rows, begin=None):
        return raddle.PagedKV([0, len(rows)], [0, 1], [0], [16], qo_rows=ints(*rows), kv_begin=begin)

    with refuses(ValueError, "levels is empty"):
        raddle.Cascade([])
    with refuses(TypeError, "levels[0]", "a float"):
        raddle.Cascade([1.0])
    with refuses(ValueError, "levels[0]: qo_rows[1] is 3", "3 rows"):
        raddle.Cascade([prefix([0, 3]), paged()])
    with refuses(ValueError, "levels[0]: qo_rows[1] is 0"):
        raddle.Cascade([prefix([0, 0]), paged()])
    with refuses(ValueError, "levels[1]: kv_begin[0] is 8", "expected 16"):
        raddle.Cascade([prefix([0, 1, 2]), paged(kv_begin=ints(8, 16))])
    with refuses(ValueError, "levels[1]: group 1 holds rows 1 and 2", "16 and 0"):
        raddle.Cascade([prefix([0, 1]), paged()])
    with refuses(ValueError, "levels[0]: qo_rows[0] is 1", "last level"):
        raddle.Cascade([prefix([1, 0])])
    with refuses(ValueError, "levels[0] is itself a cascade"):
        raddle.Cascade([raddle.Cascade([prefix([0, 1, 2]), paged()]), paged()])


def test_a_level_of_scattered_rows_is_no_layout_by_itself():
    level = raddle.PagedKV([0, 2], [0, 1], [0], [16], qo_rows=[1, 0])
    with refuses(ValueError, "layout has qo_rows", "cascade"):
        attention().plan(level)
