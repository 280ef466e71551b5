"""Batches at fixed addresses of a GPU, as its planner reads them, and tensors with room for any of them."""

from __future__ import annotations

import numpy as np
import raddle
from device_arrays import DeviceArray
from draws import draw
from engine import spec_of
from reference import Causal
from small import reserved

HEADS = {"dim": 64, "group": 2, "num_kv_heads": 2, "dtype": "bfloat16"}
MAXIMA = {"max_requests": 6, "max_qo_tokens": 24, "max_kv_tokens": 1000, "num_workers": 5}
PAGES, WIDTH = 300, 80


class Table:
    """A page table of up to 6 requests at fixed addresses of a GPU, written anew for every batch."""

    def __init__(self, form, page_size=16, counted=True, **options):
        requests = MAXIMA["max_requests"]
        self.qo_indptr, self.kv_len = ints(np.zeros(requests + 1)), ints(np.zeros(requests))
        self.page_indptr = ints(np.zeros(requests + 1)) if form == "lists" else None
        self.pages = ints(np.zeros(requests * WIDTH if form == "lists" else (requests, WIDTH)))
        self.count = ints([0]) if counted else None
        arrays = self.qo_indptr, self.page_indptr, self.pages, self.kv_len, page_size
        self.layout = raddle.PagedKV(*arrays, num_requests=self.count, **options)

    def write(self, layout):
        """The arrays of a reference layout; what lies behind them is bad."""
        arrays = {"qo_indptr": layout.qo_indptr, "kv_len": layout.kv_len}
        arrays.update(page_indptr=layout.page_indptr, pages=layout.page_indices)
        if self.page_indptr is None:
            table = np.full(self.pages.shape, -7, np.int32)
            for i in range(len(layout.kv_len)):
                pages = layout.pages(i)
                table[i, : len(pages)] = pages
            arrays["pages"] = table
        for name, array in arrays.items():
            if getattr(self, name) is not None:
                self._fill(getattr(self, name), array)
        if self.count is not None:
            self._fill(self.count, np.array([len(layout.kv_len)]))

    def _fill(self, there, array):
        all_of = np.full(there.shape, -9, np.int32)
        all_of[tuple(slice(n) for n in array.shape)] = array
        there.write(all_of)


class Tensors:
    """Q, pools and the output of any batch at fixed addresses."""

    def __init__(self, heads=4, kv_heads=2, dim=64, page_size=16, tokens=MAXIMA["max_qo_tokens"]):
        kind = draw(np.random.default_rng(0), lengths=[(1, 1)], **HEADS).q.dtype
        self.q, self.out = (DeviceArray(np.zeros((tokens, heads, dim), kind)) for _ in range(2))
        self.kv = tuple(DeviceArray(np.zeros((PAGES, page_size, kv_heads, dim), kind)) for _ in range(2))

    def write(self, problem):
        self.out.write(np.full(self.out.shape, 7.0, self.out.dtype))
        for there, array in zip((self.q, *self.kv), (problem.q, *problem.kv[0])):
            rest = np.full((there.shape[0] - len(array), *array.shape[1:]), np.nan, array.dtype)
            there.write(np.concatenate([array, rest]))


def ints(values):
    return DeviceArray(np.asarray(values, np.int32))


def batch(rng, kind="paged", variant=None, page_size=16, most_rows=5):
    """A batch within MAXIMA, of at most ``most_rows`` query rows a request."""
    while True:
        lengths = [(int(rng.integers(0, most_rows + 1)), int(rng.integers(0, 160))) for _ in range(rng.integers(1, 7))]
        if sum(qo for qo, _ in lengths) <= MAXIMA["max_qo_tokens"]:
            return draw(rng, kind, variant or [Causal()], lengths=lengths, page_size=page_size, **HEADS)


def reserve(gpu, variant=None, **changes):
    spec = spec_of(draw(np.random.default_rng(0), "paged", variant or [Causal()], lengths=[(1, 1)], **HEADS))
    attn = raddle.Attention(spec, device=gpu)
    return attn, reserved(attn, **{**MAXIMA, "device_lengths": True, **changes})
