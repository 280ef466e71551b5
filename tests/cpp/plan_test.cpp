// What every plan promises, on random layouts. A failure prints the seed that repeats it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "plan_batches.h"
#include "raddle/engine/variant/causal.h"
#include "raddle/engine/variant/window.h"

namespace raddle::plan_testing {
namespace {

/// Both masks at once, and a mask that only functions can answer for.
struct CausalWindow {
  Causal causal;
  SlidingWindow window;
  bool mask(const Row& r, const Key& k) const { return causal.mask(r, k) && window.mask(r, k); }
  KvSpan kv_span(const Tile& t) const {
    const KvSpan a = causal.kv_span(t), b = window.kv_span(t);
    return KvSpan{intersect(a.index, b.index), intersect(a.pos, b.pos)};
  }
  Coverage coverage(const Tile& t) const {
    return std::min(causal.coverage(t), window.coverage(t));
  }
};

struct Blocky {  // keeps every other span of 48 keys: more runs than a small limit allows
  bool mask(const Row&, const Key& k) const { return k.kv_index / 48 % 2 == 0; }
  KvSpan kv_span(const Tile&) const { return KvSpan{everything, everything}; }
  Coverage coverage(const Tile& t) const {
    if (t.kv_index.first / 48 != t.kv_index.last / 48) return Coverage::partial;
    return t.kv_index.first / 48 % 2 == 0 ? Coverage::full : Coverage::empty;
  }
};

template <class V>
void check_plan(const LayoutView& layout, const PlanConfig& config, const V& v) {
  const PlanArrays plan = make_plan(layout, config, cover_of(v));
  check_runs(layout, config, plan.view(), &v, [](const void* self, const Row& r, const Key& k) {
    return static_cast<const V*>(self)->mask(r, k);
  });
  check_work(layout, config, plan.view());
  check_bounds(layout, config, plan);
  const Balance balance = cost_of_plan(config, plan.view());
  EXPECT_EQ(balance.heaviest, plan.stats().heaviest);
  EXPECT_EQ(balance.total, plan.stats().total);
  const PlanArrays again = make_plan(layout, config, cover_of(v));
  ASSERT_EQ(plan.bytes(), again.bytes());
  EXPECT_EQ(std::memcmp(plan.data(), again.data(), plan.bytes()), 0) << "equal inputs, other bytes";
}

void check_all_masks(std::mt19937& random, const LayoutView& layout, PlanConfig config) {
  check_plan(layout, config, Causal{});
  check_plan(layout, config, SlidingWindow{between(random, -1, 200), between(random, -1, 30)});
  check_plan(layout, config, CausalWindow{{}, {between(random, 0, 300), -1}});
  config.max_runs = between(random, 0, 4);
  check_plan(layout, config, Blocky{});
}

PlanConfig random_config(std::mt19937& random) {
  PlanConfig config =
      config_for(between(random, 1, 20), between(random, 1, 3), between(random, 1, 7));
  config.schedule = static_cast<Schedule>(between(random, 0, 3));
  config.reads_whole_rows = between(random, 0, 1) == 1;
  config.has_openings = between(random, 0, 1) == 1;
  config.keeps_in_step = between(random, 0, 1) == 1;
  return config;
}

std::vector<i32> random_lengths(std::mt19937& random, i32 count, i32 most) {
  std::vector<i32> lengths(static_cast<std::size_t>(count));
  for (i32& l : lengths)
    l = between(random, 0, 3) == 0 ? between(random, 0, 1) : between(random, 0, most);
  return lengths;
}

TEST(Plan, RaggedAndPaged) {
  repeat(150, [](std::mt19937& random) {
    const i32 requests = between(random, 0, 8);
    OwnedLayout layout =
        paged(random_lengths(random, requests, 60), random_lengths(random, requests, 900));
    check_all_masks(random, layout.view(), random_config(random));
  });
}

TEST(Plan, BatchInvariantPieces) {
  repeat(60, [](std::mt19937& random) {
    const i32 requests = between(random, 1, 8);
    OwnedLayout layout =
        paged(random_lengths(random, requests, 60), random_lengths(random, requests, 900));
    PlanConfig config = random_config(random);
    config.batch_invariant = true;
    config.invariant_chunk = between(random, 1, 200);
    check_all_masks(random, layout.view(), config);
  });
}

TEST(Plan, Cascades) {
  repeat(150, [](std::mt19937& random) {
    OwnedLayout layout = random_cascade(random, between(random, 2, 3));
    check_all_masks(random, layout.view(), random_config(random));
  });
}

TEST(Plan, ExplicitBlocksWithHolesAndMaskBits) {
  repeat(80, [](std::mt19937& random) {
    OwnedLayout layout = random_blocks(random, between(random, 0, 1) == 1);
    check_all_masks(random, layout.view(), random_config(random));
  });
}

TEST(Plan, OwnPositions) {
  repeat(30, [](std::mt19937& random) {
    OwnedLayout layout = paged(random_lengths(random, 4, 40), random_lengths(random, 4, 500));
    for (i32 r = 0; r < layout.qo_indptr.back(); ++r)
      layout.qo_pos.push_back(between(random, 0, 600));
    check_all_masks(random, layout.view(), random_config(random));
  });
}

TEST(Plan, NothingToDo) {
  OwnedLayout empty;
  empty.levels.emplace_back();
  EXPECT_EQ(make_plan(empty.view(), config_for(7)).view().num_items, 0);
  OwnedLayout no_rows = paged({0, 0}, {100, 0});
  EXPECT_EQ(make_plan(no_rows.view(), config_for(7)).view().num_items, 0);
  OwnedLayout no_keys = paged({3, 1}, {0, 0});
  check_plan(no_keys.view(), config_for(7), Causal{});  // one empty writethrough item a head
  OwnedLayout cross = paged({50, 5}, {7, 1});  // qo_len > kv_len: the first rows see nothing
  check_plan(cross.view(), config_for(7), Causal{});
}

TEST(Plan, FourThousandRequests) {
  repeat(1, [](std::mt19937& random) {
    std::vector<i32> lengths(4096);
    for (i32& l : lengths) l = between(random, 0, 2000);
    OwnedLayout layout = paged(std::vector<i32>(lengths.size(), 1), lengths);
    const PlanConfig config = config_for(132, 8, 4);
    const PlanArrays plan = make_plan(layout.view(), config);
    check_work(layout.view(), config, plan.view());
    check_bounds(layout.view(), config, plan);
    EXPECT_LT(plan.stats().heaviest_over_mean(), 1.01);
  });
}

TEST(Plan, ADecodeTileCostsFewQuestions) {
  struct Counting {
    CausalWindow inner;
    mutable int questions = 0;
    KvSpan kv_span(const Tile& t) const { return inner.kv_span(t); }
    Coverage coverage(const Tile& t) const {
      ++questions;
      return inner.coverage(t);
    }
  };
  OwnedLayout layout = paged({1}, {100000});
  for (i32 left : {-1, 10, 1000, 4095, 4096, 65535}) {
    Counting cover{{{}, {left, -1}}};
    const PlanView plan = make_plan(layout.view(), config_for(4), cover_of(cover)).view();
    EXPECT_LE(cover.questions, 3) << "left " << left;
    EXPECT_LE(plan.num_runs, 2);
  }
}

TEST(Plan, ARequestIsChunkedAlikeAloneAndInABatch) {
  repeat(40, [](std::mt19937& random) {
    PlanConfig config = random_config(random);
    config.batch_invariant = true;
    const i32 qo_len = between(random, 1, 100);
    const i32 kv_len = between(random, 0, 3000);
    const auto chunks_of = [](const PlanView& plan, i32 group) {
      std::vector<std::vector<i32>> chunks;
      for (i32 i = 0; i < plan.num_items; ++i) {
        const WorkItem& item = plan.items[i];
        const QueryTile& t = plan.query_tiles[item.query_tile];
        if (t.group == group)
          chunks.push_back(
              {t.row_begin, t.num_rows, t.shape, item.kv_head, item.col_begin, item.col_end});
      }
      std::sort(chunks.begin(), chunks.end());
      return chunks;
    };
    OwnedLayout alone = paged({qo_len}, {kv_len}, 1);
    const PlanArrays one = make_plan(alone.view(), config, cover_of(Causal{}));
    std::vector<i32> qo = random_lengths(random, 6, 80), kv = random_lengths(random, 6, 2000);
    qo[3] = qo_len;
    kv[3] = kv_len;
    config.num_workers = between(random, 1, 40);
    OwnedLayout batch = paged(qo, kv, 16);
    const PlanArrays many = make_plan(batch.view(), config, cover_of(Causal{}));
    EXPECT_EQ(chunks_of(one.view(), 0), chunks_of(many.view(), 3));
  });
}

}  // namespace
}  // namespace raddle::plan_testing
