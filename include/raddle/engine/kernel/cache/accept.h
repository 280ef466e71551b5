// Tree acceptance: of a tree of drafted tokens whose keys were appended in the order of its nodes,
// the accepted path's rows move to the front, so that the cache holds the text again.
#pragma once

#include "raddle/engine/kernel/cache/bytes.h"

namespace raddle {

/// Node n of request i's tree is row qo_indptr[i] + n of the layout, and lies where that row's key
/// does. The host finds the paths: following parents anew for every node takes their square.
struct AcceptView {
  PoolBytes k, v;
  ScaleView k_scale, v_scale;  ///< of tokens; data null: none
  const i32* path;             ///< nodes of the accepted paths, request by request, each root first
  const i32* path_begin;       ///< [requests + 1] where a request's path begins
  i32* kv_len;                 ///< [requests] keys afterwards; null: not wanted
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

namespace kv {

/// Moves the bytes of one head along a path. A parent is an earlier node than its child, so nothing
/// is overwritten that is still to be read.
template <class Lanes>
RADDLE_FN void move_path(const Lanes& lanes, const PoolBytes& pool, const ScaleView& scale,
                         const LevelView& level, i32 request, const i32* path, i32 length,
                         i64 head) {
  const i32 first = first_new_column(level, request);
  for (i32 i = 0; i < length; ++i) {
    if (path[i] == i) continue;
    const Column from = column_at(level, request, first + path[i]);
    const Column to = column_at(level, request, first + i);
    if (!has_page(pool, from.block) || !has_page(pool, to.block)) continue;
    copy_bytes(lanes, head_at(pool, from.block, from.offset, head),
               head_at(pool, to.block, to.offset, head), pool.head_bytes);
    copy_scale(lanes, scale, scale, {from.block, from.offset}, {to.block, to.offset}, head);
  }
}

/// Keys of a request when its path has moved.
RADDLE_FN i32 length_after(const AcceptView& view, const LevelView& level, i32 request) {
  return first_new_column(level, request) + view.path_begin[request + 1] - view.path_begin[request];
}

/// One head of one request.
template <class Lanes>
RADDLE_FN void accept_head(const Lanes& lanes, const AcceptView& view, const LevelView& level,
                           i32 request, i64 head) {
  const i32* path = view.path + view.path_begin[request];
  const i32 length = view.path_begin[request + 1] - view.path_begin[request];
  move_path(lanes, view.k, view.k_scale, level, request, path, length, head);
  move_path(lanes, view.v, view.v_scale, level, request, path, length, head);
  if (view.kv_len && head == 0 && lanes.index() == 0)
    view.kv_len[request] = length_after(view, level, request);
}

}  // namespace kv

RADDLE_ENGINE_END
