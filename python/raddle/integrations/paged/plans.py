"""Plans of a batch for the layers that one KV cache serves, made on the GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

from raddle.attention import Attention
from raddle.integrations.paged.layers import LayerAttention
from raddle.layouts import PagedKV
from raddle.plans import Maxima, Reservation

#: Decodes of up to so many rows, times query heads a KV head, run the kernel of short queries although prefixes are looked
#: for. Between the matrix products of a model on an H200 a decode takes 15 us with it, 25 with the full kernel, whose code
#: comes from memory anew in each layer. But it reads a prefix once for every 16 such rows, where the full kernel does so
#: for 128: 32 requests of 8,192 shared tokens ought to take 55 us instead of 80, and 64 about the same (estimated from the
#: rate at which it reads keys from the L2 cache).
SHORT_PREFIX_ROWS = 256


@dataclasses.dataclass(frozen=True)
class Limits:
    """How large batches get.

    Attributes:
        max_requests: requests of a batch.
        max_qo_tokens: query rows of a batch.
        max_kv_tokens: keys of all requests.
        page_size: keys of a page.
        graph_rows: query rows of the largest batch whose runs are captured whole, and of any that only decodes.
        decode_len: query rows of a request that decodes: 1, and drafts.
        captures_mixed: graphs hold whole batches of prompts and decodes, not of decodes alone.
        only_decodes: there are no other batches; graph_rows is max_qo_tokens.
        min_prefix: shared leading tokens that are read once, from so many on; 0: prefixes are not looked for.
    """

    max_requests: int
    max_qo_tokens: int
    max_kv_tokens: int
    page_size: int
    graph_rows: int
    decode_len: int = 1
    captures_mixed: bool = False
    only_decodes: bool = False
    min_prefix: int = 0


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch: arrays as in `PagedKV`, at most how many rows q has, and how many a request."""

    qo_indptr: Any
    block_table: Any
    kv_len: Any
    num_rows: int
    longest: int

    def layout(self, page_size: int, min_prefix: int) -> PagedKV:
        """Its page table, of pages of so many keys; with ``min_prefix`` above 0, prefixes are a level."""
        arrays = self.qo_indptr, None, self.block_table, self.kv_len
        return PagedKV(*arrays, page_size=page_size, num_rows=self.num_rows, discover_prefixes=min_prefix)


class LayerPlans:
    """The plans of all layers that one plan serves, in memory that CUDA graphs may keep.

    A reservation for each use: decodes run the kernel of short queries alone, whose code is a third. Batches of few rows,
    as those with the end of a prompt, look for prefixes, too. The rest do not: they are bound by their prompts, and
    partial states of prefixes take memory with every row. A batch of one row shares a prefix with no other, and need not
    wait for states of one: on an H200 a layer of 2,112 keys takes 14 us by a plan of one level, and 22 by one of two.
    """

    def __init__(self, first: LayerAttention, dtype: Any, device: str, limits: Limits) -> None:
        self.first = first
        self.limits = limits
        self.attention = Attention(first.spec(dtype), device)
        # Keys behind a window are not read, so that a prefix is soon no work for anyone.
        self.min_prefix = limits.min_prefix if first.window is None else 0
        few, levels = min(limits.graph_rows, limits.max_qo_tokens), 2 if self.min_prefix else 1
        group = first.num_qo_heads // first.num_kv_heads
        chooses = self.min_prefix and not limits.only_decodes
        self.decode_rows = min(few, max(1, SHORT_PREFIX_ROWS // group)) if chooses else few
        self.alone = self._reserve(1, longest=1) if self.min_prefix else None
        self.decodes = None if limits.captures_mixed else self._reserve(self.decode_rows, levels, limits.decode_len)
        self.few = None if limits.only_decodes else self._reserve(few, levels)
        self.many = self._reserve(limits.max_qo_tokens) if few < limits.max_qo_tokens else None

    def _reserve(self, rows: int, levels: int = 1, longest: int = 0) -> Reservation:
        limits = self.limits
        requests = min(limits.max_requests, rows)
        most = dict(max_levels=levels, max_qo_len=longest, page_size=limits.page_size)
        maxima = Maxima(requests, rows, limits.max_kv_tokens, **most)
        return self.attention.reserve(maxima, device_lengths=True)

    def plan(self, batch: Batch) -> Reservation:
        """Plans the batch. What decides is equal when a graph is captured and when it is replayed."""
        if self.many is not None and batch.num_rows > self.limits.graph_rows:
            return self._plan(self.many, batch, 0)
        if self.alone is not None and batch.num_rows == 1:
            return self._plan(self.alone, batch, 0)
        decodes = batch.longest <= self.limits.decode_len and batch.num_rows <= self.decode_rows
        chosen = self.decodes if decodes and self.decodes is not None else self.few
        return self._plan(chosen, batch, self.min_prefix)

    def _plan(self, chosen: Reservation, batch: Batch, min_prefix: int) -> Reservation:
        chosen.update(batch.layout(self.limits.page_size, min_prefix))
        return chosen

    def params_of(self, layer: LayerAttention) -> dict[str, Any] | None:
        """Run members by which a layer differs from the first one, and its sinks; None: there are none."""
        ours = self.first.values()
        differ = {name: list(x) if isinstance(x, tuple) else x for name, x in layer.values().items() if x != ours[name]}
        if layer.sinks is not None:
            differ["sinks.logit"] = layer.sinks
        return differ or None

    @property
    def num_bytes(self) -> int:
        """Bytes of all reservations."""
        return sum(each.num_bytes for each in self.reservations)

    @property
    def reservations(self) -> list[Reservation]:
        return [each for each in (self.alone, self.decodes, self.few, self.many) if each is not None]


def plans_of(layers: list[LayerAttention], dtype: Any, device: str, limits: Limits) -> tuple[list[LayerPlans], list[int]]:
    """Plans for some layers, and which of them each layer has."""
    made: dict[Any, int] = {}
    plans: list[LayerPlans] = []
    which = []
    for layer in layers:
        key = layer.planned_as()
        if key not in made:
            made[key] = len(plans)
            plans.append(LayerPlans(layer, dtype, device, limits))
        which.append(made[key])
    return plans, which
