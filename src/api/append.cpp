#include "raddle/engine/kernel/kv/append.h"

#include <algorithm>
#include <atomic>
#include <string>

#include "api/kv_tensors.h"
#include "device/cpu/pool.h"
#include "raddle/attention.h"
#include "raddle/error.h"

namespace raddle {
namespace {

// A copy of this size takes about as long as waking the workers.
constexpr i64 parallel_bytes = i64{512} << 10;
// What a thread takes at a time: small enough to share evenly, large enough to make the counter
// cheap.
constexpr i64 chunk_bytes = i64{64} << 10;

/// Of any shape of that rank: what fits what is checked afterwards.
void check_rank(const std::string& name, const TensorRef& t, int rank, const char* expected) {
  if (t.rank != rank) {
    fail<ValueError>(name, " has ", t.rank, " dimensions; expected ", rank, " ", expected);
  }
  check_storage(name, t);
}

/// One of K and V: the new rows fit the pool, and the pool fits the layout.
void check_pair(const std::string& letter, const Layout& layout, const TensorRef& rows,
                const TensorRef& pool) {
  const Level& level = layout.levels()[0];
  const bool nhd = level.order == HeadOrder::nhd;
  const std::string rows_name = letter + "_new";
  const std::string pool_name = "pool." + letter;
  check_rank(rows_name, rows, 3, "[rows, heads, head_dim]");
  check_rank(pool_name, pool, 4,
             nhd ? "[pages, page_size, heads, head_dim] (NHD)"
                 : "[pages, heads, page_size, head_dim] (HND)");
  const PoolAxes axes = pool_axes(level.order);
  if (rows.dtype != pool.dtype) {
    fail<TypeError>(rows_name, " is ", name_of(rows.dtype), "; expected ", name_of(pool.dtype),
                    ", as ", pool_name, " is");
  }
  if (rows.shape[0] != layout.num_rows()) {
    fail<ValueError>(rows_name, " has ", rows.shape[0], " rows; expected ", layout.num_rows(),
                     ", the last of qo_indptr");
  }
  if (dim(pool, axes.slot) != level.block_size) {
    fail<ValueError>(pool_name, " has shape ", shape_text(pool), ", so page_size ",
                     dim(pool, axes.slot), " (", nhd ? "NHD" : "HND", "); expected ",
                     level.block_size, ", the layout's");
  }
  if (dim(pool, axes.head) != rows.shape[1] || pool.shape[3] != rows.shape[2]) {
    fail<ValueError>(pool_name, " has ", dim(pool, axes.head), " heads of ", pool.shape[3],
                     "; expected ", rows.shape[1], " heads of ", rows.shape[2], ", as ", rows_name,
                     " has");
  }
  check_distinct(pool_name, pool);
}

void check_layout(const Layout& layout) {
  if (layout.levels().size() != 1) {
    fail<ValueError>("layout has ", layout.levels().size(),
                     " levels; expected one page table to append to");
  }
  const Level& level = layout.levels()[0];
  const bool plain = level.storage == KvStorage::paged && level.groups_are_requests &&
                     level.block_index.empty() && level.block_first.empty() &&
                     level.block_count.empty() && level.mask_bits.empty();
  if (!plain) {
    fail<ValueError>(
        "layout is not a plain page table of requests (paged_kv without qo_rows); "
        "only such a layout says where new keys go");
  }
}

/// Every page that a new row goes to exists. Other pages aren't touched and may be anything.
void check_pages(const Layout& layout, i64 pages) {
  const LevelView& level = layout.view().levels[0];
  for (i32 i = 0; i < layout.num_requests(); ++i) {
    const i32 rows = group_rows(level, i);
    const i32 first = first_new_column(level, i);
    if (first < 0) {
      fail<ValueError>("kv_len[", i, "] is ", level.columns[i], "; expected at least ", rows,
                       ", the new rows of that request");
    }
    if (rows == 0) continue;
    for (i32 nth = first / level.block_size; nth <= (level.columns[i] - 1) / level.block_size;
         ++nth) {
      const i32 page = level.blocks[level.block_begin[i] + nth];
      if (page < 0 || page >= pages) {
        fail<ValueError>("page_indices has ", page, " as page ", nth, " of request ", i,
                         ", which new rows go to; expected 0 to ", pages - 1);
      }
    }
  }
}

AppendView append_view(const TensorRef& rows, const TensorRef& pool, HeadOrder order) {
  const i64 bytes = dtype_bytes(rows.dtype);
  const PoolAxes axes = pool_axes(order);
  AppendView view{};
  view.rows = static_cast<const u8*>(rows.data);
  view.row_step = rows.stride[0] * bytes;
  view.head_step = rows.stride[1] * bytes;
  view.pool = static_cast<u8*>(pool.data);
  view.page_step = pool.stride[0] * bytes;
  view.slot_step = step(pool, axes.slot) * bytes;
  view.pool_head_step = step(pool, axes.head) * bytes;
  view.head_bytes = rows.shape[2] * bytes;
  view.num_heads = static_cast<i32>(rows.shape[1]);
  return view;
}

}  // namespace

void append_kv(const Layout& layout, const TensorRef& k_new, const TensorRef& v_new,
               const KvRef& pool) {
  check_layout(layout);
  check_pair("k", layout, k_new, pool.k);
  check_pair("v", layout, v_new, pool.v);
  if (k_new.shape[1] != v_new.shape[1]) {
    fail<ValueError>("v_new has ", v_new.shape[1], " heads; expected ", k_new.shape[1],
                     ", as k_new has");
  }
  check_pages(layout, std::min(pool.k.shape[0], pool.v.shape[0]));

  const HeadOrder order = layout.levels()[0].order;
  const AppendView k = append_view(k_new, pool.k, order);
  const AppendView v = append_view(v_new, pool.v, order);
  const i64 row_bytes = (k.head_bytes + v.head_bytes) * k.num_heads;
  const i64 rows = layout.num_rows();
  if (rows == 0 || row_bytes == 0) return;
  const i64 chunk = std::max<i64>(1, chunk_bytes / row_bytes);
  const i64 chunks = ceil_div(rows, chunk);
  auto& workers = cpu::WorkerPool::instance();
  const i32 threads = rows * row_bytes < parallel_bytes
                          ? 1
                          : static_cast<i32>(std::min<i64>(workers.threads(), chunks));
  std::atomic<i64> next{0};
  workers.run(threads, [&](i32, i32) {
    for (i64 c = next.fetch_add(1); c < chunks; c = next.fetch_add(1)) {
      append_rows(layout.view(), k, v, static_cast<i32>(c * chunk),
                  static_cast<i32>(std::min(rows, (c + 1) * chunk)));
    }
  });
}

}  // namespace raddle
