"""ALiBi: the paper's slopes, any slopes, the formula's bits."""

import numpy as np
import pytest
import raddle
from checks import within
from draws import DTYPES, WORKERS, draw
from engine import twin
from reference import Alibi, Causal, Problem, attention
from small import refuses

HEADS = dict(dim=32, group=2, num_kv_heads=2)


def test_slopes_of_the_paper():
    assert raddle.alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert raddle.alibi_slopes(1) == [2.0**-8]
    np.testing.assert_allclose(raddle.alibi_slopes(16), 2.0 ** (-0.5 * np.arange(1, 17)), rtol=1e-7)
    # Between powers of two, every second slope of twice as many heads.
    np.testing.assert_allclose(raddle.alibi_slopes(12), [*raddle.alibi_slopes(8), *raddle.alibi_slopes(16)[0:8:2]])
    for n in (3, 6, 7, 40, 71, 112):
        slopes = raddle.alibi_slopes(n)
        assert len(set(slopes)) == n and 0.0 < min(slopes) and max(slopes) < 1.0
    with refuses(ValueError, "num_heads is 0"):
        raddle.alibi_slopes(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workers", WORKERS)
def test_long_keys(engine, rng, dtype, workers):
    """Decode and prefill over keys so far away that their weight is nothing, of either sign of slope."""
    for slopes in (raddle.alibi_slopes(4), [0.0, -0.01, 0.3, 5.0]):
        problem = draw(rng, "paged", [Alibi(slopes), Causal()], dtype, lengths=[(1, 3000), (70, 700)], **HEADS)
        engine.check(problem, num_workers=workers)


def test_the_bits_of_the_formula(engine, rng):
    """One key a row: LSE is its logit, which has the bits of s + slope * float(distance)."""
    n, slope = 300, np.float32([0.3, -1.7, 2.0**-8, 1e-3])
    q = rng.standard_normal((n, 4, 8)).astype(np.float32)
    k = rng.standard_normal((1, 4, 8)).astype(np.float32)
    layout = raddle.RaggedKV([0, n], [0, 1])
    lse = []
    for variant in ([], [raddle.Alibi(slope)]):
        attn = raddle.Attention(raddle.AttentionSpec(4, 4, 8, dtype="float32", variant=variant))
        lse.append(attn.run(attn.plan(layout), q, (k, k), return_lse=True)[1])
    distance = (0 - (np.arange(n) + 1 - n)).astype(np.float32)[:, None]
    np.testing.assert_array_equal(lse[1], lse[0] + slope * distance)


def test_slopes_are_run_members(engine, rng):
    problem = draw(rng, "paged", [Alibi([0.0] * 4), Causal()], **HEADS)
    slopes = rng.normal(0.0, 0.2, 4).astype(np.float32)
    attn = engine.attention(problem)
    plan = attn.plan(twin(problem.layout))
    found = attn.run(plan, problem.q, problem.kv[0], params={"alibi.slopes": slopes}, return_lse=True)
    meant = Problem(problem.q, problem.kv, problem.layout, [Alibi(slopes), Causal()])
    within(attention(meant), *found)
    with refuses(ValueError, "alibi.slopes", "3 elements"):
        attn.run(plan, problem.q, problem.kv[0], params={"alibi.slopes": slopes[:3]})


def test_as_many_slopes_as_heads():
    with refuses(ValueError, "alibi.slopes has 3", "4"):
        raddle.Attention(raddle.AttentionSpec(4, 2, 8, variant=[raddle.Alibi([0.5] * 3)]))
    with refuses(TypeError, "slopes", "string"):
        raddle.Alibi(["steep"])
