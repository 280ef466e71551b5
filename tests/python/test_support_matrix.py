"""The support matrix is true: what it says works is computed right, what it refuses is refused in its own words,
and nothing is refused that the project does not allow to be.

What docs/support.md says is tried on the device under test. That it is what `raddle support` prints is tested for the
CPU here, and in test_emulated.py for GPUs.
"""

from pathlib import Path

import numpy as np
import pytest
import raddle
from draws import KV_DTYPES, draw
from engine import twin
from raddle.doctor import has_gpu
from reference import (
    Alibi,
    Causal,
    PackedMask,
    Rope,
    RopeTables,
    Sigmoid,
    Sinks,
    SlidingWindow,
    SoftCap,
    YarnScaling,
)

PAGE = Path(__file__).parents[2] / "docs" / "support.md"
REFRESH = "refresh it: RADDLE_EMULATOR_HOLLOW=1 tests/gpu/emulate.sh raddle support > docs/support.md"


def table():
    """The page's verdicts: {backend: {feature: "works", or "refused: …"}}."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    (_, *backends), _, *rows = ([cell.replace("\\|", "|") for cell in line[2:-2].split(" | ")] for line in lines)
    return {backend: {feature: found[n] for feature, *found in rows} for n, backend in enumerate(backends)}


TABLE = table()

# Head dims are multiples of 8, up to 576 and 512; the others follow from what the features mean.
MAY_BE_REFUSED = {
    "head_dim: 4",
    "head_dim: 20",
    "head_dim: 520",
    "scales of K and V that are not quantised: one per head",
    "return_lse with a Scan::sum variant",
    "sink with a Scan::sum variant",
    "two sinks",
    "layout: cascade with batch_invariant",
}
# Of GPUs, too: they have no float32, and may have no 8-bit K and V.
MAY_BE_REFUSED_BY_GPUS = {"dtype: float32", *(f"kv_dtype: {kind}" for kind in KV_DTYPES)}
MAY_BE_REFUSED_BY_GPUS |= {f"scales: one {of}" for of in ("per tensor", "per head", "per token and head")}

SINKS = Sinks([0.5, -1.0, 2.0, 0.0])
LENGTHS = [(5, 90), (1, 30)]
PACKED = PackedMask(*raddle.pack_masks([np.add.outer(np.arange(qo), np.arange(kv)) % 3 > 0 for qo, kv in LENGTHS]))
TABLES = np.cos(np.arange(90 * 4)).reshape(90, 4), np.sin(np.arange(90 * 4)).reshape(90, 4)
SHIPPED = {
    "causal": [Causal()],
    "window": [SlidingWindow(20)],
    "packed_mask": [PACKED],
    "softcap": [SoftCap(5.0)],
    "sinks": [SINKS],
    "sigmoid": [Sigmoid(-1.0)],
    "alibi": [Alibi(raddle.alibi_slopes(4))],
    "rope": [Rope(8)],
    "rope_interleaved": [Rope(8, interleaved=True)],
    "rope_tables": [RopeTables(*TABLES)],
    "rope_tables_interleaved": [RopeTables(*TABLES, interleaved=True)],
    "rope with YaRN scaling": [Rope(8, scaling=YarnScaling(4.0, 64.0))],
    "softcap + window + causal (Gemma 2)": [SoftCap(5.0), SlidingWindow(20), Causal()],
    "sinks + window + causal (gpt-oss)": [SINKS, SlidingWindow(20), Causal()],
}
MASKS = {"causal": Causal(), "window": SlidingWindow(20), "packed_mask": PACKED}
SCALES = {"one per tensor": "tensor", "one per head": "head", "one per token and head": "token"}
MLA = {"dim": 576, "dim_vo": 512, "group": 4, "num_kv_heads": 1}
LAYOUTS = {
    "ragged": "ragged",
    "paged, NHD": "paged",
    "paged, HND": "paged_hnd",
    "paged, prefixes discovered": "paged_prefixes",
    "token tree": "token_tree",
    "block sparse": "bsr",
    "block sparse, mask bits": "bsr_bits",
    "block sparse, explicit blocks": "bsr_blocks",
    "cascade": "cascade",
}


def checks(**drawn):
    """Draws a problem of four query heads, runs it and compares it with the reference."""
    options = {"batch_invariant": drawn.pop("batch_invariant", False)}
    drawn = {"layout": "ragged", "dim": 16, "group": 2, "num_kv_heads": 2, "lengths": LENGTHS, **drawn}
    return lambda engine, rng: engine.check(draw(rng, **drawn), **options)


def asks_for_lse_of_a_sum(engine, rng):
    problem = draw(rng, variant=[Sigmoid()], dim=16)
    attn = engine.attention(problem)
    attn.run(attn.plan(twin(problem.layout)), problem.q, problem.kv[0], return_lse=True)


FEATURES = {
    **{f"dtype: {dtype}": checks(dtype=dtype) for dtype in ("float32", "float16", "bfloat16")},
    **{f"kv_dtype: {dtype}": checks(kv_dtype=dtype) for dtype in KV_DTYPES},
    **{f"scales: {kind}": checks(kv_dtype="float8_e4m3fn", scales=[drawn] * 2) for kind, drawn in SCALES.items()},
    "scales of K and V that are not quantised: one number": checks(scales=["tensor"] * 2),
    "scales of K and V that are not quantised: one per head": checks(scales=["head"] * 2),
    **{f"head_dim: {n}": checks(dim=n) for n in (8, 24, 64, 72, 80, 128, 192, 256, 264, 512, 4, 20, 520)},
    "head_dim_vo different from head_dim": checks(dim=16, dim_vo=24),
    "head_dim 192 with head_dim_vo 128": checks(dim=192, dim_vo=128),
    "MLA: head_dim 576 with head_dim_vo 512": checks(**MLA, latent=True),
    "MLA over two caches: k_extends_v": checks(**MLA, k_extends_v=True),
    "MLA with kv_dtype: float8_e4m3fn": checks(**MLA, kv_dtype="float8_e4m3fn"),
    "MLA over two caches with kv_dtype: float8_e4m3fn": checks(**MLA, kv_dtype="float8_e4m3fn", k_extends_v=True),
    **{f"group size: {n}": checks(group=n) for n in (1, 2, 3, 4, 7, 8, 16, 71)},
    "batch_invariant": checks(batch_invariant=True),
    **{f"variant: {name}": checks(variant=parts) for name, parts in SHIPPED.items()},
    **{f"mask in & and |: {name}": checks(variant=[(mask & Causal()) | mask]) for name, mask in MASKS.items()},
    "return_lse with a Scan::sum variant": asks_for_lse_of_a_sum,
    "sink with a Scan::sum variant": checks(variant=[Sigmoid(), SINKS]),
    "two sinks": checks(variant=[SINKS, SINKS]),
    **{f"layout: {name}": checks(layout=kind) for name, kind in LAYOUTS.items()},
    "layout: cascade with batch_invariant": checks(layout="cascade", batch_invariant=True),
}


@pytest.mark.parametrize("feature", TABLE["cpu"])
def test_row(engine, rng, feature):
    backend = engine.device.partition(":")[0]
    verdict, try_it = TABLE[backend][feature], FEATURES[feature]
    if verdict == "works":
        try_it(engine, rng)
        return
    allowed = MAY_BE_REFUSED | MAY_BE_REFUSED_BY_GPUS if backend == "cuda" else MAY_BE_REFUSED
    assert feature in allowed, f"{feature} is {verdict}"
    with pytest.raises((ValueError, TypeError)) as refusal:
        try_it(engine, rng)
    assert verdict.startswith("refused: ") and verdict[len("refused: ") :] in str(refusal.value)


def test_every_shipped_thing_has_a_row():
    named = [*(f"variant: {name}" for name in SHIPPED), *(f"layout: {name}" for name in LAYOUTS)]
    named += [*(f"mask in & and |: {name}" for name in MASKS), *MAY_BE_REFUSED, *MAY_BE_REFUSED_BY_GPUS]
    assert list(TABLE) == ["cpu", "cuda"] and TABLE["cpu"].keys() == TABLE["cuda"].keys()
    assert not set(named) - set(TABLE["cpu"])


def test_the_page_in_the_docs_is_current():
    rows = raddle.support_matrix()
    found = {row["feature"]: f"refused: {row['reason']}" if row["reason"] else "works" for row in rows}
    assert found == TABLE["cpu"], REFRESH


def test_a_device_that_is_not_there():
    with pytest.raises((RuntimeError, ValueError), match="expected"):
        raddle.support_matrix("cuda:99" if has_gpu() else "gpu")
