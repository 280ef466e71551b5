"""`flex_attention` against the reference and PyTorch's eager one: values, layouts in memory, and what it refuses."""

import numpy as np
import pytest
import raddle
import torch
from checks import compare, within
from draws import DTYPES, covering, numpy_dtype
from raddle.flex import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
    masks,
    mods,
    noop_mask,
    with_offset,
)
from raddle.flex.program import _attention_of
from reference import Exact, Flex, Problem, RaggedKV, attention
from small import refuses
from test_flex_mods import MASKS, SCORES, TOKENS, Place
from torch.nn.attention import flex_attention as theirs


def draw(rng, batch=2, heads=4, kv_heads=2, rows=50, keys=70, dim=32, dim_vo=24, dtype="float32"):
    kind = numpy_dtype(dtype)
    shapes = (batch, heads, rows, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, dim_vo)
    return tuple(rng.standard_normal(shape).astype(kind) for shape in shapes)


def exact_of(q, k, v, *variant, scale=None) -> Exact:
    """The reference on [B, H, L, E]; rows count from 0."""
    (batch, _, rows, _), keys = q.shape, k.shape[2]
    flat = [np.concatenate(x.swapaxes(1, 2), axis=0) for x in (q, k, v)]
    pos = np.tile(np.arange(rows), batch)
    layout = RaggedKV(np.arange(batch + 1) * rows, np.arange(batch + 1) * keys, qo_pos=pos)
    exact = attention(Problem(flat[0], [tuple(flat[1:])], layout, list(variant), scale))
    shaped = {name: x.reshape(batch, rows, *x.shape[1:]).swapaxes(1, 2) for name, x in vars(exact).items()}
    return Exact(**shaped)


MATRIX = covering(
    mod=[*MASKS, *SCORES],
    dtype=DTYPES,
    shape=[{"rows": TOKENS, "keys": TOKENS}, {"rows": 1, "keys": TOKENS}, {"rows": 40, "keys": 100}],
    heads=[(2, 2), (4, 2), (6, 1)],
)


@pytest.mark.parametrize("row", MATRIX, ids=lambda row: "-".join(map(str, row.values())))
def test_every_mod_of_the_library(rng, row):
    (heads, kv_heads), name = row["heads"], row["mod"]
    q, k, v = draw(rng, heads=heads, kv_heads=kv_heads, dtype=row["dtype"], **row["shape"])
    place = Place(rng, heads, 2)
    how = {"enable_gqa": heads != kv_heads, "return_lse": True}
    if name in MASKS:
        mod = MASKS[name](place)
        how["block_mask"] = create_block_mask(mod, 2, None, q.shape[2], k.shape[2])
    else:
        mod = how["score_mod"] = SCORES[name](place)
    part = Flex(mod, error={"softcap": 2e-6, "softcap_fast": 3.7e-4}.get(name, 0.0))
    within(exact_of(q, k, v, part), *flex_attention(q, k, v, **how))


def torch_score(score, b, h, q_idx, kv_idx):
    return torch.where(kv_idx % 7 == 3, -float("inf"), 3.0 * torch.tanh(score / 3.0) + 0.1 * h * (q_idx - kv_idx).abs())


def torch_mask(b, h, q_idx, kv_idx):
    return ((kv_idx <= q_idx) & (q_idx - kv_idx < 30)) | (kv_idx < 3 * b)


@pytest.mark.parametrize("gqa", [False, True])
def test_as_pytorch(rng, monkeypatch, gqa):
    """Functions written for PyTorch, with torch's own calls; a row that sees nothing; GQA; a scale."""
    monkeypatch.setattr(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    q, k, v = map(torch.tensor, draw(rng, kv_heads=2 if gqa else 4))
    how = {"score_mod": torch_score, "scale": 0.3, "enable_gqa": gqa}
    ours_mask = create_block_mask(torch_mask, 2, None, 50, 70, device="cpu")
    their_mask = theirs.create_block_mask(torch_mask, 2, None, 50, 70, device="cpu")
    out, aux = flex_attention(q, k, v, block_mask=ours_mask, return_aux=AuxRequest(lse=True), **how)
    expected, their_aux = theirs.flex_attention(
        q, k, v, block_mask=their_mask, return_aux=theirs.AuxRequest(lse=True), **how
    )
    assert out.shape == expected.shape and out.dtype == expected.dtype
    assert aux.lse.dtype == torch.float32 and aux.max_scores is None
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(aux.lse, their_aux.lse, rtol=1e-5, atol=2e-6)


def test_pytorchs_own_block_mask(rng):
    """Its blocks and its mask_mod are taken, also where the blocks say less than the function."""
    q, k, v = map(torch.tensor, draw(rng, kv_heads=4))
    ours = create_block_mask(torch_mask, 2, None, 50, 70)
    expected = flex_attention(q, k, v, block_mask=ours)
    whole = theirs.create_block_mask(torch_mask, 2, None, 50, 70, device="cpu", BLOCK_SIZE=16)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=whole), expected, rtol=1e-5, atol=2e-6)
    lists = [getattr(whole, name) for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")]
    fewer = theirs.BlockMask.from_kv_blocks(lists[0].clamp(max=1), *lists[1:], 16, torch_mask, (50, 70))
    mine = BlockMask.from_kv_blocks(lists[0].clamp(max=1), *lists[1:], 16, torch_mask, (50, 70))
    assert torch.equal(flex_attention(q, k, v, block_mask=fewer), flex_attention(q, k, v, block_mask=mine))
    x, layout = torch.randn(70, 4, 16), raddle.RaggedKV([0, 50], [0, 70], qo_pos=np.arange(50))
    attn = [
        raddle.Attention(raddle.AttentionSpec(4, 4, 16, dtype="float32", variant=[mask])) for mask in (fewer, mine)
    ]
    out = [each.run(each.plan(layout), x[:50], (x, x)) for each in attn]
    assert torch.equal(*out)


@pytest.mark.parametrize("size", [16, (8, 24), 1])
def test_given_blocks(rng, size):
    """Absent blocks are skipped and full ones kept, whatever the mask says, head by head."""
    q, k, v = draw(rng, rows=64, keys=96)
    height, width = (size, size) if isinstance(size, int) else size
    kinds = rng.integers(0, 3, (2, 4, 64 // height, 96 // width))
    lists = []
    for kind in (1, 2):
        lists += [(kinds == kind).sum(-1), np.argsort(kinds != kind, axis=-1, kind="stable")]
    given = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=size, mask_mod=masks.causal())
    pairs = kinds.repeat(height, 2).repeat(width, 3)
    kept = Flex(lambda b, h, q_idx, kv_idx: pairs[b, h, q_idx, kv_idx] > 1 - (kv_idx <= q_idx))
    within(exact_of(q, k, v, kept), *flex_attention(q, k, v, block_mask=given, enable_gqa=True, return_lse=True))


def test_absent_blocks_are_not_read(rng):
    q, k, v = draw(rng, rows=256, keys=512)
    index = np.zeros((1, 1, 2, 4), np.int32)
    index[0, 0, :, 0] = [1, 3]
    given = BlockMask.from_kv_blocks(np.ones((1, 1, 2), np.int32), index)
    exact = exact_of(q, k, v, Flex(given.as_mask()))
    for block in (0, 2):
        k[:, :, block * 128 : (block + 1) * 128] = v[:, :, block * 128 : (block + 1) * 128] = np.nan
    within(exact, *flex_attention(q, k, v, block_mask=given, enable_gqa=True, return_lse=True))


def test_key_and_value_of_any_strides(rng):
    """Transposed, cut out of wider tensors, shared with others: read where they are."""
    q, k, v = draw(rng, dim_vo=32)
    expected = flex_attention(q, k, v, enable_gqa=True)
    both = np.full((70, 2, 2, 2, 40), np.nan, np.float32)
    both[..., 0, :32], both[..., 1, 4:36] = k.transpose(2, 0, 1, 3), v.transpose(2, 0, 1, 3)
    views = both[..., 0, :32].transpose(1, 2, 0, 3), both[..., 1, 4:36].transpose(1, 2, 0, 3)
    assert np.array_equal(flex_attention(q, *views, enable_gqa=True), expected)
    rows = np.ascontiguousarray(q.swapaxes(1, 2)).swapaxes(1, 2)
    assert np.array_equal(flex_attention(rows, k, v, enable_gqa=True), expected)


@pytest.mark.parametrize("dims", [(20, 12), (7, 7), (3, 64), (64, 1), (100, 40)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dims_of_any_size(rng, dims, dtype):
    q, k, v = draw(rng, dim=dims[0], dim_vo=dims[1], dtype=dtype)
    cap, mask = mods.softcap(8.0), create_block_mask(masks.causal(), None, None, 50, 70)
    parts = Flex(cap, error=2e-6), Flex(masks.causal())
    how = {"score_mod": cap, "block_mask": mask, "enable_gqa": True, "return_lse": True}
    out, lse = flex_attention(q, k, v, **how)
    assert out.shape == (*q.shape[:3], dims[1])
    within(exact_of(q, k, v, *parts), out, lse)
    if dtype == "float32":
        mine = flex_attention(*map(torch.tensor, (q, k, v)), **how)
        assert np.array_equal(mine[0].numpy(), out) and np.array_equal(mine[1].numpy(), lse)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 2, 0, 3), (0, 1, 3, 2)])
@pytest.mark.parametrize("shape", [{"batch": 1}, {"rows": 1}, {}, {"batch": 1, "dim_vo": 20}], ids=str)
def test_output_strides_follow_the_querys(rng, monkeypatch, order, shape):
    """As PyTorch's do, so that what views its output views ours."""
    monkeypatch.setattr(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    q, k, v = map(torch.tensor, draw(rng, kv_heads=4, **shape))
    expected, lse = theirs.flex_attention(q, k, v, return_lse=True)
    q = q.permute(order).contiguous().permute([order.index(d) for d in range(4)])
    their_out, their_lse = theirs.flex_attention(q, k, v, return_lse=True)
    out, lse = flex_attention(q, k, v, return_lse=True)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-6)
    assert out.stride() == their_out.stride() and lse.stride() == their_lse.stride()


def test_one_key_and_value_for_all(rng):
    q, k, v = draw(rng, batch=3, kv_heads=4)
    block_mask = create_block_mask(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + 5 * b, 3, None, 50, 70)
    out, lse = flex_attention(q, k[:1], v[:1], block_mask=block_mask, return_lse=True)
    repeated = [np.repeat(x[:1], 3, 0) for x in (k, v)]
    within(exact_of(q, *repeated, Flex(block_mask.mask_mod)), out, lse)


@pytest.mark.parametrize("shape", [{"rows": 0}, {"keys": 0}, {"batch": 0}, {"rows": 1, "keys": 1}])
def test_small_and_empty(rng, shape):
    q, k, v = draw(rng, **shape)
    how = {"score_mod": SCORES["softcap"](None), "enable_gqa": True, "return_lse": True}
    out, lse = flex_attention(q, k, v, **how)
    assert out.shape == (*q.shape[:3], v.shape[3]) and lse.shape == q.shape[:3]
    if shape.get("keys") == 0:
        assert not out.any() and np.isneginf(lse).all()


def test_a_sliced_mask_and_its_rows(rng):
    q, k, v = draw(rng, kv_heads=4, rows=128, keys=128)
    whole = create_block_mask(masks.causal(), None, None, 128, 128, BLOCK_SIZE=32)
    part = whole[:, :, 2]
    with refuses(ValueError, "block_mask is a slice", "mask_mod"):
        flex_attention(q[:, :, 64:96], k, v, block_mask=part)
    part.mask_mod = with_offset(whole.mask_mod, 64)
    out = flex_attention(np.ascontiguousarray(q[:, :, 64:96]), k, v, block_mask=part)
    exact = exact_of(q, k, v, Flex(masks.causal()))
    compare("O", out, exact.out[:, :, 64:96], exact.out_budget[:, :, 64:96])


def test_decoding_with_an_offset(rng):
    """The same mod: by true positions on a paged cache, and by an offset in a call whose rows count from 0."""
    q, k, v = draw(rng, batch=1, heads=4, kv_heads=4, rows=1, keys=90)
    mod, mask = mods.alibi([0.5, 0.1, -0.2, 0.0]), masks.sliding_window(20)
    block_mask = create_block_mask(with_offset(mask, 89), None, None, 1, 90)
    out = flex_attention(q, k, v, score_mod=with_offset(mod, 89), block_mask=block_mask)
    spec = raddle.AttentionSpec(4, 4, 32, 24, "float32", variant=[mod, mask])
    attn = raddle.Attention(spec)
    plan = attn.plan(raddle.RaggedKV([0, 1], [0, 90]))
    found = attn.run(plan, q[:, :, 0], (np.ascontiguousarray(k[0].swapaxes(0, 1)), v[0].swapaxes(0, 1)))
    exact = exact_of(q, k, v, Flex(with_offset(mod, 89)), Flex(with_offset(mask, 89)))
    compare("O", out, exact.out, exact.out_budget)
    compare("O", found, exact.out[:, :, 0], exact.out_budget[:, :, 0])


def test_block_masks_as_variant(rng):
    """In plan/run form a block mask speaks of positions in the text."""
    q, k, v = draw(rng, batch=1, heads=4, kv_heads=4, rows=64, keys=64)
    index = np.array([[[[0, 9], [0, 1]]]], np.int32)
    given = BlockMask.from_kv_blocks(np.array([[[1, 2]]]), index, BLOCK_SIZE=32, mask_mod=masks.causal())
    spec = raddle.AttentionSpec(4, 4, 32, 24, "float32", variant=given)
    attn = raddle.Attention(spec)
    flat = [np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (q, k, v)]
    out, lse = attn.run(attn.plan(raddle.RaggedKV([0, 64], [0, 64])), flat[0], tuple(flat[1:]), return_lse=True)
    exact = exact_of(q, k, v, Flex(given.as_mask()))
    compare("O", out, exact.out[0].swapaxes(0, 1), exact.out_budget[0].swapaxes(0, 1))
    compare("LSE", lse, exact.lse[0].T, exact.lse_budget[0].T)


def test_new_values_and_shapes_compile_nothing(rng):
    """After the first call of a structure, other lengths, numbers and captured arrays ask for no kernel."""

    def call():
        batch, rows, keys = (int(n) for n in rng.integers(1, 90, 3))
        q, k, v = draw(rng, batch=batch, kv_heads=4, rows=rows, keys=keys)
        bias = rng.standard_normal(90).astype(np.float32)
        cap = float(rng.uniform(1.0, 9.0))

        def score_mod(score, b, h, q_idx, kv_idx):
            return cap * torch.tanh((score + bias[kv_idx]) / cap) + bias[q_idx] * 3

        mask = masks.prefix_lm(rng.integers(0, 50, batch))
        block_mask = create_block_mask(mask, batch, None, rows, keys)
        found = flex_attention(q, k, v, score_mod, block_mask, return_lse=True)
        within(exact_of(q, k, v, Flex(as_numpy(bias, cap), error=cap * 2.0**-21), Flex(mask)), *found)

    def as_numpy(bias, cap):
        return lambda score, b, h, q_idx, kv_idx: cap * np.tanh((score + bias[kv_idx]) / cap) + bias[q_idx] * 3.0

    def kernels():
        return raddle.cache.num_compiled(), _attention_of.cache_info().misses

    call()
    before = kernels()
    for _ in range(20):
        call()
    assert kernels() == before


def test_two_functions_of_one_name(rng):
    """Two lambdas that both capture a number of the same name."""
    q, k, v = draw(rng, kv_heads=4)

    def doubled(n):
        return lambda score, b, h, q_idx, kv_idx: score * n

    def bounded(n):
        return lambda b, h, q_idx, kv_idx: kv_idx < n

    block_mask = create_block_mask(bounded(30), None, None, 50, 70)
    found = flex_attention(q, k, v, doubled(0.5), block_mask, return_lse=True)
    within(exact_of(q, k, v, Flex(doubled(0.5)), Flex(bounded(30))), *found)


def test_jax(rng):
    jnp = pytest.importorskip("jax.numpy")
    q, k, v = draw(rng)
    block_mask = create_block_mask(masks.causal(), None, None, 50, 70)
    out = flex_attention(*map(jnp.asarray, (q, k, v)), block_mask=block_mask, enable_gqa=True)
    assert isinstance(out, jnp.ndarray)
    assert np.array_equal(out, flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True))


Q, K = np.zeros((2, 4, 50, 32), np.float32), np.zeros((2, 4, 70, 32), np.float32)
CALL = {"query": Q, "key": K, "value": K}
MASK = create_block_mask(noop_mask, None, None, 50, 70)


@pytest.mark.parametrize(
    ("error", "changes", "words"),
    [
        (ValueError, {"query": Q[0]}, ("query", "3 dimensions", "4")),
        (ValueError, {"key": K[:, :2], "value": K[:, :2]}, ("key", "2 heads", "4", "enable_gqa")),
        (ValueError, {"key": K[:, :3], "value": K[:, :3], "enable_gqa": True}, ("key", "3 heads", "4")),
        (ValueError, {"key": K[..., :16]}, ("key", "16", "32")),
        (ValueError, {"value": K[:, :, :60]}, ("value", "60", "70")),
        (TypeError, {"value": K.astype(np.float16)}, ("value", "float16", "float32")),
        (ValueError, {"key": K[:1], "value": K[:1]}, ("key", "batch of 1", "2", "block_mask")),
        (ValueError, {"query": torch.zeros(2, 4, 50, 32, requires_grad=True)}, ("query", "gradient", "forward-only")),
        (ValueError, {"block_mask": create_block_mask(noop_mask, None, None, 50, 60)}, ("(50, 60)", "(50, 70)")),
        (ValueError, {"block_mask": create_block_mask(noop_mask, 3, None, 50, 70)}, ("block_mask", "B = 3", "2")),
        (ValueError, {"block_mask": create_block_mask(noop_mask, 1, 2, 50, 70)}, ("block_mask", "H = 2", "4")),
        (TypeError, {"block_mask": noop_mask}, ("block_mask", "function", "BlockMask")),
        (TypeError, {"score_mod": noop_mask}, ("score_mod", "mask mod")),
        (TypeError, {"score_mod": 3}, ("score_mod", "int")),
        (TypeError, {"kernel_options": [1]}, ("kernel_options", "list", "dict")),
        (ValueError, {"return_aux": AuxRequest(max_scores=True)}, ("return_aux.max_scores",)),
        (ValueError, {"return_aux": AuxRequest(lse=True), "return_lse": True}, ("return_lse", "return_aux")),
        (TypeError, {"return_aux": True}, ("return_aux", "bool", "AuxRequest")),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(error, changes, words):
    with refuses(error, *words):
        flex_attention(**{**CALL, **changes})


def test_options_for_other_kernels_change_nothing(rng):
    q, k, v = draw(rng, kv_heads=4)
    assert np.array_equal(flex_attention(q, k, v, kernel_options={"BLOCK_M": 64}), flex_attention(q, k, v))
