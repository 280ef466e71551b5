"""Queries of many rows against keys that take kernels several rounds, and what is carried from round to round."""

import numpy as np
import pytest
from draws import DTYPES, draw
from reference import Causal, PackedMask, Sigmoid, Sinks, SlidingWindow, SoftCap
from test_same_bits import same

# (qo_len, kv_len): keys of several rounds with a rest, of exactly one, and of one and a bit
LENGTHS = [(40, 2305), (17, 1024), (70, 1090)]
VARIANTS = {
    "plain": [],
    "causal": [Causal()],
    "window": [SlidingWindow(900, 3)],
    "softcap": [SoftCap(4.0), Causal()],
    "sinks": [Sinks(np.float32([1.0, -2.0])), Causal()],
    "sum": [Sigmoid(-1.0), Causal()],
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 40)])
def test_several_rounds_of_keys(engine, rng, variant, dims):
    dim, dim_vo = dims
    options = {"dtype": "bfloat16", "dim": dim, "dim_vo": dim_vo, "num_kv_heads": 1, "lengths": LENGTHS}
    problem = draw(rng, "paged", VARIANTS[variant], **options)
    engine.check(problem)
    engine.check(problem, num_workers=5)


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_gaps_that_only_the_mask_itself_knows(engine, rng, dtype):
    """Rows that keep nothing of a round, rounds that no row keeps, and single keys at their borders."""
    qo_len, kv_len = 50, 2200
    keep = np.zeros((qo_len, kv_len), bool)
    keep[:20, 100:230] = keep[5:30, 1023:1025] = keep[:, 1500:1533] = keep[40:, 2199:] = True
    keep[45] = False
    bits = np.packbits(keep.ravel(), bitorder="little")
    mask = PackedMask(bits, np.int32([0, len(bits)]))
    problem = draw(rng, "ragged", [mask], dtype, num_kv_heads=1, lengths=[(qo_len, kv_len)])
    out, lse = engine.run(problem)
    assert (out[45] == 0.0).all() and np.isneginf(lse[45]).all()
    engine.check(problem)


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", [-0.1, 0.004, 0.02, 3.0])
def test_logits_that_grow_from_key_to_key(engine, rng, dtype, step):
    """A row's maximum is found late, once or again and again; or first, and what follows vanishes."""
    problem = draw(rng, "ragged", [], dtype, num_kv_heads=1, lengths=[(40, 1300)], peak=1.0)
    q, (k, _) = problem.q, problem.kv[0]
    q[..., 0] = q.shape[-1] ** 0.5
    q[7, :, 0] *= -1.0
    k[:1300, 0, 0] = step * np.arange(1300)
    engine.check(problem)
    engine.check(problem, num_workers=3)


@pytest.mark.parametrize("layout", ["ragged", "cascade"])
def test_a_row_does_not_depend_on_rows_beside_it(engine, rng, layout, monkeypatch):
    """Not on what they hold, and so not on when their maximum moves.

    Kernels on wgmma choose the references of a warp's rows together (docs/design/gpu/hopper.md).
    """
    monkeypatch.setenv("RADDLE_BACKEND", "mma")
    problem = draw(rng, layout, "plain", "bfloat16", num_kv_heads=1, lengths=[(40, 1100), (40, 1100)], peak=1.0)
    few = engine.run(problem)
    problem.q[1::2] *= 30.0
    many = engine.run(problem)
    same([x[::2] for x in few], [x[::2] for x in many])
