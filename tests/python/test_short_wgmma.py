"""Hopper's kernels for short queries: against the reference.

Needs --device cuda: an sm_90 GPU, or the emulated driver with RADDLE_EMULATOR_COMPUTE=90 (test_emulated.py).
"""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
import raddle
from checks import within
from draws import draw
from engine import OnDevice, spec_of, twin
from hopper import HEADS, ROW_BY_ROW, attention_of, check, runs_on
from reference import Sigmoid, attention
from test_empty_rows import spoil, with_empty_rows
from test_same_bits import same
from test_timeline import marks_every_item

DECODES = [(1, 300), (1, 64), (0, 5), (1, 0), (1, 1), (2, 777)]
ROWS = {8: 3, 16: 8, 32: 14, 64: 30}  # rows of a tile -> query rows of a request, of groups of 2
OWN = raddle.Variant(
    "Doubled",
    """struct Doubled {
  template <class Vec> RADDLE_FN void output(Vec& o, const Row&, float lse) const {
    o.map([&](float x, i32) { return lse == lse ? 2.0f * x : x; });
  }
};""",
    {},
)()


@pytest.mark.parametrize("layout", ["ragged", "paged", "paged_hnd", "paged_interleaved", "paged_table"])
@pytest.mark.parametrize("num_workers", [1, 3, 16])
def test_layouts(wgmma, rng, layout, num_workers):
    paged = {} if layout == "ragged" else {"page_size": int(rng.choice([8, 16, 64, 128, 256]))}
    check(wgmma, draw(rng, layout, "causal", lengths=DECODES, **paged, **HEADS), num_workers, short_rows=8)


@pytest.mark.parametrize(("page_size", "num_workers"), [(1, 16), (4, 1), (24, 3)])
def test_pages_that_are_copied_row_by_row(wgmma, rng, page_size, num_workers):
    problem = draw(rng, "paged", "causal", lengths=DECODES, page_size=page_size, **HEADS)
    check(wgmma, problem, num_workers, short_rows=8)


@pytest.mark.parametrize("lengths", [DECODES, [(40, 90), (3, 70)]], ids=["short", "long"])
def test_kernels_copy_rows_where_boxes_cannot(wgmma, rng, lengths):
    """The code for it is in kernels of layouts that need it; where it is tensors that do, of a run of its own."""
    plans = {}
    for page_size in (4, 16):
        problem = draw(rng, "paged", "causal", lengths=lengths, page_size=page_size, **HEADS)
        plans[page_size] = attention_of(wgmma, problem).plan(twin(problem.layout)).explain()
    assert ROW_BY_ROW in plans[4] and ROW_BY_ROW not in plans[16]
    # Slots behind the last whole block: no box of blocks describes such a tensor.
    problem = draw(rng, "bsr", "causal", lengths=lengths, Br=4, Bc=16, **HEADS)
    pools = tuple(np.concatenate([pool, pool[:3]]) for pool in problem.kv[0])
    attn = attention_of(wgmma, problem)
    plan = attn.plan(twin(problem.layout), num_workers=3)
    assert ROW_BY_ROW not in plan.explain()
    outs = [attn.run(plan, problem.q, kv) for kv in (problem.kv[0], pools, problem.kv[0])]
    within(attention(problem), outs[1])
    same([outs[0]], [outs[2]])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("num_workers", [1, 7])
def test_tiles(wgmma, rng, rows, num_workers):
    """Requests of every length beside the longest, whose tile it is."""
    most = ROWS[rows]
    lengths = [(most, 200), (1, 300), (most // 2, 64), *((int(n), 90) for n in rng.integers(0, most, 2))]
    problem = draw(rng, "paged", "causal", lengths=lengths, page_size=16, **HEADS)
    check(wgmma, problem, num_workers, short_rows=rows)


@pytest.mark.parametrize("group", [1, 3, 4, 7, 16])
def test_groups(wgmma, rng, group):
    heads = {**HEADS, "group": group, "dtype": "float16"}
    problem = draw(rng, "paged", "causal", lengths=[(1, 200), (1, 33)], page_size=16, **heads)
    check(wgmma, problem, 3, short_rows=8 if group <= 8 else 16)


@pytest.mark.parametrize(("dim", "dim_vo"), [(128, 128), (96, 96), (256, 256), (192, 128), (40, 72)])
def test_head_dims(wgmma, rng, dim, dim_vo):
    heads = {**HEADS, "dim": dim, "dim_vo": dim_vo}
    check(wgmma, draw(rng, "paged", "causal", lengths=DECODES, page_size=16, **heads), 3, short_rows=8)


@pytest.mark.parametrize(("dim", "dim_vo", "rows"), [(256, 256, 32), (192, 128, 16)])
def test_tiles_that_nearly_fill_shared_memory(wgmma, rng, dim, dim_vo, rows):
    heads = {**HEADS, "dim": dim, "dim_vo": dim_vo}
    lengths = [(ROWS[rows], 100), (1, 300)]
    check(wgmma, draw(rng, "paged", "causal", lengths=lengths, page_size=16, **heads), 3, short_rows=rows)


VARIANTS = ["plain", "band", "alibi_capped", "gpt_oss", "sigmoid_first", "packed_or_window"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(wgmma, rng, variant):
    lengths = [(3, 300), (1, 64), (2, 1), (4, 130)]
    problem = draw(rng, "paged", variant, lengths=lengths, page_size=16, **HEADS)
    for workers in (1, 9):
        check(wgmma, problem, workers, short_rows=8)


def test_a_variant_of_ones_own(wgmma, rng):
    """An output part, of whole items and of ones that are composed: doubling changes no rounding."""
    problem = draw(rng, "paged", "plain", lengths=[(2, 600), (1, 30)], page_size=16, **HEADS)
    for workers in (1, 5):
        attn = attention_of(wgmma, problem)
        own = OnDevice(raddle.Attention(dataclasses.replace(attn.spec, variant=[OWN]), device=wgmma))
        once, twice = (
            each.run(each.plan(twin(problem.layout), num_workers=workers), problem.q, problem.kv[0])
            for each in (attn, own)
        )
        np.testing.assert_array_equal(twice.astype(np.float32), 2.0 * once.astype(np.float32))


@pytest.mark.parametrize("variant", ["causal", "packed_mask"])
def test_drafts(wgmma, rng, variant):
    """Positions of one's own, and what a tree of drafts keeps."""
    problem = draw(rng, "paged_positions", variant, lengths=[(9, 90), (1, 200), (14, 14)], page_size=16, **HEADS)
    for workers in (1, 5):
        check(wgmma, problem, workers, short_rows=32)


@pytest.mark.parametrize("num_workers", [1, 7])
def test_cascades(wgmma, rng, num_workers):
    """What requests share is a tile with the rows of all."""
    lengths = [(1, 30), (4, 70), (1, 3), (1, 0), (2, 300)]
    problem = draw(rng, "cascade", "causal", lengths=lengths, page_size=16, **HEADS)
    rows = 2 * max(len(group.rows) for level in problem.layout.levels for group in level.groups())
    check(wgmma, problem, num_workers, short_rows=next(n for n in ROWS if rows <= n))


@pytest.mark.parametrize("prefix", [960, 1024, 1152])
def test_every_share_has_the_workers_that_look_for_it(wgmma, rng, prefix):
    """Behind the last chunk of a prefix, for which four contractions wait, a worker has ten items. A contraction for which
    it does not look would keep its count of states, and the next run would take that for its own."""
    starts, own = np.arange(0, 13, 4), np.arange(13)
    layout = raddle.Cascade([raddle.RaggedKV(starts, prefix * np.arange(4)), raddle.RaggedKV(own, 64 * own)])
    spec = raddle.AttentionSpec(2, 1, 64, dtype="bfloat16", variant=[raddle.variants.Causal()])
    kv = [
        tuple(rng.standard_normal((keys, 1, 64)).astype(ml_dtypes.bfloat16) for _ in range(2))
        for keys in (3 * prefix, 12 * 64)
    ]
    queries = rng.standard_normal((2, 12, 2, 64)).astype(ml_dtypes.bfloat16)
    again, once = (OnDevice(raddle.Attention(spec, device=wgmma)) for _ in range(2))
    plan = again.plan(layout, num_workers=2, schedule="linear")
    assert 8 < plan.longest_queue <= 16
    outs = [again.run(plan, q, kv) for q in queries]
    same([outs[1]], [once.run(once.plan(layout, num_workers=2, schedule="linear"), queries[1], kv)])


@pytest.mark.parametrize("schedule", ["linear", "algorithm1", "one-per-request"])
def test_schedules(wgmma, rng, schedule):
    problem = draw(rng, "paged", "causal", lengths=DECODES, page_size=16, **HEADS)
    check(wgmma, problem, 5, schedule=schedule, short_rows=8)


def test_states(wgmma, rng):
    check(wgmma, draw(rng, "paged", "causal", lengths=DECODES, page_size=16, **HEADS), 5, state=True, short_rows=8)


@pytest.mark.parametrize("step", [-0.1, 0.004, 0.02, 3.0])
def test_logits_that_grow_from_key_to_key(wgmma, rng, step):
    """References are raised at many tiles, or at the first alone."""
    problem = draw(rng, "ragged", "plain", lengths=[(3, 1300)], peak=1.0, **{**HEADS, "num_kv_heads": 1})
    q, (k, _) = problem.q, problem.kv[0]
    q[..., 0] = q.shape[-1] ** 0.5
    q[1, :, 0] *= -1.0
    k[:1300, 0, 0] = step * np.arange(1300)
    check(wgmma, problem, 1, short_rows=8)
    check(wgmma, problem, 3, short_rows=8)


def test_a_row_does_not_depend_on_rows_beside_it(wgmma, rng):
    """Not on what they hold, and so not on when their references move; nor on how many there are."""
    problem = draw(rng, "paged", "plain", lengths=[(4, 700), (4, 90)], peak=1.0, page_size=16, **HEADS)
    few = check(wgmma, problem, 3, short_rows=8)
    problem.q[1::2] *= 30.0
    many = check(wgmma, problem, 3, short_rows=8)
    same([x[::2] for x in few], [x[::2] for x in many])


def test_same_bits(wgmma, rng):
    """In every run of a plan."""
    problem = draw(rng, "paged", "causal", lengths=DECODES, page_size=16, **HEADS)
    first = check(wgmma, problem, 5, short_rows=8)
    for _ in range(3):
        same(first, check(wgmma, problem, 5, short_rows=8))


def test_every_item_has_its_marks(wgmma, rng):
    problem = draw(rng, "paged", "causal", lengths=DECODES, page_size=16, **HEADS)
    marks_every_item(raddle.Attention(spec_of(problem), device=wgmma), problem)


def test_batch_invariance_takes_the_kernel_of_long_queries(wgmma, rng):
    """Which of several kernels runs a request would depend on its neighbours."""
    problem = draw(rng, "paged", "causal", lengths=[(1, 300), (2, 70)], page_size=16, **HEADS)
    attn = attention_of(wgmma, problem, batch_invariant=True)
    plan = attn.plan(twin(problem.layout))
    assert runs_on(plan, 0)
    within(attention(problem), attn.run(plan, problem.q, problem.kv[0]))


def test_workspace_of_a_reservation(wgmma, rng):
    """It is known beforehand, and that of the kernel that the maxima lead to."""
    spec = attention_of(wgmma, draw(rng, "paged", "causal", lengths=[(1, 9)], page_size=16, **HEADS)).spec
    for tokens, rows in ((4, 8), (24, 64), (200, 0)):
        maxima = raddle.Maxima(max_requests=4, max_qo_tokens=tokens, max_kv_tokens=1000)
        attn = raddle.Attention(spec, device=wgmma)
        reservation = attn.reserve(maxima, num_workers=6)
        reservation.update(twin(draw(rng, "paged", "causal", lengths=[(1, 70)], page_size=16, **HEADS).layout))
        assert runs_on(reservation.plan, rows)
        assert raddle.workspace_bytes(spec, maxima, 6, wgmma) <= reservation.num_bytes


@pytest.mark.parametrize("scan", ["softmax", "sum"])
def test_rows_that_keep_nothing(wgmma, rng, scan):
    """They are 0 whatever V holds, whole and where their keys are split."""
    parts = [Sigmoid(-1.0)] if scan == "sum" else []
    problem, empty = with_empty_rows(rng, *parts, lengths=[(4, 700), (1, 77), (3, 3)], **HEADS)
    spoil(rng, problem)
    attn = attention_of(wgmma, problem)
    for workers in (1, 7):
        plan = attn.plan(twin(problem.layout), num_workers=workers)
        assert runs_on(plan, 8)
        out = attn.run(plan, problem.q, problem.kv[0])
        assert (out[empty].astype(np.float32) == 0.0).all()
