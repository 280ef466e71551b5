"""Four samples of one prompt: they share its pages by a fork, and copy the last one when they begin to differ.

    python examples/python/parallel_sampling.py

The model is one layer of random weights; what it generates means nothing, but it is the same with and without sharing.
"""

import numpy as np
import raddle

VOCABULARY, DIM, HQ, HKV, HEAD_DIM = 512, 64, 4, 2, 32
SAMPLES, PROMPT, NEW_TOKENS, PAGE_SIZE = 4, 1003, 24, 16

weights = np.random.default_rng(0)
embedding = weights.standard_normal((VOCABULARY, DIM)).astype(np.float32)
to_qkv = weights.standard_normal((DIM, (HQ + 2 * HKV) * HEAD_DIM)).astype(np.float32) / DIM**0.5
to_logits = weights.standard_normal((HQ * HEAD_DIM, VOCABULARY)).astype(np.float32)
prompt = weights.integers(0, VOCABULARY, PROMPT)
# Looked up, not multiplied a step at a time: the bits of a product by numpy may depend on its number of rows.
qkv_of = (embedding @ to_qkv).reshape(VOCABULARY, HQ + 2 * HKV, HEAD_DIM)

# A request's bits do not depend on the rest of its batch, so that both ways give exactly the same.
spec = raddle.AttentionSpec(HQ, HKV, HEAD_DIM, dtype="float32", variant=[raddle.Causal()], batch_invariant=True)
attention = raddle.Attention(spec)


def step(pool, kv, requests, tokens, qo_len):
    """Appends the requests' new tokens, attends, and returns the outputs of their last rows."""
    grown = pool.append(requests, qo_len)
    if grown.missing:
        raise MemoryError(f"{grown.missing} pages are missing")  # an engine evicts, or lets a request wait
    raddle.copy_pages(kv, grown.from_pages, grown.to_pages)
    layout = pool.layout(requests, qo_len)
    q, k, v = np.split(qkv_of[tokens], [HQ, HQ + HKV], axis=1)
    raddle.append_kv(layout, kv, k, v)
    out = attention.run(attention.plan(layout), q, kv)
    return out[np.cumsum(qo_len) - 1]


def generate(share):
    """The samples, the outputs that they were drawn from, and the pages in use at the end."""
    pool = raddle.PagePool(num_pages=512, page_size=PAGE_SIZE)
    kv = pool.make_kv(HKV, HEAD_DIM, "float32")
    if share:
        first = pool.add()
        out = step(pool, kv, [first], prompt, [PROMPT]).repeat(SAMPLES, axis=0)
        requests = [first, *pool.fork(first, SAMPLES - 1)]
    else:
        requests = [pool.add() for _ in range(SAMPLES)]
        out = step(pool, kv, requests, np.tile(prompt, SAMPLES), [PROMPT] * SAMPLES)
    draws = [np.random.default_rng(seed) for seed in range(SAMPLES)]
    samples, outputs = [], [out]
    for _ in range(NEW_TOKENS):
        logits = out.reshape(SAMPLES, -1) @ to_logits
        noise = np.stack([draw.gumbel(size=VOCABULARY) for draw in draws])
        tokens = np.argmax(logits / 4 + noise, axis=1)
        out = step(pool, kv, requests, tokens, [1] * SAMPLES)
        samples.append(tokens)
        outputs.append(out)
    used, shared = pool.used, pool.shared
    pool.finish(requests)
    assert pool.used == 0
    return np.stack(samples, axis=1), np.stack(outputs), used, shared


alone, alone_out, alone_used, _ = generate(share=False)
forked, out, used, shared = generate(share=True)
np.testing.assert_array_equal(forked, alone)
np.testing.assert_array_equal(out, alone_out)
assert len({tuple(sample) for sample in forked}) == SAMPLES
print(f"{SAMPLES} samples of {NEW_TOKENS} tokens, the same with and without sharing")
print(f"pages: {used} instead of {alone_used}, {shared} of them shared")
