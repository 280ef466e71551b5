"""FlashInfer's attention, computed by Raddle: code written for FlashInfer 0.6 runs unchanged, on CPUs, too.

::

    import raddle.compat.flashinfer as flashinfer                  # alone

    import raddle.compat.flashinfer                                # or in place of the real package's classes:
    raddle.compat.flashinfer.install()                             # before other code imports them

Names, signatures and tensors are FlashInfer's; LSE is to base 2, as there. The workspace buffers are not used: their
device says where to compute. `plan` keeps its arrays on the host, and copies those that lie on a GPU. No call copies a cache.
"""

from raddle.compat.flashinfer.batch_attention import BatchAttention
from raddle.compat.flashinfer.cascade import (
    MultiLevelCascadeAttentionWrapper,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from raddle.compat.flashinfer.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
)
from raddle.compat.flashinfer.mla import BatchMLAPagedAttentionWrapper
from raddle.compat.flashinfer.overlay import install
from raddle.compat.flashinfer.page import (
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
)
from raddle.compat.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from raddle.compat.flashinfer.quantization import packbits, segment_packbits
from raddle.compat.flashinfer.ragged import BatchPrefillWithRaggedKVCacheWrapper
from raddle.compat.flashinfer.single import (
    single_decode_with_kv_cache,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from raddle.compat.flashinfer.sparse import BlockSparseAttentionWrapper

__all__ = [
    "BatchAttention",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BlockSparseAttentionWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "fast_decode_plan",
    "get_batch_indices_positions",
    "get_seq_lens",
    "install",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "packbits",
    "segment_packbits",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]
