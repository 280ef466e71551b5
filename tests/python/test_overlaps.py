"""Memory that a call writes is no other memory of the call: refused by name, or right."""

import numpy as np
import pytest
import raddle
from small import SPEC, attention, paged, refuses

PAGES, PAGE, HEADS, DIM = 8, 16, 2, 16


def pool(rng):
    return rng.standard_normal((PAGES, PAGE, HEADS, DIM), np.float32)


def problem(rng):
    attn = attention(variant=[raddle.Causal()])
    plan = attn.plan(paged())
    return attn, plan, rng.standard_normal((3, 4, DIM), np.float32), (pool(rng), pool(rng))


def test_outputs_that_overlap_themselves(rng):
    attn, plan, q, kv = problem(rng)
    line = np.zeros(4096, np.float32)
    for strides in ((0, 64, 4), (64, 64, 4), (64, 128, 4), (16, 48, 4), (-64, 64, 4)):
        out = np.lib.stride_tricks.as_strided(line[1024:], q.shape, strides)
        with refuses(ValueError, "out has stride", "do not overlap"):
            attn.run(plan, q, kv, out=out)
    lse = np.lib.stride_tricks.as_strided(line, (3, 4), (4, 4))
    with refuses(ValueError, "lse has stride"):
        attn.run(plan, q, kv, lse=lse)
    assert not line.any()


@pytest.mark.parametrize("strides", [(1024, 128, 4), (64, 1024, 4), (-1024, 128, 4)])
def test_outputs_of_any_other_strides(rng, strides):
    attn, plan, q, kv = problem(rng)
    line = np.zeros(4096, np.float32)
    out = np.lib.stride_tricks.as_strided(line[1024:], q.shape, strides)
    np.testing.assert_array_equal(attn.run(plan, q, kv, out=out), attn.run(plan, q, kv))


def test_out_over_q(rng):
    attn, plan, q, kv = problem(rng)
    expected = attn.run(plan, q, kv)
    line = np.zeros(q.size + 8, np.float32)
    inside, shifted = line[: q.size].reshape(q.shape), line[8:].reshape(q.shape)
    inside[...] = q
    with refuses(ValueError, "out shares memory with q", "exactly q's"):
        attn.run(plan, inside, kv, out=shifted)
    np.testing.assert_array_equal(inside, q)
    attn.run(plan, inside, kv, out=inside)
    np.testing.assert_array_equal(inside, expected)


def test_out_and_lse_over_k_and_v(rng):
    attn, plan, q, (k, v) = problem(rng)
    kept = k.copy(), v.copy()
    for name, whole in (("k", k), ("v", v)):
        out = whole.reshape(-1)[100 : 100 + q.size].reshape(q.shape)
        with refuses(ValueError, f"out shares memory with kv: {name}"):
            attn.run(plan, q, (k, v), out=out)
        with refuses(ValueError, f"lse shares memory with kv: {name}"):
            attn.run(plan, q, (k, v), lse=whole.reshape(-1)[:12].reshape(3, 4))
    with refuses(ValueError, "lse shares memory with q"):
        attn.run(plan, q, (k, v), lse=q.reshape(-1)[:12].reshape(3, 4))
    out = np.zeros_like(q)
    with refuses(ValueError, "lse shares memory with out"):
        attn.run(plan, q, (k, v), out=out, lse=out.reshape(-1)[:12].reshape(3, 4))
    np.testing.assert_array_equal((k, v), kept)


def test_slices_of_one_tensor_are_apart(rng):
    """Q, K, V and O as columns of one projection, as models make them."""
    rows, heads = 20, 4
    packed = rng.standard_normal((rows, heads + 2 * HEADS + heads, DIM), np.float32)
    q, k, v, out = packed[:, :4], packed[:, 4:6], packed[:, 6:8], packed[:, 8:]
    attn = raddle.Attention(raddle.AttentionSpec(**SPEC))
    plan = attn.plan(raddle.RaggedKV([0, rows], [0, rows]))
    expected = attn.run(plan, q.copy(), (k.copy(), v.copy()))
    np.testing.assert_array_equal(attn.run(plan, q, (k, v), out=out), expected)


def test_states(rng):
    o, lse = rng.standard_normal((3, 4, DIM), np.float32), rng.standard_normal((3, 4), np.float32)
    line, other = np.zeros(o.size + 16, np.float32), rng.standard_normal(o.shape, np.float32)
    shifted, inside = line[16:].reshape(o.shape), line[: o.size].reshape(o.shape)
    with refuses(ValueError, "out shares memory with o_a"):
        raddle.merge_state(inside, lse, other, lse, out=(shifted, lse.copy()))
    with refuses(ValueError, "out shares memory with lse"):
        raddle.merge_state(o, lse, other, lse, out=(shifted, shifted.reshape(-1)[:12].reshape(3, 4)))
    expected, both = raddle.merge_state(o, lse, other, lse), (o.copy(), lse.copy())
    raddle.merge_state(*both, other, lse, out=both)
    np.testing.assert_array_equal(both[0], expected[0])
    listed, their_lse = np.stack([o, other]), np.stack([lse, lse])
    with refuses(ValueError, "out shares memory with o"):
        raddle.merge_states(listed, their_lse, out=(listed.reshape(-1)[8 : 8 + o.size].reshape(o.shape), lse.copy()))
    np.testing.assert_array_equal(raddle.merge_states(listed, their_lse, out=(listed[0], their_lse[0]))[0], expected[0])


def new_rows(rng, rows):
    return rng.standard_normal((2, rows, HEADS, DIM), np.float32)


def test_appending_to_k_and_v_that_share_memory(rng):
    k, rows = pool(rng), new_rows(rng, 3)
    kept = k.copy()
    for v in (k, k[::-1], k.reshape(-1)[16:].reshape(-1)[: 7 * PAGE * HEADS * DIM].reshape(7, PAGE, HEADS, DIM)):
        with refuses(ValueError, "pool.k shares memory with pool.v"):
            raddle.append_kv(paged(), (k, v), *rows)
    with refuses(ValueError, "pool.k shares memory with k_new"):
        raddle.append_kv(paged(), (k, pool(rng)), k[0, :3], rows[1])
    np.testing.assert_array_equal(k, kept)
    both = np.zeros((PAGES, PAGE, HEADS, 2 * DIM), np.float32)  # side by side is apart
    raddle.append_kv(paged(), (both[..., :DIM], both[..., DIM:]), *rows)
    assert np.count_nonzero(both) == rows.size


def test_a_page_twice_in_a_request(rng):
    k, v = pool(rng), pool(rng)
    for pages, kv_len, rows in (([3, 3], 20, 1), ([3, 5, 3], 40, 1), ([3, 5, 3], 40, 30), ([5, 3, 3], 40, 20)):
        layout = raddle.PagedKV([0, rows], None, [pages], [kv_len], page_size=PAGE)
        with refuses(ValueError, "page_indices has page 3", "request"):
            raddle.append_kv(layout, (k, v), *new_rows(rng, rows))
    # Where it is only read, it is the same keys twice.
    layout = raddle.PagedKV([0, 1], None, [[3, 3, 5]], [40], page_size=PAGE)
    raddle.append_kv(layout, (k, v), *new_rows(rng, 1))


def test_two_requests_at_one_slot(rng):
    layout = raddle.PagedKV([0, 1, 2], None, [[3], [3]], [5, 5], page_size=PAGE)
    with refuses(ValueError, "page_indices has page 3", "slot 4"):
        raddle.append_kv(layout, (pool(rng), pool(rng)), *new_rows(rng, 2))


def test_v_that_is_columns_of_k_moves_with_it(rng):
    """MLA's cache: V is a view of K's first columns."""
    k = pool(rng)
    v, copied = k[..., :8], k.copy()
    layout = raddle.PagedKV([0, 4], None, [[2, 0]], [24], page_size=PAGE)
    parents, accepted = np.array([-1, 0, 0, 2], np.int32), np.array([3], np.int32)
    raddle.accept_tree(layout, (k, v), parents, accepted)
    raddle.accept_tree(layout, (copied, np.zeros_like(copied)), parents, accepted)
    np.testing.assert_array_equal(k, copied)
    raddle.copy_pages((k, v), [1, 2], [3, 4])
    np.testing.assert_array_equal(k[[3, 4]], k[[1, 2]])
    with refuses(ValueError, "to.k shares memory with to.v"):
        raddle.copy_pages((k, k[..., 1:9]), [1], [3], to=(copied, copied[..., :8]))
    with refuses(ValueError, "pool.k shares memory with pool.v"):
        raddle.accept_tree(layout, (k, k[::-1]), parents, accepted)


def test_lists_of_selected_pages(rng):
    layout, q = paged(), rng.standard_normal((3, 4, DIM), np.float32)
    summary = raddle.summarize_pages(layout, (pool(rng), pool(rng)))
    pages, pos = np.zeros(4, np.int32), np.zeros(4, np.int32)
    with refuses(ValueError, "pages shares memory with count"):
        raddle.select_pages(layout, q, summary, 2, out=raddle.SelectedPages(pages, pos, pages))
    chosen = raddle.select_pages(layout, q, summary, 2)
    chosen.pages[0, 1] = -2
    with refuses(ValueError, "pages[0, 1] is -2", "-1 for none"):
        chosen.layout(layout)


def test_scales_that_are_written(rng):
    """append_kv finds scales, accept_tree moves them: K's and V's are two tensors, or move once."""
    k, v = (np.zeros((PAGES, PAGE, HEADS, DIM), np.int8) for _ in range(2))
    rows, scales = new_rows(rng, 3), rng.random((PAGES, PAGE, HEADS), np.float32)
    with refuses(ValueError, "k_scale is v_scale", "a tensor each"):
        raddle.append_kv(paged(), (k, v), *rows, k_scale=scales, v_scale=scales)
    over_k = k.reshape(-1).view(np.float32)[: scales.size].reshape(scales.shape)
    with refuses(ValueError, "v_scale shares memory with pool.k"):
        raddle.append_kv(paged(), (k, v), *rows, k_scale=scales, v_scale=over_k)
    line = np.zeros(scales.size + 8, np.float32)
    with refuses(ValueError, "k_scale shares memory with v_scale"):
        shifted = (line[8:].reshape(scales.shape), line[:-8].reshape(scales.shape))
        raddle.accept_tree(paged(), (k, v), [-1, -1, 0], [0, 0], scales=shifted)
    assert not k.any() and not line.any()
    layout = raddle.PagedKV([0, 4], None, [[2, 0]], [24], page_size=PAGE)
    once, apart = scales.copy(), (scales.copy(), scales.copy())
    for given in ((once, once), apart):
        raddle.accept_tree(layout, (k, v), np.array([-1, 0, 0, 2], np.int32), [3], scales=given)
    np.testing.assert_array_equal(once, apart[0])
    with refuses(ValueError, "to_k_scale is to_v_scale"):
        to = (k.copy(), v.copy())
        raddle.copy_pages((k, v), [1], [2], to=to, scales=apart, to_scales=(line[8:].reshape(scales.shape),) * 2)


def test_accepted_paths_that_share_slots(rng):
    k, v = pool(rng), pool(rng)
    kept = k.copy(), v.copy()
    parents = np.array([-1, -1, 1], np.int32)
    with refuses(ValueError, "page_indices has page 3 for key 3 of request 0", "for key 19 of request 0", "pages of their own"):
        layout = raddle.PagedKV([0, 20], None, [[3, 3]], [20], page_size=PAGE)
        raddle.accept_tree(layout, (k, v), np.r_[-1, np.arange(-1, 18)].astype(np.int32), [19])
    with refuses(ValueError, "page_indices has page 3", "of request 0 and", "of request 1"):
        layout = raddle.PagedKV([0, 3, 6], None, [[3], [3]], [10, 10], page_size=PAGE)
        raddle.accept_tree(layout, (k, v), np.tile(parents, 2), [2, 2])
    np.testing.assert_array_equal((k, v), kept)
    # Pages that are shared where nothing moves are fine.
    layout = raddle.PagedKV([0, 3, 6], None, [[3, 4], [3, 5]], [20, 20], page_size=PAGE)
    assert raddle.accept_tree(layout, (k, v), np.tile(parents, 2), [2, 2]).tolist() == [19, 19]
