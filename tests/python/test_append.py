"""Appending to a paged pool: row r of request i becomes its key kv_len - qo_len + r, and nothing else changes."""

import numpy as np
import pytest
import raddle
from draws import DTYPES, draw, numpy_dtype
from engine import twin
from layout_draws import paged, paged_pools
from reference import PagedKV, Problem
from reference.exact import fetch
from small import refuses


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


# --- slot mappings -------------------------------------------------------------------------------

LENGTHS = [(1, 1), (5, 70), (0, 30), (33, 33), (2, 17)]


def slots_of_rows(layout):
    """The slot of each new row of a reference page table."""
    groups = zip(layout.groups(), LENGTHS)
    return np.concatenate([group.slot[len(group.slot) - qo_len :] for group, (qo_len, _) in groups])


@pytest.mark.parametrize("kind", [np.int32, np.int64, list])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_rows_land_in_their_slots(rng, kind, kv_layout):
    """As by the page table; rows without a slot and rows behind the mapping go nowhere."""
    layout = paged(rng, LENGTHS, kv_layout=kv_layout)
    dtype = numpy_dtype("bfloat16")
    k, v = paged_pools(rng, layout, 3, 24, 16, dtype)[0]
    new = [rng.standard_normal((41, 3, dim)).astype(dtype) for dim in (24, 16)]
    expected = k.copy(), v.copy()
    raddle.append_kv(twin(layout), expected, *new)
    slots, gaps = slots_of_rows(layout), rng.permutation(48)[:4]
    mapping, rows = np.full(48, -1), [np.full((50, *x.shape[1:]), np.nan, dtype) for x in new]
    mapping[np.setdiff1d(np.arange(48), gaps)[:41]] = slots
    for padded, x in zip(rows, new):
        padded[:48][mapping >= 0] = x
    given = mapping.tolist() if kind is list else mapping.astype(kind)
    raddle.append_kv(given, (k, v), *rows, kv_layout=kv_layout)
    for found, wanted in zip((k, v), expected):
        np.testing.assert_array_equal(found.view(np.uint16), wanted.view(np.uint16))


@pytest.mark.parametrize("kind", ["number", "head", "token"])
def test_slots_of_a_quantised_pool(rng, kind):
    layout = paged(rng, LENGTHS)
    k, v = (x.view(np.uint8) for x in paged_pools(rng, layout, 2, 16, 16, numpy_dtype("float8_e4m3fn"))[0])
    new = [rng.standard_normal((41, 2, 16)).astype(np.float32) for _ in range(2)]
    made = {"number": lambda: 0.3, "head": lambda: np.array([0.2, 3.0], np.float32), "token": lambda: np.ones(k.shape[:-1], np.float32)}
    scales, twins = ([made[kind]() for _ in range(2)] for _ in range(2))
    expected = k.copy(), v.copy()
    how = dict(kv_dtype="float8_e4m3fn")
    raddle.append_kv(twin(layout), expected, *new, k_scale=twins[0], v_scale=twins[1], **how)
    raddle.append_kv(slots_of_rows(layout), (k, v), *new, k_scale=scales[0], v_scale=scales[1], **how)
    for found, wanted in zip((k, v, *scales), (*expected, *twins)):
        np.testing.assert_array_equal(found, wanted)


def test_slot_mappings_that_cannot_be(rng):
    k, v, new = np.zeros((3, 4, 2, 8), np.float32), np.zeros((3, 4, 2, 8), np.float32), np.ones((2, 2, 8), np.float32)
    for error, slots, how, words in [
        (ValueError, [1, 12], {}, ["slots[1] is on page 3; expected one of the pool's 3 pages"]),
        (ValueError, [1, 2**40], {}, ["slots[1] is on page"]),
        (ValueError, [[1, 2]], {}, ["slots has 2 dimensions; expected 1"]),
        (ValueError, [1, 2, 3], {}, ["k_new has 2 rows; expected at least 3, one a slot"]),
        (TypeError, np.array([0.5, 1.0]), {}, ["slots", "float64"]),
        (ValueError, [1, 2], {"rope": raddle.Rope(8)}, ["rope is given with a slot mapping"]),
        (ValueError, [1, 2], {"kv_layout": "DNH"}, ["kv_layout is 'DNH'"]),
    ]:
        with refuses(error, *words):
            raddle.append_kv(slots, (k, v), new, new, **how)
    with refuses(ValueError, "pool.v has pages of 5; expected 4, as pool.k has"):
        raddle.append_kv([1, 2], (k, np.zeros((3, 5, 2, 8), np.float32)), new, new)
    with refuses(ValueError, "kv_layout is 'NHD'; expected None beside a page table"):
        raddle.append_kv(raddle.PagedKV([0, 2], None, [[0]], [2], page_size=4), (k, v), new, new, kv_layout="NHD")
    assert (k == 0).all() and (v == 0).all()
    raddle.append_kv(np.zeros(0, np.int64), (k, v), new, new)
    assert (k == 0).all()
