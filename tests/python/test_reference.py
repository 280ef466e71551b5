"""The reference itself: against PyTorch's SDPA in float64, and against closed forms."""

import numpy as np
import pytest
import torch
from reference import (
    Alibi,
    BlockSparse,
    Cascade,
    Causal,
    Llama31Scaling,
    PagedKV,
    Problem,
    RaggedKV,
    Rope,
    Sigmoid,
    Sinks,
    SlidingWindow,
    SoftCap,
    YarnScaling,
    attention,
    merge_states,
)

SDPA = torch.nn.functional.scaled_dot_product_attention


def ragged(rng, qo_len, kv_len, heads=(4, 2), dim=16, dim_vo=None, variant=()):
    q = rng.standard_normal((qo_len, heads[0], dim))
    k = rng.standard_normal((kv_len, heads[1], dim))
    v = rng.standard_normal((kv_len, heads[1], dim_vo or dim))
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    return Problem(q, [(k, v)], RaggedKV(np.array([0, qo_len]), np.array([0, kv_len])), list(variant))


def by_sdpa(problem, mask=None):
    q, k, v = (torch.from_numpy(x).double().transpose(0, 1)[None] for x in (problem.q, *problem.kv[0]))
    out = SDPA(q, k, v, attn_mask=mask, enable_gqa=True, scale=problem.softmax_scale)
    return out[0].transpose(0, 1).numpy()


@pytest.mark.parametrize("dim_vo", [16, 24])
def test_plain_equals_sdpa(rng, dim_vo):
    problem = ragged(rng, 5, 9, dim_vo=dim_vo)
    np.testing.assert_allclose(attention(problem).out, by_sdpa(problem), atol=1e-14)


def test_masks_equal_sdpa_with_the_mask_written_out(rng):
    problem = ragged(rng, 6, 10, variant=[Causal(), SlidingWindow(3, 2)])
    keep = np.zeros((6, 10), bool)
    for r in range(6):
        p = 10 - 6 + r
        keep[r, max(0, p - 3) : p + 1] = True
    np.testing.assert_allclose(attention(problem).out, by_sdpa(problem, torch.from_numpy(keep)), atol=1e-14)


def test_either_of_two_masks(rng):
    problem = ragged(rng, 8, 8, variant=[SlidingWindow(0, 1) | (Causal() & SlidingWindow(2, -1))])
    keep = np.array([[j in (r, r + 1) or r - 2 <= j <= r for j in range(8)] for r in range(8)])
    np.testing.assert_allclose(attention(problem).out, by_sdpa(problem, torch.from_numpy(keep)), atol=1e-14)


def test_a_sink_is_a_key_without_value(rng):
    logits = rng.standard_normal(4)
    problem = ragged(rng, 3, 7, variant=[Sinks(logits)])
    plain, sunk = attention(ragged_like(problem)), attention(problem)
    np.testing.assert_allclose(sunk.lse, np.logaddexp(plain.lse, logits))
    np.testing.assert_allclose(sunk.out, plain.out * np.exp(plain.lse - sunk.lse)[..., None])
    np.testing.assert_array_equal(attention(problem, state=True).lse, plain.lse)


def ragged_like(problem):
    return Problem(problem.q, problem.kv, problem.layout, [])


def test_soft_cap_and_sigmoid_of_one_key():
    q, k, v = np.full((1, 1, 8), 2.0), np.full((1, 1, 8), 3.0), np.full((1, 1, 8), 5.0)
    layout = RaggedKV(np.array([0, 1]), np.array([0, 1]))
    arrays = [x.astype(np.float32) for x in (q, k, v)]

    def make(*variant):
        return Problem(arrays[0], [tuple(arrays[1:])], layout, list(variant), scale=0.5)

    assert attention(make()).lse == pytest.approx(24.0)
    assert attention(make(SoftCap(10.0))).lse == pytest.approx(10.0 * np.tanh(2.4))
    assert attention(make(Sigmoid(-24.0))).out[0, 0, 0] == pytest.approx(2.5)


def test_rope_depends_on_distances_alone(rng):
    moved = [Rope(16, 500.0, offset=o) for o in (0, 123456)]
    a, b = (attention(ragged(np.random.default_rng(1), 4, 9, variant=[rope])) for rope in moved)
    np.testing.assert_allclose(a.out, b.out, atol=1e-9)
    assert np.abs(a.out - attention(ragged(np.random.default_rng(1), 4, 9)).out).max() > 1e-2


def test_rope_turns_the_first_pair_by_the_position():
    x = np.zeros((1, 1, 8))
    x[0, 0, 0] = 1.0
    turned = Rope(6, 10000.0).rotate(x, np.array([3]), 0)
    np.testing.assert_allclose(turned[0, 0], [np.cos(3), 0, 0, np.sin(3), 0, 0, 0, 0])


def test_llama_31_scaling_keeps_high_and_divides_low_frequencies():
    scale = Llama31Scaling(8.0, 1.0, 4.0, 8192.0).scale
    assert scale(1.0) == 1.0
    assert scale(1e-5) == pytest.approx(1e-5 / 8)
    middle = 2 * np.pi * 2.5 / 8192  # 2.5 turns: half way between 1 and 4
    assert scale(middle) == pytest.approx(middle * (0.5 + 0.5 / 8))


def test_interleaved_pairs_are_neighbours():
    x = np.zeros((1, 1, 8))
    x[0, 0, 2] = 1.0
    turned = Rope(6, 8.0, interleaved=True).rotate(x, np.array([3]), 0)  # the second pair: 3 / 8^(1/3)
    np.testing.assert_allclose(turned[0, 0], [0, 0, np.cos(1.5), np.sin(1.5), 0, 0, 0, 0])


def test_yarn_by_hand():
    """theta 10000, 64 pairs, 4096 tokens: 32 turns end at pair 20.9, one turn at pair 45.03."""
    yarn = YarnScaling(4.0, 4096.0)
    plain, scaled = (Rope(128, 10000.0, scaling).frequencies() for scaling in (None, yarn))
    np.testing.assert_allclose(scaled[:21], plain[:21])
    np.testing.assert_allclose(scaled[46:], plain[46:] / 4)
    np.testing.assert_allclose(scaled[33], plain[33] * (0.5 + 0.5 / 4))
    assert yarn.magnitude == pytest.approx(1.138629436)
    assert YarnScaling(32.0, 4096.0).magnitude == pytest.approx(1.346573590)  # gpt-oss
    assert YarnScaling(40.0, 4096.0, mscale=0.707, mscale_all_dim=0.707).magnitude == 1.0  # DeepSeek-V2
    x = np.ones((1, 1, 4))
    np.testing.assert_allclose(Rope(2, scaling=yarn).rotate(x, np.array([0]), 0)[0, 0, :2], yarn.magnitude)


def test_alibi_by_hand():
    q, k, v = np.zeros((2, 2, 8)), np.zeros((3, 1, 8)), np.ones((3, 1, 8))
    layout = RaggedKV(np.array([0, 2]), np.array([0, 3]))
    lse = attention(Problem(q.astype(np.float32), [(k, v)], layout, [Alibi([1.0, -2.0])])).lse
    np.testing.assert_allclose(lse[0], [np.log(np.exp(-1) + 1 + np.exp(1)), np.log(np.exp(2) + 1 + np.exp(-2))])
    np.testing.assert_allclose(lse[1], [np.log(np.exp(-2) + np.exp(-1) + 1), np.log(np.exp(4) + np.exp(2) + 1)])


def test_every_layout_describes_the_same_attention(rng):
    """One request of 6 keys at rows 0…5, causal, in every format."""
    flat = ragged(rng, 3, 6, variant=[Causal()])
    q, kv = flat.q, flat.kv
    rows, entries = np.array([0, 3]), np.arange(3)
    pages = [tuple(x.reshape(3, 2, *x.shape[1:]) for x in kv[0])]
    hnd = [tuple(np.ascontiguousarray(x.swapaxes(1, 2)) for x in pages[0])]
    one, six = np.array([0, 1]), np.array([6])
    bits = np.packbits(np.tril(np.ones((3, 6), bool), 3).ravel(), bitorder="little")
    triples = [
        (pages, PagedKV(rows, np.array([0, 3]), entries, six, 2), [Causal()]),
        (pages, PagedKV(rows, None, entries[None], six, 2), [Causal()]),
        (hnd, PagedKV(rows, np.array([0, 3]), entries, six, 2, "HND"), [Causal()]),
        (kv, BlockSparse(3, 2, np.array([0, 3]), entries, num_rows=3, num_cols=6), [Causal()]),
        (kv, BlockSparse(3, 6, one, np.array([0]), num_rows=3, num_cols=6, mask_bits=bits), []),
        (kv, BlockSparse(1, 4, np.array([0, 2, 4, 6]), np.array([0, 1] * 3), num_rows=3, num_cols=6), [Causal()]),
        (kv, explicit_blocks(), [Causal()]),
        (pages, two_levels(), [Causal()]),
    ]
    for pools, layout, variant in triples:
        got = attention(Problem(q, pools, layout, variant))
        np.testing.assert_allclose(got.out, attention(flat).out, atol=1e-14, err_msg=str(layout))
        np.testing.assert_allclose(got.lse, attention(flat).lse, atol=1e-14)


def explicit_blocks():
    """Blocks of 3 keys, of which the first is listed in two parts."""
    return BlockSparse(
        Br=3,
        Bc=3,
        indptr=np.array([0, 3]),
        indices=np.array([0, 0, 1]),
        num_rows=3,
        kv_len=np.array([6]),
        block_pos=np.array([0, 2, 3]),
        block_first=np.array([0, 2, 0]),
        block_count=np.array([2, 1, 3]),
    )


def two_levels():
    prefix = PagedKV(np.array([0, 3]), np.array([0, 1]), np.array([0]), np.array([2]), 2, qo_rows=np.array([0, 1, 2]))
    suffix = PagedKV(np.array([0, 3]), np.array([0, 2]), np.array([1, 2]), np.array([4]), 2, kv_begin=np.array([2]))
    return Cascade([prefix, suffix])


def test_rows_without_keys_are_empty(rng):
    problem = ragged(rng, 5, 2, variant=[Causal()])
    exact = attention(problem)
    assert (exact.out[:3] == 0).all() and np.isneginf(exact.lse[:3]).all()
    assert (exact.out_budget[:3] == 0).all() and (exact.lse_budget[:3] == 0).all()
    assert np.isfinite(exact.lse[3:]).all()


def test_merged_states_of_two_halves_are_the_whole(rng):
    whole = ragged(rng, 4, 10)
    k, v = whole.kv[0]
    halves = [Problem(whole.q, [(k[a:b], v[a:b])], RaggedKV([0, 4], [0, b - a]), []) for a, b in ((0, 3), (3, 10))]
    states = [attention(half, state=True) for half in halves]
    merged = merge_states(np.stack([s.out for s in states]), np.stack([s.lse for s in states]))
    np.testing.assert_allclose(merged.out, attention(whole).out, atol=1e-14)
    np.testing.assert_allclose(merged.lse, attention(whole).lse, atol=1e-14)
