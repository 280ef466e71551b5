"""A step of a replay on a GPU, as serving engines do it: plans go into reservations, runs are a CUDA graph."""

from __future__ import annotations

import contextlib
import itertools
import sys
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Callable, ContextManager, Sequence

import tvm_ffi

import raddle
from raddle import _device_tensor
from raddle._device_tensor import DeviceTensor

from .engine import DTYPES, Batch, Engine, OnOutput, Planned, RunCost, StepCost, Way
from .models import LayerKind
from .queues import Run, items
from .span import Span

_NAN = 0xFF  # a NaN in every dtype, where all bytes are
_FEWEST_ROWS, _GROWTH = 16, 4  # of the smallest reservation, and from one to the next
# Every so many steps the workers of one run more, which is not counted, are watched.
_WATCHED_STEPS = 16
# Longer than it takes the host to enqueue what is timed, on a GPU of 2 GHz; so the host's pace is not measured.
_HEAD_START_CYCLES = 400_000


@dataclass(frozen=True)
class Reserved:
    """What a step's plans of one schedule went into."""

    schedule: str
    size: int
    """Which of the engine's sizes."""
    reservations: dict[LayerKind, raddle.Reservation]
    layout: raddle.PagedKV

    def planned(self, kind: LayerKind) -> Planned:
        return Planned(self.layout, self.reservations[kind].plan)

    def values(self) -> list[Planned]:
        return [self.planned(kind) for kind in self.reservations]


class CudaEngine(Engine):
    """Pools in a GPU's memory, and reservations of several sizes for each schedule and kind of layer.

    A step updates the smallest reservations that it fits (`raddle.select`), appends the new keys and values of all
    layers, and runs all layers: with torch by one CUDA graph, captured when a size is first used, else one by one.

    Args:
        device: "cuda" or "cuda:1".
        max_requests, max_rows: of a step.
    """

    rounds_weights = True

    def __init__(self, *arguments: Any, device: str, max_requests: int, max_rows: int, **options: Any) -> None:
        self.device = device
        self._gpu = _Torch(device) if torch_has_gpu() else _Plain(device)
        self._sizes = _sizes(max_rows)
        self._max_requests = max_requests
        self._graphs: dict[tuple[str, int], Callable[[], Any]] = {}
        with self._gpu.entered():
            super().__init__(*arguments, **options)
            self._tensors = [self._make_tensors(max_rows) for _ in range(self.num_layers)]
            self._reservations = self._reserve()
            self._append_once()

    @property
    def uses_graphs(self) -> bool:
        return isinstance(self._gpu, _Torch)

    def step(self, batch: Batch, on_output: OnOutput) -> StepCost:
        """Computes a step; `on_output` sees each layer's output, and isn't counted.

        Appends and runs take as long as the GPU takes for them, planning as long as the host.
        """
        with self._gpu.entered():
            return self._step(batch, on_output)

    def _step(self, batch: Batch, on_output: OnOutput) -> StepCost:
        cost = StepCost({way: RunCost() for way in self.ways})
        is_watched = self.steps % _WATCHED_STEPS == 0
        turns = self._turns()
        layout, reserved = self._planned(batch, turns, cost)
        for layer, tensors in enumerate(self._tensors):
            for tensor, rows in zip(tensors, self._data(batch, layer)):
                tensor.write(rows)
        cost.append_us = self._gpu.us(lambda: self._append_all(batch, layout))
        for way in turns:
            of = cost.ways[way]
            self._forget_outputs(batch.rows)
            of.run_us = self._gpu.us(self._runs(reserved[way]))
            if is_watched:
                runs = self._watch(reserved[way], of)
                if runs and of is cost.clocked and self._is_longest(cost):
                    self._keep(cost, runs)
            for layer, (*_, out) in enumerate(self._tensors):
                on_output(layer, batch, reserved[way].planned(self.model.kind(layer)), out.numpy(batch.rows))
        return cost

    def release(self, pages: Sequence[int]) -> None:
        """Pages that are no longer held: a request that reads them now gets NaN."""
        with self._gpu.entered():
            for pool, page in itertools.product(itertools.chain(*self.pools), pages):
                pool.fill(_NAN, page, 1)

    # --- plans ---------------------------------------------------------------------------------

    def _reserve(self) -> dict[tuple[str, LayerKind, int], raddle.Reservation]:
        pages, page_size = self.pools[0][0].shape[:2]
        schedules = [way.schedule for way in self.ways.values()]
        every = itertools.product(schedules, self.attention, range(len(self._sizes)))
        return {
            (schedule, kind, size): self.attention[kind].reserve(
                raddle.Maxima(
                    max_requests=min(self._sizes[size], self._max_requests),
                    max_qo_tokens=self._sizes[size],
                    max_kv_tokens=pages * page_size,
                    page_size=page_size,
                ),
                num_workers=self.num_workers,
                schedule=schedule,
            )
            for schedule, kind, size in every
        }

    def _plan(self, batch: Batch, layout: raddle.PagedKV, way: Way) -> Reserved:
        schedule = way.schedule
        kinds = list(self.attention)
        sizes = [self._reservations[schedule, kinds[0], size] for size in range(len(self._sizes))]
        size = sizes.index(raddle.select(sizes, layout))
        found = {kind: self._reservations[schedule, kind, size] for kind in kinds}
        reserved = Reserved(schedule, size, found, layout)
        for reservation in reserved.reservations.values():
            reservation.update(layout)
        return reserved

    # --- appends and runs ----------------------------------------------------------------------

    def _append_all(self, batch: Batch, layout: raddle.PagedKV) -> None:
        for layer, (pools, (_, k, v, _)) in enumerate(zip(self.pools, self._tensors)):
            self._copy_pages(batch, layer)
            raddle.append_kv(layout, pools, k.rows(batch.rows), v.rows(batch.rows))

    def _append_once(self) -> None:
        """Compiles the kernel that appends: no step should wait for that."""
        batch = Batch([Span(0, 0, 1)], [[0]])
        self._append_all(batch, batch.layout(self.page_size))
        self.release([0])

    def _runs(self, reserved: Reserved) -> Callable[[], Any]:
        """What runs all layers."""
        key = reserved.schedule, reserved.size
        if key not in self._graphs:

            def all_layers() -> None:
                for layer in range(self.num_layers):
                    self._run_layer(reserved, layer)

            self._graphs[key] = self._gpu.captured(all_layers)
        return self._graphs[key]

    def _run_layer(self, reserved: Reserved, layer: int, timeline: raddle.Timeline | None = None) -> None:
        kind = self.model.kind(layer)
        q, _, _, out = (tensor.rows(self._sizes[reserved.size]) for tensor in self._tensors[layer])
        how = {"out": out, "params": self._params(layer), "timeline": timeline}
        self.attention[kind].run(reserved.reservations[kind], q, self.pools[layer], **how)

    def _watch(self, reserved: Reserved, cost: RunCost) -> list[Run]:
        """What the workers of one run of each kind did, and how evenly; writes the same output again. Of kernels that
        mark no timelines, nothing."""
        runs = []
        for kind, reservation in reserved.reservations.items():
            if not reservation.plan.marks_timelines:
                continue
            layer = next(n for n in range(self.num_layers) if self.model.kind(n) == kind)
            timeline = raddle.Timeline(reservation, self.device)
            self._run_layer(reserved, layer, timeline)
            marks = timeline.read()
            busy = marks.busy_us
            cost.busy_us.append((float(busy.max()), float(busy.mean())))
            cost.planned.append(reservation.plan.balance)
            runs.append(Run(layer, items(marks), reservation.plan.explain()))
        return runs

    # --- memory --------------------------------------------------------------------------------

    def _make_pools(self, shape: tuple[int, ...]) -> list[tuple[Any, Any]]:
        dtype = DTYPES[self.model.dtype]
        pools = [tuple(DeviceTensor(shape, dtype, self.device) for _ in "kv") for _ in range(self.num_layers)]
        for pool in itertools.chain(*pools):
            pool.fill(_NAN)
        return pools

    def _make_tensors(self, rows: int) -> tuple[DeviceTensor, ...]:
        """A layer's Q, new K and V, and output: at addresses that graphs know."""
        heads = (self.model.num_qo_heads, *2 * (self.model.num_kv_heads,), self.model.num_qo_heads)
        dtype, dim = DTYPES[self.model.dtype], self.model.head_dim
        tensors = tuple(DeviceTensor((rows, h, dim), dtype, self.device) for h in heads)
        tensors[0].fill(0)  # rows of Q that no batch has used yet
        return tensors

    def _forget_outputs(self, rows: int) -> None:
        for *_, out in self._tensors:
            out.fill(_NAN, 0, rows)


def _sizes(max_rows: int) -> list[int]:
    """Rows of the reservations: few for steps that decode alone, all for the rest."""
    sizes = []
    rows = _FEWEST_ROWS
    while rows < max_rows:
        sizes.append(rows)
        rows *= _GROWTH
    return [*sizes, max_rows]


def torch_has_gpu() -> bool:
    """Whether torch is installed and sees a GPU."""
    torch = sys.modules.get("torch")  # tvm_ffi imports it where it is installed
    return torch is not None and torch.cuda.is_available()


class _Plain:
    """A GPU without torch: the default stream, the host's clock, no graphs."""

    def __init__(self, device: str) -> None:
        self.device = device

    def entered(self) -> ContextManager[Any]:
        """In which all that the GPU is given goes to the stream of the replay."""
        return contextlib.nullcontext()

    def captured(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """What repeats `work`."""
        return work

    def us(self, work: Callable[[], Any]) -> float:
        """Microseconds that the GPU takes for `work`; waits for it."""
        _device_tensor.synchronize(self.device)
        start = perf_counter()
        work()
        _device_tensor.synchronize(self.device)
        return (perf_counter() - start) * 1e6


class _Torch:
    """torch's streams, graphs and events."""

    def __init__(self, device: str) -> None:
        self.torch = sys.modules["torch"]
        self.stream = self.torch.cuda.Stream(self.torch.device(device))

    def entered(self) -> ContextManager[Any]:
        return tvm_ffi.use_torch_stream(self.torch.cuda.stream(self.stream))

    def captured(self, work: Callable[[], Any]) -> Callable[[], Any]:
        graph = self.torch.cuda.CUDAGraph()
        with tvm_ffi.use_torch_stream(self.torch.cuda.graph(graph, stream=self.stream)):
            work()
        return graph.replay

    def us(self, work: Callable[[], Any]) -> float:
        before, after = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.torch.cuda._sleep(_HEAD_START_CYCLES)
        before.record()
        work()
        after.record()
        after.synchronize()
        return 1e3 * before.elapsed_time(after)
