"""Run with an installed wheel and no compiler on PATH: one small attention against numpy."""

import shutil

import numpy as np
import raddle

assert not any(map(shutil.which, ("c++", "g++", "cc", "gcc", "clang"))), "a compiler is on PATH"

tokens, heads, dim = 7, 2, 16
q, k, v = np.random.default_rng(0).standard_normal((3, tokens, heads, dim)).astype(np.float32)

logits = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim)
logits[:, ~np.tri(tokens, dtype=bool)] = -np.inf
weights = np.exp(logits - logits.max(-1, keepdims=True))
weights /= weights.sum(-1, keepdims=True)
expected = np.einsum("hqk,khd->qhd", weights, v)

if hasattr(raddle, "attention"):
    out = raddle.attention(q, k, v, causal=True)
    out = out if isinstance(out, np.ndarray) else np.from_dlpack(out)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
print("raddle", raddle.__version__, "works from the wheel:", raddle.__file__)
