"""Every shipped variant × layout × dtype × head dim × group × workers × schedule: every pair of values occurs."""

import ml_dtypes
import numpy as np
import pytest
import raddle
import reference.budgets
from checks import within
from draws import DTYPES, GROUPS, HEAD_DIMS, SCHEDULES, VARIANTS, WORKERS, covering, draw, problems
from hypothesis import given
from hypothesis import strategies as st
from layout_draws import LAYOUTS
from reference import Causal, Problem, RaggedKV, Rope, SoftCap, attention

MATRIX = covering(
    variant=list(VARIANTS),
    layout=list(LAYOUTS),
    dtype=DTYPES,
    dim=HEAD_DIMS,
    dim_vo=["same", 8, 40, 256],
    group=GROUPS,
    workers=WORKERS,
    schedule=SCHEDULES,
)
SMALL = covering(variant=list(VARIANTS), dtype=DTYPES, dim=[24, 80, 128], workers=[2, 132])


def label(row) -> str:
    return "-".join(str(value) for value in row.values())


@pytest.mark.parametrize("row", MATRIX, ids=label)
def test_matrix(engine, rng, row):
    row = dict(row)
    how = {"num_workers": row.pop("workers"), "schedule": row.pop("schedule")}
    dim_vo = row.pop("dim_vo")
    # Interleaved K and V are one tensor, so their head dims are one.
    same = dim_vo == "same" or row["layout"] == "paged_interleaved"
    engine.check(draw(rng, dim_vo=None if same else dim_vo, **row), **how)


@pytest.mark.every_isa
@pytest.mark.parametrize("row", SMALL, ids=label)
def test_on_every_isa(engine, rng, row):
    row = dict(row)
    workers = row.pop("workers")
    engine.check(draw(rng, **row), num_workers=workers)


@pytest.mark.every_isa
@pytest.mark.parametrize("layout", ["paged", "paged_positions"])
@pytest.mark.parametrize("dim", [40, 128, 256])
def test_strips_and_tiles_of_long_queries(engine, rng, layout, dim):
    """One strip of rows a tile and many, keys of one tile and many, and masks that drop whole tiles."""
    lengths = [(9, 700), (5, 130), (40, 500), (300, 410), (17, 17)]
    problem = draw(rng, layout, "causal", "bfloat16", dim=dim, group=4, num_kv_heads=1, lengths=lengths)
    engine.check(problem, num_workers=2)


@given(problem=problems(), workers=st.integers(1, 200), schedule=st.sampled_from(SCHEDULES))
def test_any_problem(engine, problem, workers, schedule):
    engine.check(problem, num_workers=workers, schedule=schedule)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_long_keys_are_split(engine, rng, dtype, schedule):
    """Two decodes of thousands of keys on many workers: most of the output comes out of contractions."""
    lengths = [(1, 3000), (1, 1111)]
    problem = draw(rng, dtype=dtype, variant="plain", dim=64, group=4, num_kv_heads=1, lengths=lengths, peak=1.0)
    engine.check(problem, num_workers=132, schedule=schedule)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_of_a_thousand_tokens(engine, rng, dtype):
    problem = draw(rng, layout="ragged", dtype=dtype, dim=128, group=4, num_kv_heads=1, lengths=[(1000, 1000)])
    engine.check(problem)


@pytest.mark.parametrize("scale", [0.0, 0.37, -0.2])
def test_a_scale_of_the_callers_own(engine, rng, scale):
    problem = draw(rng, lengths=[(3, 50)])
    problem.scale = scale
    engine.check(problem)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "paged_interleaved"])  # one tensor: one head dim
@pytest.mark.parametrize(("dim", "dim_vo"), [(192, 128), (128, 192)])
def test_head_dims_of_q_k_and_of_v_differ(engine, rng, dtype, layout, dim, dim_vo):
    """192/128 is DeepSeek's prefill. Decode, chunks and prompts, split and not."""
    rope = Rope(64, interleaved=True)
    lengths = [(1, 300), (17, 150), (40, 40)]
    problem = draw(rng, layout, [rope, Causal()], dtype, dim, dim_vo, group=4, num_kv_heads=1, lengths=lengths)
    for workers in (1, 7):
        engine.check(problem, num_workers=workers)
    engine.check(problem, num_workers=7, state=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dims_differ_in_one_call(rng, dtype):
    problem = draw(rng, "ragged", [Causal()], dtype, 192, 128, lengths=[(30, 80)])
    out, lse = raddle.attention(problem.q, *problem.kv[0], causal=True, return_lse=True)
    assert out.shape == (*problem.q.shape[:2], 128)
    within(attention(problem), out, lse)


@pytest.mark.every_isa
@pytest.mark.parametrize("cap", [0.75, 30.0, 50.0])
@pytest.mark.parametrize("rows", [1, 4096])
def test_soft_caps_of_all_numbers(engine, cap, rows):
    """Every positive bfloat16 up to 8 caps, and its negative, as the only logit of a row: the LSE is that logit."""
    numbers = np.arange(1 << 15, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    numbers = numbers[numbers <= 8.0 * cap]
    numbers = np.resize(np.concatenate([numbers, -numbers]), (2 * len(numbers) // 4096 + 1) * 4096)
    q = np.zeros((len(numbers), 1, 64), ml_dtypes.bfloat16)
    q[:, 0, 5] = numbers
    k = np.zeros((len(numbers) // rows, 1, 64), ml_dtypes.bfloat16)
    k[:, 0, 5] = 1.0
    each, all_rows = np.arange(len(k) + 1), np.arange(len(k) + 1) * rows
    layout = RaggedKV(all_rows, each)
    problem = Problem(q, [(k, k)], layout, [SoftCap(cap)], scale=1.0)
    _, lse = engine.run(problem)
    exact = cap * np.tanh(numbers.astype(np.float64) / cap)
    assert np.abs(lse[:, 0] - exact).max() <= cap * (reference.budgets.TANH + 8 * reference.budgets.U32)
