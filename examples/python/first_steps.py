"""Two requests decode one token each over a paged KV cache: plan once a step, run once a layer.

    python examples/python/first_steps.py
"""

import ml_dtypes
import numpy as np
import raddle

NUM_LAYERS = 2
NUM_PAGES, PAGE_SIZE, HKV, HEAD_DIM = 8, 16, 8, 128

spec = raddle.AttentionSpec(
    num_qo_heads=32,
    num_kv_heads=HKV,
    head_dim=HEAD_DIM,
    dtype="bfloat16",
    variant=[raddle.SoftCap(30.0), raddle.Causal()],
)
attention = raddle.Attention(spec)

rng = np.random.default_rng(0)


def numbers(*shape):
    return rng.standard_normal(shape).astype(ml_dtypes.bfloat16)


pools = [
    (numbers(NUM_PAGES, PAGE_SIZE, HKV, HEAD_DIM), numbers(NUM_PAGES, PAGE_SIZE, HKV, HEAD_DIM))
    for _ in range(NUM_LAYERS)
]

# Request 0 has 40 keys on pages 7, 2 and 5, request 1 has 17 on pages 0 and 1: those of the new tokens included.
layout = raddle.PagedKV(
    qo_indptr=[0, 1, 2], page_indptr=[0, 3, 5], page_indices=[7, 2, 5, 0, 1], kv_len=[40, 17], page_size=PAGE_SIZE
)
plan = attention.plan(layout)
print(plan.explain())

for number, pool in enumerate(pools):
    q, k_new, v_new = numbers(2, 32, HEAD_DIM), numbers(2, HKV, HEAD_DIM), numbers(2, HKV, HEAD_DIM)
    raddle.append_kv(layout, pool, k_new, v_new)
    out, lse = attention.run(plan, q, pool, return_lse=True)
    print(f"layer {number}: out {out.shape} {out.dtype}, lse from {lse.min():.3f} to {lse.max():.3f}")

# Without a plan, for one sequence:
q, k, v = numbers(5, 32, HEAD_DIM), numbers(5, HKV, HEAD_DIM), numbers(5, HKV, HEAD_DIM)
print("one call:", raddle.attention(q, k, v, causal=True).shape)
