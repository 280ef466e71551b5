"""Batches at fixed sizes, as a GPU that plans for itself finds them: entries that a batch does not use are bad."""

from __future__ import annotations

import numpy as np

MAX_REQUESTS, MAX_ROWS, PAGES, WIDTH = 16, 32, 512, 32


def batches(rng: np.random.Generator, number: int, shared: bool) -> list[dict[str, np.ndarray]]:
    """Each an int32 array of qo_indptr, kv_len, table (pages of 16) and count; with `shared` lists begin alike."""
    return [_batch(rng, shared) for _ in range(number)]


def _batch(rng: np.random.Generator, shared: bool) -> dict[str, np.ndarray]:
    requests = int(rng.integers(1, MAX_REQUESTS + 1))
    qo_len = rng.integers(0, 3, requests)
    kv_len = rng.integers(1, 16 * WIDTH, requests)
    table = rng.integers(0, PAGES, (requests, WIDTH))
    if shared:
        # As many pages as the shorter one may share: none that holds keys of its own rows.
        for i in range(1, requests):
            other = int(rng.integers(0, i))
            pages = max(0, min(kv_len[i] - qo_len[i], kv_len[other] - qo_len[other])) // 16
            table[i, :pages] = table[other, :pages]
    whole = {
        "qo_indptr": np.full(MAX_REQUESTS + 1, -5, np.int32),
        "kv_len": np.full(MAX_REQUESTS, -5, np.int32),
        "table": np.full((MAX_REQUESTS, WIDTH), -5, np.int32),
        "count": np.array([requests], np.int32),
    }
    whole["qo_indptr"][: requests + 1] = np.concatenate([[0], np.cumsum(qo_len)])
    whole["kv_len"][:requests], whole["table"][:requests] = kv_len, table
    return whole
