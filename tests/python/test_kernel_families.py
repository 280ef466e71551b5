"""Hopper's family of GPU kernels: which plans take it and why, and that it computes what the other one does.

Needs --device cuda: an sm_90 GPU, or the emulated driver with RADDLE_EMULATOR_COMPUTE=90 (test_emulated.py).
"""

import dataclasses
import itertools

import numpy as np
import pytest
import raddle
import tvm_ffi
from checks import within
from device_table import MAXIMA, PAGES, Table, Tensors, batch, reserve
from draws import draw
from engine import Engine, twin
from hopper import CLUSTERS, HEADS, ROW_BY_ROW, attention_of, check, runs_on
from reference import Alibi, Causal, Flex, SoftCap, attention
from small import refuses, reserved
from test_flex_mods import MASKS, SCORES, Place

LONG = [(70, 90), (1, 300), (0, 5), (33, 140), (130, 131)]
streams = itertools.count(0xA0000, 0x100)


@pytest.mark.parametrize("layout", ["ragged", "paged", "paged_hnd", "paged_interleaved", "paged_table"])
@pytest.mark.parametrize("num_workers", [1, 3, 8])
def test_layouts(wgmma, rng, layout, num_workers):
    paged = {} if layout == "ragged" else {"page_size": int(rng.choice([8, 16, 64, 256]))}
    check(wgmma, draw(rng, layout, "causal", lengths=LONG, **paged, **HEADS), num_workers)


FULL_TILES = [(128, 1700), (70, 1500), (120, 1300), (128, 1800), (128, 0)]  # of two blocks, or nearly
WIDE = {**HEADS, "dim": 128}  # clusters are slower with narrow heads


@pytest.mark.parametrize("layout", ["ragged", "paged"])
def test_clusters(wgmma, rng, layout):
    """Workers of two blocks, where all rows of both need the same keys; one block has few rows of a tile."""
    variant = {"ragged": [], "paged": [Alibi(np.float32([0.5, 0.25, 0.1, 0.0]))]}[layout]
    paged = {"page_size": 64} if layout == "paged" else {}
    problem = draw(rng, layout, variant, lengths=FULL_TILES, **paged, **WIDE)
    plan = attention_of(wgmma, problem).plan(twin(problem.layout), num_workers=2)
    assert CLUSTERS in plan.explain() and "2 blocks in clusters of 2" in plan.explain(), plan.explain()
    check(wgmma, problem, 2)


def test_no_clusters(wgmma, rng):
    """Where half of the rows would wait for keys of the others, pages are small, one block works alone, heads are narrow,
    or a request's bits may not depend on others."""
    for variant, page_size, num_workers, lengths, heads in [
        ("causal", 64, 2, [(300, 300)], WIDE),
        ("plain", 16, 2, [(300, 300)], WIDE),
        ("plain", 64, 1, [(300, 300)], WIDE),
        ("plain", 64, 2, FULL_TILES, HEADS),
    ]:
        problem = draw(rng, "paged", variant, lengths=lengths, page_size=page_size, **heads)
        plan = attention_of(wgmma, problem).plan(twin(problem.layout), num_workers=num_workers)
        assert runs_on(plan, 0) and CLUSTERS not in plan.explain(), plan.explain()
    problem = draw(rng, "ragged", [], lengths=FULL_TILES, **WIDE)
    for batch_invariant in (False, True):  # which of the others have them depends on the batch
        attn = attention_of(wgmma, problem, batch_invariant=batch_invariant)
        text = attn.plan(twin(problem.layout), num_workers=2).explain()
        assert (CLUSTERS in text) != batch_invariant, text


def test_workspace_bytes_bound_the_plans_of_every_family(wgmma, monkeypatch):
    """Of heads 256 wide, tiles of Hopper's long queries have twice the rows of the others'."""
    monkeypatch.delenv("RADDLE_BACKEND")
    spec = raddle.AttentionSpec(1, 1, 256, dtype="bfloat16")
    plan = raddle.Attention(spec, device=wgmma).plan(raddle.RaggedKV([0, 128], [0, 400_000]), num_workers=100)
    assert runs_on(plan, 0)
    maxima = raddle.Maxima(max_requests=1, max_qo_tokens=128, max_kv_tokens=400_000)
    assert plan.workspace_bytes <= raddle.workspace_bytes(spec, maxima, 100, wgmma)


@pytest.mark.parametrize("schedule", ["linear", "algorithm1", "one-per-request"])
def test_schedules(wgmma, rng, schedule):
    check(wgmma, draw(rng, "paged", "causal", lengths=LONG, page_size=16, **HEADS), 5, schedule=schedule)


def test_states(wgmma, rng):
    check(wgmma, draw(rng, "paged", "causal", lengths=LONG, page_size=16, **HEADS), 5, state=True)


SHORT_OF_LONG = [(70, 90), (1, 120), (33, 140), (130, 131)]  # within the tables of the mods


@pytest.mark.parametrize(
    "mods",
    [
        ("document", "softcap"),
        ("dilated_window", "alibi"),
        ("natten_tiled", "t5_buckets"),
        ("tree", "relative_position_bias"),
    ],
    ids="-".join,
)
def test_functions_of_python(wgmma, rng, mods):
    """A mask and a score: masks whose tiles are empty, full and partial; arrays that both index."""
    place = Place(rng, 4, len(SHORT_OF_LONG))
    mask, score = MASKS[mods[0]](place), SCORES[mods[1]](place)
    variant = [Flex(score, error=2e-6 if mods[1] == "softcap" else 0.0), Flex(mask)]
    check(wgmma, draw(rng, "paged", variant=variant, lengths=SHORT_OF_LONG, page_size=16, **HEADS), 5)


@pytest.mark.parametrize("order", ["rising", "falling", "none"])
@pytest.mark.parametrize("layout", ["ragged", "paged"])
def test_documents_by_their_numbers(wgmma, rng, layout, order):
    """Rows keep an interval of keys where the captured array is in order; else the mask is asked."""
    numbers = np.repeat(np.arange(9), rng.integers(1, 60, 9))[:144]
    numbers = np.pad(numbers, (0, 144 - len(numbers)), mode="edge")
    numbers = {"rising": numbers, "falling": numbers[::-1].copy(), "none": rng.permutation(9)[numbers]}[order]
    is_text = np.arange(144) < rng.integers(100, 140, (len(SHORT_OF_LONG), 1))

    def document(b, h, q_idx, kv_idx):
        return (numbers[q_idx] == numbers[kv_idx]) & (kv_idx <= q_idx) & is_text[b, kv_idx]

    paged = {"page_size": 16} if layout == "paged" else {}
    check(wgmma, draw(rng, layout, variant=[Flex(document)], lengths=SHORT_OF_LONG, **paged, **HEADS), 5)


@pytest.mark.parametrize("num_workers", [1, 7])
def test_cascades(wgmma, rng, num_workers):
    """Short queries of the requests beside long ones of what they share."""
    lengths = [(1, 30), (9, 70), (1, 3), (40, 60)]
    check(wgmma, draw(rng, "cascade", "causal", lengths=lengths, page_size=16, **HEADS), num_workers)


def test_batch_invariance(wgmma, rng):
    """Other workers, and other requests beside it, change no bit of a request's."""
    problem = draw(rng, "paged", "causal", lengths=[(40, 2300), (3, 30)], page_size=16, **HEADS)
    attn = attention_of(wgmma, problem, batch_invariant=True)
    layout = twin(problem.layout)
    outs = []
    for workers in (1, 6):
        outs.append(attn.run(attn.plan(layout, num_workers=workers), problem.q, problem.kv[0]))
    within(attention(problem), outs[0])
    np.testing.assert_array_equal(outs[0].view(np.uint16), outs[1].view(np.uint16))


def slopes_of(slope, heads=slice(0, 0)):
    slopes = np.full(4, 0.01, np.float32)
    slopes[heads] = slope
    return slopes


def with_slopes(slope):
    def changed(problem, heads):
        slopes = slopes_of(slope, heads)
        return dataclasses.replace(problem, variant=[Alibi(slopes), Causal()]), {"alibi.slopes": slopes}

    return [Alibi(slopes_of(0.01)), Causal()], changed


def with_logits_beyond_the_cap():
    def changed(problem, heads):
        q = problem.q.copy()
        q[:, heads] = (q[:, heads].astype(np.float32) * 20).astype(q.dtype)
        return dataclasses.replace(problem, q=q), {}

    return [SoftCap(8.0), Causal()], changed


@pytest.mark.parametrize("heads", [slice(0, 2), slice(2, 4)], ids=["first heads", "last heads"])
@pytest.mark.parametrize(
    ("variant", "changed"),
    [with_slopes(4.0), with_slopes(-4.0), with_logits_beyond_the_cap()],
    ids=["near keys win", "far keys win", "beyond the cap"],
)
def test_logits_change_no_bit_of_other_items(wgmma, rng, variant, changed, heads):
    """A worker may draw any item before another: what the logits of some heads have it do ends with their item. Keys
    are read from the last one on, so that those of the first tiles weigh most, or those of later ones."""
    problem = draw(rng, "ragged", variant=variant, lengths=[(140, 700)], **HEADS)
    attn = attention_of(wgmma, problem)
    plan = attn.plan(twin(problem.layout), num_workers=1)
    assert runs_on(plan, 0)
    outs = []
    for each, params in ((problem, {}), changed(problem, heads)):
        outs.append(attn.run(plan, each.q, each.kv[0], params=params))
        within(attention(each), outs[-1])
    others = np.delete(np.arange(4), heads)
    np.testing.assert_array_equal(*(out[:, others].view(np.uint16) for out in outs))


def test_long_queries_mark_no_timeline(wgmma, rng):
    problem = draw(rng, "paged", "causal", lengths=LONG, page_size=16, **HEADS)
    attn = attention_of(wgmma, problem)
    plan = attn.plan(twin(problem.layout))
    assert not plan.marks_timelines
    with refuses(ValueError, "timeline is given", "marks nothing", "RADDLE_BACKEND=mma"):
        attn.run(plan, problem.q, problem.kv[0], timeline=raddle.Timeline(plan, wgmma))


COPIED_BY_ROWS = [
    ("paged", {"page_size": 1}),
    ("paged", {"page_size": 4}),
    ("paged_hnd", {"page_size": 24}),
    ("paged_interleaved", {"page_size": 5}),
]


@pytest.mark.parametrize(("layout", "pages"), COPIED_BY_ROWS)
def test_layouts_that_are_copied_row_by_row(wgmma, rng, layout, pages):
    check(wgmma, draw(rng, layout, "causal", lengths=LONG, **pages, **HEADS), 5)


@pytest.mark.parametrize("variant", ["causal", "alibi"])
@pytest.mark.parametrize("layout", ["paged", "paged_hnd"])
@pytest.mark.parametrize(
    ("page_size", "lengths", "short_rows"),
    [(300, LONG, 0), (1000, LONG, 0), (5, [(3, 5), (1, 4), (0, 0)], 8), (333, [(1, 90), (2, 333)], 8)],
)
def test_requests_of_one_page(wgmma, rng, page_size, lengths, short_rows, layout, variant):
    """Boxes copy pages of any size, too, where each request has one, as in a contiguous cache."""
    problem = draw(rng, layout, variant, lengths=lengths, page_size=page_size, **HEADS)
    assert ROW_BY_ROW not in attention_of(wgmma, problem).plan(twin(problem.layout)).explain()
    check(wgmma, problem, 5, short_rows=short_rows)


def test_a_request_with_one_page_beside_others(wgmma, rng):
    problem = draw(rng, "paged", "causal", lengths=[(70, 90), (3, 301)], page_size=300, **HEADS)
    assert ROW_BY_ROW in attention_of(wgmma, problem).plan(twin(problem.layout)).explain()
    check(wgmma, problem, 5)


@pytest.mark.parametrize("variant", ["causal", "alibi", "window"])
@pytest.mark.parametrize(("lengths", "short_rows"), [(LONG, 0), ([(1, 90), (2, 333), (0, 0), (4, 5)], 8)])
def test_ragged_keys_anywhere(wgmma, rng, lengths, short_rows, variant):
    """Boxes copy them wherever they begin, as the keys of a padded cache."""
    problem = draw(rng, "ragged_rows", variant, lengths=lengths, **HEADS)
    assert ROW_BY_ROW not in attention_of(wgmma, problem).plan(twin(problem.layout)).explain()
    check(wgmma, problem, 5, short_rows=short_rows)


@pytest.mark.parametrize(("Br", "Bc", "short_rows"), [(3, 16, 8), (3, 5, 8), (40, 16, 0)])
def test_blocks_of_slots(wgmma, rng, Br, Bc, short_rows):
    check(wgmma, draw(rng, "bsr", "causal", lengths=LONG, Br=Br, Bc=Bc, **HEADS), 5, short_rows=short_rows)


def test_specs_that_it_does_not_serve(wgmma):
    def refused(why, *dims, **options):
        spec = raddle.AttentionSpec(4, 2, *dims, **{"dtype": "bfloat16", **options})
        with refuses(ValueError, 'RADDLE_BACKEND is "wgmma"', why):
            raddle.Attention(spec, device=wgmma)

    refused("head dims", 264)
    refused("head dims", 64, 264)
    refused("kv_dtype other than dtype", 64, kv_dtype="float8_e4m3fn")
    refused("parts for queries, keys or values", 64, variant=raddle.Rope(64))


@pytest.mark.parametrize(("dim", "dim_vo", "dtype"), [(256, 256, "bfloat16"), (192, 128, "float16"), (136, 160, "bfloat16")])
def test_wide_heads(wgmma, rng, dim, dim_vo, dtype):
    """Tiles of 64 keys; above 192, the queries of an item take the only slot from those before."""
    heads = {**HEADS, "dim": dim, "dim_vo": dim_vo, "dtype": dtype}
    check(wgmma, draw(rng, "paged", "causal", lengths=LONG, page_size=16, **heads), 3)


def test_heads_whose_long_queries_it_does_not_serve(wgmma, rng):
    heads = {**HEADS, "dim_vo": 72}
    problem = draw(rng, "paged", "causal", lengths=[(1, 30), (33, 40)], page_size=16, **heads)
    attn = attention_of(wgmma, problem)
    with refuses(ValueError, 'RADDLE_BACKEND is "wgmma", layout has long queries', "does not serve long queries"):
        attn.plan(twin(problem.layout))
    with refuses(ValueError, "a reservation of long queries is made, and wgmma", "of V multiples of 32"):
        reserved(attn.attention, **{**MAXIMA, "max_qo_tokens": 40})


# Maxima with more than 64 fused rows in a group, and without.
TOKENS = pytest.mark.parametrize(("tokens", "short_rows"), [(40, 0), (24, 64)])


@TOKENS
@pytest.mark.parametrize(("page_size", "zeroes"), [(16, False), (16, True), (4, True)])
def test_graphs(wgmma, emulator, rng, tokens, short_rows, page_size, zeroes):
    """Later batches in the graph of a captured run, whose maps are those of the pools that it captured."""
    attn = attention_of(wgmma, batch(rng)).attention
    reservation = reserved(attn, **{**MAXIMA, "max_qo_tokens": tokens})
    tensors = Tensors(page_size=page_size, tokens=tokens)
    stream = next(streams)
    for step in range(4):
        problem = batch(rng, page_size=page_size)
        reservation.update(twin(problem.layout))
        tensors.write(problem)
        if step == 0:
            assert runs_on(reservation.plan, short_rows)
            emulator.raddle_emulator_capture(stream)
            with tvm_ffi.use_raw_stream(tvm_ffi.device(attn.device), stream):
                attn.run(reservation, tensors.q, tensors.kv, out=tensors.out, zero_unused_rows=zeroes)
            emulator.raddle_emulator_capture(None)
        emulator.raddle_emulator_replay(stream)
        out, rows = tensors.out.numpy(), len(problem.q)
        within(attention(problem), out[:rows])
        assert (out[rows:] == (0.0 if zeroes else 7.0)).all()


@TOKENS
@pytest.mark.parametrize("prefixes", [False, True])
def test_plans_made_on_the_device(wgmma, rng, prefixes, tokens, short_rows):
    levels = 2 if prefixes else 1
    attn, reservation = reserve(wgmma, max_levels=levels, max_qo_tokens=tokens)
    table, tensors = Table("lists", num_pages=PAGES, discover_prefixes=16 if prefixes else False), Tensors(tokens=tokens)
    for _ in range(3):
        problem = batch(rng, "paged_prefixes" if prefixes else "paged")
        problem.layout.discover_prefixes = 16 if prefixes else 0
        table.write(problem.layout), tensors.write(problem)
        reservation.update(table.layout)
        assert runs_on(reservation.plan, short_rows, prefixes)
        attn.run(reservation, tensors.q, tensors.kv, out=tensors.out)
        reservation.check()
        within(attention(problem), tensors.out.numpy()[: len(problem.q)])


@pytest.mark.parametrize(
    ("maxima", "short_rows", "why"),
    [
        ({"max_qo_len": 1, "page_size": 16}, 8, "requests decode, and page_size is known"),
        ({"max_qo_len": 2, "max_levels": 2, "page_size": 16}, 64, "requests decode, and page_size is known"),
        ({"max_qo_len": 1, "page_size": 4}, 8, "requests decode, and page_size is known"),
        ({"max_qo_len": 1}, None, "a reservation takes pages of any size"),
        ({"max_qo_len": 1, "page_size": 12}, None, "a reservation takes pages of any size"),
        ({"max_qo_len": 5, "page_size": 16}, None, "a reservation takes any queries"),
        ({"page_size": 16}, None, "a reservation takes any queries"),
        ({"max_qo_tokens": 96, "page_size": 16}, 0, "batches are mostly prompts, and page_size is known"),
        ({"max_qo_tokens": 96}, None, "a reservation takes any queries"),
    ],
)
def test_the_choice_of_a_reservation(wgmma, rng, monkeypatch, maxima, short_rows, why):
    """Decodes whose pages are known; requests of more rows than that, which the device finds, are computed, too."""
    monkeypatch.delenv("RADDLE_BACKEND")
    prefixes, page_size = maxima.get("max_levels", 1) > 1, maxima.get("page_size", 16)
    attn, reservation = reserve(wgmma, **maxima)
    tensors = Tensors(page_size=page_size, tokens={**MAXIMA, **maxima}["max_qo_tokens"])
    table = Table("lists", page_size, num_pages=PAGES, discover_prefixes=16 if prefixes else False)
    for _ in range(2):
        problem = batch(rng, "paged_prefixes" if prefixes else "paged", page_size=page_size)
        problem.layout.discover_prefixes = 16 if prefixes else 0
        table.write(problem.layout), tensors.write(problem)
        reservation.update(table.layout)
        lines = reservation.plan.explain()
        assert f"kernel family: {'mma' if short_rows is None else 'wgmma'} ({why})" in lines
        assert short_rows is None or runs_on(reservation.plan, short_rows, prefixes)
        attn.run(reservation, tensors.q, tensors.kv, out=tensors.out)
        reservation.check()
        within(attention(problem), tensors.out.numpy()[: len(problem.q)])


def test_the_choice(wgmma, rng, monkeypatch):
    """By default: long queries where they are served, and those of decoding that were timed, with the reason."""
    monkeypatch.delenv("RADDLE_BACKEND")

    def chosen(lengths, layout="ragged", page_size=16, **heads):
        paged = {"page_size": page_size} if layout == "paged" else {}
        problem = draw(rng, layout, "causal", lengths=lengths, **paged, **{**HEADS, **heads})
        return attention_of(wgmma, problem).plan(twin(problem.layout)).explain()

    assert "kernel family: wgmma (it is expected to be faster: mma" in chosen([(1300, 1300)])
    assert "kernel family: wgmma" in chosen([(512, 512)] * 4)
    assert "kernel family: wgmma (all queries are short)" in chosen([(1, 3000), (4, 90)])
    assert "kernel family: wgmma (all queries are short)" in chosen([(1, 300)], "paged")
    assert "kernel family: mma (all queries are short, and wgmma is not known" in chosen([(1, 3000), (8, 90)])
    assert "kernel family: mma (all queries are short, and wgmma is not known" in chosen([(1, 300)], dim=256, dim_vo=256)
    assert "kernel family: wgmma (all queries are short)" in chosen([(1, 300)], "paged", page_size=1)
    assert "kernel family: wgmma (it is expected to be faster" in chosen([(1300, 1300)], "paged", page_size=4)
    assert "kernel family: mma (wgmma is slower where" in chosen([(1300, 1300)], "paged", page_size=24)
    assert "kernel family: wgmma (it is expected to be faster" in chosen([(1300, 1300)], "paged", page_size=1301)
    assert "kernel family: wgmma (it is expected to be faster: mma" in chosen([(300, 300)], dim=256)
    # A long prompt beside requests that generate, and the other way round.
    assert "kernel family: wgmma" in chosen([(1300, 1300), (1, 40), (1, 70)])
    assert "kernel family: mma (it is expected to be faster" in chosen([(20, 60), *[(1, 1000)] * 12])
    monkeypatch.setenv("RADDLE_BACKEND", "mma")
    assert "kernel family: mma (RADDLE_BACKEND asks for it)" in chosen([(1300, 1300)])
    monkeypatch.setenv("RADDLE_BACKEND", "cutlass")
    with refuses(ValueError, 'RADDLE_BACKEND is "cutlass"; expected "mma" or "wgmma"'):
        chosen([(1, 1)])
