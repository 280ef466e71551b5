"""SGLang's attention backend (sglang.srt.layers.attention.base_attn_backend).

A batch is planned on the GPU, once a step for all layers of a kind, from SGLang's table of token slots: pages of one
token. The plan of a captured decode is a part of its graph.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention

from raddle.integrations.paged.layers import LayerAttention, OwnParts
from raddle.integrations.paged.plans import Batch, Limits
from raddle.integrations.sglang.drafts import drafts_of
from raddle.integrations.sglang.layers import find_layers, layer_attention, refuse_model
from raddle.integrations.sglang.steps import Steps

logger = logging.getLogger("sglang.raddle")

#: Least number of shared leading tokens that are read once for all requests; 0: prefixes are not looked for.
MIN_PREFIX = "RADDLE_SGLANG_MIN_PREFIX"


class GraphArrays(NamedTuple):
    """What captured decodes read, at fixed addresses."""

    table: Any  #: [max_bs, context] int32 slots
    kv_len: Any  #: [max_bs] int32
    qo_indptr: Any  #: [max_bs + 1] int32, of one row a request


class Backend(AttentionBackend):
    """What Raddle serves; the rest is refused when the engine starts."""

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any) -> None:
        super().__init__()
        refuse_model(runner)
        self.drafts = drafts_of(runner)
        self.pool = runner.token_to_kv_pool
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.device = torch.device(runner.device)
        self.dtype = runner.dtype
        drafted = self.drafts.per_request if self.drafts else 0
        self.decode_len = drafted or 1
        self.context_len = min(self.req_to_token.shape[1], runner.model_config.context_len + drafted)
        found = find_layers(runner.model, RadixAttention)
        self.layers = {each.layer.layer_id: layer_attention(each, runner.dtype, runner.kv_cache_dtype) for each in found}
        self._refuse_windows_of_trees()
        self.arguments = runner.server_args
        self.graph: GraphArrays | None = None
        self.of_trees: dict[str, Any] | None = None  # run members of the current batch's trees
        self._make_plans(runner.req_to_token_pool.size)

    def _refuse_windows_of_trees(self) -> None:
        # Distances in a tree are those of positions, which differ from those of its slots.
        if self.drafts and self.drafts.branches and any(layer.window is not None for layer in self.layers.values()):
            raise NotImplementedError(
                "speculative_eagle_topk above 1 beside layers with a sliding window: Raddle's backend for SGLang does not "
                "serve it"
            )

    def _make_plans(self, max_requests: int) -> None:
        self.max_requests = max_requests
        limits = _limits(self.arguments, max_requests, self.context_len, self.decode_len)
        self.usual = self.steps = self._make_steps(self.layers, limits)
        self.checks = self.usual  # of drafts; in a chain, each row sees those before it
        if self.drafts:
            self.drafts.make_mask(max_requests, self.device)
            if self.drafts.branches:
                own = OwnParts((self.drafts.tree(),), replace=False)
                trees = {number: layer.with_parts(own) for number, layer in self.layers.items()}
                self.checks = self._make_steps(trees, _of_decodes(limits))

    def _make_steps(self, layers: dict[int, LayerAttention], limits: Limits) -> Steps:
        steps = Steps(layers, self.dtype, str(self.device), limits)
        logger.info("Raddle: %s", steps)
        return steps

    # --- plans -------------------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plans a batch that runs eagerly."""
        if forward_batch.forward_mode.is_idle():
            return
        drafts = self._drafts_in(forward_batch)
        table = self._slots(forward_batch, self._width(forward_batch, drafts))
        kv_len = forward_batch.seq_lens.to(torch.int32) + drafts
        qo_indptr, rows, longest = self._rows_of(forward_batch, drafts)
        trees = forward_batch.spec_info.custom_mask if drafts else None
        self._plan(Batch(qo_indptr, table, kv_len, num_rows=rows, longest=longest), drafts, trees)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Takes memory for what graphs of decodes read."""
        if max_bs > self.max_requests:
            self._make_plans(max_bs)
        of = {"dtype": torch.int32, "device": self.device}
        table = torch.zeros((max_bs, self.context_len), **of)
        self.graph = GraphArrays(table, torch.ones(max_bs, **of), torch.arange(max_bs + 1, **of))

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a capture and before each replay: the batch's slots and lengths, without a copy to the host."""
        self._require(forward_batch, "DECODE", "IDLE")
        drafts = self._drafts_in(forward_batch)
        arrays, bs, width = self._graph_arrays(), forward_batch.batch_size, self._width(forward_batch, drafts)
        arrays.table[:bs, :width].copy_(self._slots(forward_batch, width))
        arrays.kv_len[:bs].copy_(forward_batch.seq_lens[:bs])
        if self.drafts and drafts:
            arrays.kv_len[:bs].add_(drafts)
            self.drafts.bring(forward_batch.spec_info)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Plans in the graph: a replay plans anew, from what the arrays hold then."""
        arrays, bs, drafts = self._graph_arrays(), forward_batch.batch_size, self._drafts_in(forward_batch)
        rows, qo_indptr = drafts or 1, arrays.qo_indptr[: bs + 1]
        of_batch = qo_indptr * rows if drafts else qo_indptr, arrays.table[:bs], arrays.kv_len[:bs]
        trees = self.drafts.mask.buffer if self.drafts else None
        self._plan(Batch(*of_batch, num_rows=bs * rows, longest=rows), drafts, trees)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def _graph_arrays(self) -> GraphArrays:
        if self.graph is None:
            raise RuntimeError("a CUDA graph is captured before init_cuda_graph_state; expected that call first")
        return self.graph

    def _drafts_in(self, forward_batch: Any) -> int:
        """Rows of each request beyond its lengths, which count no drafts; 0 where none are checked."""
        if self.drafts is None or forward_batch.forward_mode.name != "TARGET_VERIFY":
            return 0
        rows = forward_batch.spec_info.draft_token_num
        if rows > self.decode_len:
            raise NotImplementedError(
                f"a batch checks {rows} drafts a request; expected at most speculative_num_draft_tokens = {self.decode_len}"
            )
        return rows

    def _width(self, forward_batch: Any, drafts: int) -> int:
        """Columns of the table that hold the batch's slots; all, where the host does not know."""
        lengths = getattr(forward_batch, "seq_lens_cpu", None)
        return self.context_len if lengths is None else max(int(torch.as_tensor(lengths).max()) + drafts, 1)

    def _slots(self, forward_batch: Any, width: int) -> Any:
        return self.req_to_token[forward_batch.req_pool_indices[: forward_batch.batch_size], :width]

    def _rows_of(self, forward_batch: Any, drafts: int) -> tuple[Any, int, int]:
        """qo_indptr, the number of rows, and that of the longest request."""
        self._require(forward_batch, "DECODE", "EXTEND", "MIXED")
        bs = forward_batch.batch_size
        if drafts or forward_batch.forward_mode.is_decode():
            rows = drafts or 1
            return torch.arange(bs + 1, dtype=torch.int32, device=self.device) * rows, bs * rows, rows
        qo_indptr = torch.zeros(bs + 1, dtype=torch.int32, device=self.device)
        qo_indptr[1:] = torch.cumsum(forward_batch.extend_seq_lens[:bs], dim=0)
        lengths = forward_batch.extend_seq_lens_cpu
        rows = forward_batch.out_cache_loc.shape[0] if lengths is None else sum(lengths)
        return qo_indptr, rows, rows if lengths is None else max(lengths)

    def _plan(self, batch: Batch, drafts: int, trees: Any) -> None:
        """One launch for each kind of layer. ``trees``: what rows see of the drafts, where some are checked."""
        self.steps = self.checks if drafts else self.usual
        self.steps.plan(batch, self.pool)
        self.of_trees = self.drafts.params(trees, len(batch.kv_len), drafts) if self.drafts and drafts else None

    def _require(self, forward_batch: Any, *names: str) -> None:
        """Raises NotImplementedError for a batch of another mode."""
        names = (*names, "TARGET_VERIFY") if self.drafts else names
        mode = forward_batch.forward_mode.name
        if mode not in names:
            raise NotImplementedError(f"forward mode {mode}; Raddle's backend for SGLang serves {' and '.join(names)} here")

    @property
    def verify_mask(self) -> Any:
        """Where the draft's kernel says what rows of trees see; None: nothing is drafted."""
        return self.drafts.mask if self.drafts else None

    # --- layers ------------------------------------------------------------------------------------

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> Any:
        """Returns [tokens, Hq · D]: q of that shape or with heads apart, k and v [tokens, Hkv, D]."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, **more)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> Any:
        """The same of prompts, and of prompts beside decodes."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, **more)

    def _attend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool, sinks: Any = None, **unknown: Any
    ) -> Any:
        served = self.steps.served[layer.layer_id]
        if unknown:
            raise NotImplementedError(f"{', '.join(unknown)} of an attention layer; Raddle's backend does not serve them")
        if (sinks is not None) != served.has_sinks:
            raise NotImplementedError(
                f"layer {layer.layer_id} is called {'with' if sinks is not None else 'without'} sinks; expected what its "
                "model's attribute 'sinks' said when the engine started"
            )
        if k is not None and save_kv_cache:
            self._store(layer, forward_batch.out_cache_loc, k, v)
        q = q.reshape(q.shape[0], -1)
        out = q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        params = {**(served.params or {}), **self.of_trees} if self.of_trees else served.params
        options: dict[str, Any] = {"scale": float(layer.scaling), "params": params, "zero_unused_rows": True}
        if served.is_quantized:
            options |= {"k_scale": layer.k_scale_float, "v_scale": layer.v_scale_float}
        kv = tuple(self.pool.get_kv_buffer(layer.layer_id))
        served.attention.run(self.steps.planned[served.nth], q, kv, out=out, **options)
        return out

    def _store(self, layer: Any, slots: Any, k: Any, v: Any) -> None:
        if layer.k_scale is None:
            self.pool.set_kv_buffer(layer, slots, k, v)
        else:  # SGLang's pool divides them by their scales in place
            self.pool.set_kv_buffer(layer, slots, k.clone(), v.clone(), layer.k_scale, layer.v_scale)


def _limits(arguments: Any, max_requests: int, context_len: int, decode_len: int) -> Limits:
    """The largest batches, as SGLang's arguments have them: a chunk of prompts, with decodes beside it."""
    chunk = arguments.chunked_prefill_size or -1
    prompts = chunk if chunk > 0 else max(arguments.max_prefill_tokens, context_len)
    return Limits(
        max_requests=max_requests,
        max_qo_tokens=prompts + max_requests * decode_len,
        max_kv_tokens=max_requests * context_len,
        page_size=1,
        graph_rows=max_requests * decode_len,
        decode_len=decode_len,
        min_prefix=0 if arguments.disable_radix_cache else _min_prefix(),
    )


def _of_decodes(limits: Limits) -> Limits:
    """Those of batches that only decode."""
    return dataclasses.replace(limits, max_qo_tokens=limits.graph_rows, only_decodes=True)


def _min_prefix() -> int:
    text = os.environ.get(MIN_PREFIX, "512")
    if not text.isdecimal():
        raise ValueError(f"{MIN_PREFIX} is '{text}'; expected the least number of tokens, or 0 to look for no prefixes")
    return int(text)
