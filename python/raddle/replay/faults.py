"""Faults to plant in a replay (``--inject``). Each is of a kind that a serving engine really has, small, and
never shows as a crash: verification must find it.
"""

from __future__ import annotations

import numpy as np

import raddle

from .engine import Batch, Engine
from .models import LayerKind, spec


class AppendFault(Engine):
    """The last key of each request's first chunk, and its value, are written as zeros."""

    def _append(
        self, batch: Batch, layout: raddle.PagedKV, layer: int, k: np.ndarray, v: np.ndarray
    ) -> None:
        for i, span in enumerate(batch.spans):
            if span.begin == 0:
                last = batch.qo_indptr[i + 1] - 1
                k[last], v[last] = 0, 0
        super()._append(batch, layout, layer, k, v)


class PageFault(Engine):
    """The second entry of every request's page table repeats its first."""

    def _plan(self, batch: Batch, layout: raddle.PagedKV) -> dict[LayerKind, raddle.Plan]:
        tables = [[table[0], *table[:1], *table[2:]][: len(table)] for table in batch.tables]
        return super()._plan(batch, Batch(batch.spans, tables).layout(self.page_size))


class MaskFault(Engine):
    """The mask is off by one: every row misses its own key, and a window begins one key too early."""

    def _plan(self, batch: Batch, layout: raddle.PagedKV) -> dict[LayerKind, raddle.Plan]:
        spans = [span._replace(begin=span.begin - 1) for span in batch.spans]
        shifted = Batch(spans, [self._pages(span, table) for span, table in zip(spans, batch.tables)])
        return super()._plan(batch, shifted.layout(self.page_size))

    def _pages(self, span, table):
        return table[: -(-(span.begin + span.length) // self.page_size)]


class MergeFault(Engine):
    """Decode rows are computed in two parts, and ⊕ takes the first with twice its weight."""

    def _run(
        self, batch: Batch, plan: raddle.Plan, layer: int, q: np.ndarray, out: np.ndarray
    ) -> None:
        super()._run(batch, plan, layer, q, out)
        kind = self.model.kind(layer)
        for i, (span, table) in enumerate(zip(batch.spans, batch.tables)):
            # The second part is the last page that isn't empty and the one before it, if there are three.
            cut = (len(table) - 2) * self.page_size
            if span.length > 1 or cut <= 0:
                continue
            row = slice(batch.qo_indptr[i], batch.qo_indptr[i] + 1)
            first = self._part(kind, layer, q[row], table[:-2], cut)
            second = self._part(kind, layer, q[row], table[-2:], span.begin + 1 - cut)
            first[1] += np.log(np.float32(2.0))
