"""Faults to plant in a replay (``--inject``): small ones of kinds that serving engines really have. None of
them crashes or is visible in a time: only the verification finds them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Sequence

import numpy as np

import raddle

from .engine import Batch, Engine, Planned, Way
from .models import LayerKind, spec
from .span import Span


class AppendFault(Engine):
    """The last row of each request's first chunk is written to the pool as zeros."""

    def _data(self, batch: Batch, layer: int) -> tuple[np.ndarray, ...]:
        q, k, v, out = super()._data(batch, layer)
        for i, span in enumerate(batch.spans):
            if span.begin == 0:
                last = batch.qo_indptr[i + 1] - 1
                k[last], v[last] = 0, 0
        return q, k, v, out


class PageFault(Engine):
    """The second entry of each request's page table repeats the first."""

    def _plan(self, batch: Batch, layout: raddle.Layout, way: Way) -> dict[LayerKind, Planned]:
        tables = [[*table[:1], *table[: len(table) > 1], *table[2:]] for table in batch.tables]
        wrong = replace(batch, tables=tables)
        return super()._plan(wrong, wrong.layout(self.page_size), way)


class MaskFault(Engine):
    """The mask is off by one: no row sees its own key, but in first chunks, which a tree's step must hold whole."""

    def _plan(self, batch: Batch, layout: raddle.Layout, way: Way) -> dict[LayerKind, Planned]:
        spans = [span._replace(begin=max(0, span.begin - 1)) for span in batch.spans]
        pages = [-(-(span.begin + span.length) // self.page_size) for span in spans]
        tables = [table[:n] for table, n in zip(batch.tables, pages)]
        wrong = replace(batch, spans=spans, tables=tables)
        return super()._plan(wrong, wrong.layout(self.page_size), way)


class MergeFault(Engine):
    """Decode rows come from two partial states, and ⊕ takes the first with twice its weight."""

    def _run(
        self, batch: Batch, plan: raddle.Plan, layer: int, q: np.ndarray, out: np.ndarray
    ) -> None:
        super()._run(batch, plan, layer, q, out)
        kind = self.model.kind(layer)
        finish = spec(self.model, kind, self.sinks[layer])
        for i, (span, table) in enumerate(zip(batch.spans, batch.tables)):
            # The second part is the last two pages, so that a short window has keys in both.
            if span.length > 1 or len(table) < 3:
                continue
            row = slice(batch.qo_indptr[i], batch.qo_indptr[i] + 1)
            first = self._part(layer, q[row], span, table, 0, len(table) - 2)
            second = self._part(layer, q[row], span, table, len(table) - 2, len(table))
            lse = np.stack([first[1] + np.log(np.float32(2.0)), second[1]])
            merged = raddle.merge_states(np.stack([first[0], second[0]]), lse, finish=finish)
            out[row] = merged[0].astype(out.dtype)

    def _part(
        self, layer: int, q: np.ndarray, span: Span, table: Sequence[int], begin: int, end: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The state (O, LSE) of one decode row over the keys of pages begin … end of its table."""
        keys = min(end * self.page_size, span.begin + 1) - begin * self.page_size
        pages = np.array(table[begin:end], np.int32)
        # Positions count from the part's first key; a window and RoPE see only distances.
        position = np.array([span.begin - begin * self.page_size], np.int32)
        layout = raddle.PagedKV(
            [0, 1], [0, len(pages)], pages, [keys], page_size=self.page_size, qo_pos=position
        )
        attention = self.attention[self.model.kind(layer)]
        pool = self.pools[layer]
        return attention.run(attention.plan(layout), q, pool, return_state=True)


class PrefixFault(Engine):
    """A request's first row after a prefix that it took over is written over the prefix's last one."""

    def _append(
        self, batch: Batch, layout: raddle.Layout, layer: int, k: np.ndarray, v: np.ndarray
    ) -> None:
        super()._append(batch, layout, layer, k, v)
        for i, (span, table) in enumerate(zip(batch.spans, batch.tables)):
            if not batch.reused or not span.begin == batch.reused[i] > 0:
                continue
            last = Batch([Span(span.request, span.begin - 1, 1)], [table[: -(-span.begin // self.page_size)]])
            row = slice(batch.qo_indptr[i], batch.qo_indptr[i] + 1)
            super()._append(last, last.layout(self.page_size), layer, k[row], v[row])


def planted(name: str, engine: type[Engine], prefix_cache: bool) -> type[Engine]:
    """An engine of that class with a fault of that kind. Raises ``ValueError`` where it has no place for it."""
    fault = INJECT[name]
    if fault in _ON_HOST and engine is not Engine:
        raise ValueError(f"--inject {name}: {_ON_HOST[fault]}; expected --device cpu")
    if fault is PrefixFault and not prefix_cache:
        raise ValueError(f"--inject {name}: no request takes over another's prefix; expected --prefix-cache")
    return fault if engine is Engine else type(fault.__name__, (fault, engine), {})


INJECT = {
    "append": AppendFault,
    "page": PageFault,
    "mask": MaskFault,
    "merge": MergeFault,
    "prefix": PrefixFault,
}
_ON_HOST = {MergeFault: "states are merged on the host", PrefixFault: "rows are written by the host"}
