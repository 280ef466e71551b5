"""Layouts: which query rows attend to which keys, and where those lie.

A layout checks its arrays, copies them, and is immutable; one layout serves any number of plans. Index
arrays are int32 or int64, of numpy, torch (CPU) or a list; int32 numpy arrays are fastest. All constructors
raise ValueError for bad values and TypeError for bad dtypes, naming the argument, what was found and
what was expected.

The formats are those of the FlashInfer paper, section 3.1 (block-sparse KV cache and composable formats).
"""

from raddle._layout import Layout
from raddle.block_sparse import BlockSparse
from raddle.cascade import Cascade
from raddle.paged_kv import PagedKV
from raddle.ragged_kv import RaggedKV

__all__ = ["BlockSparse", "Cascade", "Layout", "PagedKV", "RaggedKV"]
