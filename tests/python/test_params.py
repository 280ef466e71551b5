"""Plan members and run members: values that differ from the spec's, for a batch or for a layer."""

import numpy as np
import pytest
import raddle
from checks import within
from draws import draw
from engine import twin
from reference import Causal, Problem, Rope, Sigmoid, Sinks, SlidingWindow, SoftCap, attention

HEADS = dict(dim=32, group=2, num_kv_heads=2)


def changed(problem, *variant, scale=None):
    return Problem(problem.q, problem.kv, problem.layout, list(variant), scale)


@pytest.mark.parametrize(
    ("variant", "params", "meant"),
    [
        ([SoftCap(30.0)], {"softcap.cap": 2.0}, [SoftCap(2.0)]),
        ([SoftCap(30.0), SoftCap(9.0)], {"softcap#2.cap": 1.5}, [SoftCap(30.0), SoftCap(1.5)]),
        ([Sinks([0.0] * 4)], {"sinks.logit": np.float32([1, -2, 3, 0])}, [Sinks([1, -2, 3, 0])]),
        ([Rope(16)], {"rope.offset": np.int32([77])}, [Rope(16, offset=77)]),
        ([Sigmoid(0.0)], {"sigmoid.bias": -3.0}, [Sigmoid(-3.0)]),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_run_members(engine, rng, variant, params, meant):
    problem = draw(rng, "paged", variant, **HEADS)
    attn = engine.attention(problem)
    plan = attn.plan(twin(problem.layout))
    out = attn.run(plan, problem.q, problem.kv[0], params=params)
    within(attention(changed(problem, *meant)), out)
    # The spec's own values are in force again.
    within(attention(problem), attn.run(plan, problem.q, problem.kv[0]))


def test_plan_members(engine, rng):
    problem = draw(rng, "paged", [SlidingWindow(5), Causal()], lengths=[(3, 200), (40, 40)], **HEADS)
    attn = engine.attention(problem)
    plan = attn.plan(twin(problem.layout), num_workers=7, params={"window.left": 90, "window.right": 0})
    found = attn.run(plan, problem.q, problem.kv[0], return_lse=True)
    within(attention(changed(problem, SlidingWindow(90, 0), Causal())), *found)


def test_a_layers_own_scale(engine, rng):
    problem = draw(rng, "paged", "causal", **HEADS)
    attn = engine.attention(problem)
    plan = attn.plan(twin(problem.layout))
    found = attn.run(plan, problem.q, problem.kv[0], scale=0.05, return_lse=True)
    within(attention(changed(problem, Causal(), scale=0.05)), *found)


def test_rope_offsets_are_one_or_one_a_request(engine, rng):
    problem = draw(rng, "paged", [Rope(8, offset=np.int32([0, 5, 9]))], lengths=[(1, 4)] * 3, **HEADS)
    engine.check(problem)
    two = draw(rng, "paged", problem.variant, lengths=[(1, 4)] * 2, **HEADS)
    with pytest.raises(ValueError, match="rope.offset has 3.*2"):
        engine.run(two)


def test_rope_offsets_by_request_need_keys_of_one_request(engine, rng):
    rope = [Rope(8, offset=np.int32([0, 5]))]
    # Row blocks of one row each: no key belongs to both requests.
    engine.check(draw(rng, "bsr", rope, lengths=[(2, 7), (3, 6)], Br=1, Bc=2, **HEADS))
    pool = np.zeros((3, 4, 1, 8), np.float32)
    prefix = raddle.PagedKV([0, 2], [0, 1], [0], [4], page_size=4)
    rest = raddle.PagedKV([0, 1, 2], [0, 1, 2], [1, 2], [2, 3], page_size=4)
    spec = raddle.AttentionSpec(1, 1, 8, dtype="float32", variant=[raddle.Rope(8, offset=np.int32([0, 5]))])
    attn = raddle.Attention(spec)
    with pytest.raises(ValueError, match="rope.offset.*share"):
        attn.run(attn.plan(raddle.Cascade([prefix, rest])), np.zeros((2, 1, 8), np.float32), (pool, pool))


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "variant, member, good, bad",
    [
        (raddle.SoftCap, "softcap.cap", 3.0, [0.0, -1.0, NAN, INF, 1e300]),
        (raddle.Sigmoid, "sigmoid.bias", -3.0, [NAN, INF, -INF, 1e300]),
        (raddle.Sinks, "sinks.logit", [0.5, -INF], [[0.5, NAN], np.float64([NAN, 0.5]), [INF, 0.5]]),
        (raddle.Alibi, "alibi.slopes", [0.5, -0.25], [[0.5, NAN], [INF, 0.0], np.float32([-INF, 1.0])]),
    ],
)
def test_bad_values_are_refused_wherever_they_come_in(variant, member, good, bad):
    """By the constructor, and by params of a run, in the same words."""
    attn = raddle.Attention(raddle.AttentionSpec(2, 1, 8, dtype="float32", variant=[variant(good)]))
    plan = attn.plan(raddle.RaggedKV([0, 1], [0, 3]))
    q, kv = np.ones((1, 2, 8), np.float32), np.ones((3, 1, 8), np.float32)
    out = np.full_like(q, np.nan)
    for value in bad:
        with pytest.raises(ValueError, match="(is|holds) .*expected a (finite )?number") as refusal:
            variant(value)
        expected = str(refusal.value).split(";")[1]
        with pytest.raises(ValueError) as other:
            attn.run(plan, q, (kv, kv), out=out, params={member: value})
        assert str(other.value).startswith(f"params: '{member}' ") and str(other.value).endswith(expected)
        assert np.isnan(out).all()
    attn.run(plan, q, (kv, kv), out=out, params={member: good})
    assert np.isfinite(out).all()


def test_a_temperature_is_positive():
    attn = raddle.Attention(raddle.AttentionSpec(1, 1, 8, dtype="float32", variant=[raddle.Rope(8)]))
    x = np.ones((1, 1, 8), np.float32)
    with pytest.raises(ValueError, match="rope.magnitude' is 0; expected a finite number above 0"):
        attn.run(attn.plan(raddle.RaggedKV([0, 1], [0, 1])), x, (x, x), params={"rope.magnitude": 0})
