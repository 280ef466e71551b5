"""`generate_batch` with the names that Raddle registers.

Until 5.18 transformers puts "paged|" before a name, looks that up, and gives the implementation its paged cache. Later
versions drop the prefix, refuse all names but a few of their own, and have the cache gather keys and values first. There,
two methods step aside for models whose implementation is Raddle's.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from raddle.integrations.transformers.attention import attend
from raddle.integrations.transformers.paged import attend_paged

NAMES = ("raddle", "paged|raddle")


def attend_either(
    module: torch.nn.Module, *tensors: Any, paged_cache: Any = None, **how: Any
) -> tuple[torch.Tensor, None]:
    """`attend_paged` where keys and values lie in a paged cache, else `attend`."""
    if paged_cache is None:
        return attend(module, *tensors, **how)
    return attend_paged(module, *tensors, cache=paged_cache, **how)


def admit() -> None:
    """Has `generate_batch` keep Raddle, and leave keys and values where they lie, in versions that do neither."""
    from transformers.generation.continuous_batching import continuous_api
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    manager = continuous_api.ContinuousBatchingManager
    if not _refuses_names(manager):
        return
    switch, update = manager.switch_to_cb_friendly_attn, PagedAttentionCache.update

    @functools.wraps(switch)
    def switched(self: Any, model: Any, *given: Any, **named: Any) -> None:
        if model.config._attn_implementation not in NAMES:
            switch(self, model, *given, **named)

    @functools.wraps(update)
    def updated(self: Any, key_states: Any, value_states: Any, layer_idx: int, kwargs: dict[str, Any]) -> Any:
        if self.config._attn_implementation not in NAMES:
            return update(self, key_states, value_states, layer_idx, kwargs)
        kwargs["paged_cache"] = self  # an argument of the attention
        return key_states, value_states

    manager.switch_to_cb_friendly_attn, PagedAttentionCache.update = switched, updated


def _refuses_names(manager: Any) -> bool:
    """Whether it is of a version later than 5.18, whose method takes no argument beside the model."""
    switch = getattr(manager, "switch_to_cb_friendly_attn", None)
    return switch is not None and switch.__code__.co_argcount > 2
