"""What each worker of a run on a GPU did when: for people who look for lost time."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from raddle._device_tensor import DeviceTensor
from raddle._tensors import kind_of, lend_integer
from raddle.plans import Plan, Reservation

#: What a worker comes to (include/raddle/engine/kernel/gpu/launch.h, TimelineStage): its start once, then of every
#: item: its first keys are asked for, its last key is computed, its rows or state are stored, it is done. What it
#: composes of other workers' states at the end of its queue is one more, with its last item's number.
STAGES = ("started", "opened", "computed", "stored", "finished", "contracted")
_MARK = np.dtype([("stage", np.int8), ("item", np.int32), ("us", np.float64)])
_LAST_SHOWN = 12


class Timeline:
    """Room for the marks that `Attention.run` makes of a plan, in the GPU's memory.

    Args:
        plan: what is run; of a reservation the plan in force. `run` refuses one whose `Plan.marks_timelines` is False.
        device: of the attention: "cuda:1", or "cuda".
        num_items: items of a worker to have room for; None: as many as the longest queue has. Later ones are dropped.

    Raises:
        ValueError: a plan that was made on the GPU, without num_items: only the GPU knows its queues.
        RuntimeError: a device that is not there.

    Example:
        >>> def measured(attn, plan, q, kv, out):
        ...     timeline = raddle.Timeline(plan, attn.device)
        ...     attn.run(plan, q, kv, out=out, timeline=timeline)
        ...     return timeline.read().summary()
    """

    def __init__(self, plan: Plan | Reservation, device: str, num_items: int | None = None) -> None:
        plan = plan.plan if isinstance(plan, Reservation) else plan
        if not hasattr(plan, "longest_queue"):
            raise TypeError(f"plan is {kind_of(plan)}; expected a raddle.Plan or a raddle.Reservation")
        if num_items is None:
            num_items = plan.longest_queue
        num_items = None if num_items is None else lend_integer(num_items, "num_items")
        if num_items is None:
            raise ValueError("num_items is None, and the plan was made on the GPU; expected the items of a worker")
        # Two marks at least: a tensor of less is refused.
        marks = 2 + max(1, num_items) * (len(STAGES) - 2)
        self._tensor = DeviceTensor((plan.num_workers, marks, 2), np.float32, device)
        self.clear()

    def clear(self) -> None:
        """Forgets all marks, in stream order: before another run."""
        self._tensor.fill(0)

    def read(self) -> Marks:
        """Returns the marks of the run, `Marks`; waits for it on the current stream."""
        return Marks(self._tensor.numpy().view(np.int32))

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options)


class Marks:
    """What the workers did.

    Args:
        raw: int32 [workers, marks, 2]: ns of the GPU's clock, of which 32 bits are kept, and the stage with the item's
            number above it (3 bits). Zeros: nothing.

    Attributes:
        workers: of each worker its marks in the order of time: a structured array of stage (an index into `STAGES`),
            item (its number in the plan) and us, microseconds since the first mark of all.

    Raises:
        TypeError: what is no array.

    Example:
        >>> from raddle.timeline import Marks
        >>> raw = np.zeros((1, 4, 2), np.int32)
        >>> raw[0, :3] = [[1000, 0], [3000, 1], [9000, 2]]        # started; item 0 opened, computed
        >>> Marks(raw).busy_us.tolist()
        [8.0]
    """

    def __init__(self, raw: np.ndarray) -> None:
        made = raw.any(axis=-1)
        times, what = raw[..., 0], raw[..., 1]
        # The clock may wrap around during the run: differences are what counts.
        origin = times[made][:1]
        since = np.where(made, (times - origin).astype(np.int32), 0) if origin.size else np.zeros(times.shape, np.int32)
        since = since.astype(np.int64) - (since[made].min() if origin.size else 0)
        self.workers = [self._row(since[w][made[w]], what[w][made[w]]) for w in range(len(raw))]

    @staticmethod
    def _row(ns: np.ndarray, what: np.ndarray) -> np.ndarray:
        row = np.empty(len(ns), _MARK)
        row["stage"], row["item"], row["us"] = what & 7, what >> 3, ns * 1e-3
        return row[np.argsort(row["us"], kind="stable")]

    @property
    def busy_us(self) -> np.ndarray:
        """Microseconds from each worker's first mark to its last."""
        return np.array([row["us"][-1] - row["us"][0] if len(row) else 0.0 for row in self.workers])

    @property
    def ends_us(self) -> np.ndarray:
        """When each worker that did anything made its last mark."""
        return np.array([row["us"][-1] for row in self.workers if len(row)])

    def stages(self) -> dict[str, dict[str, np.ndarray]]:
        """Returns for each stage ``at``, when workers came to it, and ``took``, microseconds since their mark before."""
        rows = [row for row in self.workers if len(row)]
        none = np.zeros(0)
        found = {}
        for number, name in enumerate(STAGES):
            at = [row["us"][row["stage"] == number] for row in rows]
            took = [np.diff(row["us"])[row["stage"][1:] == number] for row in rows]
            found[name] = {"at": np.concatenate([none, *at]), "took": np.concatenate([none, *took])}
        return found

    def summary(self) -> str:
        """Returns, as text, percentiles of each stage, when workers ended, and what the last one did at last."""
        if not any(map(len, self.workers)):
            return "no marks: the run had no items, or was given no timeline"
        lines = [f"{'us':21}{'marks':>8}" + "".join(f"{name:>9}" for name in ("min", "p25", "median", "p75", "max"))]
        for name, values in self.stages().items():
            for kind, us in values.items():
                if us.size:
                    numbers = "".join(f"{q:9.1f}" for q in np.percentile(us, [0, 25, 50, 75, 100]))
                    lines.append(f"{name:10} {kind:10}{us.size:8}{numbers}")
        p5, median, last = np.percentile(self.ends_us, [5, 50, 100])
        busy = self.busy_us[[len(row) > 0 for row in self.workers]]
        over = busy.max() / busy.mean() if busy.mean() else 1.0
        lines.append(f"{len(busy)} workers end: p5 {p5:.1f}, median {median:.1f}, last {last:.1f}")
        lines.append(f"longest busy worker over the mean: {over:.3f}")
        worker = max(range(len(self.workers)), key=lambda w: self.workers[w]["us"][-1] if len(self.workers[w]) else -1)
        marks = [f"{STAGES[stage]} {item} at {us:.1f}" for stage, item, us in self.workers[worker][-_LAST_SHOWN:]]
        lines.append(f"the last, worker {worker}: {', '.join(marks)}")
        return "\n".join(lines)

    def json(self) -> str:
        """Returns Chrome's trace events, which https://ui.perfetto.dev opens: a row for each worker.

        An event is named by the stage at which it ends; it begins at the worker's mark before. Its item is in ``args``.
        """
        events = [
            {
                "name": STAGES[stage],
                "ph": "X",  # a complete event: ts and dur in microseconds
                "pid": 0,
                "tid": worker,
                "ts": round(float(begin), 3),
                "dur": round(float(end - begin), 3),
                "args": {"item": int(item)},
            }
            for worker, row in enumerate(self.workers)
            for begin, (stage, item, end) in zip(row["us"], row[1:])
        ]
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}, separators=(",", ":"))
