"""A row with nothing to attend to is exactly 0, whatever V holds: a weight of 0 alone would not remove Inf and NaN."""

import dataclasses

import numpy as np
import pytest
from draws import draw, numpy_dtype, sinks
from reference import PackedMask, Sigmoid

#: (rows, keys) of each request: long tiles, short ones, and decodes of which some keep nothing.
LENGTHS = [(45, 130), (1, 200), (3, 3), (1, 77)]


def with_empty_rows(rng, *parts, lengths=LENGTHS, **how):
    """A problem whose masks keep nothing for every third row; returns it and which rows those are."""
    problem = draw(rng, "paged", "plain", lengths=lengths, page_size=16, **how)
    masks = [rng.random((qo, kv)) < 0.5 for qo, kv in lengths]
    empty = np.concatenate([np.arange(len(mask)) % 3 == 0 for mask in masks])
    at = 0
    for mask in masks:
        mask[empty[at : at + len(mask)]] = False
        at += len(mask)
    bits = [np.packbits(mask.ravel(), bitorder="little") for mask in masks]
    indptr = np.concatenate([[0], np.cumsum([len(each) for each in bits])]).astype(np.int32)
    return dataclasses.replace(problem, variant=[PackedMask(np.concatenate(bits), indptr), *parts]), empty


def spoil(rng, problem):
    """V of every key becomes NaN or infinite, in places."""
    for _, v in problem.kv:
        bad = np.array([np.nan, np.inf, -np.inf], np.float32).astype(v.dtype)
        v[...] = np.where(rng.random(v.shape) < 0.7, bad[rng.integers(0, 3, v.shape)], v)


def check_empty(out, lse, empty, expected_lse):
    assert (out[empty].astype(np.float32) == 0.0).all()
    if lse is not None:
        np.testing.assert_array_equal(lse[empty], np.broadcast_to(expected_lse, lse[empty].shape))


@pytest.mark.every_isa
@pytest.mark.parametrize("workers", [1, 7])
@pytest.mark.parametrize("group", [1, 5])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_that_keep_nothing(engine, rng, dtype, group, workers):
    problem, empty = with_empty_rows(rng, dtype=dtype, group=group, dim=64)
    spoil(rng, problem)
    for state in (False, True):
        out, lse = engine.run(problem, num_workers=workers, state=state)
        check_empty(out, lse, empty, -np.inf)


@pytest.mark.parametrize("dim", [8, 72, 256])
def test_head_dims(engine, rng, dim):
    problem, empty = with_empty_rows(rng, dtype="float16", group=2, dim=dim)
    spoil(rng, problem)
    check_empty(*engine.run(problem, num_workers=3), empty, -np.inf)


@pytest.mark.every_isa
@pytest.mark.parametrize("workers", [1, 7])
def test_sums_and_sinks(engine, rng, workers):
    problem, empty = with_empty_rows(rng, Sigmoid(-1.0), dtype="bfloat16", group=2, num_kv_heads=2, dim=64)
    spoil(rng, problem)
    check_empty(*engine.run(problem, num_workers=workers), empty, None)
    sink = sinks(rng, 4)
    problem, empty = with_empty_rows(rng, sink, dtype="bfloat16", group=2, num_kv_heads=2, dim=64)
    spoil(rng, problem)
    check_empty(*engine.run(problem, num_workers=workers), empty, sink.logits)


def test_quantised_values(engine, rng):
    problem, empty = with_empty_rows(rng, dtype="bfloat16", group=4, dim=64, kv_dtype="float8_e4m3fn")
    for _, v in problem.kv:
        v[rng.random(v.shape) < 0.7] = numpy_dtype("float8_e4m3fn").type(np.nan)
    check_empty(*engine.run(problem, num_workers=3), empty, -np.inf)


def test_hidden_keys_reach_nothing(engine, rng):
    """K of keys that a mask hides from all rows is Inf and NaN: no bit changes."""
    hidden = rng.random(150) < 0.4
    masks = [np.ones((qo, kv), bool) & ~hidden[:kv] for qo, kv in ((45, 130), (1, 150))]
    bits = [np.packbits(mask.ravel(), bitorder="little") for mask in masks]
    indptr = np.array([0, len(bits[0]), len(bits[0]) + len(bits[1])], np.int32)
    problem = draw(rng, "paged", "plain", "float16", group=2, dim=64, lengths=[mask.shape for mask in masks], page_size=1)
    problem = dataclasses.replace(problem, variant=[PackedMask(np.concatenate(bits), indptr)])
    expected = engine.run(problem, num_workers=3)
    for number, mask in enumerate(masks):
        pages = np.array(problem.layout.pages(number))[hidden[: mask.shape[1]]]
        problem.kv[0][0][pages] = rng.choice([np.nan, np.inf, -np.inf], problem.kv[0][0][pages].shape)
    for found, before in zip(engine.run(problem, num_workers=3), expected):
        np.testing.assert_array_equal(found, before)


@pytest.mark.parametrize("workers", [1, 7])
def test_hidden_values_stay_in_their_request(engine, rng, workers):
    """Where a mask hides Inf or NaN in V, rows of that request may be NaN, and no others; K's reach nothing."""
    problem, _ = with_empty_rows(rng, dtype="float16", group=2, dim=64)
    expected = engine.run(problem, num_workers=workers)
    _, v = problem.kv[0]
    v[problem.layout.pages(0)] = np.nan
    for found, before in zip(engine.run(problem, num_workers=workers), expected):
        np.testing.assert_array_equal(found[LENGTHS[0][0] :], before[LENGTHS[0][0] :])
