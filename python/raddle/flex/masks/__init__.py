"""Masks for `raddle.flex`: each a function that makes a ``mask_mod(b, h, q_idx, kv_idx)``, True = keep.

They join by `raddle.flex.and_masks` and `raddle.flex.or_masks`. Without further ado they serve as ``variant=`` of
`raddle.AttentionSpec` (positions are those in the text) and in `raddle.flex.create_block_mask` (rows count from 0).
Numbers and arrays that they capture are run-time values: another window or another batch of documents compiles
nothing. On numpy arrays they compute what they say. docs/gallery.md shows them.
"""

from raddle.flex.masks.attention_sinks import attention_sinks
from raddle.flex.masks.causal import causal
from raddle.flex.masks.dilated_window import dilated_window
from raddle.flex.masks.document import document
from raddle.flex.masks.global_local import global_local
from raddle.flex.masks.natten import morton_order, natten, tiled_order
from raddle.flex.masks.prefix_lm import prefix_lm
from raddle.flex.masks.sliding_window import sliding_window
from raddle.flex.masks.tree import tree

__all__ = [
    "attention_sinks",
    "causal",
    "dilated_window",
    "document",
    "global_local",
    "morton_order",
    "natten",
    "prefix_lm",
    "sliding_window",
    "tiled_order",
    "tree",
]
