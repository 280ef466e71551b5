// How evenly plans hand out work, and how much scratch they need.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "plan/heuristics.h"
#include "plan_batches.h"
#include "plan_testing.h"
#include "raddle/engine/plan/assign.h"
#include "raddle/engine/variant/causal.h"
#include "raddle/engine/variant/window.h"
#include "test_seed.h"

namespace raddle::plan_testing {
namespace {

OwnedLayout decode(const std::vector<i32>& kv_len) {
  return paged(std::vector<i32>(kv_len.size(), 1), kv_len);
}

PlanConfig with(PlanConfig config, Schedule schedule) {
  config.schedule = schedule;
  return config;
}

// Zipf-distributed lengths (exponent 1.5) scaled to a mean: bench/workloads draws the same.
const std::vector<i32> skewed_1024{455, 65,  1885, 3185, 845,  3445, 130, 65,
                                   390, 650, 65,   260,  4161, 325,  390, 65};
const std::vector<i32> skewed_8192{3640, 520,  15083, 25486, 6761,  27566, 1040, 520,
                                   3120, 5201, 520,   2080,  33288, 2600,  3120, 520};

TEST(PlanBalance, SkewedDecode) {
  for (const auto& lengths : {skewed_1024, skewed_8192}) {
    OwnedLayout layout = decode(lengths);
    for (i32 workers : {2, 16, 132}) {
      const PlanConfig config = config_for(workers, 8, 4);
      const PlanArrays plan = make_plan(layout.view(), config, cover_of(Causal{}));
      check_work(layout.view(), config, plan.view());
      EXPECT_LE(plan.stats().heaviest_over_mean(), 1.15)
          << workers << " workers: " << plan.stats().explain();
    }
  }
}

/// The most heads whose units lie between the first unit of one of them and its last.
i32 heads_at_a_time(const PlanView& plan) {
  const auto head_of = [&](i32 i) {
    return std::pair{plan.query_tiles[plan.items[i].query_tile].group, plan.items[i].kv_head};
  };
  std::map<std::pair<i32, i32>, i32> last;
  for (i32 i = 0; i < plan.num_items; ++i) last[head_of(i)] = i;
  std::set<std::pair<i32, i32>> open;
  std::size_t most = 0;
  for (i32 i = 0; i < plan.num_items; ++i) {
    open.insert(head_of(i));
    most = std::max(most, open.size());
    if (last[head_of(i)] == i) open.erase(head_of(i));
  }
  return static_cast<i32>(most);
}

TEST(PlanBalance, ManyLongTilesAreDrawn) {
  const u32 seed = test_seed();
  i32 drawn = 0;
  for (u32 i = 0; i < 40; ++i) {
    SCOPED_TRACE(seed_text(seed + i));
    std::mt19937 random(seed + i);
    std::vector<i32> lengths;
    for (i32 r = between(random, 1, 8); r > 0; --r) lengths.push_back(between(random, 900, 4000));
    OwnedLayout layout = paged(lengths, lengths);
    PlanConfig config = config_for(between(random, 2, 8), between(random, 4, 8), 2);
    config.cached_columns = 8192;
    const PlanArrays plan = make_plan(layout.view(), config, cover_of(Causal{}));
    check_work(layout.view(), config, plan.view());
    check_bounds(layout.view(), config, plan);
    const PlanStats& stats = plan.stats();
    const PlanView view = plan.view();
    if (view.queue_indptr[config.num_workers] == view.num_items) continue;
    ++drawn;
    EXPECT_STREQ(stats.schedule, "shared queue");
    EXPECT_EQ(cost_of_plan(config, view).heaviest, stats.heaviest);
    EXPECT_LE(stats.heaviest * config.num_workers * 100, stats.uncut * 104);
    EXPECT_LE(heads_at_a_time(view), config.cached_columns / 900 + 1);
  }
  EXPECT_GE(drawn, 10);
}

/// Whether every queue goes through whole rows of K: all KV heads of the same columns, in turns.
bool takes_whole_rows(const PlanView& plan) {
  for (i32 w = 0; w < plan.num_workers; ++w) {
    const i32 count = plan.queue_indptr[w + 1] - plan.queue_indptr[w];
    if (count % plan.num_kv_heads != 0) return false;
    const WorkItem* items = plan.items + plan.queue_indptr[w];
    for (i32 i = 0; i < count; ++i) {
      const WorkItem& first = items[i - i % plan.num_kv_heads];
      if (items[i].kv_head != i % plan.num_kv_heads || items[i].query_tile != first.query_tile ||
          items[i].col_begin != first.col_begin || items[i].col_end != first.col_end)
        return false;
    }
  }
  return true;
}

TEST(PlanBalance, HeadsOfADecodeStayTogetherWhereThatIsBalanced) {
  for (const std::vector<i32>& lengths :
       {std::vector<i32>{8192}, std::vector<i32>{9000, 9000, 9000}, std::vector<i32>(16, 1024)}) {
    const std::vector<i32> ones(lengths.size(), 1);
    OwnedLayout layout = paged(ones, lengths);
    PlanConfig config = config_for(2, 8, 4);
    for (const bool together : {false, true}) {
      config.reads_whole_rows = together;
      const PlanArrays plan = make_plan(layout.view(), config, cover_of(Causal{}));
      check_work(layout.view(), config, plan.view());
      check_bounds(layout.view(), config, plan);
      EXPECT_LE(plan.stats().heaviest_over_mean(), 1.03) << plan.stats().explain();
      EXPECT_EQ(takes_whole_rows(plan.view()), together || lengths.size() == 16)
          << lengths.size() << " requests: " << plan.stats().explain();
    }
  }
}

TEST(PlanBalance, LinearSplitKeepsItsBound) {
  const u32 seed = test_seed();
  for (u32 i = 0; i < 300; ++i) {
    SCOPED_TRACE(seed_text(seed + i));
    std::mt19937 random(seed + i);
    const i32 requests = between(random, 1, 12);
    std::vector<i32> qo, kv;
    for (i32 r = 0; r < requests; ++r) {
      qo.push_back(between(random, 0, 2) ? 1 : between(random, 1, 200));
      kv.push_back(between(random, 0, 2) ? between(random, 0, 300) : between(random, 300, 20000));
    }
    OwnedLayout layout = paged(qo, kv);
    PlanConfig config =
        with(config_for(between(random, 1, 140), between(random, 1, 8), between(random, 1, 8)),
             Schedule::linear);
    config.costs[short_queries].per_state_row = config.costs[long_queries].per_state_row =
        between(random, 0, 3000);
    const PlanArrays plan = make_plan(layout.view(), config, cover_of(Causal{}));
    const PlanView view = plan.view();
    const i64 mean = plan.stats().total / config.num_workers;
    i64 tile = 0, contraction = 0;
    for (i32 q = 0; q < view.num_query_tiles; ++q) {
      const QueryTile& t = view.query_tiles[q];
      const CostModel& model = config.costs[t.shape];
      const UnitCost cost = cost_of(model, t.num_rows, false);
      const i32 n = count_kv_tiles(view.runs, t.run_begin, t.run_end, view.shapes[t.shape].keys);
      const i32 piece = least_piece(cost, i64{model.per_state_row} * t.num_rows, n,
                                    plan.stats().uncut / config.num_workers);
      tile = std::max(tile, cost.tile * piece);
      contraction = std::max(contraction, cost.resume);
    }
    EXPECT_LE(plan.stats().heaviest, mean + tile + 2 * contraction + 1) << plan.stats().explain();
    i32 most = 0;  // partial tiles of a worker
    for (i32 w = 0; w < config.num_workers; ++w) {
      i32 partial = 0;
      for (i32 item = view.queue_indptr[w]; item < view.queue_indptr[w + 1]; ++item)
        partial += view.items[item].partial_row >= 0;
      most = std::max(most, partial);
    }
    EXPECT_LE(most, 2);
    EXPECT_LE(make_plan(layout.view(), with(config, Schedule::automatic), cover_of(Causal{}))
                  .stats()
                  .heaviest,
              plan.stats().heaviest + contraction);
  }
}

/// The items of a unit of a level, by where they begin.
std::map<std::pair<i32, i32>, std::vector<i32>> begins_of_units(const PlanView& plan, i32 level) {
  std::map<std::pair<i32, i32>, std::vector<i32>> found;
  for (i32 i = 0; i < plan.num_items; ++i) {
    const WorkItem& item = plan.items[i];
    if (plan.query_tiles[item.query_tile].level == level)
      found[{item.query_tile, item.kv_head}].push_back(item.col_begin);
  }
  for (auto& [unit, begins] : found) std::sort(begins.begin(), begins.end());
  return found;
}

PlanConfig in_step(PlanConfig config, bool is = true) {
  config.keeps_in_step = is;
  return config;
}

TEST(PlanBalance, PrefixesAreCutInStep) {
  struct Case {
    std::vector<SharedBy> prefixes;
    i32 own;
    double most;  // heaviest over mean
  };
  for (const Case& each :
       {Case{{{32, 8192}}, 288, 1.08}, Case{{{128, 2048}}, 256, 1.08},
        Case{{{20, 4096}, {7, 16384}}, 512, 1.12}, Case{{{16, 8192}}, 4096, 1.05}}) {
    OwnedLayout layout = behind_prefixes(each.prefixes, each.own);
    const PlanConfig config = in_step(with(config_for(132, 8, 4), Schedule::linear));
    const PlanArrays arrays = make_plan(layout.view(), config);
    const PlanView plan = arrays.view();
    check_work(layout.view(), config, plan);
    check_bounds(layout.view(), config, arrays);
    EXPECT_LE(arrays.stats().heaviest_over_mean(), each.most) << arrays.stats().explain();
    // All tiles and heads of a prefix are cut at the same columns, into chunks for a worker each.
    std::map<i32, std::vector<i32>> of_group;
    for (const auto& [unit, begins] : begins_of_units(plan, 0)) {
      const i32 group = plan.query_tiles[unit.first].group;
      EXPECT_EQ(of_group.emplace(group, begins).first->second, begins);
    }
    for (i32 w = 0; w < plan.num_workers; ++w) {
      i32 chunks = 0;
      for (i32 i = plan.queue_indptr[w]; i < plan.queue_indptr[w + 1]; ++i) {
        const bool is_chunk = plan.query_tiles[plan.items[i].query_tile].level == 0;
        EXPECT_TRUE(!is_chunk || i == plan.queue_indptr[w]) << "a chunk comes first";
        chunks += is_chunk;
      }
      EXPECT_LE(chunks, 1);
    }
  }
}

TEST(PlanBalance, PrefixesForWhichWorkersDoNotSufficeAreOneLine) {
  OwnedLayout layout = behind_prefixes(std::vector<SharedBy>(12, {4, 2048}), 512);
  const PlanConfig config = in_step(with(config_for(80, 8, 4), Schedule::linear));
  const PlanArrays plan = make_plan(layout.view(), config);
  check_work(layout.view(), config, plan.view());
  check_bounds(layout.view(), config, plan);
  EXPECT_LE(plan.stats().heaviest_over_mean(), 1.15) << plan.stats().explain();
}

/// Whatever heads, prefixes and masks: few heads, whose chunks would be too many or too long, and
/// tiles of a prefix that keep different keys are one line.
TEST(PlanBalance, InStepIsLittleHeavierThanOneLine) {
  AttentionSpec spec;
  spec.head_dim_qk = spec.head_dim_vo = 128;
  spec.dtype = DType::bfloat16;
  repeat(150, [&](std::mt19937& random) {
    spec.num_kv_heads = 1 << between(random, 0, 3);
    spec.num_qo_heads = spec.num_kv_heads * between(random, 1, 8);
    std::vector<SharedBy> prefixes;
    for (i32 n = between(random, 1, 3); n > 0; --n)
      prefixes.push_back({between(random, 2, 40), between(random, 512, 40000)});
    OwnedLayout layout = behind_prefixes(prefixes, between(random, 1, 3000));
    const PlanConfig config =
        gpu_plan_config(spec, 90, KernelFamily::wgmma, 64, 132, Schedule::linear);
    const SlidingWindow window{between(random, 0, 1) ? -1 : between(random, 500, 20000), -1};
    i64 heaviest[2];
    for (const bool is : {false, true}) {
      const PlanArrays plan = make_plan(layout.view(), in_step(config, is), cover_of(window));
      check_work(layout.view(), config, plan.view());
      heaviest[is] = plan.stats().heaviest;
    }
    const i64 start = cost_of(config.costs[short_queries], 64, true).start;
    EXPECT_LE(heaviest[true], heaviest[false] * 9 / 8 + start)
        << spec.num_kv_heads << " heads, " << prefixes[0].requests << " requests behind "
        << prefixes[0].columns << " keys, window " << window.left;
  });
}

/// The least heaviest load of any assignment.
i64 best_assignment(const std::vector<i64>& costs, std::size_t at, std::vector<i64>& loads,
                    i64 best) {
  if (at == costs.size()) return std::min(best, *std::max_element(loads.begin(), loads.end()));
  for (std::size_t w = 0; w < loads.size(); ++w) {
    if (w > 0 && loads[w] == loads[w - 1]) continue;
    loads[w] += costs[at];
    if (loads[w] < best) best = best_assignment(costs, at + 1, loads, best);
    loads[w] -= costs[at];
  }
  return best;
}

TEST(PlanBalance, Algorithm1KeepsTheLongestFirstGuarantee) {
  const u32 seed = test_seed();
  for (u32 i = 0; i < 100; ++i) {
    SCOPED_TRACE(seed_text(seed + i));
    std::mt19937 random(seed + i);
    std::vector<i32> lengths(static_cast<std::size_t>(between(random, 1, 5)));
    for (i32& l : lengths) l = between(random, 1, 1500);
    OwnedLayout layout = decode(lengths);
    const i32 workers = between(random, 2, 4);
    const PlanConfig config = with(config_for(workers, 1, 4), Schedule::algorithm1);
    const PlanArrays plan = make_plan(layout.view(), config);
    const PlanView view = plan.view();
    std::vector<i64> costs;
    for (i32 item = 0; item < view.num_items; ++item) {
      PlanView one = view;
      const i32 queue[] = {item, item + 1, item + 1};
      one.num_workers = 1;
      one.num_items = item + 1;
      one.queue_indptr = queue;
      costs.push_back(cost_of_plan(config, one).total);
    }
    std::vector<i64> loads(static_cast<std::size_t>(workers), 0);
    const i64 best = best_assignment(costs, 0, loads, plan.stats().total + 1);
    EXPECT_LE(3 * workers * plan.stats().heaviest,
              (4 * workers - 1) * best);  // Graham: 4/3 - 1/(3 W)
    EXPECT_GE(plan.stats().heaviest, best);
  }
}

/// The worker of each head of each piece when the most expensive piece goes to the least loaded
/// worker, the lowest of equal ones: [piece][head].
std::vector<std::vector<i32>> longest_first(const std::vector<i64>& costs, i32 heads, i32 workers,
                                            std::vector<i64>& loads) {
  std::vector<i32> order(costs.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&costs](i32 a, i32 b) {
    return costs[static_cast<std::size_t>(a)] > costs[static_cast<std::size_t>(b)];
  });
  loads.assign(static_cast<std::size_t>(workers), 0);
  std::vector<std::vector<i32>> worker_of(costs.size());
  for (const i32 piece : order)
    for (i32 head = 0; head < heads; ++head) {
      const auto least = std::min_element(loads.begin(), loads.end());
      *least += costs[static_cast<std::size_t>(piece)];
      worker_of[static_cast<std::size_t>(piece)].push_back(static_cast<i32>(least - loads.begin()));
    }
  return worker_of;
}

TEST(PlanBalance, HeadGroupsAreAssignedAsTheirWorkersWouldBe) {
  const u32 seed = test_seed();
  for (u32 i = 0; i < 300; ++i) {
    SCOPED_TRACE(seed_text(seed + i));
    std::mt19937 random(seed + i);
    const i32 heads = between(random, 1, 16), workers = between(random, 1, 80);
    // Costs of few values, so that many are equal, and of many digits.
    const i32 values = between(random, 1, 40), unit = between(random, 1, 1 << 24);
    std::vector<i64> costs(static_cast<std::size_t>(between(random, 1, 60)));
    for (i64& cost : costs) cost = i64{between(random, 1, values)} * unit;
    std::vector<i64> loads;
    const auto expected = longest_first(costs, heads, workers, loads);

    std::vector<Ranked> ranked, spare(costs.size());
    for (const i64 cost : costs) ranked.push_back({cost, static_cast<i32>(ranked.size())});
    const auto count = static_cast<i32>(ranked.size());
    sort_most_expensive_first(ranked.data(), count, spare.data());
    const i32 group = std::gcd(heads, workers);
    EXPECT_EQ(heads % group + workers % group, 0);
    std::vector<Load> heap(static_cast<std::size_t>(workers / group));
    std::vector<Placement> placed(costs.size() * static_cast<std::size_t>(heads / group));
    const i64 heaviest = assign_longest_first(ranked.data(), count, heads / group, workers / group,
                                              heap.data(), placed.data());
    EXPECT_EQ(heaviest, *std::max_element(loads.begin(), loads.end()));
    auto found = expected;
    for (auto& of_piece : found) std::fill(of_piece.begin(), of_piece.end(), -1);
    for (const Placement& p : placed)
      for (i32 j = 0; j < group; ++j)
        found[static_cast<std::size_t>(p.piece)][static_cast<std::size_t>(p.kv_head * group + j)] =
            p.worker * group + j;
    EXPECT_EQ(found, expected);
  }
}

/// Two workers share a multiprocessor: w and w + half.
TEST(PlanBalance, PairedWorkersAreNumberedOnceEach) {
  const u32 seed = test_seed();
  for (u32 i = 0; i < 200; ++i) {
    SCOPED_TRACE(seed_text(seed + i));
    std::mt19937 random(seed + i);
    const i32 heads = between(random, 1, 8), workers = 2 * between(random, 1, 60);
    std::vector<i32> lengths(static_cast<std::size_t>(between(random, 1, 24)));
    const i32 most = between(random, 1, 4000);
    for (i32& length : lengths) length = between(random, 0, most);
    if (i % 2 == 0) std::fill(lengths.begin(), lengths.end(), most);
    PlanConfig config = config_for(workers, heads, 4);
    config.bandwidth_sharers = 2;
    config.schedule = i % 3 == 0 ? Schedule::algorithm1 : Schedule::automatic;
    config.batch_invariant = i % 7 == 0;
    OwnedLayout layout = decode(lengths);
    const PlanArrays plan = make_plan(layout.view(), config, cover_of(Causal{}));
    check_work(layout.view(), config, plan.view());
    check_bounds(layout.view(), config, plan);
  }
}

TEST(PlanBalance, PairedWorkersHaveTheHalvesOfATile) {
  PlanConfig config = config_for(256, 8, 4);
  config.bandwidth_sharers = 2;
  config.schedule = Schedule::algorithm1;
  OwnedLayout layout = decode(std::vector<i32>(16, 8192));
  const PlanArrays arrays = make_plan(layout.view(), config, cover_of(Causal{}));
  const PlanView plan = arrays.view();
  ASSERT_EQ(plan.num_items, 256);
  for (i32 i = 0; i < plan.num_items; ++i) EXPECT_EQ(plan.items[i].paired_half, 1);
  check_work(layout.view(), config, plan);
}

/// A thread plans for GPUs and CPUs in turns: pairs are of one plan.
TEST(PlanBalance, PairsOfAnEarlierPlanAreForgotten) {
  PlanConfig paired = config_for(256, 1, 4);
  paired.bandwidth_sharers = 2;
  paired.schedule = Schedule::algorithm1;
  OwnedLayout halves = decode(std::vector<i32>(128, 8192));
  make_plan(halves.view(), paired, cover_of(Causal{}));
  PlanConfig together = config_for(4, 2, 4);
  together.reads_whole_rows = true;
  OwnedLayout alone = decode({16000});
  const PlanArrays plan = make_plan(alone.view(), together, cover_of(Causal{}));
  EXPECT_TRUE(takes_whole_rows(plan.view())) << plan.stats().explain();
  check_work(alone.view(), together, plan.view());
}

/// The worker with most is paired with the one that has least.
TEST(PlanBalance, MuchIsPairedWithLittle) {
  PlanConfig config = config_for(8, 1, 4);
  config.bandwidth_sharers = 2;
  std::vector<i32> lengths;
  for (i32 i = 8; i > 0; --i) lengths.push_back(1024 * i);
  OwnedLayout layout = decode(lengths);
  config.schedule = Schedule::one_per_request;
  const PlanArrays apart = make_plan(layout.view(), config);
  EXPECT_EQ(apart.view().items[4].col_end, 4096) << "as they come";
  config.schedule = Schedule::automatic;
  config.costs[short_queries].per_state = 1 << 28;  // whole tiles
  const PlanArrays arrays = make_plan(layout.view(), config);
  const PlanView plan = arrays.view();
  ASSERT_EQ(plan.num_items, 8);
  for (i32 w = 0; w < 4; ++w) {
    const WorkItem& much = plan.items[plan.queue_indptr[w]];
    const WorkItem& little = plan.items[plan.queue_indptr[w + 4]];
    EXPECT_EQ(much.col_end + little.col_end, 9 * 1024);
  }
}

TEST(PlanBalance, ChunksAreNoShorterThanTheirComposition) {
  OwnedLayout layout = decode({16384});
  PlanConfig config = with(config_for(256, 1, 16), Schedule::algorithm1);
  const auto chunks = [&] {
    const PlanArrays plan = make_plan(layout.view(), config, cover_of(Causal{}));
    check_work(layout.view(), config, plan.view());
    return plan.view().num_items;
  };
  CostModel& cost = config.costs[short_queries];
  cost.per_tile = 1000;
  cost.per_tile_row = 0;
  cost.per_state_row = 1;  // a state of 16 rows is composed in a fraction of a tile's time
  const i32 num_tiles = 16384 / config.shapes[short_queries].keys;
  EXPECT_EQ(chunks(), std::min(256, num_tiles));
  cost.per_state_row = 1000;  // in four times a tile's
  EXPECT_LE(chunks() * chunks(), num_tiles / 4 + chunks());
  EXPECT_GE((chunks() + 1) * (chunks() + 1), num_tiles / 4);
}

TEST(PlanBalance, SeventeenEqualRequestsDefeatAlgorithm1) {
  OwnedLayout layout = decode(std::vector<i32>(17, 4096));
  const PlanConfig config = config_for(132, 8, 4);
  // 136 units just below the chunk limit on 132 workers: four workers get two.
  EXPECT_GT(
      make_plan(layout.view(), with(config, Schedule::algorithm1)).stats().heaviest_over_mean(),
      1.9);
  EXPECT_LT(make_plan(layout.view(), config).stats().heaviest_over_mean(), 1.02);
}

TEST(PlanBalance, WholeTilesWhereSplittingGainsNothing) {
  OwnedLayout layout = decode(std::vector<i32>(16, 1024));
  const PlanArrays plan = make_plan(layout.view(), config_for(132, 8, 4));
  EXPECT_EQ(plan.view().num_contractions, 0) << plan.stats().explain();
  EXPECT_EQ(plan.view().num_items, 128);
}

/// Blocks in clusters save a part of a tile's time, and lose where half of a tile's rows keep
/// nothing of the keys that the others need, or where there are too few tiles.
TEST(PlanBalance, ClustersWhereTheyAreFaster) {
  const auto rows_planned = [](i32 group_size, std::vector<i32> lengths, const auto& variant) {
    AttentionSpec spec;
    spec.num_kv_heads = 8, spec.num_qo_heads = 8 * group_size;
    spec.head_dim_qk = spec.head_dim_vo = 128;
    spec.dtype = DType::bfloat16;
    const PlanConfig alone =
        gpu_plan_config(spec, 90, KernelFamily::wgmma, 0, 132, Schedule::automatic);
    const PlanConfig clusters = cluster_plan_config(spec, alone);
    EXPECT_EQ(clusters.num_workers, 66);
    OwnedLayout layout = paged(lengths, lengths);
    const PlanArrays plan = make_plan(layout.view(), alone, cover(variant), &clusters);
    check_work(layout.view(), plan.config(), plan.view());
    const PlanArrays other = make_plan(
        layout.view(), plan.config().num_workers == 66 ? alone : clusters, cover(variant));
    EXPECT_LE(plan.stats().time, other.stats().time + least_gain);
    return plan.config().shapes[long_queries].rows;
  };
  const std::vector<i32> many(16, 8192);
  EXPECT_EQ(rows_planned(1, many, Causal{}), 256);
  EXPECT_EQ(rows_planned(4, many, Causal{}), 256);
  EXPECT_EQ(rows_planned(4, std::vector<i32>(16, 2048), Causal{}), 256);
  EXPECT_EQ(rows_planned(1, std::vector<i32>(16, 512), Causal{}), 128);
  EXPECT_EQ(rows_planned(1, many, SlidingWindow{512, 0}), 128);
  EXPECT_EQ(rows_planned(4, {300}, Causal{}), 128);
}

TEST(PlanBalance, OnePerRequestKeepsARequestTogether) {
  OwnedLayout layout = paged({1, 30, 0, 7}, {100, 40, 50, 2000});
  const PlanConfig config = with(config_for(2), Schedule::one_per_request);
  const PlanArrays plan = make_plan(layout.view(), config);
  check_work(layout.view(), config, plan.view());
  std::vector<i32> worker_of(4, -1);
  for (i32 w = 0; w < 2; ++w) {
    for (i32 i = plan.view().queue_indptr[w]; i < plan.view().queue_indptr[w + 1]; ++i) {
      i32& worker = worker_of[static_cast<std::size_t>(
          plan.view().query_tiles[plan.view().items[i].query_tile].group)];
      EXPECT_TRUE(worker == -1 || worker == w);
      worker = w;
    }
  }
  EXPECT_EQ(worker_of, (std::vector<i32>{0, 1, -1, 0}));
}

/// State rows of the plan, and the bound for maxima that just hold the layout.
void expect_attained(OwnedLayout& layout, const PlanConfig& config, i64 kv_tokens) {
  const LayoutView view = layout.view();
  const PlanArrays plan = make_plan(view, config);
  check_work(view, config, plan.view());
  const Maxima maxima{view.num_requests, view.num_rows, kv_tokens, view.num_levels, 0};
  EXPECT_EQ(plan.sizes().partial_rows, plan_bounds(config, maxima).partial_rows);
}

TEST(PlanBounds, ArePartialStatesOfSomePlan) {
  // 16 tokens of 4 heads fill a long tile of 64 rows.
  OwnedLayout level = paged(std::vector<i32>(8, 16), std::vector<i32>(8, 8192));
  expect_attained(level, with(config_for(9, 1, 4), Schedule::linear), 8 * 8192);

  // Each of three workers has a chunk of the prefix and a part of the last level.
  constexpr i32 shared = 16384, own = 6400;
  OwnedLayout cascade = paged({16}, {shared + own});
  cascade.levels.insert(cascade.levels.begin(), cascade.levels.front());
  cascade.levels[0].columns = {shared};
  cascade.levels[1].columns = {own};
  cascade.levels[1].kv_begin = {shared};
  expect_attained(cascade, in_step(with(config_for(3, 1, 4), Schedule::linear)), shared);

  OwnedLayout invariant = paged({16}, {1000});
  PlanConfig config = config_for(3, 1, 4);
  config.batch_invariant = true;
  expect_attained(invariant, config, 1000);
}

TEST(PlanBounds, WorkspaceBytes) {
  const PlanConfig config = config_for(132, 8, 4);
  const Maxima maxima{16, 16, 16 * 8192, 1, 0};
  const PlanSizes n = plan_bounds(config, maxima);
  EXPECT_EQ(n.partial_rows, 131 * 64 + 8 * 64);
  EXPECT_EQ(workspace_bytes(config, maxima, 128), n.partial_rows * 129 * 4 + 16 + n.expected * 4);
}

}  // namespace
}  // namespace raddle::plan_testing
