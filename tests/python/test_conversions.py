"""The same attention in another format: page table → BSR, dense boolean mask → BSR."""

import numpy as np
import pytest
import raddle
from checks import within
from draws import DTYPES, draw
from engine import spec_of, twin
from reference import Problem, RaggedKV, attention


@pytest.mark.parametrize("variant", ["plain", "causal", "gpt_oss", "rope"])
def test_a_page_table_as_bsr(rng, variant):
    problem = draw(rng, "paged", variant, lengths=[(3, 50), (1, 7), (0, 4), (20, 20)])
    attn = raddle.Attention(spec_of(problem))
    plan = attn.plan(twin(problem.layout).to_block_sparse(), num_workers=5)
    within(attention(problem), *attn.run(plan, problem.q, problem.kv[0], return_lse=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("Br", "Bc"), [(1, 1), (1, 16), (3, 2), (4, 7), (64, 64)])
def test_a_dense_mask_as_bsr(rng, dtype, Br, Bc):
    """Against the reference's own masks: keys with equal rows of the mask are kept by bits of one block."""
    rows, cols = 23, 61
    mask = rng.random((rows, cols)) < 0.3
    mask[4:12, 8:40] = True
    mask[15] = False
    base = draw(rng, "ragged", "plain", dtype, lengths=[(rows, cols)])
    layout = raddle.BlockSparse.from_dense_mask(mask, Br, Bc)
    attn = raddle.Attention(spec_of(base))
    found = attn.run(attn.plan(layout, num_workers=3), base.q, base.kv[0], return_lse=True)
    for row in range(rows):
        kept = [np.ascontiguousarray(x[mask[row]]) for x in base.kv[0]]
        one = RaggedKV(np.array([0, 1]), np.array([0, len(kept[0])]))
        exact = attention(Problem(base.q[row : row + 1], [tuple(kept)], one, []))
        within(exact, *(x[row : row + 1] for x in found))


def test_a_mask_of_several_requests(rng):
    mask = rng.random((9, 30)) < 0.5
    base = draw(rng, "ragged", "plain", lengths=[(9, 30)])
    layouts = [raddle.BlockSparse.from_dense_mask(mask, 2, 4, qo_indptr=p) for p in (None, np.array([0, 4, 4, 9]))]
    attn = raddle.Attention(spec_of(base))
    a, b = (attn.run(attn.plan(layout), base.q, base.kv[0]) for layout in layouts)
    np.testing.assert_allclose(a, b, atol=2e-6)
