"""Trees of drafted tokens: a row sees the text before the tree, and its own ancestors (speculative decoding)."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np

from raddle.flex._arrays import by_request, integers
from raddle.flex.ops import maximum


def tree(parents: Any, context: Any = 0) -> Callable[..., Any]:
    """Mask: node n of the tree is the token at position ``context + n``; it sees the context, its ancestors and itself.

    Args:
        parents: [nodes], or [requests, nodes] for a tree a request: the parent of each node, an earlier node, or
            -1 for a root, which follows the context.
        context: tokens before the tree: an int, or an array [requests] of ints.

    Rows before the tree are causal. Positions must be the order in the request, as they are unless a layout gives
    others (``qo_pos``). Ancestry is an interval: a node's descendants are a run of a walk through the tree, depth
    first, so that the bounds of a tile say what it keeps. Trees as in SpecInfer (arXiv 2305.09781), section 4.2.

    Returns:
        A mask mod.

    Raises:
        ValueError: parents that are not earlier nodes, or a negative context.
        TypeError: what is no array of integers.

    Example:
        >>> mask = flex.masks.tree([-1, 0, 0, 1], context=10)
        >>> bool(mask(0, 0, 13, 11)), bool(mask(0, 0, 13, 12))          # node 3 sees node 1, not node 2
        (True, False)
    """
    table = integers(parents, "parents", np.ndim(parents))
    if table.ndim not in (1, 2) or table.shape[-1] == 0:
        raise ValueError(f"parents has shape {table.shape}; expected [nodes] or [requests, nodes], with nodes")
    if (table < -1).any() or (table >= np.arange(table.shape[-1])).any():
        raise ValueError("parents has an entry that is no earlier node; expected -1 or a smaller node number")
    begin = integers(np.atleast_1d(by_request(context, "context")), "context")
    walks = [_walk(row) for row in np.atleast_2d(table)]
    enter, leave = (np.array(part, np.int32) for part in zip(*walks))
    last_tree, last_context = len(enter) - 1, len(begin) - 1

    def tree(b, h, q_idx, kv_idx):
        # One tree or one context for all requests: every request reads the first.
        which = b * (last_tree > 0)
        start = begin[b * (last_context > 0)]
        row, key = q_idx - start, kv_idx - start
        place = enter[which, maximum(row, 0)]
        ancestor = (enter[which, maximum(key, 0)] <= place) & (place < leave[which, maximum(key, 0)])
        return (kv_idx <= q_idx) & ((key < 0) | ancestor)

    return tree


def _walk(parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Depth first: when each node is entered, and how many nodes have been entered when it is left."""
    size = np.ones(len(parents), np.int32)
    for node in range(len(parents) - 1, -1, -1):  # children come after their parents
        if parents[node] >= 0:
            size[parents[node]] += size[node]
    enter, free = np.zeros(len(parents), np.int32), np.zeros(len(parents) + 1, np.int32)
    for node, parent in enumerate(parents):  # free[-1]: of the roots
        enter[node] = free[parent]
        free[parent] += size[node]
        free[node] = enter[node] + 1
    return enter, enter + size
