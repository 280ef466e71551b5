// Accepting a path of a token tree.
#include "cache/checks.h"
#include "cache/on_device.h"
#include "layout/normal_form.h"
#include "layout/token_tree.h"
#include "raddle/engine/kernel/cache/accept.h"
#include "raddle/error.h"
#include "raddle/kv.h"

namespace raddle {
namespace {

/// Raises unless the parents form trees and every accepted node lies in its request's tree. Returns
/// the number of nodes on all paths.
i64 check_trees(const LayoutView& layout, const LevelView& level, const std::vector<i32>& parents,
                const std::vector<i32>& accepted) {
  i64 moved = 0;
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
    moved += kv::path_length(parents.data() + row, nodes, last);
  }
  return moved;
}

/// The pages of the nodes that are read or written.
void check_path_pages(const LayoutView& layout, const LevelView& level,
                      const std::vector<i32>& parents, const std::vector<i32>& accepted,
                      i64 pages) {
  for (i32 i = 0; i < layout.num_requests; ++i) {
    const i32 row = layout.qo_indptr[i], last = accepted[static_cast<std::size_t>(i)];
    const i32 first = kv::first_new_column(level, i);
    const i32* tree = parents.data() + row;
    const i32 length = kv::path_length(tree, layout.qo_indptr[i + 1] - row, last);
    i32 node = last;
    for (i32 to = length - 1; to >= 0; --to, node = tree[node]) {
      check_page(level, i, (first + node) / level.block_size, pages, "an accepted node lies in");
      check_page(level, i, (first + to) / level.block_size, pages, "an accepted node moves to");
    }
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
  const i64 moved = check_trees(batch, level, tree, last);
  check_path_pages(batch, level, tree, last, std::min(dim(pool.k, 0), dim(pool.v, 0)));

  const DeviceId device = common_device({{"pool.k", pool.k}, {"pool.v", pool.v}});
  AcceptView view{pool_bytes(pool.k, order),
                  pool_bytes(pool.v, order),
                  k_scale,
                  v_scale,
                  tree.data(),
                  last.data(),
                  kv_len};
  if (v_moves_with_k) view.v.head_bytes = 0;
  const i64 requests = batch.num_requests;
  if (is_gpu(device)) {
    // The paths are known here, so their lengths are, too.
    for (i32 i = 0; kv_len && i < requests; ++i)
      kv_len[i] = kv::length_after(view, batch, level, i);
    AcceptView there = view;
    there.kv_len = nullptr;
    return cuda::accept({device, stream}, layout, there, pool.k.dtype);
  }
  const i64 bytes = (view.k.head_bytes + view.v.head_bytes) * view.k.num_heads *
                    (moved / std::max<i64>(1, requests) + 1);
  share_units(requests, bytes, [&](i64 begin, i64 end) {
    for (i64 i = begin; i < end; ++i) {
      // A pool without heads has nothing to move, but the lengths must be written nevertheless.
      for (i64 head = 0; head < std::max(view.k.num_heads, 1); ++head)
        kv::accept_head(kv::Alone{}, view, batch, level, static_cast<i32>(i), head);
    }
  });
}

}  // namespace raddle
