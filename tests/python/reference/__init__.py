"""The fp64 reference: what Raddle's attention means, written for reading, and how far a kernel may be off.

Everything is exact arithmetic over float64 arrays; nothing here imports raddle. A problem is a layout (which
keys does a row attend to, and where do they lie), a variant (a list of parts), Q, K and V::

    layout = PagedKV(qo_indptr, page_indptr, page_indices, kv_len, page_size=16)
    exact = attention(Problem(q, [(k, v)], layout, [SoftCap(30.0), Causal()]))
    exact.out, exact.lse                    # [rows, Hq, Dvo], [rows, Hq]
    exact.out_budget, exact.lse_budget      # the error that a kernel may show, element by element

Layouts and variants carry the names and the arguments of their raddle twins.
"""

from .exact import Exact, Problem, attention, merge_states
from .budgets import UNIT
from .layouts import BlockSparse, Cascade, PagedKV, RaggedKV, TokenTree, keys_of_rows
from .variants import (
    Alibi,
    Causal,
    Flex,
    LinearScaling,
    Llama31Scaling,
    Mask,
    PackedMask,
    Rope,
    RopeTables,
    Sigmoid,
    Sinks,
    SlidingWindow,
    SoftCap,
    YarnScaling,
)

__all__ = [
    "UNIT",
    "Alibi",
    "BlockSparse",
    "Cascade",
    "Causal",
    "Exact",
    "Flex",
    "LinearScaling",
    "Llama31Scaling",
    "Mask",
    "PackedMask",
    "PagedKV",
    "Problem",
    "RaggedKV",
    "Rope",
    "RopeTables",
    "Sigmoid",
    "Sinks",
    "SlidingWindow",
    "SoftCap",
    "TokenTree",
    "YarnScaling",
    "attention",
    "keys_of_rows",
    "merge_states",
]
