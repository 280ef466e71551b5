"""Plan once a batch, run once a layer."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import tvm_ffi

from raddle import _keywords, _library
from raddle._compiled import compiled, is_traced, numbered
from raddle._tensors import (
    current_stream,
    finished,
    lend,
    lend_flag,
    lend_integer,
    lend_output,
    lend_pools,
    lend_scale,
    lend_unasked,
    make_output,
    refuse_tracer,
    shape_of_out,
    shape_of_rows,
)
from raddle.layouts import Layout
from raddle.plans import Maxima, Plan, Reservation, fields_of_maxima
from raddle.spec import AttentionSpec, fields_of
from raddle.variants import members

_attention = _library.function("raddle.attention")
_plan = _library.function_in_order("raddle.plan", "attention layout num_workers schedule params stream")
_reserve = _library.function("raddle.reserve")
_run = _library.function_in_order(
    "raddle.run",
    "attention plan q out lse return_state lse_base_2 zero_unused_rows scale timeline params k_scale v_scale *kv",
)
_has_lse = _library.function("raddle.has_lse")
_device = _library.function("raddle.device")
_busy_us = _library.function("raddle.busy_us")


@tvm_ffi.register_object("raddle.Attention")
class Attention(_library.Handle):
    """The attention that a spec describes, ready to plan and run. Thread-safe.

    Args:
        spec: what to compute.
        device: "cpu", "cuda" (the GPU that is current, else the first), "cuda:1", or a torch.device. On a GPU two
            kernels are compiled, unless the cache has them, by NVRTC (``pip install "/path/to/raddle[cuda]"``). The one
            of short queries, which decodes, is waited for here; the other, which takes twice as long, by the first
            `plan` with long queries, or by `reserve`.

    Plan and run follow the FlashInfer paper, section 3.3 (load-balanced scheduling; Listing 1).

    Raises:
        ValueError: a spec that the device cannot compute, named by its field.
        TypeError: ``spec`` is not an `AttentionSpec`.
        RuntimeError: a device that is not there; `raddle doctor` tells what is missing.
        CompileError: a variant of your own, or a GPU's kernel, that does not compile.

    Example:
        >>> attn = raddle.Attention(raddle.AttentionSpec(8, 2, 64, dtype="float32", variant=raddle.Causal()))
        >>> plan = attn.plan(raddle.PagedKV([0, 1, 2], None, [[0, 1], [2, 3]], [30, 17], page_size=16))
        >>> q, pool = np.ones((2, 8, 64), np.float32), np.ones((4, 2, 16, 2, 64), np.float32)
        >>> attn.run(plan, q, pool).shape
        (2, 8, 64)
    """

    __slots__ = ("spec", "device", "_has_lse", "_dim_vo", "_out_is_like_q", "number", "__weakref__")

    @_keywords.answered("Attention")
    def __init__(self, spec: AttentionSpec, device: Any = "cpu") -> None:
        # A call, unlike a constructor, lets other threads run meanwhile: this one may compile.
        self.__move_handle_from__(_attention(spec=fields_of(spec, "spec"), device=str(device)))
        self.spec = spec
        self.device = _device(self)
        self._has_lse = _has_lse(self)
        self._dim_vo = int(spec.head_dim_vo)  # the spec's may be a subclass, which torch 2.11 does not trace
        self._out_is_like_q = spec.head_dim == spec.head_dim_vo
        numbered(self)

    def plan(
        self,
        layout: Layout,
        num_workers: int | None = None,
        schedule: str = "auto",
        params: dict[str, Any] | None = None,
        stream: int | None = None,
        **unknown: NoReturn,
    ) -> Plan:
        """Decides how a batch is computed.

        Args:
            layout: what attends to what.
            num_workers: work queues; None: the threads of the worker pool, or on a GPU as many thread blocks as fit
                on it at once.
            schedule: "auto" takes the cheapest; "linear" (equal spans of a prefix sum), "algorithm1" (of the
                paper) and "one-per-request" (the baseline) insist on one.
            params: plan members that differ from the spec's, such as ``{"window.left": 1023}``.
            stream: GPUs: the stream (a cudaStream_t's number) on which the plan goes up; None: torch's current one, or
                tvm_ffi's. Runs on other streams wait for it there; nothing waits on the host.

        On a GPU the first plan with long queries waits for their kernel, should it still be compiled.

        Returns:
            A `Plan` for any number of runs, of any number of layers.

        Raises:
            ValueError: a layout that the spec cannot serve, an unknown schedule, or ``params`` that are no plan members.
            TypeError: ``layout`` is not a layout.
            CompileError: on a GPU, a kernel of long queries that does not compile.
        """
        if unknown:
            _keywords.refuse("Attention.plan", unknown, Attention.plan)
        for name, value in (("self", self), ("layout", layout), ("num_workers", num_workers), ("schedule", schedule)):
            if value.__class__ not in _library.PLAIN:
                _library.refuse_unmade(value, name)
        if stream is None:
            if self.device != "cpu":
                stream = current_stream(self.device)
        else:
            stream = lend_integer(stream, "stream")
        try:
            return numbered(_plan(self, layout, num_workers, schedule, members(params), stream))
        except (BufferError, RuntimeError) as error:
            _library.refuse_arrays(error, layout=layout, num_workers=num_workers, schedule=schedule)

    @_keywords.answered("Attention.reserve")
    def reserve(
        self,
        maxima: Maxima,
        *,
        num_workers: int | None = None,
        schedule: str = "auto",
        params: dict[str, Any] | None = None,
        stream: int | None = None,
        device_lengths: bool = False,
    ) -> Reservation:
        """Room for all plans within maxima, so that `run` may be captured in a CUDA graph.

        Args:
            maxima: the largest batches. On a GPU the kernel that so many query rows may need is waited for here.
            num_workers, schedule, params, stream: same as in `plan`, for all plans of the reservation.
            device_lengths: lengths and page tables lie on the GPU and are planned there (`Reservation.update`). Its
                kernel is compiled here, and memory for it taken. The schedule is linear: the plan, and so every bit of
                the output, is that of the host under ``schedule="linear"``. With max_levels=2 layouts have
                ``discover_prefixes``, which excludes batch_invariant. Not with a `PackedMask`. On a CPU layouts lie on
                the host as ever, and the schedule is linear.

        Returns:
            A `Reservation`, to be updated before its first run.

        Raises:
            ValueError: maxima that cannot be, or options that exclude each other.
            TypeError: ``maxima`` is not a `Maxima`.
            RuntimeError: memory that does not suffice, with the size that was asked for.
        """
        _library.refuse_unmade(self, "self")
        if stream is None and self.device != "cpu":
            stream = current_stream(self.device)
        reservation = _reserve(
            attention=self,
            maxima=fields_of_maxima(maxima),
            num_workers=num_workers,
            schedule=schedule,
            params=members(params),
            stream=stream,
            device_lengths=device_lengths,
        )
        reservation.device = self.device
        return numbered(reservation)

    @property
    def last_busy_us(self) -> list[float]:
        """Microseconds that each worker thread was busy in the calling thread's last `run`; empty on a GPU."""
        return list(_busy_us())

    def run(
        self,
        plan: Plan | Reservation,
        q: Any,
        kv: Any,
        *,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        return_state: bool = False,
        lse_base_2: bool = False,
        zero_unused_rows: bool = False,
        scale: float | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
        params: dict[str, Any] | None = None,
        timeline: Any = None,
        **unknown: NoReturn,
    ) -> Any:
        """Computes attention for one layer.

        Args:
            plan: of this attention, or a reservation of it. While a CUDA graph is captured, only a reservation.
            q: [rows, Hq, head_dim] or [rows, Hq · head_dim] in the spec's dtype; or [B, L, Hq, head_dim] where each of
                the plan's B requests has L rows, of any strides: the transpose of [B, Hq, L, head_dim], say.
                Not of a reservation.
            kv: a tuple (k, v), or one tensor with K and V in dimension 1 ([pages, 2, page_size, Hkv, D],
                [tokens, 2, Hkv, D]); or a list of those, one a level of the layout. Any strides with a
                contiguous last dimension. With pages of one token also [slots, Hkv, D], and ragged keys also
                [tokens, Hkv · D]. With a kv_dtype also uint8 tensors of its bits. Of MLA with absorbed
                weights, v is a view of k: ``(cache, cache[..., :512])``; or, where the spec says k_extends_v, k is
                what follows v in a key: ``(k_pe, c_kv)``. A GPU reads memory once then.
            out: [rows, Hq, head_dim_vo] or [rows, Hq · head_dim_vo] to write; None: a new tensor of q's kind, with as
                many dimensions.
            lse: [rows, Hq] (of such a q [B, L, Hq]) float32 to write, of any strides: the transpose of [Hq, rows], say;
                None: a new one if it is returned.
            return_lse: return (out, lse); lse is the natural logarithm of the softmax's denominator,
                sinks included, and -inf for a row without keys.
            return_state: return the state (O, LSE) in float32, without sinks and output parts, for
                `raddle.merge_states`. O alone for a `Sigmoid`.
            lse_base_2: LSE is written as a logarithm to base 2, as FlashInfer has it, by the same kernel. Functions
                that merge states expect natural ones.
            zero_unused_rows: of a reservation, whose q may have more rows than the batch: the rows of out beyond the
                batch's become 0, and of lse -inf, by the same kernel, in every replay of a graph, too. Otherwise they
                keep what they hold, which may be NaN.
            scale: softmax scale of this layer; None: the spec's.
            k_scale, v_scale: what K and V are multiplied by; None: 1. Of 8 bits (the spec's kv_dtype): a number, or
                float32 tensors where K and V lie: of one element; [Hkv], one a head; or one a token and head, K's or V's
                shape without its last dimension ([pages, page_size, Hkv], [pages, Hkv, page_size], [tokens, Hkv]).
                Where kv is a list of levels, a list has one of them a level. Of 16 and 32 bits: a number, or one element
                on the host, the same of all levels, and with k_extends_v of K and V. On a GPU the first run with such a
                v_scale that is not 1 waits for a kernel of its own.
            params: run members that differ from the spec's, such as ``{"softcap.cap": 50.0}``. On a GPU an array may lie
                there, contiguous and in the member's own dtype: it is not copied. Kernels read it where it lies, in stream
                order; so do those of a graph in each replay, and see what was written since. Like q, it must live until
                the run ended; one that a graph reads is kept as long as the reservation. Nobody checks its values, nor
                indices of a score that are computed from them: these are clamped. What the host needs is refused there:
                a `RopeTables`'s offset, a SpanTensor.
            timeline: GPUs: a `raddle.Timeline` of the plan, to which each worker writes what it did when (or a zero
                float32 tensor [workers, marks, 2] to read as one); costs less than a microsecond an item. Not under
                torch.compile.

        On a GPU all tensors lie there, rows are multiples of 16 bytes apart, and the call launches one kernel on the
        current stream of q's framework (torch's current stream) and waits for nothing. Every stream has scratch of its
        own, CUDA's per-thread default stream one a thread. A stream may be destroyed before plans that ran on it. The
        default stream is refused while another one that it waits for captures a graph: it would end the capture.

        torch.compile takes the call as an operator that it does not look into, whatever the plan; make plans outside.

        Returns:
            out; or (out, lse) where lse was asked for. A row without keys is 0, its lse -inf.

        Raises:
            ValueError: a shape, a stride, a device or a value that does not fit, before anything is written.
            TypeError: a dtype, or what is no tensor, before anything is written.
        """
        if unknown:
            _keywords.refuse("Attention.run", unknown, Attention.run)
        try:
            self.number, plan.number  # only what was made has one, and to look takes a tenth of the time of asking
        except AttributeError:
            _library.refuse_unmade(self, "self")
            _library.refuse_unmade(plan, "plan")
        spec = self.spec
        if is_traced():
            scales = k_scale, v_scale
            flags = return_lse, return_state, zero_unused_rows
            found = compiled.run(self, plan, q, kv, out, lse, *flags, scale, scales, params, timeline)
            if lse_base_2 and (lse is not None or isinstance(found, tuple)):
                (found[1] if lse is None else lse).mul_(1.0 / math.log(2.0))  # fused with what comes next
            return found
        q_lent = lend(q, "q")
        if type(kv) is tuple and len(kv) == 2:
            pools = (lend_unasked(kv[0], "kv: k"), lend_unasked(kv[1], "kv: v"))
        else:
            pools = lend_pools(kv, lend_unasked)
        if scale is not None and scale.__class__ is not float:
            refuse_tracer(scale, "scale")
            _library.refuse_unmade(scale, "scale")
        if return_lse is not False:
            return_lse = lend_flag(return_lse, "return_lse")
        if return_state is not False:
            return_state = lend_flag(return_state, "return_state")
        if lse_base_2 is not False:
            lse_base_2 = lend_flag(lse_base_2, "lse_base_2")
        if zero_unused_rows is not False:
            zero_unused_rows = lend_flag(zero_unused_rows, "zero_unused_rows")
        wants_lse = return_lse or (return_state and self._has_lse)
        if out is not None:
            result, out_lent = out, lend_output(out, "out", lend_unasked)
        else:
            # A q of a wrong shape is refused before the output that has it too.
            is_like_q = self._out_is_like_q and not return_state
            shape = None if is_like_q else shape_of_out(q, spec.num_qo_heads, spec.head_dim_vo)
            result, out_lent = make_output(q, shape, "float32" if return_state else spec.dtype, "out")
        result_lse, lse_lent = lse, None
        if lse is not None:
            lse_lent = lend_output(lse, "lse")
        elif wants_lse:
            result_lse, lse_lent = make_output(q, (*shape_of_rows(q), spec.num_qo_heads), "float32", "lse")
        try:
            _run(
                self,
                plan,
                q_lent,
                out_lent,
                lse_lent,
                return_state,
                lse_base_2,
                zero_unused_rows,
                scale,
                None if timeline is None else lend_output(timeline, "timeline"),
                members(params),
                lend_scale(k_scale, "k_scale"),
                lend_scale(v_scale, "v_scale"),
                *pools,
            )
        except (BufferError, RuntimeError) as error:
            lend_pools(kv)
            lend_output(out_lent, "out")
            _library.refuse_arrays(error, plan=plan, scale=scale)
        if out is None:
            result = finished(q, result)
        if not wants_lse:
            return result
        return result, (finished(q, result_lse) if lse is None else result_lse)
