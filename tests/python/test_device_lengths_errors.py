"""Lengths and page tables on a GPU: what the host sees is refused by name, what only the GPU sees shows in `check`."""

import dataclasses

import numpy as np
import pytest
import raddle
from checks import within
from device_arrays import DeviceArray, usual_gpu
from device_table import HEADS, MAXIMA, PAGES, WIDTH, Table, Tensors, batch, ints, reserve
from draws import draw
from engine import twin
from reference import Problem, attention
from small import refuses, reserved

# --- what is wrong shows in check ------------------------------------------------------------------


def with_(array, at, value):
    array = array.copy()
    array[at] = value
    return array


# what check says -> the arrays that are wrong, and the request that is then taken for one without keys (None: rows)
SPOILED = {
    "request 1: kv_len is below 0": (lambda x: {"kv_len": with_(x.kv_len, 1, -5)}, 1),
    "request 1: page_indices has fewer pages than kv_len needs": (
        lambda x: {"kv_len": with_(x.kv_len, 1, 16 * WIDTH + 1)},
        1,
    ),
    "request 1: page_indices names a page that is not in the pool": (
        lambda x: {"page_indices": with_(x.page_indices, x.page_indptr[1], PAGES)},
        1,
    ),
    "request 2: page_indices names a page that is not in the pool of num_pages, or is -1": (
        lambda x: {"page_indices": with_(x.page_indices, x.page_indptr[2], -1)},
        2,
    ),
    "request 1: qo_indptr decreases, or leaves 0 to max_qo_tokens = 24: rows there are left alone": (
        lambda x: {"qo_indptr": with_(x.qo_indptr, 2, 30)},
        None,
    ),
}


@pytest.mark.parametrize("words", SPOILED)
def test_a_bad_request_is_taken_for_one_without_keys(gpu, rng, words):
    attn, reservation = reserve(gpu)
    table, tensors = Table("table", num_pages=PAGES), Tensors()
    problem = draw(rng, "paged", "causal", lengths=[(2, 40), (1, 70), (1, 20)], page_size=16, **HEADS)
    spoiled, without_keys = SPOILED[words]
    tensors.write(problem)
    table.write(dataclasses.replace(problem.layout, **spoiled(problem.layout)))
    reservation.update(table.layout)
    attn.run(reservation, tensors.q, tensors.kv, out=tensors.out)
    with refuses(ValueError, words):
        reservation.check()
    reservation.check()  # it has been said
    out, planned, rows = tensors.out.numpy()[:4], problem.layout, 4
    if without_keys is None:
        assert (out[2:] == 7.0).all()
        rows, planned = 2, dataclasses.replace(planned, qo_indptr=np.array([0, 2, 2, 2], np.int32))
    else:
        planned = dataclasses.replace(planned, kv_len=with_(planned.kv_len, without_keys, 0))
    within(attention(Problem(problem.q[:rows], problem.kv, planned, problem.variant)), out[:rows])
    table.write(problem.layout)
    reservation.update(table.layout)
    attn.run(reservation, tensors.q, tensors.kv, out=tensors.out)
    reservation.check()
    within(attention(problem), tensors.out.numpy()[:4])


@pytest.mark.parametrize(
    "words, lengths",
    [
        ("qo_indptr has more rows than max_qo_tokens = 24", [(20, 30), (5, 9)]),
        ("kv_len has more keys than max_kv_tokens = 1000", [(1, 400), (2, 601)]),
    ],
)
def test_a_batch_beyond_the_maxima_is_not_computed(gpu, rng, words, lengths):
    attn, reservation = reserve(gpu)
    table, tensors = Table("lists"), Tensors()
    problem = draw(rng, "paged", "causal", lengths=lengths, page_size=16, **HEADS)
    table.write(problem.layout), tensors.write(draw(rng, lengths=[(1, 1)], page_size=16, **HEADS))
    reservation.update(table.layout)
    attn.run(reservation, tensors.q, tensors.kv, out=tensors.out)
    assert (tensors.out.numpy() == 7.0).all()
    with refuses(ValueError, words, "of the reservation: the plan is empty"):
        reservation.check()


def test_more_requests_than_the_arrays_have(gpu, rng):
    attn, reservation = reserve(gpu)
    table = Table("lists")
    table.write(batch(rng).layout)
    table.count.write(np.array([7], np.int32))
    reservation.update(table.layout)
    with refuses(ValueError, "num_requests", "max_requests = 6", "plan is empty"):
        reservation.check()


# --- what the host sees is refused by name -----------------------------------------------------------


ZEROS = {"qo_indptr": 3, "page_indptr": 3, "page_indices": 4, "kv_len": 2}


def page_table(**changes):
    arrays = {name: ints(np.zeros(n)) for name, n in ZEROS.items()}
    return raddle.PagedKV(**{**arrays, "page_size": 16, **changes})


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"qo_indptr": np.zeros(3, np.int32)}, ValueError, ["qo_indptr lies on 'cpu'", f"'{usual_gpu()}'", "kv_len"]),
        ({"kv_len": np.zeros(2, np.int32)}, ValueError, [f"qo_indptr lies on '{usual_gpu()}'", "host"]),
        ({"page_indices": lambda: DeviceArray(np.zeros(4, np.int64))}, TypeError, ["page_indices has dtype int64"]),
        ({"kv_len": lambda: DeviceArray(np.zeros(2, np.float32))}, TypeError, ["kv_len has dtype float32"]),
        ({"page_indices": lambda: ints(np.zeros((2, 4)))}, ValueError, ["page_indices has 2 dimensions; expected 1"]),
        ({"page_indptr": None}, ValueError, ["page_indices has 1 dimensions; expected 2"]),
        ({"qo_indptr": lambda: ints(np.zeros(2))}, ValueError, ["qo_indptr has 2 entries; expected 3"]),
        ({"page_indptr": lambda: ints(np.zeros(4))}, ValueError, ["page_indptr has 4 entries; expected 3"]),
        ({"page_indptr": None, "page_indices": lambda: ints(np.zeros((3, 4)))}, ValueError, ["page_indices", "3", "2"]),
        ({"kv_len": lambda: DeviceArray(np.zeros(4, np.int32)[::2])}, ValueError, ["kv_len has stride 2"]),
        ({"page_size": 0}, ValueError, ["page_size is 0"]),
        ({"num_pages": -1}, ValueError, ["num_pages is -1"]),
        ({"discover_prefixes": -2}, ValueError, ["discover_prefixes is"]),
        ({"qo_pos": np.zeros(1, np.int32)}, ValueError, ["qo_pos is given"]),
        ({"num_requests": lambda: ints([1, 2])}, ValueError, ["num_requests has 2 entries; expected 1"]),
    ],
)
def test_bad_page_tables(gpu, changes, error, words):
    with refuses(error, *words):
        page_table(**{name: value() if callable(value) else value for name, value in changes.items()})


def test_arrays_of_two_gpus(emulator):
    with refuses(ValueError, "qo_indptr lies on 'cuda:0'", "'cuda:1', where kv_len lies"):
        page_table(kv_len=DeviceArray(np.zeros(2, np.int32), 1))


def test_reservations_and_layouts_of_other_kinds(gpu, rng):
    attn, reservation = reserve(gpu)
    problem = batch(rng)
    with refuses(ValueError, "layout has its lengths on a GPU", "device_lengths=True"):
        attn.plan(page_table())
    with refuses(ValueError, f"layout lies on '{usual_gpu()}'", "device_lengths=True"):
        reserved(attn, **MAXIMA).update(page_table())
    with refuses(ValueError, "layout lies on the host", f"'{usual_gpu()}'", "device_lengths=True"):
        reservation.update(twin(problem.layout))
    with refuses(ValueError, "layout has 7 requests", "max_requests = 6"):
        arrays = {"qo_indptr": ints(np.zeros(8)), "page_indptr": ints(np.zeros(8)), "kv_len": ints(np.zeros(7))}
        reservation.update(page_table(**arrays))
    with refuses(ValueError, "page_size is 16; expected 32, as of the reservation"):
        reserve(gpu, page_size=32)[1].update(page_table())
    with refuses(ValueError, "discover_prefixes is 512; expected False", "max_levels", "1"):
        reservation.update(page_table(discover_prefixes=True))
    with refuses(ValueError, "discover_prefixes is 0; expected more", "max_levels", "2"):
        reserve(gpu, max_levels=2)[1].update(page_table())
    on_cpu = raddle.Attention(raddle.AttentionSpec(4, 2, 64))
    with refuses(ValueError, f"layout lies on '{usual_gpu()}'; expected 'cpu'"):
        reserved(on_cpu, **MAXIMA, device_lengths=True).update(page_table())
    for changes, words in (
        ({"schedule": "algorithm1"}, ["schedule is 'algorithm1'", "'linear'"]),
        ({"max_levels": 3}, ["max_levels is 3", "2"]),
    ):
        with refuses(ValueError, *words):
            reserved(attn, **{**MAXIMA, "device_lengths": True, **changes})


def test_runs_have_room_for_any_batch(gpu, rng):
    attn, reservation = reserve(gpu)
    tensors, problem = Tensors(), batch(rng)
    reservation.update(page_table(num_pages=PAGES + 1))
    with refuses(ValueError, "q is [23, 4, 64]", "expected [24, 4, 64]"):
        attn.run(reservation, DeviceArray(np.zeros((23, 4, 64), problem.q.dtype)), tensors.kv, out=tensors.out)
    with refuses(ValueError, f"kv: k has {PAGES} pages", f"page {PAGES}"):
        attn.run(reservation, tensors.q, tensors.kv, out=tensors.out)


def test_bits_of_a_batch_are_refused(gpu):
    mask = raddle.PackedMask(np.zeros(1, np.uint8), np.zeros(3, np.int32))
    attn = raddle.Attention(raddle.AttentionSpec(4, 2, 64, variant=[mask]), device=gpu)
    with refuses(ValueError, "packed_mask has bits for every pair", "host"):
        reserved(attn, **MAXIMA, device_lengths=True).update(page_table())
