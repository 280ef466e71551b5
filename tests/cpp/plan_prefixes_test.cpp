// Prefix discovery on host and device: the same cascade, the same plan. A failure prints the seed
// that repeats it.
#include "plan/heuristics.h"
#include "plan/shared_runs.h"
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
    window.variants.first = SlidingWindow{between(random, 0, 300), -1};
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

/// Decodes behind one prompt; lengths in pages of 16 keys.
OwnedBatch behind_one_prompt(i32 requests, i32 shared, i32 own) {
  OwnedBatch batch;
  batch.page_size = 16;
  batch.page_indptr.push_back(0);
  for (i32 r = 0; r < requests; ++r) {
    batch.qo_indptr.push_back(r + 1);
    batch.kv_len.push_back(batch.page_size * (shared + own));
    for (i32 p = 0; p < shared + own; ++p)
      batch.pages.push_back(p < shared ? p : own * r + shared + p);
    batch.page_indptr.push_back(static_cast<i32>(batch.pages.size()));
  }
  return batch;
}

PlanConfig hopper_config() {
  AttentionSpec spec;
  spec.num_qo_heads = 32;
  spec.num_kv_heads = 8;
  spec.head_dim_qk = spec.head_dim_vo = 128;
  spec.dtype = DType::bfloat16;
  return gpu_plan_config(spec, 90, KernelFamily::wgmma, 64, 132, Schedule::linear);
}

/// Many workers compose a prefix's rows side by side, so that its chunks are short enough for all.
TEST(Prefixes, NoWorkerIdlesBesideALongPrefix) {
  constexpr i32 shared = 512;
  const OwnedBatch batch = behind_one_prompt(16, shared, 16);
  const PrefixCascade found = discover_prefixes(lists_of(batch, begins_of(batch)), 256);
  OwnedLayout layout = layout_of(batch, found);
  const PlanArrays plan = make_plan(layout.view(), hopper_config(), cover(Composition<NoMask>{}));
  const PlanView view = plan.view();
  EXPECT_EQ(found.columns, std::vector<i32>{batch.page_size * shared});
  for (i32 w = 0; w < view.num_workers; ++w)
    EXPECT_LT(view.queue_indptr[w], view.queue_indptr[w + 1]) << "worker " << w;
}

TEST(Prefixes, TheDeviceCutsInStepAsTheHostDoes) {
  repeat(12, [](std::mt19937& random) {
    const OwnedBatch batch =
        behind_one_prompt(between(random, 2, 70), between(random, 32, 600), between(random, 0, 40));
    check(random, batch, hopper_config(), 256, Composition<NoMask>{});
  });
}

/// Lists that agree in their first page and in the page at the least depth, but not between: both
/// planners compare them with one leader, find less in common, and leave them apart.
TEST(Prefixes, ListsThatAgreeAtBothEndsOnly) {
  OwnedBatch batch;
  batch.page_size = 4;
  batch.page_indptr.push_back(0);
  batch.kv_indptr.push_back(0);
  for (const i32 between : {7, 8, 8, 7}) {
    batch.qo_indptr.push_back(batch.qo_indptr.back() + 1);
    batch.kv_len.push_back(4 * 3 + 2);
    for (const i32 page : {5, between, 9, 100 + batch.num_requests()}) batch.pages.push_back(page);
    batch.page_indptr.push_back(static_cast<i32>(batch.pages.size()));
  }
  const std::vector<i32> begins = begins_of(batch);
  const PrefixCascade found = discover_prefixes(lists_of(batch, begins), 12);
  EXPECT_EQ(found.rows, (std::vector<i32>{0, 3}));
  EXPECT_EQ(found.kv_begin, (std::vector<i32>{12, 0, 0, 12}));
  std::mt19937 random(test_seed());
  PlanConfig config = config_for(7, 2, 4);
  config.schedule = Schedule::linear;  // as on a device
  check(random, batch, config, 12, Composition<Leaf<0>, Causal>{});
}

/// Pages that two requests may share, entry by entry.
i32 common_pages(const OwnedBatch& batch, const std::vector<i32>& begins, i32 a, i32 b) {
  const auto most = [&](i32 r) {
    return shareable_pages(batch.qo_indptr[at(r) + 1] - batch.qo_indptr[at(r)], batch.kv_len[at(r)],
                           batch.page_size);
  };
  i32 n = 0;
  while (n < std::min(most(a), most(b)) &&
         shares_page(&batch.pages[at(begins[at(a)])], &batch.pages[at(begins[at(b)])], n))
    ++n;
  return n;
}

TEST(SharedRuns, ArePairwiseWhatListsHaveInCommon) {
  std::size_t nested = 0;
  repeat(200, [&](std::mt19937& random) {
    const OwnedBatch batch = random_shared(random, 12, 20);
    const std::vector<i32> begins = begins_of(batch);
    const std::vector<SharedRun> runs = find_shared_runs(lists_of(batch, begins));
    const i32 n = batch.num_requests();
    // The deepest run that holds two requests ends where their lists part.
    std::vector<i32> common(at(n * n), 0);
    for (std::size_t i = 0; i < runs.size(); ++i) {
      const SharedRun& run = runs[i];
      EXPECT_LT(run.begin, run.end);
      EXPECT_GE(run.members.size(), 2u);
      EXPECT_TRUE(std::is_sorted(run.members.begin(), run.members.end()));
      EXPECT_LT(run.parent, static_cast<i32>(i));
      EXPECT_EQ(run.begin, run.parent < 0 ? 0 : runs[at(run.parent)].end);
      nested += run.parent >= 0;
      for (const i32 a : run.members)
        for (const i32 b : run.members) common[at(a * n + b)] = run.end;
    }
    for (i32 a = 0; a < n; ++a)
      for (i32 b = 0; b < n; ++b) {
        if (a == b) continue;
        EXPECT_EQ(common[at(a * n + b)], common_pages(batch, begins, a, b)) << a << " " << b;
      }
  });
  EXPECT_GT(nested, 20u);
}

/// Eight requests: a text that all begin with, one more a half, one more a pair, then their own.
OwnedBatch nested_batch(std::mt19937& random) {
  OwnedBatch batch;
  batch.page_size = 16;
  batch.page_indptr.push_back(0);
  i32 length[3][8];
  for (auto& level : length)
    for (i32& pages : level) pages = between(random, 0, 80);
  for (i32 r = 0; r < 8; ++r) {
    for (i32 level = 0; level < 3; ++level) {
      const i32 text = level == 0 ? 0 : r >> (3 - level);
      for (i32 p = 0; p < length[level][text]; ++p)
        batch.pages.push_back(100000 * level + 1000 * text + p);
    }
    const i32 rows = between(random, 0, 3) * between(random, 0, 3);
    batch.pages.push_back(900000 + r);
    batch.page_indptr.push_back(static_cast<i32>(batch.pages.size()));
    batch.qo_indptr.push_back(batch.qo_indptr.back() + rows);
    batch.kv_len.push_back(16 * (batch.page_indptr.back() - batch.page_indptr[at(r)] - 1) +
                           between(random, rows, 16));
  }
  return batch;
}

/// Cost of a choice, for one KV head, without its margin, and the most that this may be: a run is
/// read at most once per request.
i64 cost_of_choice(const std::vector<SharedRun>& runs, const OwnedBatch& batch,
                   const PlanConfig& config, u32 chosen, i64& margin) {
  i64 kv_tile = 0;  // of the last group
  const auto group = [&](i64 rows, i64 keys, bool start) {
    i64 cost = 0, per_256 = 0;
    kv_tile = 0;
    const i32 fused = static_cast<i32>(rows) * config.group_size;
    for (i32 t = 0; t < count_tiles(config, fused); ++t) {
      const QueryTile tile = make_tile(config, 0, 0, fused, t);
      const UnitCost unit = cost_of(config.costs[tile.shape], tile.num_rows, true);
      cost += unit.start;
      kv_tile += unit.tile;
      per_256 += unit.tile * 256 / config.shapes[tile.shape].keys;
    }
    return start ? cost + keys * per_256 / 256 : per_256;
  };
  i64 cost = 0;
  margin = 0;
  std::vector<i32> end(batch.kv_len.size(), 0), behind(runs.size(), 0);
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const SharedRun& run = runs[i];
    const i32 begin = run.parent < 0 ? 0 : behind[at(run.parent)];
    behind[i] = begin;
    if (!(chosen >> i & 1)) continue;
    behind[i] = run.end;
    i64 rows = 0, each = 0;
    const i64 keys = i64{run.end - begin} * batch.page_size;
    for (const i32 r : run.members) {
      rows += batch.qo_indptr[at(r) + 1] - batch.qo_indptr[at(r)];
      each += group(batch.qo_indptr[at(r) + 1] - batch.qo_indptr[at(r)], 0, false);
      margin += kv_tile;
      end[at(r)] = run.end;
    }
    cost += group(rows, keys, true);
    margin += each * keys / 256 / 6;
  }
  for (std::size_t r = 0; r < end.size(); ++r)
    if (batch.qo_indptr[r + 1] > batch.qo_indptr[r])
      cost += group(batch.qo_indptr[r + 1] - batch.qo_indptr[r],
                    batch.kv_len[r] - end[r] * batch.page_size, true);
  return cost;
}

TEST(SharedRuns, TheChoiceIsTheCheapest) {
  std::size_t several = 0;
  repeat(200, [&](std::mt19937& random) {
    const OwnedBatch batch = nested_batch(random);
    const std::vector<i32> begins = begins_of(batch);
    const PageLists lists = lists_of(batch, begins);
    const std::vector<SharedRun> runs = find_shared_runs(lists);
    ASSERT_LE(runs.size(), 7u);  // every choice is tried, and none is too deep
    const PlanConfig config = random_config(random);
    const ChosenRuns found =
        choose_runs(runs, lists, std::vector<i32>(batch.kv_len.size(), 0), config);
    u32 mask = 0;
    for (const ChosenRun& each : found.runs) mask |= u32{1} << each.run;
    several += found.runs.size() > 1;
    i64 margin = 0, unused = 0, least = cost_of_choice(runs, batch, config, 0, unused);
    const i64 alone = least;
    const i64 cost = cost_of_choice(runs, batch, config, mask, margin);
    EXPECT_LE(found.margin, margin);
    EXPECT_LE(cost + found.margin, alone);
    // A margin may stand between the choice and the cheapest, never more.
    for (u32 other = 0; other < u32{1} << runs.size(); ++other) {
      i64 others_margin = 0;
      const i64 others = cost_of_choice(runs, batch, config, other, others_margin);
      least = std::min(least, others + others_margin);
    }
    EXPECT_LE(cost, least);
  });
  EXPECT_GT(several, 10u);
}

}  // namespace
}  // namespace raddle::plan_testing
