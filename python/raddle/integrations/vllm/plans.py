"""Plans of a batch for the layers of one builder, made on the GPU. Imports nothing of vLLM."""

from __future__ import annotations

import dataclasses
from typing import Any

from raddle.attention import Attention
from raddle.integrations.vllm.layers import LayerAttention
from raddle.layouts import PagedKV
from raddle.plans import Maxima, Reservation


@dataclasses.dataclass(frozen=True)
class Limits:
    """How large batches get.

    Attributes:
        max_requests: requests of a batch.
        max_qo_tokens: query rows of a batch.
        max_kv_tokens: keys of all requests.
        graph_rows: query rows of the largest batch whose runs are captured whole, and of any that only decodes.
        min_prefix: shared leading tokens that are read once, from so many on; 0: prefixes are not looked for.
    """

    max_requests: int
    max_qo_tokens: int
    max_kv_tokens: int
    graph_rows: int
    min_prefix: int = 0


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch: arrays as of `PagedKV`, and at most how many rows q has."""

    qo_indptr: Any
    block_table: Any
    kv_len: Any
    page_size: int
    num_rows: int

    def layout(self, min_prefix: int) -> PagedKV:
        """Its page table; with ``min_prefix`` above 0, prefixes are a level."""
        arrays = self.qo_indptr, None, self.block_table, self.kv_len
        return PagedKV(*arrays, page_size=self.page_size, num_rows=self.num_rows, discover_prefixes=min_prefix)


class LayerPlans:
    """The plans of all layers that one plan serves, in memory that CUDA graphs may keep.

    Two reservations, because partial states of prefixes take memory with every row: a small one, which looks for shared
    prefixes, for batches that may be captured, and one for the rest, which are bound by their prompts.
    """

    def __init__(self, first: LayerAttention, dtype: Any, device: str, limits: Limits) -> None:
        self.first = first
        self.limits = limits
        self.attention = Attention(first.spec(dtype), device)
        # Keys behind a window are not read, so that a prefix is soon no work for anyone.
        self.min_prefix = limits.min_prefix if first.window is None else 0
        small = min(limits.graph_rows, limits.max_qo_tokens)
        self.small = self._reserve(small, levels=2 if self.min_prefix else 1)
        self.large = self._reserve(limits.max_qo_tokens, levels=1) if small < limits.max_qo_tokens else None

    def _reserve(self, rows: int, levels: int) -> Reservation:
        limits = self.limits
        maxima = Maxima(min(limits.max_requests, rows), rows, limits.max_kv_tokens, max_levels=levels)
        return self.attention.reserve(maxima, device_lengths=True)

    def plan(self, batch: Batch) -> Reservation:
        """Plans the batch. Which reservation has it depends on num_rows alone, so graphs find their own again."""
        if self.large is None or batch.num_rows <= self.limits.graph_rows:
            self.small.update(batch.layout(self.min_prefix))
            return self.small
        self.large.update(batch.layout(0))
        return self.large

    def params_of(self, layer: LayerAttention) -> dict[str, Any] | None:
        """Run members by which a layer differs from the first one; None: it does not."""
        ours = self.first.values()
        differ = {name: list(x) if isinstance(x, tuple) else x for name, x in layer.values().items() if x != ours[name]}
        return differ or None

    @property
    def num_bytes(self) -> int:
        """Bytes of both reservations."""
        return self.small.num_bytes + (self.large.num_bytes if self.large else 0)


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
