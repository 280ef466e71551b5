"""Forty typical mistakes and what Raddle says: read by a test, which holds the messages to it, and by the docs.

The code of each finds numpy as np, torch, raddle, what it needs of raddle.flex, and a small problem made rightly: q [6, 4, 16],
k and v [6, 2, 16] of float32, x [1, 4, 6, 16], attn, layout (one request of 6 rows and keys) and plan.
"""

from typing import NamedTuple


class Mistake(NamedTuple):
    id: str
    code: str
    error: str  # the exception's type
    message: str


MISTAKES = [
    Mistake(
        "dtype_of_numpy",
        'attn.run(plan, q.astype("float64"), (k, v))',
        "TypeError",
        (
            "q has dtype float64; expected float32, as the spec says: pass q.astype(numpy.float32), or "
            "q.to(torch.float32)"
        ),
    ),
    Mistake(
        "bits_of_bfloat16",
        'raddle.attention(q.view("uint16"), k, v)',
        "TypeError",
        (
            "q has dtype uint16; expected float32, float16 or bfloat16: pass q.view(ml_dtypes.bfloat16) "
            "if these are its bits"
        ),
    ),
    Mistake(
        "wrong_number_of_rows",
        "attn.run(plan, q[:3], (k, v))",
        "ValueError",
        "q is [3, 4, 16] float32; expected [6, 4, 16] float32",
    ),
    Mistake(
        "k_of_another_dtype",
        'raddle.attention(q, k.astype("float16"), v)',
        "TypeError",
        "k has dtype float16; expected float32, as q has",
    ),
    Mistake(
        "v_longer_than_k",
        "raddle.attention(q, k[:5], v)",
        "ValueError",
        "v has 6 keys; expected 5, as k has",
    ),
    Mistake(
        "heads_do_not_divide",
        "raddle.attention(q[:, :3], k, v)",
        "ValueError",
        "k has 2 heads and q 3; expected a divisor of q's",
    ),
    Mistake(
        "head_dims_differ",
        "raddle.attention(q, k[..., :8], v[..., :8])",
        "ValueError",
        "k has a head dimension of 8; expected 16, as q has",
    ),
    Mistake(
        "rows_or_heads_first",
        "raddle.attention(q[None], k[None], v[None])",
        "ValueError",
        (
            "q is [1, 6, 4, 16] and k [1, 6, 2, 16], which can be either [B, S, H, D] or [B, H, S, D]; "
            "expected layout='BSHD' (flash-attn's order) or layout='BHSD' (that of PyTorch's "
            "scaled_dot_product_attention)"
        ),
    ),
    Mistake(
        "sdpa_decode",
        "raddle.attention(q[None, :1].swapaxes(1, 2), k[None].swapaxes(1, 2), v[None].swapaxes(1, 2))",
        "ValueError",
        (
            "q is [1, 4, 1, 16] and k [1, 2, 6, 16], which can be only [B, H, S, D]; expected "
            "layout='BHSD' (as [B, S, H, D], k has 6 heads and q 1; expected a divisor of q's)"
        ),
    ),
    Mistake(
        "causal_as_text",
        'raddle.attention(q, k, v, causal="false")',
        "TypeError",
        "causal is 'false'; expected True or False",
    ),
    Mistake(
        "sdpa_is_causal",
        "raddle.attention(q, k, v, is_causal=True)",
        "TypeError",
        "attention has no argument 'is_causal'; write causal=",
    ),
    Mistake(
        "sdpa_attn_mask",
        "raddle.attention(q, k, v, attn_mask=np.ones((6, 6), bool))",
        "TypeError",
        (
            "attention has no argument 'attn_mask'; write variant=[a function (b, h, q_idx, kv_idx) of "
            "raddle.flex, or raddle.PackedMask]"
        ),
    ),
    Mistake(
        "causal_of_a_spec",
        "raddle.AttentionSpec(4, 2, 16, causal=True)",
        "TypeError",
        "AttentionSpec has no argument 'causal'; write variant=[raddle.Causal()]",
    ),
    Mistake(
        "class_instead_of_value",
        "raddle.AttentionSpec(4, 2, 16, variant=[raddle.Causal])",
        "TypeError",
        "variant[0] is the class Causal; expected one made of it, with parentheses: Causal(…)",
    ),
    Mistake(
        "unknown_dtype",
        'raddle.Attention(raddle.AttentionSpec(4, 2, 16, dtype="float64"))',
        "ValueError",
        "dtype is 'float64'; expected 'float32', 'float16' or 'bfloat16'",
    ),
    Mistake(
        "unknown_kv_dtype",
        'raddle.Attention(raddle.AttentionSpec(4, 2, 16, kv_dtype="fp4"))',
        "ValueError",
        "kv_dtype is 'fp4'; expected 'float8_e4m3fn', 'float8_e5m2', 'int8' or None",
    ),
    Mistake(
        "window_of_a_model",
        "raddle.SlidingWindow(window=1024)",
        "TypeError",
        (
            "SlidingWindow has no argument 'window'; write left=, which does not count the row itself: "
            "window - 1 of most models"
        ),
    ),
    Mistake(
        "no_cap",
        "raddle.SoftCap(0.0)",
        "ValueError",
        "cap is 0; expected a finite number above 0",
    ),
    Mistake(
        "last_page_len",
        (
            "raddle.PagedKV([0, 1], paged_kv_indptr=[0, 1], paged_kv_indices=[0], "
            "paged_kv_last_page_len=[3])"
        ),
        "TypeError",
        (
            "PagedKV has no argument 'paged_kv_indptr'; write page_indptr=; nor 'paged_kv_indices'; "
            "write page_indices=; nor 'paged_kv_last_page_len'; write kv_len=, where kv_len = (pages of "
            "the request - 1) * page_size + last_page_len"
        ),
    ),
    Mistake(
        "qo_indptr_without_end",
        "raddle.PagedKV([0], [0, 1], [0], [16])",
        "ValueError",
        "qo_indptr has 1 entries; expected 2, one more than requests: kv_len and page_indptr have 1",
    ),
    Mistake(
        "indptr_of_lengths",
        "raddle.RaggedKV([3, 3], [0, 6])",
        "ValueError",
        "qo_indptr[0] is 3; expected 0",
    ),
    Mistake(
        "too_few_pages",
        "raddle.PagedKV([0, 1], [0, 1], [7], [17], page_size=16)",
        "ValueError",
        "page_indptr[0]..[1] lists 1 pages; kv_len[0] = 17 at page_size 16 needs 2",
    ),
    Mistake(
        "ragged_block_table",
        "raddle.PagedKV([0, 1, 2], None, [[0, 1], [2]], [20, 3])",
        "ValueError",
        "page_indices has rows of unequal length; expected equal ones: pad with -1",
    ),
    Mistake(
        "page_outside_of_the_pool",
        (
            "paged = attn.plan(raddle.PagedKV([0, 6], None, [[7]], [6], page_size=16))\n"
            "pool = np.zeros((4, 16, 2, 16), np.float32)\n"
            "attn.run(paged, q, (pool, pool))"
        ),
        "ValueError",
        "kv: k has 4 pages; the layout uses page 7",
    ),
    Mistake(
        "append_was_refused",
        (
            "pool = raddle.PagePool(num_pages=1, page_size=16)\n"
            "request = pool.add()\n"
            "assert pool.append([request], [17]).missing == 1\n"
            "pool.layout([request], qo_len=17)"
        ),
        "ValueError",
        (
            "requests[0] has no room for its query rows: its last append reported 1 missing pages and "
            "changed nothing; expected an append that reports 0, after pages were given back, or qo_len 0"
        ),
    ),
    Mistake(
        "pages_not_released",
        "raddle.PagePool(4).release([0])",
        "ValueError",
        "pages[0] is 0, which was released already; expected a page that allocate or retain gave you",
    ),
    Mistake(
        "plan_of_another_attention",
        (
            "other = raddle.Attention(raddle.AttentionSpec(2, 2, 16, dtype='float32'))\n"
            "other.run(plan, q[:, :2], (k, v))"
        ),
        "ValueError",
        (
            "plan is of another attention; expected one made by this Attention, or by one of an equal "
            "spec"
        ),
    ),
    Mistake(
        "misspelt_parameter",
        'attn.plan(layout, params={"window.lft": 3})',
        "ValueError",
        "params: no member is named 'window.lft'; the spec's variant has none",
    ),
    Mistake(
        "scale_of_float_keys",
        "attn.run(plan, q, (k, v), k_scale=0.5)",
        "ValueError",
        "k_scale is given, and kv: k is float32; expected no scale: only K and V of 8 bits have them",
    ),
    Mistake(
        "unknown_schedule",
        'attn.plan(layout, schedule="fast")',
        "ValueError",
        "schedule is 'fast'; expected 'auto', 'linear', 'algorithm1' or 'one-per-request'",
    ),
    Mistake(
        "softmax_scale",
        "attn.run(plan, q, (k, v), softmax_scale=0.1)",
        "TypeError",
        "Attention.run has no argument 'softmax_scale'; write scale=",
    ),
    Mistake(
        "read_only_output",
        (
            "out = q.copy()\n"
            "out.flags.writeable = False\n"
            "attn.run(plan, q, (k, v), out=out)"
        ),
        "ValueError",
        "out is a read-only array; expected one that can be written",
    ),
    Mistake(
        "gradient",
        "raddle.attention(torch.zeros(6, 4, 16, requires_grad=True), k, v)",
        "ValueError",
        (
            "q requires a gradient; Raddle is forward-only: pass q.detach(), or call it under "
            "torch.no_grad()"
        ),
    ),
    Mistake(
        "plan_kept_in_a_pickle",
        "pickle.dumps(attn)",
        "TypeError",
        "an Attention cannot be pickled; make it again from its arguments",
    ),
    Mistake(
        "mask_with_if",
        (
            "def mask(b, h, q_idx, kv_idx):\n"
            "    if q_idx >= kv_idx:\n"
            "        return True\n"
            "    return False\n"
            "\n"
            "create_block_mask(mask, None, None, 8, 8)"
        ),
        "TraceError",
        (
            "mask_with_if.py:2: if q_idx >= kv_idx:\n"
            "  a condition on a traced value has no truth value here; write "
            "raddle.flex.ops.where(condition, a, b) instead of if"
        ),
    ),
    Mistake(
        "mask_with_and",
        (
            "def mask(b, h, q_idx, kv_idx):\n"
            "    return q_idx >= kv_idx and q_idx - kv_idx < 4\n"
            "\n"
            "create_block_mask(mask, None, None, 8, 8)"
        ),
        "TraceError",
        (
            "mask_with_and.py:2: return q_idx >= kv_idx and q_idx - kv_idx < 4\n"
            "  a condition on a traced value has no truth value here; write `a & b` (with parentheses) "
            "instead of `a and b`"
        ),
    ),
    Mistake(
        "mask_without_return",
        (
            "def mask(b, h, q_idx, kv_idx):\n"
            "    q_idx >= kv_idx\n"
            "\n"
            "create_block_mask(mask, None, None, 8, 8)"
        ),
        "TraceError",
        (
            "mask_without_return.py:1: mask\n"
            "  the function returns None; expected a bool: is `return` missing?"
        ),
    ),
    Mistake(
        "mask_of_numbers",
        (
            "def mask(b, h, q_idx, kv_idx):\n"
            "    return q_idx - kv_idx\n"
            "\n"
            "create_block_mask(mask, None, None, 8, 8)"
        ),
        "TraceError",
        (
            "mask_of_numbers.py:1: mask\n"
            "  the mask is an int; expected a bool; compare it, for example with > 0 or != 0"
        ),
    ),
    Mistake(
        "mod_of_three_arguments",
        (
            "def score(score, h, q_idx):\n"
            "    return score\n"
            "\n"
            "raddle.AttentionSpec(4, 2, 16, variant=[score])"
        ),
        "TraceError",
        (
            "mod_of_three_arguments.py:1: score\n"
            "  the function takes 3 positional arguments; expected 5 (score, b, h, q_idx, kv_idx) or 4 "
            "(b, h, q_idx, kv_idx)"
        ),
    ),
    Mistake(
        "mod_with_math",
        (
            "def score(score, b, h, q_idx, kv_idx):\n"
            "    return 20 * math.tanh(score / 20)\n"
            "\n"
            "raddle.AttentionSpec(4, 2, 16, variant=[score])"
        ),
        "TraceError",
        (
            "mod_with_math.py:2: return 20 * math.tanh(score / 20)\n"
            "  a traced value is used where Python needs a float now; write raddle.flex.ops.tanh instead "
            "of math.tanh"
        ),
    ),
    Mistake(
        "mod_with_random",
        (
            "def score(score, b, h, q_idx, kv_idx):\n"
            "    return score + torch.rand(())\n"
            "\n"
            "raddle.AttentionSpec(4, 2, 16, variant=[score])"
        ),
        "TraceError",
        (
            "mod_with_random.py:2: return score + torch.rand(())\n"
            "  a random number is drawn when the function is traced, once, and would be the same for "
            "every pair and call; draw an array before, capture it and index it with b, h, q_idx or "
            "kv_idx"
        ),
    ),
    Mistake(
        "stale_document",
        (
            "document = np.zeros(10, np.int32)\n"
            "\n"
            "def same(b, h, q_idx, kv_idx):\n"
            "    return document[q_idx] == document[kv_idx]\n"
            "\n"
            "create_block_mask(same, None, None, 40, 40)"
        ),
        "ValueError",
        (
            "same: captured array document has 10 elements and is indexed with 39 (q_idx = 0 to 39); "
            "expected at least 40 elements, or an index that is clamped: raddle.flex.ops.clamp(index, 0, "
            "9)"
        ),
    ),
    Mistake(
        "stale_document_of_a_plan",
        (
            "document = np.zeros((2, 4), np.int32)\n"
            "\n"
            "def same(b, h, q_idx, kv_idx):\n"
            "    return document[b, q_idx] == document[b, kv_idx]\n"
            "\n"
            "spec = raddle.AttentionSpec(4, 2, 16, dtype='float32', variant=[same])\n"
            "raddle.Attention(spec).plan(layout)"
        ),
        "ValueError",
        (
            "same: captured array document, dimension 1, has 4 elements and is indexed with 5 for "
            "request 0 (q_idx = 0 to 5); expected at least 6 elements, or an index that is clamped: "
            "raddle.flex.ops.clamp(index, 0, 3)"
        ),
    ),
    Mistake(
        "block_mask_of_other_lengths",
        (
            "mask = create_block_mask(masks.causal(), None, None, 8, 8)\n"
            "flex_attention(x, x, x, block_mask=mask)"
        ),
        "ValueError",
        "block_mask is for lengths (8, 8); expected (query, key) = (6, 6)",
    ),
    Mistake(
        "mask_not_made",
        "create_block_mask(masks.causal, None, None, 8, 8)",
        "TypeError",
        (
            "mask_mod is a function of 0 arguments; expected (score, b, h, q_idx, kv_idx) or (b, h, "
            "q_idx, kv_idx)"
        ),
    ),
    Mistake(
        "qo_indptr_of_another_batch",
        "raddle.PagedKV([0, 2], None, [[0], [1]], [5, 9])",
        "ValueError",
        "qo_indptr has 2 entries; expected 3, one more than requests: kv_len and page_indices have 2",
    ),
    Mistake(
        "mod_with_jax",
        (
            "import jax.numpy as jnp\n"
            "\n"
            "def score(score, b, h, q_idx, kv_idx):\n"
            "    return 20 * jnp.tanh(score / 20)\n"
            "\n"
            "raddle.AttentionSpec(4, 2, 16, variant=[score])"
        ),
        "TraceError",
        (
            "mod_with_jax.py:4: return 20 * jnp.tanh(score / 20)\n"
            "  a function of JAX gets a traced value, which it cannot compute with; write "
            "raddle.flex.ops.tanh instead of jnp.tanh"
        ),
    ),
    Mistake(
        "flex_without_gqa",
        "flex_attention(x, x[:, :2], x[:, :2])",
        "ValueError",
        "key has 2 heads and query 4; expected as many, or enable_gqa=True",
    ),
    Mistake(
        "reserved_too_small",
        (
            "reservation = attn.reserve(max_requests=1, max_qo_tokens=4, max_kv_tokens=64)\n"
            "reservation.update(layout)"
        ),
        "ValueError",
        "layout has 6 query rows; expected at most max_qo_tokens = 4 of the reservation",
    ),
    Mistake(
        "run_before_update",
        (
            "reservation = attn.reserve(max_requests=1, max_qo_tokens=8, max_kv_tokens=64)\n"
            "attn.run(reservation, q, (k, v))"
        ),
        "ValueError",
        "reservation has no plan yet; expected an update before",
    ),
]
