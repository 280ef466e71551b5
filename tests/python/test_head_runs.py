"""Decode computes the KV heads of a request together, in runs; each has the bits that it has alone."""

import numpy as np
import pytest

import raddle


@pytest.mark.every_isa
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize("dim", [24, 64, 128])
def test_a_head_in_a_run_has_the_bits_that_it_has_alone(dim, group, heads_first, rng):
    heads, page_size = 11, 16  # more than one run of most head dims, and no multiple of any
    kv_len = rng.integers(1, 400, 3).astype(np.int32)
    pages = -(-kv_len // page_size)
    indptr = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
    table = rng.permutation(indptr[-1] + 2).astype(np.int32)[: indptr[-1]]
    # Pages that no table names hold NaN, and so do the slots past each request's end.
    pools = [np.full((indptr[-1] + 2, page_size, heads, dim), np.nan, np.float32) for _ in "kv"]
    for request, length in enumerate(kv_len):
        for j in range(length):
            page = table[indptr[request] + j // page_size]
            for pool in pools:
                pool[page, j % page_size] = rng.standard_normal((heads, dim))
    if heads_first:
        pools = [np.ascontiguousarray(pool.swapaxes(1, 2)).swapaxes(1, 2) for pool in pools]
    q = rng.standard_normal((3, heads * group, dim)).astype(np.float32)
    layout = raddle.PagedKV(np.arange(4, dtype=np.int32), indptr, table, kv_len, page_size=page_size)

    dtype = str(rng.choice(["float32", "float16"]))
    q, pools = q.astype(dtype), [pool.astype(dtype) for pool in pools]

    def attend(q, k, v, heads):
        attention = raddle.Attention(raddle.AttentionSpec(heads * group, heads, dim, dtype=dtype))
        return np.asarray(attention.run(attention.plan(layout, num_workers=1), q, (k, v)))

    together = attend(q, *pools, heads)
    assert np.isfinite(together).all()
    for h in range(heads):
        alone = attend(q[:, h * group : (h + 1) * group].copy(), *(p[:, :, h : h + 1] for p in pools), 1)
        np.testing.assert_array_equal(together[:, h * group : (h + 1) * group], alone)
