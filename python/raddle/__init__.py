"""Raddle: an attention engine for LLM inference serving.

    spec = raddle.AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128, variant=[raddle.Causal()])
    attn = raddle.Attention(spec)
    plan = attn.plan(raddle.PagedKV(qo_indptr, page_indptr, page_indices, kv_len, page_size=16))
    out, lse = attn.run(plan, q, (k_pool, v_pool), return_lse=True)   # once a layer

q, out: [tokens, Hq, D]; lse: [tokens, Hq] float32; pools: [pages, page_size, Hkv, D].
"""

from raddle import _command

_command.hide_torch()  # before what imports it

from raddle import _library  # noqa: E402
from raddle._library import CompileError  # noqa: E402
from raddle.attention import Attention
from raddle.doctor import cpu_isa, cpu_threads
from raddle.functional import (
    attention,
    merge_state,
    merge_states,
    support_matrix,
    workspace_bytes,
)
from raddle.kv import SelectedPages, accept_tree, append_kv, copy_pages, select_pages, summarize_pages
from raddle.layouts import BlockSparse, Cascade, Layout, PagedKV, RaggedKV
from raddle.packed_mask import PackedMask, pack_masks
from raddle.page_pool import PagePool
from raddle.plans import Maxima, Plan, Reservation, select
from raddle.radix_cache import RadixCache
from raddle.rolling_cache import RollingCache
from raddle.rotary import LinearScaling, Llama31Scaling, Rope, RopeTables, YarnScaling
from raddle.sampling import sample
from raddle.spec import AttentionSpec
from raddle.timeline import Timeline
from raddle.token_tree import TokenTree
from raddle.variants import (
    Alibi,
    Causal,
    Sigmoid,
    Sinks,
    SlidingWindow,
    SoftCap,
    Tensor,
    Variant,
    alibi_slopes,
)


def __getattr__(name: str):
    # Many programs do without them, and `import raddle` should stay light.
    if name in ("cache", "flex", "mla", "parallel"):
        import importlib

        return importlib.import_module(f"raddle.{name}")
    raise AttributeError(f"module 'raddle' has no attribute '{name}'")


__version__: str = str(_library.version())

__all__ = [
    "Alibi",
    "Attention",
    "AttentionSpec",
    "BlockSparse",
    "Cascade",
    "Causal",
    "CompileError",
    "Layout",
    "LinearScaling",
    "Llama31Scaling",
    "Maxima",
    "PackedMask",
    "PagePool",
    "PagedKV",
    "Plan",
    "RadixCache",
    "RaggedKV",
    "Reservation",
    "RollingCache",
    "Rope",
    "RopeTables",
    "SelectedPages",
    "Sigmoid",
    "Sinks",
    "SlidingWindow",
    "SoftCap",
    "Tensor",
    "Timeline",
    "TokenTree",
    "Variant",
    "YarnScaling",
    "accept_tree",
    "alibi_slopes",
    "append_kv",
    "attention",
    "copy_pages",
    "cpu_isa",
    "cpu_threads",
    "merge_state",
    "merge_states",
    "pack_masks",
    "sample",
    "select",
    "select_pages",
    "summarize_pages",
    "support_matrix",
    "workspace_bytes",
]
