"""Attention whose scores and masks are written in Python: FlexAttention's programming model.

::

    from raddle.flex import create_block_mask, flex_attention, masks, mods

    block_mask = create_block_mask(masks.sliding_window(1023, 0), None, None, L, S)
    out = flex_attention(q, k, v, score_mod=mods.softcap(30.0), block_mask=block_mask)    # [B, H, L, E]

The same functions serve as ``variant=`` of `raddle.AttentionSpec`, on every layout. They are run once over symbolic
values and become C++; numbers and arrays that they capture become run-time values. `raddle.flex.ops` has functions
for them. In `flex_attention`, ``q_idx`` counts rows from 0; in plan/run form it is the position in the text, and
`with_offset` converts.
"""

from raddle.flex import masks, mods, ops
from raddle.flex.attention import AuxOutput, AuxRequest, FlexKernelOptions, flex_attention
from raddle.flex.block_mask import BlockMask, create_block_mask, create_mask
from raddle.flex.offset import and_masks, noop_mask, or_masks, with_offset
from raddle.flex.trace import TraceError

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "FlexKernelOptions",
    "TraceError",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "flex_attention",
    "masks",
    "mods",
    "noop_mask",
    "ops",
    "or_masks",
    "with_offset",
]
