// Batches as a caller holds them on a device, drawn at random, and their layouts for the host's
// planner.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "plan/prefixes.h"
#include "plan_testing.h"
#include "raddle/engine/kernel/gpu_planner/launch.h"
#include "test_seed.h"

namespace raddle::plan_testing {

inline std::size_t at(i32 i) { return static_cast<std::size_t>(i); }

/// A batch as a caller holds it on the device.
struct OwnedBatch {
  std::vector<i32> qo_indptr{0}, kv_len, kv_indptr, page_indptr, pages;
  i64 row_stride = 0;
  i32 page_size = 0;  ///< 0: ragged keys
  i32 num_pages = 0;

  i32 num_requests() const { return static_cast<i32>(qo_indptr.size()) - 1; }
  DeviceBatch view() const {
    DeviceBatch b{};
    b.num_requests = num_requests();
    b.qo_indptr = qo_indptr.data();
    b.kv_len = kv_len.data();
    b.kv_indptr = kv_indptr.data();
    if (page_size > 0) b.pages = pages.data();
    if (!page_indptr.empty()) b.page_indptr = page_indptr.data();
    b.row_stride = row_stride;
    b.num_entries = page_indptr.empty() ? row_stride : static_cast<i64>(pages.size());
    if (page_size == 0) b.num_entries = kv_indptr.back();
    b.page_size = page_size;
    b.num_pages = num_pages;
    return b;
  }
};

template <class F>
void repeat(i32 times, F&& f) {
  const u32 seed = test_seed();
  for (u32 i = 0; i < static_cast<u32>(times) && !testing::Test::HasFailure(); ++i) {
    SCOPED_TRACE(seed_text(seed + i));
    std::mt19937 random(seed + i);
    f(random);
  }
}

inline PlanConfig random_config(std::mt19937& random) {
  PlanConfig config =
      config_for(between(random, 1, 40), between(random, 1, 4), between(random, 1, 9));
  config.schedule = Schedule::linear;
  config.max_runs = between(random, 0, 1) * between(random, 1, 5);
  if (between(random, 0, 1)) config.costs[short_queries].per_item = between(random, 0, 100000);
  if (between(random, 0, 1))
    config.costs[short_queries].per_level_tile = between(random, 1, 100000);
  config.has_openings = between(random, 0, 1) == 1;
  config.keeps_in_step = between(random, 0, 1) == 1;
  return config;
}

/// The same, with cuts at absolute columns.
inline PlanConfig random_invariant_config(std::mt19937& random) {
  PlanConfig config = random_config(random);
  config.batch_invariant = true;
  config.invariant_chunk = between(random, 1, 300);
  return config;
}

/// Lengths, pages and the way they are listed, at random. Unused entries name no page.
inline OwnedBatch random_batch(std::mt19937& random, i32 most_requests, i32 most_rows,
                               i32 most_keys) {
  OwnedBatch batch;
  batch.kv_len.reserve(1);  // never null
  const i32 requests = between(random, 0, most_requests);
  const i32 kind = between(random, 0, 2);
  batch.page_size = kind == 0 ? 0 : 1 << between(random, 0, 5);
  if (kind > 0) batch.num_pages = between(random, 0, 1) * 1000;
  batch.kv_indptr.push_back(0);
  if (kind == 1) batch.page_indptr.push_back(0);
  if (kind == 2) batch.row_stride = ceil_div(most_keys, batch.page_size) + between(random, 0, 3);
  for (i32 i = 0; i < requests; ++i) {
    const bool decode = between(random, 0, 1) == 1;
    batch.qo_indptr.push_back(batch.qo_indptr.back() +
                              (decode ? between(random, 0, 1) : between(random, 0, most_rows)));
    batch.kv_len.push_back(between(random, 0, 5) == 0 ? 0 : between(random, 0, most_keys));
    batch.kv_indptr.push_back(batch.kv_indptr.back() + batch.kv_len.back());
    if (kind == 0) continue;
    const i32 used = ceil_div(batch.kv_len.back(), batch.page_size);
    const i32 listed =
        kind == 2 ? static_cast<i32>(batch.row_stride) : used + between(random, 0, 2);
    for (i32 p = 0; p < listed; ++p) batch.pages.push_back(p < used ? between(random, 0, 999) : -7);
    if (kind == 1) batch.page_indptr.push_back(static_cast<i32>(batch.pages.size()));
  }
  batch.pages.push_back(-7);
  return batch;
}

/// The batch's layout for the host's planner.
inline OwnedLayout host_layout(const OwnedBatch& batch) {
  std::vector<i32> qo_len;
  for (i32 i = 0; i < batch.num_requests(); ++i)
    qo_len.push_back(batch.qo_indptr[static_cast<std::size_t>(i) + 1] -
                     batch.qo_indptr[static_cast<std::size_t>(i)]);
  return paged(qo_len, batch.kv_len, std::max(batch.page_size, 1));
}

/// Maxima that hold the batch, and a little more.
inline Maxima maxima_of(const OwnedBatch& batch, const PlanConfig& config, i32 spare,
                        i32 levels = 1) {
  return Maxima{batch.num_requests() + spare,
                *std::max_element(batch.qo_indptr.begin(), batch.qo_indptr.end()) + 3 * spare,
                std::accumulate(batch.kv_len.begin(), batch.kv_len.end(), i64{0}) + 100 * spare,
                levels, config.max_runs};
}

/// Requests whose lists begin with one of a few prefixes, cut short at random.
inline OwnedBatch random_shared(std::mt19937& random, i32 most_requests, i32 most_rows) {
  OwnedBatch batch;
  batch.page_size = 1 << between(random, 0, 4);
  batch.num_pages = between(random, 0, 1) * 100000;
  batch.page_indptr.push_back(0);
  batch.kv_indptr.push_back(0);
  batch.kv_len.reserve(1);
  const i32 requests = between(random, 0, most_requests);
  i32 next = 1000;
  for (i32 r = 0; r < requests; ++r) {
    const i32 kind = between(random, 0, 3);
    const i32 shared = kind == 0 ? 0 : between(random, 0, 40);
    const i32 keys = between(random, 0, 60 * batch.page_size);
    const i32 rows =
        between(random, 0, 3) > 0 ? between(random, 0, 1) : between(random, 0, most_rows);
    batch.qo_indptr.push_back(batch.qo_indptr.back() + rows);
    batch.kv_len.push_back(keys);
    for (i32 p = 0; p < ceil_div(keys, batch.page_size); ++p)
      batch.pages.push_back(p < shared ? 100 * kind + p : next++);
    batch.page_indptr.push_back(static_cast<i32>(batch.pages.size()));
  }
  batch.pages.push_back(-7);
  return batch;
}

inline PageLists lists_of(const OwnedBatch& batch, const std::vector<i32>& begin) {
  return PageLists{batch.qo_indptr, batch.kv_len, begin, batch.pages.data(), batch.page_size};
}

inline std::vector<i32> begins_of(const OwnedBatch& batch) {
  return {batch.page_indptr.begin(), batch.page_indptr.end() - 1};
}

/// The cascade as the host plans it.
inline OwnedLayout layout_of(const OwnedBatch& batch, const PrefixCascade& cascade) {
  OwnedLayout layout;
  layout.qo_indptr = batch.qo_indptr;
  layout.kv_len = batch.kv_len;
  layout.row_request = cascade.row_request;
  OwnedLevel prefix, last;
  prefix.groups_are_requests = false;
  prefix.block_size = last.block_size = batch.page_size;
  prefix.row_indptr = cascade.row_indptr;
  prefix.rows = cascade.rows;
  prefix.columns = cascade.columns;
  prefix.block_begin = cascade.block_begin;
  prefix.blocks = last.blocks = batch.pages;
  last.row_indptr = batch.qo_indptr;
  last.columns = cascade.suffix;
  last.kv_begin = cascade.kv_begin;
  last.block_begin = cascade.suffix_begin;
  layout.levels = {prefix, last};
  return layout;
}

}  // namespace raddle::plan_testing
