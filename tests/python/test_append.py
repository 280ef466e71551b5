"""Appending to a paged pool: row r of request i becomes its key kv_len - qo_len + r, and nothing else changes."""

import numpy as np
import pytest
import raddle
from draws import DTYPES, draw, numpy_dtype
from engine import twin
from layout_draws import paged, paged_pools
from reference import PagedKV, Problem
from reference.exact import fetch


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rows_land_where_the_table_says(rng, dtype, kv_layout, interleaved):
    kind = numpy_dtype(dtype)
    lengths = [(1, 1), (5, 70), (0, 30), (33, 33), (2, 17)]
    layout = paged(rng, lengths, kv_layout=kv_layout)
    k, v = paged_pools(rng, layout, 3, 24, 24, kind, interleaved=interleaved)[0]
    before = [x.astype(np.float32) for x in (k, v)]
    new = [rng.standard_normal((41, 3, 24)).astype(kind) for _ in range(2)]
    raddle.append_kv(twin(layout), k.base if interleaved else (k, v), *new)

    row = 0
    for group, (qo_len, _) in zip(layout.groups(), lengths):
        slots = group.slot[len(group.slot) - qo_len :]
        for pool, rows in zip((k, v), new):
            np.testing.assert_array_equal(fetch(pool, slots, kv_layout), rows[row : row + qo_len].astype(np.float64))
        row += qo_len
        for old in before:
            pages = old.swapaxes(1, 2) if kv_layout == "HND" else old
            pages[slots // pages.shape[1], slots % pages.shape[1]] = 0.0
    for pool, old in zip((k, v), before):
        now, elsewhere = pool.astype(np.float32), old != 0.0
        np.testing.assert_array_equal(now[elsewhere], old[elsewhere])


def test_decoding_token_by_token_equals_the_whole_prompt(engine, rng):
    whole = draw(rng, "paged", "causal", "float32", dim=16, group=2, num_kv_heads=2, lengths=[(12, 12)], page_size=5)
    k, v = whole.kv[0]
    keys = [fetch(pool, whole.layout.groups()[0].slot, "NHD").astype(np.float32) for pool in (k, v)]
    expected, _ = engine.run(whole)
    k[...], v[...] = np.nan, np.nan
    for t in range(12):
        table = whole.layout.page_indptr, whole.layout.page_indices
        step = PagedKV(np.array([0, 1]), *table, np.array([t + 1]), 5)
        raddle.append_kv(twin(step), (k, v), *(x[t : t + 1] for x in keys))
        out, _ = engine.run(Problem(whole.q[t : t + 1], [(k, v)], step, whole.variant))
        np.testing.assert_allclose(out[0], expected[t], atol=2e-6)
