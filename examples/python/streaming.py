"""An endless text in constant memory (StreamingLLM): attention sinks and a recent window, decoded token by token.

    python examples/python/streaming.py

One layer of random weights, beside a cache that keeps everything: as long as nothing is dropped both say the same.
Afterwards the rolling cache's steps cost what they cost before, and what they say is checked against all keys and
values of the text, of which the sinks and the window are picked by hand.
"""

from time import perf_counter

import numpy as np
import raddle

HQ, HKV, DIM, PAGE_SIZE = 8, 2, 64, 16
SINKS, WINDOW, TOKENS = 4, 508, 3072
KEPT = SINKS + WINDOW

rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((TOKENS, heads, DIM)).astype(np.float32) for heads in (HQ, HKV, HKV))

# K is kept unturned: RoPE turns it inside of attention, by its position in the cache, which changes with every step.
variant = [raddle.Rope(DIM), raddle.Causal()]
attention = raddle.Attention(raddle.AttentionSpec(HQ, HKV, DIM, dtype="float32", variant=variant))


class Rolling:
    def __init__(self):
        self.pool = raddle.PagePool(KEPT // PAGE_SIZE, PAGE_SIZE)
        self.cache = raddle.RollingCache(self.pool)
        self.request = self.cache.add(SINKS, WINDOW)

    def append(self, count):
        return self.cache.append([self.request], count)


class Full:
    def __init__(self):
        self.pool = raddle.PagePool(TOKENS // PAGE_SIZE, PAGE_SIZE)
        self.request = self.pool.add()

    def append(self, count):
        self.pool.append([self.request], [count])
        layout = self.pool.layout([self.request], count)
        return layout, layout


def read(cache, chunk=128):
    """The text: half of the window in chunks, as a prompt, then token by token. Returns outputs and seconds a step."""
    kv = cache.pool.make_kv(HKV, DIM, "float32")
    outputs, seconds, at = [], [], 0
    while at < TOKENS:
        start, rows = perf_counter(), slice(at, at + (chunk if at < WINDOW // 2 else 1))
        pages, layout = cache.append(rows.stop - rows.start)
        raddle.append_kv(pages, kv, k[rows], v[rows])
        outputs.append(attention.run(attention.plan(layout), q[rows], kv))
        seconds += [perf_counter() - start] * (rows.stop - rows.start)
        at = rows.stop
    return np.concatenate(outputs), 1e6 * np.array(seconds), sum(part.nbytes for part in kv)


out, rolling_us, rolling_bytes = read(Rolling())
full_out, full_us, full_bytes = read(Full())
np.testing.assert_allclose(out[:KEPT], full_out[:KEPT], rtol=1e-4, atol=1e-5)

for last in (KEPT, KEPT + 1, 2000, TOKENS - 1):
    kept = np.r_[:SINKS, last + 1 - WINDOW : last + 1]
    expected = raddle.attention(q[last : last + 1], k[kept], v[kept], variant=variant)
    np.testing.assert_allclose(out[last : last + 1], expected, rtol=1e-4, atol=1e-5)

print(f"a text of {TOKENS} tokens; the rolling cache keeps the first {SINKS} and the last {WINDOW}")
for name, us, memory in (("rolling", rolling_us, rolling_bytes), ("full", full_us, full_bytes)):
    early, late = np.median(us[KEPT : KEPT + 300]), np.median(us[-300:])
    print(f"{name:>8}: {memory / 2**20:.1f} MiB, {early:.0f} µs a step at {KEPT} tokens, {late:.0f} µs at {TOKENS}")
