"""One step of a replay on the attention engine: data, append, plan, and a run a layer."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Callable, Sequence

import ml_dtypes
import numpy as np

import raddle

from . import native
from .models import LayerKind, Model, spec
from .queues import Queues, Run, whole_queues
from .scheduler import Span

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


@dataclass
class Batch:
    """A step as arrays. Rows are the query rows of all spans, one span after another."""

    spans: Sequence[Span]
    tables: Sequence[Sequence[int]]
    """Each span's pages, as many as its keys fill."""
    reused: Sequence[int] = ()
    """Of each span's request, the tokens that it took over from others; empty: none."""
    copies: tuple[Sequence[int], Sequence[int]] = ((), ())
    """Pages to copy before keys are written, and where to."""

    def __post_init__(self) -> None:
        lengths = np.array([span.length for span in self.spans], np.int32)
        begins = np.array([span.begin for span in self.spans], np.int32)
        requests = np.array([span.request for span in self.spans], np.int32)
        self.qo_indptr = _indptr(lengths)
        self.kv_len = begins + lengths
        self.page_indptr = _indptr([len(table) for table in self.tables])
        self.page_indices = np.fromiter((p for table in self.tables for p in table), np.int32)
        self.request = np.repeat(requests, lengths)
        first = np.repeat(begins - self.qo_indptr[:-1], lengths)
        self.position = first + np.arange(self.rows, dtype=np.int32)
        self.follows_reused = np.repeat(np.array(self.reused or [0] * len(lengths)) > 0, lengths)

    @property
    def rows(self) -> int:
        return int(self.qo_indptr[-1])

    @property
    def shared_pages(self) -> int:
        """Pages of more than one request."""
        return int(np.count_nonzero(np.unique(self.page_indices, return_counts=True)[1] > 1))

    def layout(self, page_size: int) -> raddle.PagedKV:
        return raddle.PagedKV(
            self.qo_indptr, self.page_indptr, self.page_indices, self.kv_len, page_size=page_size
        )


@dataclass
class RunCost:
    """Measured microseconds of a step under one schedule, all layers together, and how evenly runs were spread."""

    plan_us: float = 0.0
    run_us: float = 0.0
    busy_us: list[tuple[float, float]] = field(default_factory=list)
    """Of each run whose workers were watched: the heaviest worker's, and the mean."""
    planned: list[float] = field(default_factory=list)
    """Of each of those: the plan's own heaviest over mean."""


@dataclass
class StepCost:
    """What a step took: its appends, and under each schedule its plans and runs."""

    schedules: dict[str, RunCost]
    append_us: float = 0.0

    @property
    def clocked(self) -> RunCost:
        """Of the first schedule, by which the clock goes."""
        return next(iter(self.schedules.values()))

    @property
    def seconds(self) -> float:
        return (self.append_us + self.clocked.plan_us + self.clocked.run_us) * 1e-6


OnOutput = Callable[[int, Batch, raddle.Plan, np.ndarray], None]


class Engine:
    """Pools of all layers, and an ``Attention`` for each kind of layer, on the CPU.

    A step is computed under each of `schedules`, which take turns in being first, so that none finds warmer caches
    than the others; the output of the last one is looked at.
    """

    device = "cpu"

    def __init__(
        self,
        model: Model,
        num_layers: int,
        num_pages: int,
        page_size: int,
        seed: int = 0,
        schedules: Sequence[str] = ("auto",),
        num_workers: int | None = None,
        prompts: native.SharedPrompts = native.SharedPrompts(),
    ) -> None:
        self.model, self.num_layers, self.page_size, self.seed = model, num_layers, page_size, seed
        self.prompts = prompts
        self.schedules, self.num_workers = tuple(schedules), num_workers
        self.steps = 0
        self.longest: Queues | None = None
        """Of the steps whose workers were watched, the one whose runs took longest under the first schedule."""
        kinds = dict.fromkeys(model.kind(layer) for layer in range(num_layers))
        self.attention = {kind: raddle.Attention(spec(model, kind), self.device) for kind in kinds}
        self.device = next(iter(self.attention.values())).device
        self.pools = self._make_pools((num_pages, page_size, model.num_kv_heads, model.head_dim))
        self.sinks = [native.sinks(seed, layer, model.num_qo_heads) for layer in range(num_layers)]
        self._resize(1)

    @property
    def rounds_weights(self) -> bool:
        """Whether kernels round the softmax's weights to the dtype; on CPUs, AMX does in bf16."""
        return self.model.dtype == "bfloat16" and raddle.cpu_isa() == "amx"

    def step(self, batch: Batch, on_output: OnOutput) -> StepCost:
        """Computes a step; `on_output` sees each layer's output, and isn't counted."""
        cost = StepCost({schedule: RunCost() for schedule in self.schedules})
        turns = self._turns()
        layout, plans = self._planned(batch, turns, cost)
        busy_us = []
        for layer in range(self.num_layers):
            kind = self.model.kind(layer)
            q, k, v, out = self._data(batch, layer)
            start = perf_counter()
            self._append(batch, layout, layer, k, v)
            cost.append_us += (perf_counter() - start) * 1e6
            for schedule in turns:
                plan, of = plans[schedule][kind], cost.schedules[schedule]
                start = perf_counter()
                self._run(batch, plan, layer, q, out)
                of.run_us += (perf_counter() - start) * 1e6
                busy = self.attention[kind].last_busy_us
                if of is cost.clocked:
                    busy_us.append(busy)
                of.busy_us.append((max(busy), sum(busy) / len(busy)))
                of.planned.append(plan.balance)
            on_output(layer, batch, plans[turns[-1]][kind], out)
        if self._is_longest(cost):
            explained = {kind: plan.explain() for kind, plan in plans[self.schedules[0]].items()}
            self._keep(
                cost,
                [
                    Run(layer, whole_queues(busy), explained[self.model.kind(layer)])
                    for layer, busy in enumerate(busy_us)
                ],
            )
        return cost

    def _is_longest(self, cost: StepCost) -> bool:
        return self.longest is None or cost.clocked.run_us > self.longest.run_us

    def _keep(self, cost: StepCost, runs: list[Run]) -> None:
        self.longest = Queues(self.steps - 1, cost.clocked.run_us, runs)

    def _planned(self, batch: Batch, turns: Sequence[str], cost: StepCost) -> tuple[raddle.PagedKV, dict[str, Any]]:
        """The layout and each schedule's plans; making the layout counts for all of them."""
        start = perf_counter()
        layout = batch.layout(self.page_size)
        layout_us = (perf_counter() - start) * 1e6
        plans = {}
        for schedule in turns:
            start = perf_counter()
            plans[schedule] = self._plan(batch, layout, schedule)
            cost.schedules[schedule].plan_us = layout_us + (perf_counter() - start) * 1e6
        return layout, plans

    def _turns(self) -> list[str]:
        """The schedules in this step's order."""
        first = self.steps % len(self.schedules)
        self.steps += 1
        return [*self.schedules[first:], *self.schedules[:first]]

    def release(self, pages: Sequence[int]) -> None:
        """Pages that nobody holds any more: whoever reads them now gets NaN."""
        for pool in itertools.chain(*self.pools):
            _poison(pool, pages)

    # The parts of a step, each a seam at which `faults` plants something wrong.

    def _plan(
        self, batch: Batch, layout: raddle.PagedKV, schedule: str
    ) -> dict[LayerKind, raddle.Plan]:
        return {
            kind: attention.plan(layout, num_workers=self.num_workers, schedule=schedule)
            for kind, attention in self.attention.items()
        }

    def _append(
        self, batch: Batch, layout: raddle.PagedKV, layer: int, k: np.ndarray, v: np.ndarray
    ) -> None:
        self._copy_pages(batch, layer)
        raddle.append_kv(layout, self.pools[layer], k, v)

    def _copy_pages(self, batch: Batch, layer: int) -> None:
        if len(batch.copies[0]):
            raddle.copy_pages(self.pools[layer], *batch.copies)

    def _run(
        self, batch: Batch, plan: raddle.Plan, layer: int, q: np.ndarray, out: np.ndarray
    ) -> None:
        kind = self.model.kind(layer)
        self.attention[kind].run(plan, q, self.pools[layer], out=out, params=self._params(layer))

    def _params(self, layer: int) -> dict[str, Any] | None:
        return {"sinks.logit": self.sinks[layer]} if self.model.kind(layer).sinks else None

    def _data(self, batch: Batch, layer: int) -> tuple[np.ndarray, ...]:
        """Q, K and V of a step's rows, and where its output goes: NaN until it is written."""
        if batch.rows > len(self._buffers[0]):
            self._resize(batch.rows)
        q, k, v, out = (buffer[: batch.rows] for buffer in self._buffers)
        for stream, rows in (("query", q), ("key", k), ("value", v)):
            native.fill(stream, self.seed, layer, batch.request, batch.position, rows, self.prompts)
        _poison(out)
        return q, k, v, out

    def _make_pools(self, shape: tuple[int, ...]) -> list[tuple[Any, Any]]:
        """K and V of every layer, all NaN."""
        dtype = DTYPES[self.model.dtype]
        pools = [(np.empty(shape, dtype), np.empty(shape, dtype)) for _ in range(self.num_layers)]
        for pool in itertools.chain(*pools):
            _poison(pool)
        return pools

    def _resize(self, rows: int) -> None:
        # Kept from step to step: the first touch of fresh memory would count as a run's time.
        heads = (self.model.num_qo_heads, *2 * (self.model.num_kv_heads,), self.model.num_qo_heads)
        dtype, dim = DTYPES[self.model.dtype], self.model.head_dim
        self._buffers = [np.empty((rows, h, dim), dtype) for h in heads]


def _indptr(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    indptr = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=indptr[1:])
    return indptr


def _poison(array: np.ndarray, pages: slice | Sequence[int] = slice(None)) -> None:
    # All bits set are a NaN in every dtype, and integers are stored faster than ml_dtypes' floats.
    bits = array.view(np.uint32 if array.itemsize == 4 else np.uint16)
    bits[pages] = np.iinfo(bits.dtype).max
