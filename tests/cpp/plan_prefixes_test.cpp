// Prefix discovery on host and device: the same cascade, the same plan. A failure prints the seed;
// RADDLE_SEED repeats it.
#include <cstdlib>
#include <numeric>

#include "plan/prefixes.h"
#include "plan_device_testing.h"
#include "raddle/engine/variant/composition.h"
#include "raddle/engine/variant/shipped.h"

namespace raddle::plan_testing {
namespace {

template <class F>
void repeat(i32 times, F&& f) {
  const char* given = std::getenv("RADDLE_SEED");
  const u32 seed =
      given ? static_cast<u32>(std::strtoul(given, nullptr, 10)) : std::random_device{}();
  for (u32 i = 0; i < static_cast<u32>(times) && !testing::Test::HasFailure(); ++i) {
    SCOPED_TRACE("RADDLE_SEED=" + std::to_string(seed + i));
    std::mt19937 random(seed + i);
    f(random);
  }
}

std::size_t at(i32 i) { return static_cast<std::size_t>(i); }

/// Requests whose lists begin with one of a few prefixes, cut short at random.
OwnedBatch random_shared(std::mt19937& random, i32 most_requests, i32 most_rows) {
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

PageLists lists_of(const OwnedBatch& batch, const std::vector<i32>& begin) {
  return PageLists{batch.qo_indptr, batch.kv_len, begin, batch.pages.data(), batch.page_size};
}

std::vector<i32> begins_of(const OwnedBatch& batch) {
  return {batch.page_indptr.begin(), batch.page_indptr.end() - 1};
}

/// The cascade as the host plans it.
OwnedLayout layout_of(const OwnedBatch& batch, const PrefixCascade& cascade) {
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

Maxima maxima_of(const OwnedBatch& batch, const PlanConfig& config, i32 spare) {
  return Maxima{batch.num_requests() + spare, batch.qo_indptr.back() + 3 * spare,
                std::accumulate(batch.kv_len.begin(), batch.kv_len.end(), i64{0}), 2,
                config.max_runs};
}

void expect_equal_list(const char* name, const i32* got, const std::vector<i32>& expected) {
  for (std::size_t i = 0; i < expected.size(); ++i)
    ASSERT_EQ(got[i], expected[i]) << name << "[" << i << "]";
}

template <class V>
CoverFns cover(const V& v) {
  if constexpr (has_mask<V>) return cover_of(v);
  return {};
}

template <class V>
void check(std::mt19937& random, const OwnedBatch& batch, const PlanConfig& config, i32 min_prefix,
           const V& v) {
  const std::vector<i32> begins = begins_of(batch);
  const PrefixCascade cascade = discover_prefixes(lists_of(batch, begins), min_prefix);
  OwnedLayout layout = layout_of(batch, cascade);
  const PlanArrays host = make_plan(layout.view(), config, cover(v));
  check_work(layout.view(), config, host.view());
  DeviceBatch on_device = batch.view();
  on_device.min_prefix = min_prefix;
  DevicePlanner<V> planner(v, on_device, config, maxima_of(batch, config, between(random, 0, 3)),
                           between(random, 0, 1) == 1);
  for (i32 i = 0; i < 2; ++i) {
    planner.run(random, 32 * between(random, 1, 3));
    EXPECT_EQ(planner.result.report.errors, 0);
    const LayoutArrays got = planner::layout_arrays(planner.result.launch);
    expect_equal_list("row_indptr", got.prefix_indptr, cascade.row_indptr);
    expect_equal_list("rows", got.prefix_rows, cascade.rows);
    expect_equal_list("columns", got.prefix_len, cascade.columns);
    expect_equal_list("block_begin", got.prefix_begin, cascade.block_begin);
    expect_equal_list("row_request", got.row_request, cascade.row_request);
    expect_equal_list("suffix", got.suffix, cascade.suffix);
    expect_equal_list("kv_begin", got.kv_begin, cascade.kv_begin);
    expect_equal_list("suffix_begin", got.block_begin, cascade.suffix_begin);
    expect_equal_plans(planner.result, host);
  }
}

PlanConfig random_config(std::mt19937& random) {
  PlanConfig config =
      config_for(between(random, 1, 40), between(random, 1, 4), between(random, 1, 9));
  config.schedule = Schedule::linear;
  return config;
}

TEST(Prefixes, DeviceAndHostFindTheSame) {
  repeat(25, [](std::mt19937& random) {
    const OwnedBatch batch = random_shared(random, 12, 20);
    const PlanConfig config = random_config(random);
    const i32 min_prefix = between(random, 1, 100);
    check(random, batch, config, min_prefix, Composition<NoMask>{});
    check(random, batch, config, min_prefix, Composition<Leaf<0>, Causal>{});
    Composition<AllOf<Leaf<0>, Leaf<1>>, SlidingWindow, Causal> window{};
    window.parts.first = SlidingWindow{between(random, 0, 300), -1};
    check(random, batch, config, min_prefix, window);
  });
}

TEST(Prefixes, ManyRequests) {
  repeat(4, [](std::mt19937& random) {
    check(random, random_shared(random, 150, 3), random_config(random), between(random, 1, 60),
          Composition<Leaf<0>, Causal>{});
  });
}

TEST(Prefixes, WhatIsSharedIsEqualAndWorthALevel) {
  std::size_t groups_found = 0;
  repeat(200, [&](std::mt19937& random) {
    const OwnedBatch batch = random_shared(random, 12, 20);
    const std::vector<i32> begins = begins_of(batch);
    const i32 min_prefix = between(random, 1, 100);
    const PrefixCascade found = discover_prefixes(lists_of(batch, begins), min_prefix);
    const i32 n = batch.num_requests();
    groups_found += found.columns.size();
    std::vector<i32> groups(batch.kv_len.size(), -1), members(found.columns.size());
    for (i32 g = 0; g < static_cast<i32>(found.columns.size()); ++g) {
      EXPECT_GE(found.columns[at(g)], min_prefix);
      EXPECT_EQ(found.columns[at(g)] % batch.page_size, 0);
      for (i32 i = found.row_indptr[at(g)]; i < found.row_indptr[at(g) + 1]; ++i) {
        const i32 r = found.row_request[at(found.rows[at(i)])];
        if (groups[at(r)] != g) ++members[at(g)];
        groups[at(r)] = g;
      }
      EXPECT_GE(members[at(g)], 2);
    }
    for (i32 r = 0; r < n; ++r) {
      const i32 g = groups[at(r)];
      const i32 shared = g < 0 ? 0 : found.columns[at(g)];
      EXPECT_EQ(found.kv_begin[at(r)], shared);
      EXPECT_EQ(found.suffix[at(r)], batch.kv_len[at(r)] - shared);
      EXPECT_EQ(found.suffix_begin[at(r)], begins[at(r)] + shared / batch.page_size);
      if (shared > 0) {
        EXPECT_GE(found.suffix[at(r)], batch.qo_indptr[at(r) + 1] - batch.qo_indptr[at(r)]);
      }
      for (i32 p = 0; p < shared / batch.page_size; ++p)
        EXPECT_EQ(batch.pages[at(begins[at(r)] + p)],
                  batch.pages[at(found.block_begin[at(g)] + p)]);
    }
  });
  EXPECT_GT(groups_found, 20u);
}

TEST(Prefixes, AllRequestsOfOnePrompt) {
  OwnedBatch batch;
  batch.page_size = 16;
  batch.page_indptr.push_back(0);
  for (i32 r = 0; r < 8; ++r) {
    batch.qo_indptr.push_back(r + 1);
    batch.kv_len.push_back(16 * 40 + 5 + r);
    for (i32 p = 0; p < 41; ++p) batch.pages.push_back(p < 40 ? p : 100 + r);
    batch.page_indptr.push_back(static_cast<i32>(batch.pages.size()));
  }
  const std::vector<i32> begins = begins_of(batch);
  const PrefixCascade found = discover_prefixes(lists_of(batch, begins), 256);
  EXPECT_EQ(found.columns, std::vector<i32>{640});
  EXPECT_EQ(found.rows.size(), 8u);
  EXPECT_EQ(discover_prefixes(lists_of(batch, begins), 641).columns.size(), 0u);
}

}  // namespace
}  // namespace raddle::plan_testing
