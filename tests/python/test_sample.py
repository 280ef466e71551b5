"""`raddle.sample`: exact draws by seed, filters against fp64, distributions, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import raddle
from draws import numpy_dtype
from reference import sampling
from small import refuses

DTYPES = ["float32", "float16", "bfloat16"]


def drawn(rng, rows, vocab, dtype="float32", spread=3.0):
    return (rng.standard_normal((rows, vocab)) * spread).astype(numpy_dtype(dtype))


def test_philox_of_the_reference():
    """Known answers of its authors (Random123, kat_vectors)."""
    assert sampling.philox(0, (0, 0, 0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert sampling.philox(2**64 - 1, (ones,) * 4) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert sampling.philox(0x299F31D0A4093822, pi) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


FILTERS = {
    "all": {},
    "warm": {"temperature": 1.7},
    "cold": {"temperature": 0.3},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.05},
    "top_k and top_p": {"top_k": 20, "top_p": 0.5, "temperature": 0.8},
    "all filters": {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3},
}


def check_rows(logits, tokens, seeds, offsets, parameters):
    for row, token in enumerate(tokens):
        probability = sampling.distribution(logits[row], **parameters)
        u = sampling.uniform(int(seeds[row]), int(offsets[row]))
        assert sampling.agrees(int(token), u, probability), (row, int(token), u, parameters)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FILTERS)
def test_draws(rng, dtype, name):
    """Each token is the one that its random number stands for."""
    logits = drawn(rng, 40, int(rng.integers(41, 400)), dtype)
    seeds, offsets = rng.integers(0, 2**62, 40), rng.integers(0, 2**40, 40)
    tokens = raddle.sample(logits, seed=seeds, offset=offsets, **FILTERS[name])
    assert tokens.dtype == np.int32
    check_rows(logits.astype(np.float64), tokens, seeds, offsets, FILTERS[name])


def test_a_large_vocabulary(rng):
    logits = drawn(rng, 3, 151_936, "bfloat16", 2.0)
    tokens = raddle.sample(logits, seed=5, top_k=50, top_p=0.95, temperature=0.7)
    parameters = {"top_k": 50, "top_p": 0.95, "temperature": 0.7}
    check_rows(logits.astype(np.float64), tokens, [5] * 3, range(3), parameters)


def golden_logits(rows, vocab):
    """Numbers that no library's random numbers decide."""
    index = np.arange(rows * vocab, dtype=np.uint64)
    return (((index * 2654435761 + 12345) % 1000).astype(np.float32) / 128).reshape(rows, vocab)


GOLDEN = {
    "all": [960, 579, 763, 609, 362, 604, 14, 876],
    "top_k": [650, 332, 491, 491, 173, 491, 14, 650],
    "top_p": [956, 575, 759, 604, 353, 604, 10, 872],
    "all filters": [968, 579, 763, 604, 353, 604, 14, 876],
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_tokens(name):
    """The same tokens in every version, on every machine."""
    tokens = raddle.sample(golden_logits(8, 1000), seed=20261124, offset=np.arange(8) * 1000, **FILTERS[name])
    assert tokens.tolist() == GOLDEN[name]


@pytest.mark.parametrize("name", FILTERS)
def test_distributions(name):
    """Chi-square of 20,000 draws, whose seeds are fixed: the outcome is the same in every run."""
    logits = golden_logits(1, 60)[0]
    draws = 20_000
    tokens = raddle.sample(np.broadcast_to(logits, (draws, 60)), seed=7, **FILTERS[name])
    expected = sampling.distribution(logits, **FILTERS[name]) * draws
    found = np.bincount(tokens, minlength=60)
    assert not found[expected == 0].any()
    common = expected >= 5  # rarer tokens are one class
    classes = [(found[common], expected[common]), ([found[~common].sum()], [expected[~common].sum()])]
    found, expected = (np.concatenate([each[n] for each in classes]) for n in (0, 1))
    found, expected = found[expected > 0], expected[expected > 0]
    statistic, freedom = ((found - expected) ** 2 / expected).sum(), len(found) - 1
    assert statistic < freedom + 4 * np.sqrt(2 * freedom) + 4, (statistic, freedom)


def kept_of(logits, draws=2000, **parameters):
    """The tokens that are ever drawn of one row."""
    rows = np.broadcast_to(logits, (draws, len(logits)))
    return sorted(set(raddle.sample(rows, seed=3, **parameters).tolist()))


def test_equal_logits_are_kept_by_index():
    logits = np.array([0.0, 1.0, 0.0, 1.0, 1.0, 0.0], np.float32)
    assert kept_of(logits, top_k=2) == [1, 3]
    assert kept_of(logits, top_k=4) == [0, 1, 3, 4]
    assert kept_of(np.zeros(8, np.float32), top_p=0.5) == [0, 1, 2, 3]
    assert kept_of(np.zeros(8, np.float32), top_k=4, top_p=0.51) == [0, 1, 2]
    assert kept_of(np.zeros(8, np.float32), top_p=0.501) == [0, 1, 2, 3, 4]
    assert raddle.sample(logits[None], temperature=0.0).tolist() == [1]
    assert raddle.sample(np.array([[-0.0, 0.0]], np.float32), temperature=0.0).tolist() == [0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ends_of_filters(rng, dtype):
    """What keeps one token is greedy, what keeps all changes nothing."""
    logits = drawn(rng, 30, 300, dtype)
    best = np.argmax(logits.astype(np.float32), axis=1)
    for parameters in ({"temperature": 0.0}, {"temperature": 1e-40}, {"top_k": 1}, {"top_p": 1e-12}):
        assert raddle.sample(logits, **parameters).tolist() == best.tolist(), parameters
    for parameters in ({"temperature": 1e-30}, {"min_p": 1.0}):  # equal logits stay equally likely
        tokens = raddle.sample(logits, **parameters)
        np.testing.assert_array_equal(logits[np.arange(30), tokens], logits.max(axis=1))
    plain = raddle.sample(logits, seed=9).tolist()
    for parameters in ({"top_k": 0}, {"top_k": -1}, {"top_k": 300}, {"top_k": 2**40}, {"top_p": 1.0}, {"min_p": 0.0}):
        assert raddle.sample(logits, seed=9, **parameters).tolist() == plain, parameters
    uniform = raddle.sample(logits, temperature=3e38, seed=9)
    check_rows(np.zeros((30, 300)), uniform, [9] * 30, range(30), {})


def test_masked_tokens_are_never_drawn(rng):
    logits = drawn(rng, 50, 200)
    masked = rng.random((50, 200)) < 0.9
    masked[:, 17] = False
    logits[masked] = -np.inf
    for parameters in ({}, {"top_k": 150}, {"top_p": 0.999}, {"temperature": 0.0}, {"temperature": 5.0}):
        tokens = raddle.sample(logits, **parameters)
        assert not masked[np.arange(50), tokens].any()


def test_neighbours_change_nothing(rng):
    """A row's token is a function of the row, its parameters, its seed and its offset."""
    rows = 24
    logits = drawn(rng, rows, 333)
    arrays = {
        "temperature": rng.choice([0.0, 0.5, 1.0, 2.0], rows).astype(np.float32),
        "top_k": rng.choice([0, 1, 7, 400], rows).astype(np.int32),
        "top_p": rng.choice([0.3, 0.9, 1.0], rows).astype(np.float32),
        "min_p": rng.choice([0.0, 0.1], rows).astype(np.float32),
        "seed": rng.integers(-(2**62), 2**62, rows),
        "offset": rng.integers(0, 100, rows).astype(np.int32),
    }
    tokens = raddle.sample(logits, **arrays)
    order = rng.permutation(rows)
    shuffled = raddle.sample(logits[order], **{name: x[order] for name, x in arrays.items()})
    np.testing.assert_array_equal(shuffled, tokens[order])
    for row in range(rows):
        alone = {name: x[row].item() for name, x in arrays.items()}
        assert raddle.sample(logits[row : row + 1], **alone).tolist() == [tokens[row]]


def test_seeds_and_offsets(rng):
    logits = np.zeros((64, 5000), np.float32)
    first = raddle.sample(logits, seed=1)
    assert raddle.sample(logits, seed=1).tolist() == first.tolist()
    assert raddle.sample(logits).tolist() == raddle.sample(logits, seed=0, offset=list(range(64))).tolist()
    others = [raddle.sample(logits, seed=2), raddle.sample(logits, seed=1, offset=list(range(64, 128)))]
    assert all((first != other).mean() > 0.9 for other in others)
    assert len(set(raddle.sample(logits, seed=1, offset=4).tolist())) == 1
    assert raddle.sample(logits, seed=2**64 - 1).tolist() == raddle.sample(logits, seed=-1).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_penalties(rng, dtype):
    rows, vocab = 60, 50
    logits = drawn(rng, rows, vocab, dtype)
    counts = rng.choice([-1, 0, 0, 1, 3], (rows, vocab)).astype(np.int32)
    drawn_of = counts.copy()
    penalties = {"repetition_penalty": 1.6, "presence_penalty": 0.4, "frequency_penalty": -0.7}
    short = {name.removesuffix("_penalty"): x for name, x in penalties.items()}
    exact = np.stack([sampling.penalised(x, n, **short) for x, n in zip(logits.astype(np.float64), counts)])
    tokens = raddle.sample(logits, counts=counts, count_drawn=False, seed=4, top_p=0.9, **penalties)
    check_rows(exact, tokens, [4] * rows, range(rows), {"top_p": 0.9})
    np.testing.assert_array_equal(counts, drawn_of)
    arrays = {name: np.full(rows, x, np.float32) for name, x in penalties.items()}
    again = raddle.sample(logits, counts=counts, seed=4, top_p=np.full(rows, 0.9, np.float32), **arrays)
    np.testing.assert_array_equal(again, tokens)
    at = np.arange(rows), tokens
    drawn_of[at] = np.maximum(drawn_of[at], 0) + 1
    np.testing.assert_array_equal(counts, drawn_of)


def test_repetition_alone_reads_prompts():
    logits = np.array([[2.0, 1.5, -1.0]], np.float32)
    counts = np.array([[-1, 0, 0]], np.int32)
    greedy = {"temperature": 0.0, "count_drawn": False, "counts": counts}
    assert raddle.sample(logits, repetition_penalty=1.5, **greedy).tolist() == [1]
    assert raddle.sample(logits, presence_penalty=9.0, **greedy).tolist() == [0]
    counts[0, 0] = 1
    assert raddle.sample(logits, presence_penalty=0.6, **greedy).tolist() == [1]


def test_outputs_and_strides(rng):
    logits = drawn(rng, 20, 96)
    expected = raddle.sample(logits, seed=1).tolist()
    wide = np.full((40, 100), np.nan, np.float32)
    wide[::2, :96] = logits
    out = np.full((20, 3), -5, np.int64)
    assert raddle.sample(wide[::2, :96], seed=1, out=out[:, 1]) is not None
    assert out[:, 1].tolist() == expected and (out[:, [0, 2]] == -5).all()
    assert raddle.sample(np.zeros((0, 7), np.float32)).shape == (0,)
    single = raddle.sample(np.zeros((3, 1), np.float16))
    assert single.tolist() == [0, 0, 0]


def test_torch(rng):
    torch = pytest.importorskip("torch")
    logits = drawn(rng, 6, 50)
    arrays = {"temperature": torch.full((6,), 0.5), "top_k": torch.full((6,), 9)}
    tokens = raddle.sample(torch.from_numpy(logits), seed=3, **arrays)
    assert tokens.dtype == torch.int32
    assert tokens.tolist() == raddle.sample(logits, temperature=0.5, top_k=9, seed=3).tolist()


LOGITS = np.zeros((2, 4), np.float32)
COUNTS = np.zeros((2, 4), np.int32)
BAD = [
    ({"temperature": -1.0}, "temperature is -1; expected a finite number of at least 0"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"temperature": np.array([1, np.inf], np.float32)}, "temperature[1] is inf; expected a finite number"),
    ({"temperature": np.ones(3, np.float32)}, "temperature is [3] float32; expected a number, or [2] float32"),
    ({"temperature": np.ones(2)}, "temperature is float64; expected float32"),
    ({"top_p": 0.0}, "top_p is 0; expected a number above 0, at most 1"),
    ({"top_p": 1.5}, "top_p is 1.5"),
    ({"min_p": -0.5}, "min_p is -0.5; expected a number from 0 to 1"),
    ({"top_k": np.array([1])}, "top_k has shape [1]; expected an integer, or [2]"),
    ({"top_k": 1.5}, "top_k"),
    ({"seed": 2**64}, "seed is 18446744073709551616; expected an integer of 64 bits"),
    ({"offset": np.zeros((2, 1), np.int64)}, "offset has shape [2, 1]"),
    ({"repetition_penalty": 1.2}, "repetition_penalty is given without counts; expected counts [rows, vocab] int32"),
    ({"repetition_penalty": 0.0, "counts": COUNTS}, "repetition_penalty is 0; expected a finite number above 0"),
    ({"counts": COUNTS[:, :3]}, "counts is not [2, 4] int32"),
    ({"counts": np.broadcast_to(COUNTS[:1], (2, 4)).copy()[:, ::-1]}, "counts is not [2, 4] int32"),
    ({"counts": COUNTS.astype(np.int64)}, "counts is not [2, 4] int32"),
    ({"out": np.zeros(3, np.int32)}, "out has 3 elements in 1 dimensions; expected [2]"),
    ({"out": np.zeros(2, np.float32)}, "out has dtype float32; expected int32 or int64"),
    ({"out": COUNTS[:, 0], "counts": COUNTS}, "out"),
    ({"generator": 1}, "sample has no argument 'generator'; write seed="),
]


@pytest.mark.parametrize(("parameters", "message"), BAD)
def test_bad_parameters(parameters, message):
    parameters = {"out": np.full(2, 77, np.int32), **parameters}
    before = parameters["out"].copy()
    with pytest.raises((ValueError, TypeError)) as error:
        raddle.sample(LOGITS, **parameters)
    assert message in str(error.value)
    np.testing.assert_array_equal(parameters["out"], before)
    assert not COUNTS.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (((1, 2), np.nan), "logits[1, 2] is nan; expected finite numbers and -inf"),
        (((1, 3), -np.nan), "logits[1, 3] is"),
        (((0, 1), np.inf), "logits[0, 1] is inf"),
        (((1,), -np.inf), "logits[1] has no number above -inf; expected one at least"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits(change, message, temperature):
    """All rows are looked at before a token of any is written."""
    logits, out, counts = LOGITS.copy(), np.full(2, 77, np.int32), COUNTS.copy()
    logits[change[0]] = change[1]
    with refuses(ValueError, message):
        raddle.sample(logits, temperature=temperature, counts=counts, out=out)
    assert out.tolist() == [77, 77] and not counts.any()


def test_bad_tensors():
    with refuses(ValueError, "logits is [4] float32; expected [rows, vocab] float32, float16 or bfloat16"):
        raddle.sample(LOGITS[0])
    with refuses(TypeError, "logits"):
        raddle.sample(COUNTS)
    with refuses(ValueError, "logits has a vocabulary of 0 tokens; expected 1 to 4194304"):
        raddle.sample(np.zeros((2, 0), np.float32))
    with refuses(ValueError, "logits has a vocabulary of 4194305 tokens"):
        raddle.sample(np.broadcast_to(np.zeros((1, 1), np.float32), (1, 2**22 + 1)).copy())
    with refuses(ValueError, "out"):
        raddle.sample(LOGITS, out=LOGITS.view(np.int32)[:, 0])
    with refuses(ValueError, "counts"):
        raddle.sample(LOGITS, counts=np.lib.stride_tricks.as_strided(COUNTS, (2, 4), (0, 4)))
    with refuses(ValueError, "logits[0, 0] is inf with its penalties"):
        raddle.sample(LOGITS + 3e38, counts=COUNTS + 1, repetition_penalty=0.5, count_drawn=False)
