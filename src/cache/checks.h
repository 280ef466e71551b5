// Checks of layouts and pools that the functions on a KV cache share, and how they divide work
// among threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <string>

#include "backend/kv_tensors.h"
#include "device/cpu/pool.h"
#include "raddle/engine/kernel/cache/bytes.h"

namespace raddle {

/// The level of a layout that is a plain page table of requests; `why` ends the error for others
/// ("to append to").
const LevelView& check_page_table(const Layout& layout, const char* why);

/// Raises unless `pool` is one of pages, with any number of heads and any head dimension.
void check_pool(const std::string& name, const TensorRef& pool, HeadOrder order);

/// Raises unless it holds the layout's pages, too.
void check_pool(const std::string& name, const TensorRef& pool, const Layout& layout);

/// Raises unless V has as many heads as K.
void check_heads(const KvRef& pool, HeadOrder order);

/// K and V of a pool that is written page by page, `name` "pool" or "to": apart; or V is columns of
/// K (MLA), which move with it. Raises otherwise. Returns whether V is.
bool check_pair_apart(const std::string& name, const KvRef& pool);

/// Scales of tokens that are written with a pool, `name` "pool" or "to", lie apart from its K and V
/// and from each other, or are one tensor for both. Raises otherwise. Returns whether they are.
bool check_scales_apart(const std::string& name, const KvRef& pool);

/// Raises unless `request` has a page `nth` in the pool; `why` ("new rows go to") says what needs
/// it.
void check_page(const LevelView& level, i32 request, i32 nth, i64 pages, const char* why);

/// Raises unless a row can be processed 8 elements at a time.
void check_head_dim(const std::string& name, i64 head_dim, const char* why = "");

/// Scales of a pool's tokens, which move together with its rows; without data where none are given.
/// The pool is [pages, …] of rank 3 or 4.
ScaleView moved_scales(const std::string& name, const ScaleRef& scale, const std::string& pool_name,
                       const TensorRef& pool, HeadOrder order);

/// Scales of any kind: one for all, per head, or per token and head.
ScaleView pool_scale(const std::string& name, const ScaleRef& scale, const std::string& pool_name,
                     const TensorRef& pool, HeadOrder order);

PoolBytes pool_bytes(const TensorRef& pool, HeadOrder order);

/// Calls f(begin, end) for parts of [0, units), on several threads where `unit_bytes` per unit are
/// enough traffic to wake them for.
template <class F>
void share_units(i64 units, i64 unit_bytes, F f) {
  // Traffic of this size takes about as long as waking the workers.
  constexpr i64 parallel_bytes = i64{512} << 10;
  // What a thread takes at a time: small enough to share evenly, large enough to make the counter
  // cheap.
  constexpr i64 part_bytes = i64{64} << 10;
  if (units <= 0) return;
  const i64 part = std::max<i64>(1, part_bytes / std::max<i64>(1, unit_bytes));
  const i64 parts = ceil_div(units, part);
  auto& workers = cpu::WorkerPool::instance();
  const i32 threads = units * unit_bytes < parallel_bytes
                          ? 1
                          : static_cast<i32>(std::min<i64>(workers.threads(), parts));
  std::atomic<i64> next{0};
  workers.run(threads, [&](i32, i32) {
    for (i64 i = next.fetch_add(1); i < parts; i = next.fetch_add(1))
      f(i * part, std::min(units, (i + 1) * part));
  });
}

}  // namespace raddle
