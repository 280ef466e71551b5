"""The plans of a step: what all layers of a model compute of one batch."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from raddle.attention import Attention
from raddle.integrations.paged.layers import LayerAttention
from raddle.integrations.paged.plans import Batch, LayerPlans, Limits, plans_of
from raddle.plans import Reservation


class Served(NamedTuple):
    """How a layer is computed."""

    attention: Attention
    nth: int  #: which of a step's plans is its
    params: dict[str, Any] | None
    has_sinks: bool
    is_quantized: bool


class Steps:
    """Plans for a model's layers, and the current batch's.

    Attributes:
        served: by a layer's number.
        planned: the current batch's plans.
    """

    def __init__(self, layers: dict[int, LayerAttention], dtype: Any, device: str, limits: Limits) -> None:
        self.limits = limits
        self.plans, which = plans_of(list(layers.values()), dtype, device, limits)
        self.served = {
            number: Served(
                self.plans[nth].attention,
                nth,
                self.plans[nth].params_of(layer),
                layer.sinks is not None,
                layer.kv_dtype is not None,
            )
            for (number, layer), nth in zip(layers.items(), which)
        }
        self.planned: list[Reservation] = []

    def plan(self, batch: Batch, pool: Any) -> None:
        """Plans a batch: one launch for each kind of layer."""
        batches = {False: batch}
        self.planned = []
        for plans in self.plans:
            is_apart = _has_pool_of_window(plans, pool)
            if is_apart not in batches:
                table = pool.translate_loc_from_full_to_swa(batch.block_table).to(batch.block_table.dtype)
                batches[is_apart] = dataclasses.replace(batch, block_table=table)
            self.planned.append(plans.plan(batches[is_apart]))
        self.batches = batches  # their arrays live until the next plan

    def __str__(self) -> str:
        size = sum(plans.num_bytes for plans in self.plans) / 2**20
        return f"{len(self.served)} layers, plans a step: {len(self.plans)}, {size:.0f} MiB, {self.limits}"


def _has_pool_of_window(plans: LayerPlans, pool: Any) -> bool:
    """Whether layers with a window have slots of their own, as in models that mix both kinds."""
    return plans.first.window is not None and hasattr(pool, "translate_loc_from_full_to_swa")
