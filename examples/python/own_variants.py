"""Attention that does not come with Raddle: a mask in Python, a scan in C++.

Both are compiled when the `Attention` is made, once a machine, and take a C++ compiler.
"""

import time

import numpy as np
import raddle
from raddle import flex

# --- a mask in Python: each row sees the last `window` tokens of its own document ---------------------------

document = np.repeat([0, 1, 2], [50, 30, 20])
window = 16


def sliding_document(b, h, q_idx, kv_idx):
    same = document[q_idx] == document[kv_idx]
    return same & (kv_idx <= q_idx) & (q_idx - kv_idx < window)


# --- a scan in C++: FlashSigmoid (Ramapuram et al. 2024), a plain sum of sigmoids in place of a softmax -----

FlashSigmoid = raddle.Variant(
    "FlashSigmoid",
    """
    struct FlashSigmoid {
      static constexpr Scan scan = Scan::sum;
      float bias;

      RADDLE_FN float logits(float s, const Row&, const Key&) const {
        return math::sigmoid(s + bias);
      }
    };
    """,
    params={"bias": float},
)

rng = np.random.default_rng(0)
q = rng.standard_normal((100, 4, 64), dtype=np.float32)  # [tokens, Hq, D]
k, v = (rng.standard_normal((100, 2, 64), dtype=np.float32) for _ in "kv")
layout = raddle.RaggedKV([0, 100], [0, 100])

for variant in ([flex.mods.softcap(30.0), sliding_document], [FlashSigmoid(bias=-1.0), raddle.Causal()]):
    start = time.perf_counter()
    attention = raddle.Attention(raddle.AttentionSpec(4, 2, 64, dtype="float32", variant=variant))
    out = attention.run(attention.plan(layout), q, (k, v))
    print(f"{variant}: {1e3 * (time.perf_counter() - start):.0f} ms, |O| = {np.abs(out).mean():.4f}")

print(flex.create_block_mask(sliding_document, None, None, 100, 100, BLOCK_SIZE=10))
