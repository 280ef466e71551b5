// Tree acceptance: of a tree of drafted tokens whose keys were appended in the order of its nodes,
// the accepted path's rows move to the front, so that the cache holds the text again.
#pragma once

#include "raddle/engine/kernel/cache/bytes.h"

namespace raddle {

/// Node n of request i's tree is row qo_indptr[i] + n of the layout, and lies where that row's key
/// does.
struct AcceptView {
  PoolBytes k, v;
  ScaleView k_scale, v_scale;  ///< of tokens; data null: none
  const i32* parents;          ///< [rows] the node's parent, an earlier node of its tree, or -1
  const i32* accepted;         ///< [requests] the last accepted node; -1: none
  i32* kv_len;                 ///< [requests] keys afterwards; null: not wanted
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

namespace kv {

/// Nodes on the path from a root to `node`, both included; 0 for -1. -1 where the path leaves the
/// tree: a parent that is no earlier node.
RADDLE_FN i32 path_length(const i32* parents, i32 num_nodes, i32 node) {
  if (node < -1 || node >= num_nodes) return -1;
  i32 length = 0;
  while (node >= 0) {
    const i32 parent = parents[node];
    if (parent < -1 || parent >= node) return -1;
    node = parent;
    ++length;
  }
  return length;
}

/// The node `up` steps above `node`.
RADDLE_FN i32 ancestor(const i32* parents, i32 node, i32 up) {
  for (; up > 0; --up) node = parents[node];
  return node;
}

/// Moves the bytes [offset, offset + bytes) of one head along the path, root first: a parent comes
/// before its child, so nothing is overwritten that is still to be read. Trees are shallow: walking
/// up again for every step costs less than a list of the path.
template <class Lanes>
RADDLE_FN void move_path(const Lanes& lanes, const PoolBytes& pool, const ScaleView& scale,
                         const LevelView& level, i32 request, const i32* parents, i32 last,
                         i32 length, i64 head) {
  const i32 first = first_new_column(level, request);
  for (i32 i = 0; i < length; ++i) {
    const i32 node = ancestor(parents, last, length - 1 - i);
    if (node == i) continue;
    const Column from = column_at(level, request, first + node);
    const Column to = column_at(level, request, first + i);
    if (!has_page(pool, from.block) || !has_page(pool, to.block)) continue;
    copy_bytes(lanes, head_at(pool, from.block, from.offset, head),
               head_at(pool, to.block, to.offset, head), pool.head_bytes);
    copy_scale(lanes, scale, scale, {from.block, from.offset}, {to.block, to.offset}, head);
  }
}

/// Keys of a request when its path has moved; trees that are none accept nothing.
RADDLE_FN i32 length_after(const AcceptView& view, const LayoutView& layout, const LevelView& level,
                           i32 request) {
  const i32 row = layout.qo_indptr[request];
  const i32 length =
      path_length(view.parents + row, layout.qo_indptr[request + 1] - row, view.accepted[request]);
  return first_new_column(level, request) + max(length, 0);
}

/// One head of one request.
template <class Lanes>
RADDLE_FN void accept_head(const Lanes& lanes, const AcceptView& view, const LayoutView& layout,
                           const LevelView& level, i32 request, i64 head) {
  const i32 row = layout.qo_indptr[request];
  const i32 nodes = layout.qo_indptr[request + 1] - row;
  const i32* parents = view.parents + row;
  const i32 last = view.accepted[request];
  const i32 length = path_length(parents, nodes, last);
  if (length > 0) {
    move_path(lanes, view.k, view.k_scale, level, request, parents, last, length, head);
    move_path(lanes, view.v, view.v_scale, level, request, parents, last, length, head);
  }
  if (view.kv_len && head == 0 && lanes.index() == 0)
    view.kv_len[request] = length_after(view, layout, level, request);
}

}  // namespace kv

RADDLE_ENGINE_END
