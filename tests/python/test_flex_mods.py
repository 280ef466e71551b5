"""The library of score and mask mods: each is what it says, traced or not, on every layout; the gallery shows it."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from checks import within
from draws import DTYPES, covering, draw
from raddle.flex import gallery, masks, mods, noop_mask, picture, with_offset
from raddle.flex.trace import trace_mask, trace_score
from reference import Flex, attention
from small import refuses

TOKENS = 144  # no test is longer: a canvas of 12 x 12
CANVAS = 12


@dataclass
class Place:
    """What a drawn mod must know."""

    rng: np.random.Generator
    heads: int
    requests: int

    def parents(self, *shape):
        """A forest: every node's parent is an earlier node, or none."""
        return np.floor(self.rng.random(shape) * (np.arange(shape[-1]) + 1)).astype(int) - 1

    def offsets(self):
        cuts = np.sort(self.rng.integers(0, TOKENS + 1, 5))  # empty documents too
        return np.concatenate([[0], cuts, [TOKENS]])


MASKS = {
    "causal": lambda at: masks.causal(),
    "window": lambda at: masks.sliding_window(int(at.rng.integers(0, 60))),
    "band": lambda at: masks.sliding_window(*(int(x) for x in at.rng.integers(0, 40, 2))),
    "ahead": lambda at: masks.sliding_window(-1, int(at.rng.integers(0, 40))),
    "prefix_lm": lambda at: masks.prefix_lm(int(at.rng.integers(0, 80))),
    "prefix_lm_by_request": lambda at: masks.prefix_lm(at.rng.integers(0, 80, at.requests)),
    "document": lambda at: masks.document(at.offsets()),
    "dilated_window": lambda at: masks.dilated_window(int(at.rng.integers(0, 9)), int(at.rng.integers(1, 7))),
    "global_local": lambda at: masks.global_local(int(at.rng.integers(0, 30)), int(at.rng.integers(0, 10))),
    "attention_sinks": lambda at: masks.attention_sinks(int(at.rng.integers(0, 6)), int(at.rng.integers(0, 30))),
    "tree": lambda at: masks.tree(at.parents(TOKENS - 9), 9),
    "tree_by_request": lambda at: masks.tree(at.parents(at.requests, TOKENS), at.rng.integers(0, 50, at.requests)),
    "natten": lambda at: masks.natten(CANVAS, (5, 3)),
    "natten_tiled": lambda at: masks.natten(CANVAS, 5, masks.tiled_order(CANVAS, (3, 4))),
    "natten_morton": lambda at: masks.natten(CANVAS, 5, masks.morton_order(CANVAS)),
    "shifted": lambda at: with_offset(masks.causal(), at.rng.integers(-30, 30, at.requests)),
    "noop": lambda at: noop_mask,
}
SCORES = {
    "alibi": lambda at: mods.alibi(at.rng.normal(0.0, 0.1, at.heads)),
    "softcap": lambda at: mods.softcap(3.7),
    "softcap_fast": lambda at: mods.softcap(3.7, fast=True),
    "relative_position_bias": lambda at: mods.relative_position_bias(at.rng.normal(0.0, 1.0, (at.heads, 31))),
    "t5_buckets": lambda at: mods.t5_buckets(at.rng.normal(0.0, 1.0, (32, at.heads))),
    "t5_buckets_both": lambda at: mods.t5_buckets(at.rng.normal(0.0, 1.0, (16, at.heads)), 40, bidirectional=True),
}
LENGTHS = {
    "prefill": lambda rng: [(n := int(rng.integers(2, TOKENS + 1)), n), (1, 1), (77, 77)],
    "decode": lambda rng: [(1, int(rng.integers(1, TOKENS + 1))) for _ in range(4)],
    "mixed": lambda rng: [(1, 90), (int(rng.integers(2, 40)), TOKENS), (0, 30), (17, 17)],
}
MATRIX = covering(
    mod=[*MASKS, *SCORES],
    layout=["ragged", "paged", "paged_hnd", "paged_table", "bsr", "cascade"],
    dtype=DTYPES,
    lengths=list(LENGTHS),
    group=[1, 2, 3],
)


@pytest.mark.parametrize("row", MATRIX, ids=lambda row: "-".join(map(str, row.values())))
def test_on_every_layout(engine, rng, row):
    row = dict(row)
    lengths, group, name = LENGTHS[row.pop("lengths")](rng), row.pop("group"), row.pop("mod")
    if row["layout"] == "cascade":  # whose prefix comes before these lengths
        lengths = [(min(qo, 50), min(kv, 50)) for qo, kv in lengths]
    mod = {**MASKS, **SCORES}[name](Place(rng, 2 * group, len(lengths)))
    part = Flex(mod, error={"softcap": 2e-6, "softcap_fast": 3.7e-4}.get(name, 0.0))  # cap times what tanh may be off
    engine.check(draw(rng, variant=[part], dim=32, num_kv_heads=2, group=group, lengths=lengths, **row))


@pytest.mark.parametrize(
    ("made", "meant"),
    [
        (mods.softcap(3.7), mods.softcap(3.701)),
        (mods.alibi([0.1] * 4), mods.alibi([0.1, 0.1, 0.1001, 0.1])),
        (mods.relative_position_bias(np.zeros((4, 31))), mods.relative_position_bias(1e-3 * np.eye(31)[[3] * 4])),
        (masks.sliding_window(20), masks.sliding_window(21)),
        (masks.document([0, 50, 144]), masks.document([0, 51, 144])),
        (masks.natten(CANVAS, 5), masks.natten(CANVAS, (5, 3))),
    ],
)  # fmt: skip
def test_budgets_have_teeth(engine, rng, made, meant):
    """What is a little off leaves the budget of what was meant."""
    problem = draw(rng, variant=[Flex(made)], num_kv_heads=2, group=2, lengths=[(90, 120)], peak=2.0)
    found = engine.run(problem)
    within(attention(problem), *found)
    problem.variant = [Flex(meant)]
    with pytest.raises(AssertionError, match="error / budget"):
        within(attention(problem), *found)


@pytest.fixture
def place(rng):
    """Three requests with two heads."""
    return Place(rng, 2, 3)


GRID = np.ogrid[:3, :2, :TOKENS, :TOKENS]


@pytest.mark.parametrize("name", MASKS)
def test_masks_traced_and_as_they_stand(place, name):
    mask = MASKS[name](place)
    as_it_stands = np.broadcast_to(mask(*GRID), (3, 2, TOKENS, TOKENS))
    assert np.array_equal(trace_mask(mask).evaluate(*GRID), as_it_stands)


@pytest.mark.parametrize("name", SCORES)
def test_scores_traced_and_as_they_stand(place, name):
    mod = SCORES[name](place)
    scores = 5.0 * place.rng.standard_normal((3, 2, TOKENS, TOKENS))
    traced = trace_score(mod).evaluate(*GRID, score=scores)
    np.testing.assert_allclose(traced, mod(scores, *GRID), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*MASKS, *SCORES])
def test_new_values_are_the_same_code(rng, name):
    """Whatever numbers and arrays a mod captures, it compiles once."""
    make, trace = (MASKS[name], trace_mask) if name in MASKS else (SCORES[name], trace_score)
    first, second = (trace(make(Place(rng, heads, 4))) for heads in (2, 6))
    assert first.source == second.source


def test_windows(rng):
    _, _, q_idx, kv_idx = GRID
    ahead = kv_idx - q_idx
    assert np.array_equal(masks.causal()(*GRID), ahead <= 0)
    assert np.array_equal(masks.sliding_window(7)(*GRID), ahead >= -7)
    assert np.array_equal(masks.sliding_window(7, 2)(*GRID), (ahead >= -7) & (ahead <= 2))
    assert np.array_equal(masks.sliding_window(-1, 2)(*GRID), ahead <= 2)
    assert masks.sliding_window(-1)(*GRID).all()
    assert np.array_equal(masks.dilated_window(4, 3)(*GRID), np.isin(ahead, np.arange(-4, 5) * 3))
    assert np.array_equal(masks.prefix_lm(30)(*GRID), (kv_idx < 30) | (ahead <= 0))
    assert np.array_equal(masks.global_local(5, 3)(*GRID), (np.abs(ahead) <= 5) | (kv_idx < 3) | (q_idx < 3))
    kept = (ahead <= 0) & ((ahead >= -9) | (kv_idx < 4))
    assert np.array_equal(masks.attention_sinks(4, 9)(*GRID), kept)


def test_documents(place):
    offsets = place.offsets()
    number = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    found = masks.document(offsets)(*GRID)[0, 0]
    assert np.array_equal(found, number[:, None] == number[None])


def test_trees(place):
    context, nodes = 20, 60
    parents = place.parents(nodes)
    seen = np.tri(context + nodes, context + nodes, dtype=bool)
    seen[context:, context:] = False
    for node in range(nodes):
        ancestor = node
        while ancestor >= 0:
            seen[context + node, context + ancestor] = True
            ancestor = parents[ancestor]
    place_of = np.ogrid[: context + nodes, : context + nodes]
    assert np.array_equal(masks.tree(parents, context)(0, 0, *place_of), seen)
    both = masks.tree(np.stack([place.parents(nodes), parents]), [3, context])
    assert np.array_equal(both(1, 0, *place_of), seen)


@pytest.mark.parametrize("order", ["rows", "tiled", "morton"])
def test_natten(rng, order):
    height, width, kernel = 7, 9, (3, 5)
    token = {
        "rows": np.arange(height * width),
        "tiled": masks.tiled_order((height, width), (2, 4)),
        "morton": masks.morton_order((height, width)),
    }[order]
    expected = np.zeros((height * width, height * width), bool)
    for place, number in enumerate(token):
        row, column = divmod(number, width)
        top = min(max(row - kernel[0] // 2, 0), height - kernel[0])
        left = min(max(column - kernel[1] // 2, 0), width - kernel[1])
        inside = np.zeros((height, width), bool)
        inside[top : top + kernel[0], left : left + kernel[1]] = True
        expected[place] = inside.ravel()[token]
    found = masks.natten((height, width), kernel, token)(0, 0, *np.ogrid[: height * width, : height * width])
    assert np.array_equal(found, expected)


def test_orders():
    tiled, morton = masks.tiled_order((4, 6), (2, 3)), masks.morton_order(4)
    assert tiled[:12].tolist() == [0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11]
    assert morton.tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]


@pytest.mark.parametrize("both", [False, True])
def test_t5_buckets(rng, both):
    """Against the rule as T5 states it, distance by distance."""
    buckets, longest = 32, 128
    found = mods.t5_buckets(np.arange(buckets)[:, None], longest, both)(0.0, 0, 0, *np.ogrid[:300, :300])
    half = buckets // 2 if both else buckets
    for q_idx, kv_idx in rng.integers(0, 300, (500, 2)):
        behind = q_idx - kv_idx
        first = half if both and behind < 0 else 0
        behind = abs(behind) if both else max(behind, 0)
        exact = half // 2
        coarse = exact + int(np.log(max(behind, 1) / exact) / np.log(longest / exact) * (half - exact))
        assert found[q_idx, kv_idx] == first + (behind if behind < exact else min(coarse, half - 1))


def test_biases(place):
    _, h, q_idx, kv_idx = GRID
    slopes, table = place.rng.normal(size=2).astype(np.float32), place.rng.normal(size=(2, 7)).astype(np.float32)
    assert np.array_equal(mods.alibi(slopes)(0.0, *GRID), slopes[h] * (kv_idx - q_idx))
    clipped = np.clip(kv_idx - q_idx, -3, 3) + 3
    assert np.array_equal(mods.relative_position_bias(torch.tensor(table))(0.0, *GRID), table[h, clipped])
    assert mods.softcap(2.0)(3.0, *GRID) == pytest.approx(2.0 * np.tanh(1.5))
    assert mods.softcap(2.0, fast=True)(3.0, *GRID) == pytest.approx(2.0 * np.tanh(1.5), abs=2e-4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: masks.sliding_window(-2), ("left", "-2", "at least -1")),
        (lambda: masks.prefix_lm([3, -1]), ("prefix_length", "negative")),
        (lambda: masks.document([1, 5]), ("offsets", "ascend")),
        (lambda: masks.document([0, 5, 4]), ("offsets", "ascend")),
        (lambda: masks.dilated_window(3, 0), ("dilation", "0", "at least 1")),
        (lambda: masks.global_local(-1, 0), ("window", "-1")),
        (lambda: masks.attention_sinks(-1, 0), ("sink_tokens", "-1")),
        (lambda: masks.tree([0]), ("parents", "no earlier node")),
        (lambda: masks.tree([[[0]]]), ("parents", "(1, 1, 1)")),
        (lambda: masks.tree([-1], -3), ("context", "-3")),
        (lambda: masks.natten(4, 2), ("kernel", "2", "odd")),
        (lambda: masks.natten(4, 5), ("kernel", "5", "4")),
        (lambda: masks.natten(2, 1, [0, 1, 2, 2]), ("order", "permutation")),
        (lambda: mods.softcap(0.0), ("cap", "0.0", "above 0")),
        (lambda: mods.alibi([0.5, np.nan]), ("slopes", "finite")),
        (lambda: mods.relative_position_bias(np.zeros((2, 4))), ("bias", "4", "odd")),
        (lambda: mods.t5_buckets(np.zeros((1, 2))), ("bias", "1 buckets", "expected 2")),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(make, words):
    with refuses(ValueError, *words):
        make()


@pytest.mark.parametrize("make", [lambda: masks.document([0.5, 2.0]), lambda: masks.sliding_window(1.5)])
def test_fractions_are_refused(make):
    with refuses(TypeError, "expected"):
        make()


def test_the_gallery_in_the_docs_is_current():
    docs = Path(__file__).parents[2] / "docs"
    for name, text in gallery.files().items():
        assert (docs / name).read_text(encoding="utf-8") == text, "refresh it: raddle gallery docs"
    assert {path.stem for path in (docs / "gallery").iterdir()} == {e.name for e in gallery.ENTRIES + gallery.NATTEN}


@pytest.mark.parametrize("entry", gallery.ENTRIES, ids=lambda entry: entry.name)
def test_a_picture_paints_what_is_kept(entry):
    image, kinds = gallery.draw(entry)
    mask = eval(entry.code, dict(gallery._NAMES))
    keep = np.broadcast_to(mask(0, 0, *np.ogrid[: entry.tokens, : entry.tokens]), (entry.tokens,) * 2)
    painted = np.zeros(keep.shape, bool)
    for path in re.findall(rf'<path d="([^"]*)" fill="{picture._COLOURS[picture.FULL]}"', image):
        for x, y, width, height in re.findall(r"M(\d+) (\d+)h(\d+)v(\d+)h-\d+z", path):
            painted[int(y) : int(y) + int(height), int(x) : int(x) + int(width)] = True
    assert np.array_equal(painted, keep)
    tiles = keep.reshape(len(kinds), entry.tile, len(kinds), entry.tile)
    assert np.array_equal(kinds, tiles.any((1, 3)).astype(int) + tiles.all((1, 3)))
