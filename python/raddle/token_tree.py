"""Trees of drafted tokens: what speculative decoding verifies in one step."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from raddle import _library
from raddle._tensors import host_array, lend, lend_index, lend_indices
from raddle.kv import accept_tree
from raddle.layouts import Layout, PagedKV
from raddle.packed_mask import pack_masks

_token_tree = _library.function("raddle.token_tree")


class TokenTree(Layout):
    """Requests whose newest keys are a tree of drafted tokens, over a page table (Medusa, EAGLE, SpecInfer).

    The rows of a request are the nodes of its tree: node n is row n, and key ``kv_len - qo_len + n`` of its pages. A
    row sees all of the text before the tree, itself, and its ancestors. A request that drafts nothing is a tree of one
    node.

    Args:
        qo_indptr, page_indptr, page_indices, kv_len, page_size, kv_layout: same as in `PagedKV`, on the host; kv_len
            counts the nodes.
        parents: [rows] int32 or int64: each node's parent, an earlier node of its request, or -1 for a root, which
            follows the text.
        masks: instead of parents, what each row sees of its request's nodes: a boolean matrix [qo_len, qo_len] a
            request, or those packed, a pair (bits, indptr) as `pack_masks` makes it. Never [qo_len, kv_len]: what
            stands before a tree is seen by all of it.
        qo_pos: [rows] positions of rows and nodes in the text; None: the tokens before the tree plus the depth in
            it, which is how many other nodes a row sees.
        max_nodes: nodes of the largest tree that a `Reservation` is to serve; None: those of this batch's largest.

    It plans as two levels: the text, where no mask of the tree is evaluated, and the nodes, with qo_len² bits. Windows,
    ALiBi and fused RoPE go by positions, so by depth; Causal, which goes by the order of the nodes, keeps every
    ancestor and may be in the spec or not.

    A step appends the nodes' keys, attends, and keeps the path that was accepted::

        tree = raddle.TokenTree(qo_indptr, None, block_table, kv_len, 16, parents=parents)
        raddle.append_kv(tree.pages, pools, k, v, rope=rope)
        out = attn.run(attn.plan(tree), q, pools)
        kv_len = tree.accept(pools, accepted)  # the last accepted node of each request

    Trees as in SpecInfer (arXiv 2305.09781), section 4.2.

    Raises:
        ValueError: parents that are no tree, such as a cycle; masks of another shape; or what `PagedKV` refuses.
        TypeError: arrays of another dtype.

    Example:
        >>> tree = raddle.TokenTree([0, 4], None, [[5, 2]], [24], 16, parents=[-1, 0, 0, 1])
        >>> tree.num_levels, tree.parents.tolist()
        (2, [-1, 0, 0, 1])
    """

    __slots__ = ("pages", "parents")

    #: The page table with the nodes' positions: what `append_kv` takes.
    pages: PagedKV
    #: [rows] as given, or found from the masks; None where those are no trees.
    parents: np.ndarray | None

    def __init__(
        self,
        qo_indptr: Any,
        page_indptr: Any = None,
        page_indices: Any = None,
        kv_len: Any = None,
        page_size: int = 16,
        kv_layout: str = "NHD",
        *,
        parents: Any = None,
        masks: Sequence[Any] | tuple[Any, Any] | None = None,
        qo_pos: Any = None,
        max_nodes: int | None = None,
    ) -> None:
        bits = indptr = None
        if masks is not None:
            packed = isinstance(masks, tuple) and len(masks) == 2 and getattr(masks[0], "ndim", 0) == 1
            bits, indptr = masks if packed else pack_masks(_of_nodes(masks, qo_indptr))
            bits, indptr = lend(bits, "masks[0]"), lend_index(indptr, "masks[1]")
        arrays = lend_indices(
            qo_indptr=qo_indptr,
            page_indptr=page_indptr,
            page_indices=page_indices,
            kv_len=kv_len,
            qo_pos=qo_pos,
            parents=parents,
        )
        bitmasks = dict(mask_bits=bits, mask_indptr=indptr, max_nodes=max_nodes)
        made = _token_tree(**arrays, page_size=page_size, kv_layout=kv_layout, **bitmasks)
        self.__move_handle_from__(made["layout"])
        self.pages = PagedKV.__new__(PagedKV)
        self.pages.__move_handle_from__(made["pages"])
        found = np.array(list(made["parents"]), np.int32)
        self.parents = found if len(found) == self.num_rows else None

    def _extras(self) -> dict[str, Any]:
        return {"pages": self.pages, "parents": self.parents}

    def accept(self, kv_pool: Any, accepted: Any, *, scales: Any = None) -> Any:
        """Makes the path to each request's last accepted node its next keys: `accept_tree` of this tree.

        Args:
            kv_pool, accepted, scales: same as in `accept_tree`.

        Returns:
            The requests' numbers of keys afterwards, as `accept_tree` returns them.

        Raises:
            ValueError: masks that are no trees, or a node outside of its tree.
        """
        _library.refuse_unmade(self, "self")
        if self.parents is None:
            raise ValueError("masks are no trees, so there is no path; expected rows that see what their parent sees")
        return accept_tree(self.pages, kv_pool, self.parents, accepted, scales=scales)


def _of_nodes(masks: Sequence[Any], qo_indptr: Any) -> Sequence[Any]:
    """The masks, if they are [qo_len, qo_len]: their bytes alone would not tell 3 nodes from 4."""
    for number, (mask, nodes) in enumerate(zip(masks, np.diff(host_array(qo_indptr, "qo_indptr")))):
        shape = list(np.shape(mask))
        if shape != [nodes, nodes]:
            raise ValueError(f"masks[{number}] has shape {shape}; expected [{nodes}, {nodes}], its nodes")
    return masks
