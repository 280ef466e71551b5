#include "raddle/engine/kernel/kv/append.h"

#include <algorithm>
#include <atomic>
#include <string>

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

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::float16:
      return "float16";
    case DType::bfloat16:
      return "bfloat16";
    default:
      return "float32";
  }
}

std::string shape_text(const TensorRef& t) {
  std::string text = "[";
  for (std::size_t i = 0; i < static_cast<std::size_t>(t.rank); ++i) {
    text += (i ? ", " : "") + std::to_string(t.shape[i]);
  }
  return text + "]";
}

i64 num_elements(const TensorRef& t) {
  i64 n = 1;
  for (std::size_t i = 0; i < static_cast<std::size_t>(t.rank); ++i) n *= t.shape[i];
  return n;
}

void check_tensor(const char* name, const TensorRef& t, int rank, const char* expected) {
  if (t.rank != rank) {
    fail<ValueError>(name, " has ", t.rank, " dimensions; expected ", rank, " ", expected);
  }
  const auto last = static_cast<std::size_t>(rank - 1);
  for (std::size_t i = 0; i <= last; ++i) {
    if (t.shape[i] < 0)
      fail<ValueError>(name, " has shape ", shape_text(t), "; expected none below 0");
  }
  if (t.shape[last] > 1 && t.stride[last] != 1) {
    fail<ValueError>(name, " has stride ", t.stride[last], " in its last dimension; expected 1");
  }
  if (!t.data && num_elements(t) > 0) fail<ValueError>(name, " has no data");
}

/// Where heads and slots stand in a pool's shape.
struct PoolAxes {
  std::size_t slot, head;
};

PoolAxes pool_axes(HeadOrder order) {
  return order == HeadOrder::nhd ? PoolAxes{1, 2} : PoolAxes{2, 1};
}

/// One of K and V: the new rows fit the pool, and the pool fits the layout.
void check_pair(const std::string& letter, const Layout& layout, const TensorRef& rows,
                const TensorRef& pool) {
  const Level& level = layout.levels()[0];
  const bool nhd = level.order == HeadOrder::nhd;
  const std::string rows_name = letter + "_new";
  const std::string pool_name = "pool." + letter;
  check_tensor(rows_name.c_str(), rows, 3, "[rows, heads, head_dim]");
  check_tensor(pool_name.c_str(), pool, 4,
               nhd ? "[pages, page_size, heads, head_dim] (NHD)"
                   : "[pages, heads, page_size, head_dim] (HND)");
  const PoolAxes axes = pool_axes(level.order);
  if (rows.dtype != pool.dtype) {
    fail<TypeError>(rows_name, " is ", dtype_name(rows.dtype), "; expected ",
                    dtype_name(pool.dtype), ", as ", pool_name, " is");
  }
  if (rows.shape[0] != layout.num_rows()) {
    fail<ValueError>(rows_name, " has ", rows.shape[0], " rows; expected ", layout.num_rows(),
                     ", the last of qo_indptr");
  }
  if (pool.shape[axes.slot] != level.block_size) {
    fail<ValueError>(pool_name, " has shape ", shape_text(pool), ", so page_size ",
                     pool.shape[axes.slot], " (", nhd ? "NHD" : "HND", "); expected ",
                     level.block_size, ", the layout's");
  }
  if (pool.shape[axes.head] != rows.shape[1] || pool.shape[3] != rows.shape[2]) {
    fail<ValueError>(pool_name, " has ", pool.shape[axes.head], " heads of ", pool.shape[3],
                     "; expected ", rows.shape[1], " heads of ", rows.shape[2], ", as ", rows_name,
                     " has");
  }
  for (std::size_t i = 0; i < 3; ++i) {
    // A broadcast pool would have several threads write one place.
    if (pool.shape[i] > 1 && pool.stride[i] == 0) {
      fail<ValueError>(pool_name, " has stride 0 in dimension ", i,
                       "; expected distinct elements, as they are written");
    }
  }
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
  view.slot_step = pool.stride[axes.slot] * bytes;
  view.pool_head_step = pool.stride[axes.head] * bytes;
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
