// Prefix discovery on host and device: the same cascade, the same plan. A failure prints the seed;
// RADDLE_SEED repeats it.
#include "plan_device_testing.h"
#include "raddle/engine/variant/composition.h"
#include "raddle/engine/variant/shipped.h"

namespace raddle::plan_testing {
namespace {

void expect_equal_list(const char* name, const i32* got, const std::vector<i32>& expected) {
  for (std::size_t i = 0; i < expected.size(); ++i)
    ASSERT_EQ(got[i], expected[i]) << name << "[" << i << "]";
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
  DevicePlanner<V> planner(v, on_device, config, maxima_of(batch, config, between(random, 0, 3), 2),
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
