// The planner kernel, on emulated threads: the host's plan byte for byte. A failure prints the
// seed that repeats it.
#include "plan_device_testing.h"
#include "raddle/engine/variant/composition.h"
#include "raddle/engine/variant/shipped.h"
#include "raddle/error.h"

namespace raddle::plan_testing {
namespace {

template <class V>
void check(std::mt19937& random, const OwnedBatch& batch, const PlanConfig& config, const V& v) {
  DevicePlanner<V> planner(v, batch.view(), config, maxima_of(batch, config, between(random, 0, 3)),
                           between(random, 0, 1) == 1);
  OwnedLayout layout = host_layout(batch);
  const PlanArrays host = make_plan(layout.view(), config, cover(v));
  for (i32 i = 0; i < 2; ++i) {  // a second launch finds its memory as the first one did
    planner.run(random, 32 * between(random, 1, 3));
    EXPECT_EQ(planner.result.report.errors, 0);
    expect_equal_plans(planner.result, host);
  }
}

void check_all(std::mt19937& random, const OwnedBatch& batch, const PlanConfig& config) {
  check(random, batch, config, Composition<NoMask>{});
  check(random, batch, config, Composition<Leaf<0>, Causal>{});
  Composition<AllOf<Leaf<1>, Leaf<2>>, SoftCap, SlidingWindow, Causal> gemma{};
  gemma.variants.rest.first = SlidingWindow{between(random, 0, 300), -1};
  check(random, batch, config, gemma);
}

TEST(DevicePlan, IsTheHosts) {
  repeat(25, [](std::mt19937& random) {
    check_all(random, random_batch(random, 9, 70, 900), random_config(random));
  });
}

TEST(DevicePlan, IsTheHostsWithFixedChunks) {
  repeat(25, [](std::mt19937& random) {
    check_all(random, random_batch(random, 9, 70, 900), random_invariant_config(random));
  });
  repeat(3, [](std::mt19937& random) {
    check_all(random, random_batch(random, 200, 3, 300), random_invariant_config(random));
  });
}

TEST(DevicePlan, FixedChunksOfOneRequestFillWhatThereIsRoomFor) {
  std::mt19937 random(1);
  PlanConfig config = config_for(1000, 2, 1);
  config.schedule = Schedule::linear;
  config.batch_invariant = true;
  config.invariant_chunk = 1;
  config.shapes[long_queries].keys = config.shapes[short_queries].keys;
  const i32 chunk = static_cast<i32>(least_absolute_chunk(config));
  OwnedBatch batch;  // ragged
  batch.qo_indptr = {0, 1};
  batch.kv_len = {7 * chunk + 1};
  batch.kv_indptr = {0, 7 * chunk + 1};
  const Composition<NoMask> plain{};
  DevicePlanner planner(plain, batch.view(), config, maxima_of(batch, config, 0));
  planner.run(random);
  EXPECT_EQ(planner.result.sizes.items, 2 * 8);
  EXPECT_EQ(planner.result.sizes.partial_rows, 2 * 8);
  const PlanSizes bounds = plan_bounds(config, maxima_of(batch, config, 0));
  EXPECT_EQ(bounds.items, 2 * 8);
  EXPECT_EQ(bounds.partial_rows, 2 * 8);
}

TEST(DevicePlan, FixedChunksRefuseLongRequests) {
  repeat(10, [](std::mt19937& random) {
    OwnedBatch batch = random_batch(random, 9, 9, 300);
    batch.num_pages = 0;
    const PlanConfig config = random_invariant_config(random);
    Maxima maxima = maxima_of(batch, config, 1);
    maxima.max_qo_len = 4;
    const Composition<Leaf<0>, Causal> causal{};
    DevicePlanner planner(causal, batch.view(), config, maxima);
    planner.run(random);
    i32 first = -1;
    for (i32 r = batch.num_requests() - 1; r >= 0; --r)
      if (batch.qo_indptr[at(r) + 1] - batch.qo_indptr[at(r)] > 4) first = r;
    EXPECT_EQ(planner.result.report.errors, first < 0 ? 0 : too_long);
    if (first >= 0) {
      EXPECT_EQ(planner.result.report.request, first);
    }
    const QueryTile* tiles = planner.result.array<QueryTile>(planner.result.launch.at.query_tiles);
    for (i64 t = 0; t < planner.result.sizes.query_tiles; ++t)
      EXPECT_LE(batch.qo_indptr[at(tiles[t].group) + 1] - batch.qo_indptr[at(tiles[t].group)], 4);
  });
}

void expect_empty(const DevicePlan& plan, i32 error) {
  EXPECT_EQ(plan.report.errors, error);
  EXPECT_EQ(plan.sizes.items, 0);
  for (i32 w = 0; w <= plan.launch.config.num_workers; ++w)
    EXPECT_EQ(plan.array<i32>(plan.launch.at.queue_indptr)[w], 0);
}

TEST(DevicePlan, WhatExceedsTheMaximaIsNotPlanned) {
  repeat(10, [](std::mt19937& random) {
    OwnedBatch batch = random_batch(random, 9, 9, 300);
    batch.qo_indptr.push_back(batch.qo_indptr.back() + 2);
    batch.kv_len.push_back(5);
    batch.kv_indptr.push_back(batch.kv_indptr.back() + 5);
    batch.page_indptr.clear();
    batch.page_size = 0;
    const PlanConfig config = random_config(random);
    const Composition<Leaf<0>, Causal> causal{};
    const Maxima fits = maxima_of(batch, config, 0);
    Maxima rows = fits, keys = fits;
    rows.max_qo_tokens -= between(random, 1, 2);
    keys.max_kv_tokens -= between(random, 1, 5);
    DevicePlanner few_rows(causal, batch.view(), config, rows);
    few_rows.run(random);
    expect_empty(few_rows.result, too_many_rows);
    DevicePlanner few_keys(causal, batch.view(), config, keys);
    few_keys.run(random);
    expect_empty(few_keys.result, too_many_keys);
    EXPECT_EQ(few_keys.result.report.request, -1);

    // How many requests there are, only the device knows.
    DeviceBatch counted = batch.view();
    i32 count = fits.max_requests + between(random, 1, 3);
    counted.num_requests_at = &count;
    DevicePlanner planner(causal, counted, config, fits);
    planner.run(random);
    expect_empty(planner.result, too_many_requests);
    count = -1;
    planner.run(random);
    expect_empty(planner.result, too_many_requests);
    count = fits.max_requests;
    planner.run(random);
    EXPECT_EQ(planner.result.report.errors, 0);
    OwnedLayout layout = host_layout(batch);
    expect_equal_plans(planner.result, make_plan(layout.view(), config, cover(causal)));
  });
}

/// Spoils one request of a batch of pages. Returns the error, and the batch as it is then planned.
PlanError spoil(std::mt19937& random, OwnedBatch& batch, i32 r, OwnedBatch& planned) {
  const auto at = static_cast<std::size_t>(r);
  const bool table = batch.page_indptr.empty();
  const auto begin = table ? at * static_cast<std::size_t>(batch.row_stride)
                           : static_cast<std::size_t>(batch.page_indptr[at]);
  const i32 used = ceil_div(batch.kv_len[at], batch.page_size);
  planned = batch;
  planned.kv_len[at] = 0;
  switch (between(random, 0, used > 0 ? 3 : 0)) {
    case 1:
      batch.pages[begin + static_cast<std::size_t>(between(random, 0, used - 1))] =
          between(random, 0, 1) ? batch.num_pages : -2;
      return bad_page;
    case 2:
      std::fill_n(batch.pages.begin() + static_cast<std::ptrdiff_t>(begin), used, -1);
      return bad_page;
    case 3:
      batch.kv_len[at] =
          (used + 3 + (table ? static_cast<i32>(batch.row_stride) : 0)) * batch.page_size;
      return bad_table;
    default:
      batch.kv_len[at] = -between(random, 1, 1000);
      return bad_keys;
  }
}

TEST(DevicePlan, ABadRequestIsEmptyAndSaid) {
  repeat(40, [](std::mt19937& random) {
    OwnedBatch batch = random_batch(random, 9, 9, 300), planned;
    if (batch.num_requests() == 0 || batch.page_size == 0) return;
    batch.num_pages = 1000;
    const PlanConfig config = random_config(random);
    const Maxima maxima = maxima_of(batch, config, 1);
    const i32 bad = between(random, 0, batch.num_requests() - 1);
    const PlanError error = spoil(random, batch, bad, planned);
    const Composition<NoMask> plain{};
    DevicePlanner planner(plain, batch.view(), config, maxima);
    planner.run(random);
    const bool has_rows = planned.qo_indptr[static_cast<std::size_t>(bad)] <
                          planned.qo_indptr[static_cast<std::size_t>(bad) + 1];
    if (error != bad_page || has_rows || planner.result.report.errors != 0) {
      EXPECT_EQ(planner.result.report.errors, error);
      EXPECT_EQ(planner.result.report.request, bad);
    }  // else the planner does not read the pages
    OwnedLayout layout = host_layout(planned);
    expect_equal_plans(planner.result, make_plan(layout.view(), config, {}));
  });
}

TEST(DevicePlan, RowsThatDecreaseAreNone) {
  repeat(20, [](std::mt19937& random) {
    OwnedBatch batch = random_batch(random, 9, 9, 300);
    const i32 n = batch.num_requests();
    if (n < 3) return;
    const Maxima maxima = maxima_of(batch, config_for(1), 1);
    const i32 bad = between(random, 1, n - 2);
    batch.qo_indptr[static_cast<std::size_t>(bad)] =
        between(random, 0, 1) ? -5 : maxima.max_qo_tokens + 1;
    const PlanConfig config = random_config(random);
    const Composition<Leaf<0>, Causal> causal{};
    DevicePlanner planner(causal, batch.view(), config, maxima);
    planner.run(random);
    EXPECT_EQ(planner.result.report.errors, bad_rows);
    EXPECT_EQ(planner.result.report.request, bad - 1);  // both neighbours have a bad end
    for (i64 t = 0; t < planner.result.sizes.query_tiles; ++t) {
      const i32 group =
          planner.result.array<QueryTile>(planner.result.launch.at.query_tiles)[t].group;
      EXPECT_TRUE(group != bad && group != bad - 1);
    }
  });
}

TEST(DevicePlan, UnusedPagesMayBeMissing) {
  repeat(10, [](std::mt19937& random) {
    OwnedBatch batch;
    batch.page_size = 16;
    batch.num_pages = 100;
    batch.row_stride = 20;
    for (i32 r = 0; r < 5; ++r) {
      batch.qo_indptr.push_back(r + 1);
      batch.kv_len.push_back(between(random, 250, 320));
      for (i32 p = 0; p < 20; ++p) batch.pages.push_back(p < 9 ? -1 : p);
    }
    batch.kv_indptr.push_back(0);
    const PlanConfig config = config_for(7);
    Composition<Leaf<0>, SlidingWindow> window{};
    window.variants.first = SlidingWindow{100, 0};  // keeps keys from 149 on: page 9
    DevicePlanner planner(window, batch.view(), config, maxima_of(batch, config, 0));
    planner.run(random);
    EXPECT_EQ(planner.result.report.errors, 0);
    OwnedLayout layout = host_layout(batch);
    PlanConfig linear = config;
    linear.schedule = Schedule::linear;
    expect_equal_plans(planner.result, make_plan(layout.view(), linear, cover(window)));
    batch.kv_len[3] = 240;  // keeps keys from 139 on
    planner.run(random);
    EXPECT_EQ(planner.result.report.errors, bad_page);
    EXPECT_EQ(planner.result.report.request, 3);
    const QueryTile* tiles = planner.result.array<QueryTile>(planner.result.launch.at.query_tiles);
    for (i32 t = 0; t < 5; ++t) EXPECT_EQ(tiles[t].run_end > tiles[t].run_begin, t != 3);
  });
}

TEST(DevicePlan, ItsWorkersHave16Bits) {
  std::mt19937 random(1);
  const OwnedBatch batch = random_batch(random, 9, 9, 300);
  const PlanConfig config = config_for(65537);
  try {
    plan_launch(batch.view(), config, maxima_of(batch, config, 0), false, 0);
    FAIL() << "planned";
  } catch (const ValueError& e) {
    EXPECT_STREQ(e.what(), "num_workers is 65537; expected at most 65536 on the device");
  }
}

TEST(DevicePlan, ManyRequests) {
  repeat(4, [](std::mt19937& random) {
    check_all(random, random_batch(random, 200, 3, 300), random_config(random));
  });
}

}  // namespace
}  // namespace raddle::plan_testing
