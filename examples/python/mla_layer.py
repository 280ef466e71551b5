"""A layer of multi-head latent attention (DeepSeek-V2), with and without absorbed weights: a prompt, then steps of decode.

    python examples/python/mla_layer.py

Without absorption every step makes K and V of all heads out of the cached latents and attends to those. With it,
attention runs over the latents themselves, one KV head of 576 for all query heads: weights are random, sizes those of
a DeepSeek-V2 with fewer heads and a smaller model around them. In float32, so that both can be held to a budget.
"""

import numpy as np
import raddle
from raddle import mla

HIDDEN, HEADS, Q_LORA = 256, 16, 192
RANK, NOPE, ROPE, V_DIM = mla.KV_LORA_RANK, mla.NOPE, mla.ROPE, 128
PROMPTS, STEPS, PAGE_SIZE = [150, 33], 5, 16
UNIT = 2.0**-24  # of float32: half an ulp of 1

rng = np.random.default_rng(0)


def random(*shape, depth):
    return rng.standard_normal(shape, np.float32) / np.float32(depth**0.5)


w_dq, w_dkv, w_kr = (random(HIDDEN, n, depth=HIDDEN) for n in (Q_LORA, RANK, ROPE))
w_uq, w_qr = (random(Q_LORA, HEADS, n, depth=Q_LORA) for n in (NOPE, ROPE))
w_uk, w_uv = (random(RANK, HEADS, n, depth=RANK) for n in (NOPE, V_DIM))
w_o = random(HEADS, V_DIM, HIDDEN, depth=HEADS * V_DIM)


def normed(x):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True))


def turn(x, pos):
    """RoPE of pairs (x[2i], x[2i + 1])."""
    angle = pos[:, None, None] * 10000.0 ** (-np.arange(0, ROPE, 2) / ROPE)
    a, b = x[..., 0::2], x[..., 1::2]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape).astype(np.float32)


def layer(absorbed):
    """The layer's outputs for all prompts and steps; `attend` gets queries that are turned."""
    tokens = np.random.default_rng(1)
    pool = raddle.PagePool(num_pages=64, page_size=PAGE_SIZE)
    cache = np.zeros((64, PAGE_SIZE, 1, RANK + ROPE), np.float32)
    requests = [pool.add() for _ in PROMPTS]
    plain = raddle.Attention(raddle.AttentionSpec(HEADS, HEADS, NOPE + ROPE, V_DIM, "float32", variant=raddle.Causal()))
    latent = raddle.Attention(mla.spec(HEADS, dtype="float32", variant=raddle.Causal()))
    w_q, w_out = mla.absorb_q(w_uq, w_uk), mla.absorb_out(w_uv, w_o)
    kv_len, outputs = np.zeros(len(PROMPTS), int), []
    for qo_len in [PROMPTS] + [[1] * len(PROMPTS)] * STEPS:
        x = tokens.standard_normal((sum(qo_len), HIDDEN), np.float32)
        pos = np.concatenate([n + np.arange(rows) for n, rows in zip(kv_len, qo_len)])
        kv_len = kv_len + qo_len
        pool.append(requests, qo_len)
        layout = pool.layout(requests, qo_len)
        mla.append(layout, cache, normed(x @ w_dkv), x @ w_kr, rope=raddle.Rope(ROPE, interleaved=True))
        c_q = normed(x @ w_dq)
        q_pe = turn(np.tensordot(c_q, w_qr, 1), pos)
        if absorbed:
            # W_UQ · W_UK is one matrix; `mla.latent_q` would apply the two in turn.
            q = np.concatenate([np.tensordot(c_q, w_q, 1), q_pe], -1)
            out = latent.run(latent.plan(layout), q, mla.kv(cache))
            outputs.append(np.tensordot(out, w_out, 2))
        else:
            rows = [cache[pool.pages(r)].reshape(-1, RANK + ROPE)[:n] for r, n in zip(requests, kv_len)]
            c_kv, k_pe = np.split(np.concatenate(rows), [RANK], axis=1)
            k_pe = np.broadcast_to(k_pe[:, None], (len(k_pe), HEADS, ROPE))
            k = np.concatenate([np.tensordot(c_kv, w_uk, 1), k_pe], -1)
            ragged = raddle.RaggedKV(*(np.cumsum([0, *n], dtype=np.int32) for n in (qo_len, kv_len)))
            q = np.concatenate([np.tensordot(c_q, w_uq, 1), q_pe], -1)
            out = plain.run(plain.plan(ragged), q, (k, np.tensordot(c_kv, w_uv, 1)))
            outputs.append(np.tensordot(out, w_o, 2))
    return np.concatenate(outputs)


unabsorbed, out = layer(absorbed=False), layer(absorbed=True)

# Both forms sum the same products in another order. A sum of n products in float32 errs by about √n roundings of its own
# size, 6 √n being next to never exceeded; a logit is a chain of three such sums, no larger than |q| |k| · scale, and
# weights that change by a factor of e^δ move a head's output by (e^2δ - 1) times what values differ by.
x = normed(rng.standard_normal((1000, HIDDEN), np.float32))
q = np.tensordot(normed(x @ w_dq), np.concatenate([w_uq, w_qr], -1), 1)
c_kv = normed(x @ w_dkv)
k, v = np.tensordot(c_kv, w_uk, 1), np.tensordot(c_kv, w_uv, 1)
longest = np.linalg.norm(q, axis=-1).max() * np.hypot(np.linalg.norm(k, axis=-1).max(), np.linalg.norm(x @ w_kr, axis=-1).max())
depths = sum(n**0.5 for n in (Q_LORA, NOPE, RANK))
delta = 2 * 6 * depths * UNIT * longest * (NOPE + ROPE) ** -0.5
budget = np.expm1(2 * delta) * np.abs(v).max() * np.linalg.norm(w_o.reshape(-1, HIDDEN), axis=0).max()
budget += 2 * 6 * sum(n**0.5 for n in (RANK, V_DIM, HEADS * V_DIM)) * UNIT * np.abs(unabsorbed).max()
difference = np.abs(out - unabsorbed).max()
assert difference <= budget < 0.01 * np.abs(out).max(), (difference, budget)

print(f"prompts of {PROMPTS}, then {STEPS} steps of decode: {len(out)} rows, outputs up to {np.abs(out).max():.2f}")
print(f"absorbed and not differ by {difference:.1e} at most; roundings may add up to {budget:.1e}")
print(f"a cached token has {RANK + ROPE} numbers, and {HEADS * (NOPE + ROPE + V_DIM):,} where K and V of all heads are kept")
