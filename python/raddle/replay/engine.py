"""One step of a replay on the attention engine: data, append, plan, and a run a layer."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Callable, NamedTuple, Sequence

import ml_dtypes
import numpy as np

import raddle

from . import native
from .models import LayerKind, Model, spec
from .queues import Queues, Run, whole_queues
from .span import Span
from .speculation import Tree

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
    trees: Sequence[Tree | None] = ()
    """What spans drafted; empty: none did."""

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
        self.is_tree = np.repeat([tree is not None for tree in self.trees] or [False] * len(lengths), lengths)
        self.departs = np.full(self.rows, -1, np.int32)
        for i, tree in enumerate(self.trees):
            if tree:
                rows = slice(*self.qo_indptr[i : i + 2])
                self.position[rows] = begins[i] + tree.depths
                self.request[rows], self.departs[rows] = tree.requests, tree.departs
        self.follows_reused = np.repeat(np.array(self.reused or [0] * len(lengths)) > 0, lengths)

    @property
    def rows(self) -> int:
        return int(self.qo_indptr[-1])

    @property
    def shared_pages(self) -> int:
        """Pages of more than one request."""
        return int(np.count_nonzero(np.unique(self.page_indices, return_counts=True)[1] > 1))

    @property
    def shares_pages(self) -> np.ndarray:
        """Rows of requests whose first page another one reads as well: bool [rows]."""
        first = self.page_indices[self.page_indptr[:-1]]
        _, same, counts = np.unique(first, return_inverse=True, return_counts=True)
        return np.repeat(counts[same] > 1, np.diff(self.qo_indptr))

    @property
    def accepted(self) -> list[int]:
        """Of each span, the last row whose keys stay."""
        return [tree.last if tree else span.length - 1 for span, tree in zip(self.spans, self.trees)]

    def layout(self, page_size: int) -> raddle.PagedKV | raddle.TokenTree:
        """A token tree where any request drafts; a chunk of prefill is a chain then."""
        table = self.qo_indptr, self.page_indptr, self.page_indices, self.kv_len, page_size
        if not any(self.trees):
            return raddle.PagedKV(*table)
        parents = [
            tree.parents if tree else np.arange(-1, span.length - 1, dtype=np.int32)
            for span, tree in zip(self.spans, self.trees)
        ]
        return raddle.TokenTree(*table, parents=np.concatenate(parents))

    def shared(self, attention: raddle.Attention, page_size: int, **how: Any) -> raddle.Layout:
        """A cascade where that pays; `how` the plan will be made."""
        table = self.qo_indptr, self.page_indptr, self.page_indices, self.kv_len
        return raddle.Cascade.from_page_tables(attention, *table, page_size, **how)


class Way(NamedTuple):
    """How a step may be computed."""

    schedule: str
    cascades: bool = False
    """Whether pages that requests share become levels where that pays (`raddle.Cascade.from_page_tables`)."""


SINGLE = "single"  # the way's name that cascades are compared with


class Planned(NamedTuple):
    """A plan, and what it was made of."""

    layout: raddle.Layout
    plan: raddle.Plan


@dataclass
class RunCost:
    """Measured microseconds of a step in one way, all layers together, and how evenly runs were spread."""

    plan_us: float = 0.0
    run_us: float = 0.0
    busy_us: list[tuple[float, float]] = field(default_factory=list)
    """Of each run whose workers were watched: the heaviest worker's, and the mean."""
    planned: list[float] = field(default_factory=list)
    """Of each of those: the plan's own heaviest over mean."""
    levels: int = 1
    """Of its layouts, the most."""


@dataclass
class StepCost:
    """What a step took: its appends, and in each way its plans and runs."""

    ways: dict[str, RunCost]
    append_us: float = 0.0
    """With trees, moving what was accepted to its place as well."""

    @property
    def clocked(self) -> RunCost:
        """Of the first way, by which the clock goes."""
        return next(iter(self.ways.values()))

    @property
    def seconds(self) -> float:
        return (self.append_us + self.clocked.plan_us + self.clocked.run_us) * 1e-6


OnOutput = Callable[[int, Batch, Planned, np.ndarray], None]


class Engine:
    """Pools of all layers, and an ``Attention`` for each kind of layer, on the CPU.

    A step is computed in each of its ways, which take turns in being first, so that none finds warmer caches than the
    others; each one's output is looked at.

    Args:
        schedules: a way for each.
        cascades: whether these read pages that requests share once, where that pays.
        compares_single: a way more: the first schedule without cascades.
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
        cascades: bool = False,
        compares_single: bool = False,
    ) -> None:
        self.model, self.num_layers, self.page_size, self.seed = model, num_layers, page_size, seed
        self.prompts = prompts
        self.num_workers = num_workers
        self.ways = {schedule: Way(schedule, cascades) for schedule in schedules}
        if compares_single:
            self.ways[SINGLE] = Way(schedules[0])
        self.steps = 0
        self.longest: Queues | None = None
        """Of the steps whose workers were watched, the one whose runs took longest in the first way."""
        kinds = dict.fromkeys(model.kind(layer) for layer in range(num_layers))
        self.attention = {kind: raddle.Attention(spec(model, kind), self.device) for kind in kinds}
        self.device = next(iter(self.attention.values())).device
        self.pools = self._make_pools((num_pages, page_size, model.num_kv_heads, model.head_dim))
        self.sinks = [native.sinks(seed, layer, model.num_qo_heads) for layer in range(num_layers)]
        self._resize(1)

    @property
    def rounds_weights(self) -> bool:
        """Whether kernels round the softmax's weights to the dtype; on CPUs, products of bf16 do."""
        return self.model.dtype == "bfloat16" and raddle.cpu_isa() in ("avx512_bf16", "amx")

    def step(self, batch: Batch, on_output: OnOutput) -> StepCost:
        """Computes a step; `on_output` sees each layer's output, and isn't counted."""
        cost = StepCost({way: RunCost() for way in self.ways})
        turns = self._turns()
        layout, plans = self._planned(batch, turns, cost)
        busy_us = []
        for layer in range(self.num_layers):
            kind = self.model.kind(layer)
            q, k, v, out = self._data(batch, layer)
            start = perf_counter()
            self._append(batch, layout, layer, k, v)
            cost.append_us += (perf_counter() - start) * 1e6
            for way in turns:
                planned, of = plans[way][kind], cost.ways[way]
                _poison(out)  # or what another way wrote would hide what this one doesn't
                start = perf_counter()
                self._run(batch, planned.plan, layer, q, out)
                of.run_us += (perf_counter() - start) * 1e6
                busy = self.attention[kind].last_busy_us
                if of is cost.clocked:
                    busy_us.append(busy)
                of.busy_us.append((max(busy), sum(busy) / len(busy)))
                of.planned.append(planned.plan.balance)
                on_output(layer, batch, planned, out)
            start = perf_counter()
            self._accept(batch, layout, layer)
            cost.append_us += (perf_counter() - start) * 1e6
        if self._is_longest(cost):
            first = plans[next(iter(self.ways))]
            explained = {kind: f"{layout.explain()}\n{plan.explain()}" for kind, (layout, plan) in first.items()}
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

    def _planned(self, batch: Batch, turns: Sequence[str], cost: StepCost) -> tuple[raddle.Layout, dict[str, Any]]:
        """The layout and each way's plans; making the layout counts for all of them."""
        start = perf_counter()
        layout = batch.layout(self.page_size)
        layout_us = (perf_counter() - start) * 1e6
        plans = {}
        for way in turns:
            start = perf_counter()
            plans[way] = self._plan(batch, layout, self.ways[way])
            cost.ways[way].plan_us = layout_us + (perf_counter() - start) * 1e6
            cost.ways[way].levels = max(planned.layout.num_levels for planned in plans[way].values())
        return layout, plans

    def _turns(self) -> list[str]:
        """The ways in this step's order."""
        ways = list(self.ways)
        first = self.steps % len(ways)
        self.steps += 1
        return [*ways[first:], *ways[:first]]

    def release(self, pages: Sequence[int]) -> None:
        """Pages that are no longer held: a request that reads them now gets NaN."""
        for pool in itertools.chain(*self.pools):
            _poison(pool, pages)

    # The parts of a step, each a seam at which `faults` plants something wrong.

    def _plan(self, batch: Batch, layout: raddle.Layout, way: Way) -> dict[LayerKind, Planned]:
        how = {"num_workers": self.num_workers, "schedule": way.schedule}
        plans = {}
        for kind, attention in self.attention.items():
            # What a window hides is not worth sharing, so each kind of layers chooses for itself.
            chosen = batch.shared(attention, self.page_size, **how) if way.cascades else layout
            plans[kind] = Planned(chosen, attention.plan(chosen, **how))
        return plans

    def _append(
        self, batch: Batch, layout: raddle.Layout, layer: int, k: np.ndarray, v: np.ndarray
    ) -> None:
        self._copy_pages(batch, layer)
        pages = layout.pages if isinstance(layout, raddle.TokenTree) else layout
        raddle.append_kv(pages, self.pools[layer], k, v)

    def _accept(self, batch: Batch, layout: raddle.Layout, layer: int) -> None:
        if isinstance(layout, raddle.TokenTree):
            layout.accept(self.pools[layer], batch.accepted)

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
        """Q, K and V of a step's rows, and where its output goes."""
        if batch.rows > len(self._buffers[0]):
            self._resize(batch.rows)
        q, k, v, out = (buffer[: batch.rows] for buffer in self._buffers)
        for stream, rows in (("query", q), ("key", k), ("value", v)):
            native.fill(stream, self.seed, layer, batch.request, batch.position, rows, self.prompts)
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
