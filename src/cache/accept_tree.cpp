// Accepting a path of a token tree.
#include <algorithm>
#include <tuple>
#include <vector>

#include "cache/checks.h"
#include "cache/on_device.h"
#include "layout/normal_form.h"
#include "layout/token_tree.h"
#include "raddle/engine/kernel/cache/accept.h"
#include "raddle/error.h"
#include "raddle/kv.h"

namespace raddle {
namespace {

/// The accepted paths, root first, one request's behind another's.
struct Paths {
  std::vector<i32> nodes;
  std::vector<i32> begin{0};  ///< [requests + 1]
};

/// Raises unless the parents form trees and every accepted node lies in its request's tree.
Paths find_paths(const LayoutView& layout, const LevelView& level, const std::vector<i32>& parents,
                 const std::vector<i32>& accepted) {
  Paths paths;
  for (i32 i = 0; i < layout.num_requests; ++i) {
    const i32 row = layout.qo_indptr[i], nodes = layout.qo_indptr[i + 1] - row;
    if (kv::first_new_column(level, i) < 0)
      fail<ValueError>("kv_len[", i, "] is ", level.columns[i], "; expected at least ", nodes,
                       ", the nodes of that request's tree");
    check_tree(parents.data() + row, nodes, i, row);
    const i32 last = accepted[static_cast<std::size_t>(i)];
    if (last < -1 || last >= nodes)
      fail<ValueError>("accepted[", i, "] is ", last, "; expected a node of that request's ", nodes,
                       ", or -1 for none");
    for (i32 node = last; node >= 0; node = parents[static_cast<std::size_t>(row + node)])
      paths.nodes.push_back(node);
    std::reverse(paths.nodes.begin() + paths.begin.back(), paths.nodes.end());
    paths.begin.push_back(static_cast<i32>(paths.nodes.size()));
  }
  return paths;
}

/// The pages of the nodes that are read or written.
void check_path_pages(const LevelView& level, const Paths& paths, i64 pages) {
  for (std::size_t i = 0; i + 1 < paths.begin.size(); ++i) {
    const auto request = static_cast<i32>(i);
    const i32 first = kv::first_new_column(level, request), begin = paths.begin[i];
    for (i32 to = paths.begin[i + 1] - begin - 1; to >= 0; --to) {
      const i32 node = paths.nodes[static_cast<std::size_t>(begin + to)];
      check_page(level, request, (first + node) / level.block_size, pages,
                 "an accepted node lies in");
      check_page(level, request, (first + to) / level.block_size, pages,
                 "an accepted node moves to");
    }
  }
}

/// A slot that a path's rows leave or go to.
struct PathSlot {
  i32 page, offset, request, column;
  bool written;
};

/// Raises where a row goes to a slot that another one of the paths leaves or goes to: a page twice
/// in a request, or requests that share one where they differ.
void check_path_slots(const LevelView& level, const Paths& paths) {
  std::vector<PathSlot> slots;
  for (std::size_t i = 0; i + 1 < paths.begin.size(); ++i) {
    const auto request = static_cast<i32>(i);
    const i32 first = kv::first_new_column(level, request), begin = paths.begin[i];
    const auto add = [&](i32 column, bool written) {
      const i32* pages = level.blocks + level.block_begin[request];
      slots.push_back(
          {pages[column / level.block_size], column % level.block_size, request, column, written});
    };
    for (i32 to = 0; to < paths.begin[i + 1] - begin; ++to) {
      const i32 node = paths.nodes[static_cast<std::size_t>(begin + to)];
      if (node == to) continue;
      add(first + node, false);
      add(first + to, true);
    }
  }
  const auto place = [](const PathSlot& x) { return std::tie(x.page, x.offset); };
  std::sort(slots.begin(), slots.end(),
            [&](const PathSlot& a, const PathSlot& b) { return place(a) < place(b); });
  for (std::size_t i = 1; i < slots.size(); ++i) {
    const PathSlot &a = slots[i - 1], &b = slots[i];
    if (place(a) != place(b) || (!a.written && !b.written)) continue;
    if (a.request == b.request && a.column == b.column) continue;
    fail<ValueError>("page_indices has page ", a.page, " for key ", a.column, " of request ",
                     a.request, " and for key ", b.column, " of request ", b.request,
                     ", where accepted nodes move to; expected pages of their own");
  }
}

}  // namespace

void accept_tree(const Layout& layout, const KvRef& pool, const IndexRef& parents,
                 const IndexRef& accepted, i32* kv_len, void* stream) {
  const LevelView& level = check_page_table(layout, "of which the rows are a tree's nodes");
  const LayoutView& batch = layout.view();
  check_pool("pool.k", pool.k, layout);
  check_pool("pool.v", pool.v, layout);
  check_distinct("pool.k", pool.k);
  check_distinct("pool.v", pool.v);
  const bool v_moves_with_k = check_pair_apart("pool", pool);
  const HeadOrder order = layout.levels()[0].order;
  check_heads(pool, order);
  const ScaleView k_scale = moved_scales("k_scale", pool.k_scale, "pool.k", pool.k, order);
  const ScaleView v_scale = moved_scales("v_scale", pool.v_scale, "pool.v", pool.v, order);
  const auto tree = copy_index("parents", parents, static_cast<std::size_t>(batch.num_rows),
                               "one a row of the batch");
  const auto last = copy_index("accepted", accepted, static_cast<std::size_t>(batch.num_requests),
                               "one a request");
  const bool one_scale = check_scales_apart("pool", pool);
  const Paths paths = find_paths(batch, level, tree, last);
  check_path_pages(level, paths, std::min(dim(pool.k, 0), dim(pool.v, 0)));
  check_path_slots(level, paths);

  const DeviceId device = common_device({{"pool.k", pool.k}, {"pool.v", pool.v}});
  AcceptView view{pool_bytes(pool.k, order), pool_bytes(pool.v, order), k_scale, v_scale,
                  paths.nodes.data(),        paths.begin.data(),        kv_len};
  if (v_moves_with_k) view.v.head_bytes = 0;
  if (one_scale) view.v_scale = {};  // moved once
  const i64 requests = batch.num_requests;
  if (is_gpu(device)) {
    for (i32 i = 0; kv_len && i < requests; ++i) kv_len[i] = kv::length_after(view, level, i);
    AcceptView there = view;
    there.kv_len = nullptr;
    return cuda::accept({device, stream}, layout, there, pool.k.dtype);
  }
  const i64 bytes = (view.k.head_bytes + view.v.head_bytes) * view.k.num_heads *
                    (paths.begin.back() / std::max<i64>(1, requests) + 1);
  share_units(requests, bytes, [&](i64 begin, i64 end) {
    for (i64 i = begin; i < end; ++i) {
      // A pool without heads has nothing to move, but the lengths must be written nevertheless.
      for (i64 head = 0; head < std::max(view.k.num_heads, 1); ++head)
        kv::accept_head(kv::Alone{}, view, level, static_cast<i32>(i), head);
    }
  });
}

}  // namespace raddle
