"""Plans and reservations: what `Attention.plan` and `Attention.reserve` make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Sequence

import tvm_ffi

from raddle import _library
from raddle._compiled import numbered
from raddle._tensors import current_stream, kind_of, lend_integer
from raddle.layouts import Layout
from raddle.variants import members

_update = _library.function_in_order("raddle.update", "reservation layout stream params")
_check = _library.function("raddle.check")
_plan_in_force = _library.function("raddle.plan_in_force")
_reserved_bytes = _library.function("raddle.reserved_bytes")
_select = _library.function("raddle.select")
_plan_info = _library.function("raddle.plan_info")
_plan_explain = _library.function("raddle.plan_explain")


@dataclass(frozen=True)
class Maxima:
    """The largest batches that a reservation or a workspace is for (`Attention.reserve`, `workspace_bytes`).

    Args:
        max_requests: requests of a batch, and groups of one level: row blocks of a block-sparse matrix, shared
            prefixes.
        max_qo_tokens: query rows of a batch. q and out of a captured run have as many; rows that a batch does not use
            are not touched.
        max_kv_tokens: keys of all requests of a level together; of a reservation with device_lengths keys of all
            requests, those that prefix discovery makes a level of included.
        max_levels: levels of a cascade.
        max_runs: coverage runs of a query tile; 0: the planner's own limit.
        max_qo_len: query rows of one request; 0: as many as max_qo_tokens. With 1, for batches that only decode, a GPU
            runs its kernel of short queries (up to 16 rows a KV head), which is faster, and takes less memory. With
            several levels, prefixes are computed in tiles of that kernel, too; not with batch_invariant. With
            device_lengths the host cannot check lengths, and longer requests are computed as well; with
            batch_invariant, which lets no reservation change bits, they are not, and `Reservation.check` raises.
        max_mask_bytes: bits of a batch's `PackedMask`, in bytes, each request's from a whole byte on; 0: as many as any
            batch within the other maxima may need: max_qo_len · max_kv_tokens · max_levels / 8 + max_requests, with
            max_qo_tokens for a max_qo_len of 0, and at most 2^31 - 1. A reservation on a GPU takes memory for them with
            its first update.
        page_size: keys of a page of every layout, which then has no other keys; 0: layouts may be of any kind. On Hopper a
            reservation for decodes (max_qo_len of at most 8 rows a KV head), or for prompts (a max_qo_len of 0, and
            max_qo_tokens of at least 16 max_requests), runs faster kernels where it is known and a power of two;
            `Plan.explain` tells.

    They are checked where they are used.

    Raises:
        TypeError: the first three are not given.

    Example:
        >>> raddle.Maxima(max_requests=8, max_qo_tokens=8, max_kv_tokens=8192).max_levels
        1
    """

    max_requests: int
    max_qo_tokens: int
    max_kv_tokens: int
    max_levels: int = 1
    max_runs: int = 0
    max_qo_len: int = 0
    max_mask_bytes: int = 0
    page_size: int = 0


def fields_of_maxima(maxima: Any) -> dict[str, int]:
    """The fields of the argument ``maxima`` by name, as they cross to C++."""
    if isinstance(maxima, Maxima):
        return {name: getattr(maxima, name) for name in maxima.__dataclass_fields__}
    expected = "raddle.Maxima(max_requests=…, max_qo_tokens=…, max_kv_tokens=…)"
    raise TypeError(f"maxima is {kind_of(maxima)}; expected {expected}")


@tvm_ffi.register_object("raddle.Plan")
class Plan(_library.Handle):
    """How a batch will be computed: an immutable value without scratch, made by `Attention.plan`.

    It keeps copies of the layout's arrays and serves every layer and any number of runs. Of a plan that a GPU made of
    lengths that only it knows, the counts below are None.

    Example:
        >>> attn = raddle.Attention(raddle.AttentionSpec(8, 2, 64, dtype="float32"))
        >>> plan = attn.plan(raddle.RaggedKV([0, 100], [0, 100]), num_workers=1)
        >>> plan.num_workers, plan.balance
        (1, 1.0)
    """

    __slots__ = ("number", "__weakref__")

    @property
    def num_workers(self) -> int:
        """Work queues that the plan fills."""
        return _plan_info(self)["num_workers"]

    @property
    def num_items(self) -> int | None:
        """Work items: spans of a query tile's keys for one KV head."""
        return _plan_info(self).get("num_items")

    @property
    def longest_queue(self) -> int | None:
        """Items of the worker that has most."""
        return _plan_info(self).get("longest_queue")

    @property
    def num_query_tiles(self) -> int | None:
        """Query tiles: rows of one group with their heads fused."""
        return _plan_info(self).get("num_query_tiles")

    @property
    def num_contractions(self) -> int | None:
        """Query tiles whose output is composed of partial states."""
        return _plan_info(self).get("num_contractions")

    @property
    def workspace_bytes(self) -> int | None:
        """Bytes of partial states and counters that a run needs."""
        return _plan_info(self).get("workspace_bytes")

    @property
    def balance(self) -> float | None:
        """Planned cost of the heaviest queue over the mean, contraction included; 1 is perfect."""
        return _plan_info(self).get("balance")

    @property
    def estimated_us(self) -> float | None:
        """Estimated microseconds until the last worker is done, by the planner's cost model.

        Plans of one spec and device are compared by it; how long a run takes on this machine is for `run` to show.
        """
        return _plan_info(self).get("estimated_us")

    @property
    def marks_timelines(self) -> bool:
        """Whether runs write the marks of a `Timeline`: those of GPUs do, except Hopper's kernels of long queries."""
        return _plan_info(self)["marks_timelines"]

    def explain(self) -> str:
        """Returns, as lines of text for people, which schedule was taken, its estimated time, and what is read."""
        return _plan_explain(self)

    def _text(self) -> str:
        info = _plan_info(self)
        if "num_items" not in info:
            return f"Plan(made on the device, {info['num_workers']} workers)"
        return f"Plan({info['num_items']} items, {info['num_workers']} workers, balance {info['balance']:.3f})"


@tvm_ffi.register_object("raddle.Reservation")
class Reservation(_library.Handle):
    """Room for every plan within maxima at addresses that never change, and scratch: made by `Attention.reserve`.

    What a CUDA graph needs: `run` takes it in place of a plan, also while a graph is captured, and each replay
    computes the layout of the last `update`. It must outlive the graph, and no graph of it may run while another
    one does.

    Example:
        >>> attn = raddle.Attention(raddle.AttentionSpec(8, 2, 64, dtype="float32", variant=raddle.Causal()))
        >>> reservation = attn.reserve(raddle.Maxima(max_requests=4, max_qo_tokens=4, max_kv_tokens=512, max_qo_len=1))
        >>> q, pool = np.ones((4, 8, 64), np.float32), np.ones((8, 2, 16, 2, 64), np.float32)
        >>> for kv_len in ([30, 17], [31, 18]):
        ...     reservation.update(raddle.PagedKV([0, 1, 2], None, [[0, 1], [2, 3]], kv_len, page_size=16))
        ...     out = attn.run(reservation, q, pool, out=np.zeros_like(q))
    """

    __slots__ = ("device", "number", "__weakref__")

    def update(self, layout: Layout, stream: int | None = None, *, params: dict[str, Any] | None = None) -> None:
        """Plans a batch into the reservation.

        A layout on the host is planned there and goes up asynchronously. A `PagedKV` whose page table lies on the GPU
        is planned there, if the reservation was made with ``device_lengths=True``: one kernel on the stream reads
        lengths and pages and writes the plan. The host copies nothing, waits for nothing and allocates nothing on the
        GPU, and a stream that captures a graph may take the call: captured with the runs, it plans anew at every
        replay, from what the arrays hold then::

            layout = raddle.PagedKV(qo_indptr, None, block_table, seq_lens, page_size=16)
            with torch.cuda.graph(graph):
                reservation.update(layout)
                attn.run(reservation, q, (k_pool, v_pool), out=out)  # once a layer
            seq_lens += 1
            graph.replay()

        The arrays are read until the last run of the plan, and graphs keep them alive. A run captured without its
        update fixes the block table for later updates. q and out have max_qo_tokens rows, since the host does not know
        how many there are; rows that a batch does not use are not touched, unless `Attention.run` is asked to zero them.

        Args:
            layout: within the maxima, with the page size and the number of levels of the first one. A captured graph
                keeps which optional arrays there are: what later layouts lack of them (explicit query positions, a
                prefix that requests share) is written out, but they may have nothing that no layout before the
                capture had. So update with all of it before capturing.
            stream: GPUs: same as in `Attention.plan`. Runs and replays on that stream after this call compute the
                layout.
            params: the mask of this batch, ``packed_mask.bits`` and ``packed_mask.indptr`` (`PackedMask`), of at most
                max_mask_bytes; None: those of ``reserve(params=…)`` or of the spec. They go up with the plan, into
                memory of the reservation, so that replays read them. Other plan members are the reservation's, for
                graphs keep their values.

        What is wrong with lengths that only the GPU knows shows in `check`: a batch beyond the maxima makes an empty
        plan, whose runs write nothing, and a request with a bad length or page is taken for one without keys, whose
        output is 0.

        Raises:
            ValueError: a layout that does not fit, or ``params`` that are no arrays of a batch; the plan before then
                stays in force.
        """
        for name, value in (("self", self), ("layout", layout)):
            _library.refuse_unmade(value, name)
        stream = self._stream_of(stream)
        try:
            _update(self, layout, stream, members(params))
        except (BufferError, RuntimeError) as error:
            _library.refuse_arrays(error, layout=layout)

    def check(self, stream: int | None = None) -> None:
        """Waits for the stream, and asks whether lengths or tables on the GPU were bad since the last check.

        Only plans made on the GPU need it: `update` itself raises for a layout on the host.

        Args:
            stream: GPUs: same as in `Attention.plan`.

        Raises:
            ValueError: they were; the message names the arrays, the first bad request of the last bad plan, and what was
                made of it.
        """
        _library.refuse_unmade(self, "self")
        _check(reservation=self, stream=self._stream_of(stream))

    def _stream_of(self, stream: int | None) -> int | None:
        """The current stream of a GPU where none is given. What no constructor made has no device: the library refuses it."""
        if stream is not None:
            return lend_integer(stream, "stream")
        device = getattr(self, "device", "cpu")
        return None if device == "cpu" else current_stream(device)

    @property
    def plan(self) -> Plan:
        """The plan in force, to look at. Raises ValueError before the first update."""
        return numbered(_plan_in_force(reservation=self, head_dim_vo=None))

    @property
    def num_bytes(self) -> int:
        """Bytes of plan and scratch; the layout's arrays come on top."""
        return _reserved_bytes(self)


def select(reservations: Sequence[Reservation], layout: Layout) -> Reservation:
    """The smallest of several reservations that a layout fits (FlashInfer paper, Listing 1); it is not updated.

    Args:
        reservations: of one `Attention`, in any order.
        layout: what comes next.

    Returns:
        One of the reservations.

    Raises:
        ValueError: a layout that fits none of them; the message names what is too large for the largest.
        TypeError: a single reservation instead of a list.

    Example:
        >>> attn = raddle.Attention(raddle.AttentionSpec(8, 2, 64, dtype="float32"))
        >>> sizes = [attn.reserve(raddle.Maxima(n, n, max_kv_tokens=512)) for n in (1, 4)]
        >>> layout = raddle.PagedKV([0, 1, 2], None, [[0, 1], [2, 3]], [30, 17], page_size=16)
        >>> sizes.index(raddle.select(sizes, layout))
        1
    """
    if isinstance(reservations, Reservation):
        raise TypeError("reservations is a single one; expected a list of them")
    if not isinstance(reservations, (list, tuple)):
        raise TypeError(f"reservations is {kind_of(reservations)}; expected a list of them")
    return reservations[_select(layout, *reservations)]
