"""Score mods for `raddle.flex`: each a function that makes a ``score_mod(score, b, h, q_idx, kv_idx)``.

They serve as ``variant=`` of `raddle.AttentionSpec` (positions are those in the text) and as ``score_mod`` of
`raddle.flex.flex_attention` (rows count from 0). Numbers and arrays that they capture are run-time values. On numpy
arrays they compute what they say.
"""

from raddle.flex.mods.alibi import alibi
from raddle.flex.mods.relative_position_bias import relative_position_bias
from raddle.flex.mods.softcap import softcap
from raddle.flex.mods.t5_buckets import t5_buckets

__all__ = ["alibi", "relative_position_bias", "softcap", "t5_buckets"]
