#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include "plan_testing.h"
#include "raddle/engine/plan/bounds.h"
#include "raddle/engine/tile/walk.h"

namespace raddle::plan_testing {
namespace {

i32 fused_rows(const LevelView& level, i32 group, const PlanConfig& config) {
  return group_rows(level, group) * config.group_size;
}

}  // namespace

void check_runs(const LayoutView& layout, const PlanConfig& config, const PlanView& plan,
                const void* mask, MaskFn keeps) {
  for (i32 q = 0; q < plan.num_query_tiles; ++q) {
    const QueryTile& tile = plan.query_tiles[q];
    const LevelView& level = layout.levels[tile.level];
    const i32 keys = plan.shapes[tile.shape].keys;
    const i32 columns = level.columns[tile.group];
    std::vector<const Run*> run_of(static_cast<std::size_t>(columns), nullptr);
    for (i32 r = tile.run_begin; r < tile.run_end; ++r) {
      const Run& run = plan.runs[r];
      ASSERT_LT(run.begin, run.end);
      ASSERT_GE(run.begin, 0);
      ASSERT_LE(run.end, columns);
      ASSERT_EQ(run.begin % keys, 0);
      ASSERT_TRUE(run.end % keys == 0 || run.end == columns);
      ASSERT_NE(run.kind, Coverage::empty);
      if (r > tile.run_begin) {
        ASSERT_LE(plan.runs[r - 1].end, run.begin);
        ASSERT_FALSE(plan.runs[r - 1].end == run.begin && plan.runs[r - 1].kind == run.kind)
            << "not maximal";
      }
      for (i32 c = run.begin; c < run.end; ++c) run_of[static_cast<std::size_t>(c)] = &run;
    }
    ASSERT_LE(tile.run_end - tile.run_begin, runs_limit(config.max_runs));
    for (i32 f = tile.row_begin; f < tile.row_begin + tile.num_rows; ++f) {
      const Row row = make_row(layout, level, tile.group, f, 0, config.group_size);
      for (i32 c = 0; c < columns; ++c) {
        const Column at = column_at(level, tile.group, c);
        if (!at.valid) continue;
        bool kept = !keeps || keeps(mask, row, Key{row.request, at.kv_index, at.kv_pos, 0});
        if (level.mask_bits) {
          const i32 entry = level.block_begin[tile.group] + c / level.block_size;
          const i64 bit =
              (i64{entry} * level.block_rows + f / config.group_size) * level.block_size +
              at.offset;
          kept = kept && (level.mask_bits[bit / 8] >> (bit % 8) & 1);
        }
        const Run* run = run_of[static_cast<std::size_t>(c)];
        ASSERT_TRUE(!kept || run) << "tile " << q << " row " << f << " column " << c << " is lost";
        ASSERT_TRUE(kept || !run || run->kind == Coverage::partial)
            << "tile " << q << " row " << f << " column " << c;
      }
    }
  }
}

namespace {

/// The chunks of every (query tile, KV head), in column order; each must follow the one before.
using Chunks = std::map<std::pair<i32, i32>, std::vector<WorkItem>>;

Chunks collect_chunks(const PlanView& plan) {
  Chunks chunks;
  for (i32 i = 0; i < plan.num_items; ++i)
    chunks[{plan.items[i].query_tile, plan.items[i].kv_head}].push_back(plan.items[i]);
  for (auto& [unit, items] : chunks) {
    std::sort(items.begin(), items.end(),
              [](const WorkItem& a, const WorkItem& b) { return a.col_begin < b.col_begin; });
  }
  return chunks;
}

void check_chunks(const PlanView& plan, const Chunks& chunks, bool all_partial,
                  std::vector<i32>& owner) {
  for (const auto& [unit, items] : chunks) {
    const QueryTile& tile = plan.query_tiles[unit.first];
    const i32 keys = plan.shapes[tile.shape].keys;
    const bool none = tile.run_begin == tile.run_end;
    EXPECT_EQ(items.front().col_begin, none ? 0 : plan.runs[tile.run_begin].begin);
    EXPECT_EQ(items.back().col_end, none ? 0 : plan.runs[tile.run_end - 1].end);
    EXPECT_TRUE(!none || items.size() == 1);
    const bool partial = all_partial || items.size() > 1;
    const Split split = tile.split < 0 ? Split{-1, 0} : plan.splits[tile.split + unit.second];
    EXPECT_EQ(split.num_chunks, partial ? static_cast<i32>(items.size()) : 0);
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (i > 0) {
        // Between chunks there may lie columns that no row keeps.
        EXPECT_GE(items[i].col_begin, items[i - 1].col_end);
        for (i32 r = tile.run_begin; r < tile.run_end; ++r)
          EXPECT_TRUE(plan.runs[r].end <= items[i - 1].col_end ||
                      plan.runs[r].begin >= items[i].col_begin ||
                      items[i].col_begin == items[i - 1].col_end);
        EXPECT_EQ(items[i].col_begin % keys, 0);
      }
      EXPECT_TRUE(none || items[i].col_begin < items[i].col_end);
      EXPECT_EQ(items[i].partial_row,
                partial ? split.partial_row + static_cast<i32>(i) * tile.num_rows : -1);
      for (i32 r = 0; partial && r < tile.num_rows; ++r) {
        const std::size_t at = static_cast<std::size_t>(items[i].partial_row + r);
        ASSERT_LT(at, owner.size());
        ASSERT_EQ(owner[at], -1) << "two states share a row";
        owner[at] = unit.first;
      }
    }
  }
}

}  // namespace

namespace {

/// Tiles partition the fused rows of every group.
void check_partition(const LayoutView& layout, const PlanConfig& config, const PlanView& plan) {
  // Earlier levels leave out tiles that keep nothing.
  std::map<std::pair<i32, i32>, i32> rows_seen;
  for (i32 q = 0; q < plan.num_query_tiles; ++q) {
    const QueryTile& t = plan.query_tiles[q];
    if (t.level == layout.num_levels - 1) {
      EXPECT_EQ((rows_seen[{t.level, t.group}]), t.row_begin);
    } else {
      EXPECT_LT(t.run_begin, t.run_end);
    }
    rows_seen[{t.level, t.group}] = t.row_begin + t.num_rows;
  }
  const LevelView& last = layout.levels[layout.num_levels - 1];
  for (i32 g = 0; g < last.num_groups; ++g) {
    EXPECT_EQ((rows_seen[{layout.num_levels - 1, g}]), fused_rows(last, g, config));
  }
}

/// Runs the contractions on counters instead of states.
void check_contractions(const LayoutView& layout, const PlanConfig& config, const PlanView& plan) {
  const LevelView& last = layout.levels[layout.num_levels - 1];
  std::vector<i32> composed(static_cast<std::size_t>(plan.num_partial_rows), 0);
  std::map<std::pair<i32, i32>, i32> waiting;  // (contraction, head) -> arrivals
  for (i32 i = 0; i < plan.num_items; ++i) {
    const WorkItem& item = plan.items[i];
    const QueryTile& t = plan.query_tiles[item.query_tile];
    if (item.partial_row < 0) continue;
    for (i32 d = t.dependents_begin; d < t.dependents_end; ++d)
      ++waiting[{plan.dependents[d], item.kv_head}];
  }
  std::vector<i32> tile_contractions(static_cast<std::size_t>(plan.num_query_tiles), 0);
  for (i32 c = 0; c < plan.num_contractions; ++c) {
    const Contraction& contraction = plan.contractions[c];
    const QueryTile& out = plan.query_tiles[contraction.query_tile];
    ASSERT_EQ(out.level, layout.num_levels - 1);
    ++tile_contractions[static_cast<std::size_t>(contraction.query_tile)];
    for (i32 h = 0; h < config.num_kv_heads; ++h) {
      ASSERT_EQ((waiting[{c, h}]), plan.expected[c * config.num_kv_heads + h]);
      for (i32 s = contraction.source_begin; s < contraction.source_end; ++s) {
        const Source& source = plan.sources[s];
        const QueryTile& from = plan.query_tiles[source.query_tile];
        const Split split = plan.splits[from.split + h];
        ASSERT_LE(source.dst_row + source.num_rows, out.num_rows);
        ASSERT_LE(source.row + source.num_rows, from.num_rows);
        if (s > contraction.source_begin) {
          ASSERT_LE(plan.query_tiles[plan.sources[s - 1].query_tile].level, from.level);
        }
        for (i32 r = 0; r < source.num_rows; ++r) {
          const Row a = make_row(layout, last, out.group, out.row_begin + source.dst_row + r, h,
                                 config.group_size);
          const Row b = make_row(layout, layout.levels[from.level], from.group,
                                 from.row_begin + source.row + r, h, config.group_size);
          ASSERT_EQ(a.row, b.row);
          ASSERT_EQ(a.q_head, b.q_head);
          for (i32 chunk = 0; chunk < split.num_chunks; ++chunk) {
            ++composed[static_cast<std::size_t>(split.partial_row + chunk * from.num_rows +
                                                source.row + r)];
          }
        }
      }
    }
  }
  for (std::size_t r = 0; r < composed.size(); ++r) EXPECT_EQ(composed[r], 1) << "state row " << r;
  for (i32 q = 0; q < plan.num_query_tiles; ++q) {
    const QueryTile& t = plan.query_tiles[q];
    const bool contracted = t.split >= 0 && t.level == layout.num_levels - 1;
    EXPECT_EQ(tile_contractions[static_cast<std::size_t>(q)], contracted ? 1 : 0);
  }
}

}  // namespace

/// A paired half ends its queue, and the other half ends that of the paired worker.
void check_paired_halves(const PlanView& plan) {
  std::vector<i32> seat(static_cast<std::size_t>(plan.num_items), -1);
  for (i32 w = 0; w < plan.num_workers; ++w)
    if (plan.queue_indptr[w] < plan.queue_indptr[w + 1])
      seat[static_cast<std::size_t>(plan.queue_indptr[w + 1] - 1)] = w;
  for (i32 i = 0; i < plan.num_items; ++i) {
    const WorkItem& item = plan.items[i];
    if (item.paired_half == 0) continue;
    const i32 mine = seat[static_cast<std::size_t>(i)], half = plan.num_workers / 2;
    ASSERT_GE(mine, 0);
    const i32 beside = mine < half ? mine + half : mine - half;
    const WorkItem& theirs = plan.items[plan.queue_indptr[beside + 1] - 1];
    ASSERT_LT(plan.queue_indptr[beside], plan.queue_indptr[beside + 1]);
    ASSERT_EQ(theirs.query_tile, item.query_tile);
    ASSERT_EQ(theirs.kv_head, item.kv_head);
    ASSERT_EQ(theirs.paired_half, 1);
    const QueryTile& tile = plan.query_tiles[item.query_tile];
    ASSERT_EQ(plan.splits[tile.split + item.kv_head].num_chunks, 2);
    ASSERT_NE(theirs.partial_row, item.partial_row);
  }
}

/// An opening says of a worker's first item what the plan and the layout say.
void check_openings(const LayoutView& layout, const PlanConfig& config, const PlanView& plan) {
  for (i32 w = 0; config.has_openings && w < plan.num_workers; ++w) {
    const Opening& o = plan.openings[w];
    ASSERT_EQ(o.queue_end, plan.queue_indptr[w + 1]);
    const i32* shared = plan.queue_indptr + plan.num_workers;
    const bool draws = shared[0] == 0;
    const i32 begin = draws ? w : plan.queue_indptr[w];
    if (begin >= (draws ? shared[1] : o.queue_end)) {
      ASSERT_EQ(o.item, -1);
      continue;
    }
    ASSERT_EQ(o.item, begin);
    const WorkItem& item = plan.items[o.item];
    const QueryTile& tile = plan.query_tiles[item.query_tile];
    const LevelView& level = layout.levels[tile.level];
    EXPECT_EQ(
        std::tie(o.query_tile, o.kv_head, o.partial_row, o.item_col_begin, o.item_col_end),
        std::tie(item.query_tile, item.kv_head, item.partial_row, item.col_begin, item.col_end));
    EXPECT_EQ(std::tie(o.level, o.group, o.row_begin, o.num_rows, o.col_begin, o.col_end),
              std::tie(tile.level, tile.group, tile.row_begin, tile.num_rows, tile.col_begin,
                       tile.col_end));
    EXPECT_EQ(o.first_entry, level.block_begin[tile.group]);
    EXPECT_EQ(o.first_index, level.kv_begin ? level.kv_begin[tile.group] : 0);
    i32 tiles = 0;
    TileWalk walk(plan, item);
    for (Span span; walk.next(span); ++tiles) {
      if (tiles > 0) continue;
      EXPECT_EQ(o.span_begin, span.begin);
      EXPECT_GE(o.span_end, span.end);
      EXPECT_EQ(o.span_partial, span.partial ? 1 : 0);
    }
    EXPECT_EQ(o.num_kv_tiles, tiles);
  }
}

void check_work(const LayoutView& layout, const PlanConfig& config, const PlanView& plan) {
  ASSERT_EQ(plan.queue_indptr[0], 0);
  ASSERT_EQ(plan.queue_indptr[plan.num_workers + 1], plan.num_items);
  for (i32 w = 0; w <= plan.num_workers; ++w)
    ASSERT_LE(plan.queue_indptr[w], plan.queue_indptr[w + 1]);
  // Where earlier levels have no tile, the last one is a single level.
  const bool all_partial =
      plan.num_query_tiles > 0 && plan.query_tiles[0].level + 1 < layout.num_levels;
  const Chunks chunks = collect_chunks(plan);
  ASSERT_EQ(chunks.size(), static_cast<std::size_t>(plan.num_query_tiles) *
                               static_cast<std::size_t>(config.num_kv_heads));
  std::vector<i32> owner(static_cast<std::size_t>(plan.num_partial_rows), -1);
  check_chunks(plan, chunks, all_partial, owner);
  EXPECT_EQ(std::count(owner.begin(), owner.end(), -1), 0) << "rows of the state buffer are unused";
  check_partition(layout, config, plan);
  check_contractions(layout, config, plan);
  check_paired_halves(plan);
  check_openings(layout, config, plan);
}

void check_bounds(const LayoutView& layout, const PlanConfig& config, const PlanArrays& plan) {
  Maxima maxima{0, layout.num_rows, 0, layout.num_levels, config.max_runs};
  for (i32 l = 0; l < layout.num_levels; ++l) {
    const LevelView& level = layout.levels[l];
    maxima.max_requests = std::max(maxima.max_requests, level.num_groups);
    maxima.max_kv_tokens =
        std::max(maxima.max_kv_tokens,
                 std::accumulate(level.columns, level.columns + level.num_groups, i64{0}));
  }
  const PlanSizes bound = plan_bounds(config, maxima);
  const PlanSizes& n = plan.sizes();
  EXPECT_LE(n.query_tiles, bound.query_tiles);
  EXPECT_LE(n.runs, bound.runs);
  EXPECT_LE(n.items, bound.items);
  EXPECT_LE(n.queue_indptr, bound.queue_indptr);
  EXPECT_LE(n.splits, bound.splits);
  EXPECT_LE(n.contractions, bound.contractions);
  EXPECT_LE(n.expected, bound.expected);
  EXPECT_LE(n.sources, bound.sources);
  EXPECT_LE(n.dependents, bound.dependents);
  EXPECT_LE(n.openings, bound.openings);
  EXPECT_LE(n.partial_rows, bound.partial_rows);
}

namespace {

i64 cost_of_item(const PlanConfig& config, const PlanView& plan, const WorkItem& item) {
  const QueryTile& t = plan.query_tiles[item.query_tile];
  const CostModel& model = config.costs[t.shape];
  const i32 keys = plan.shapes[t.shape].keys;
  // Tiles are ordered by level. Where only the last one has some, the plan is of a single level.
  const bool levels = plan.query_tiles[0].level != plan.query_tiles[plan.num_query_tiles - 1].level;
  i64 cost = levels ? model.per_level_item + i64{model.per_level_item_row} * t.num_rows
                    : model.per_item + i64{model.per_item_row} * t.num_rows;
  const i32 computed = t.num_rows > few_rows ? std::max(t.num_rows, model.level_rows) : t.num_rows;
  const i64 tile = levels ? model.per_level_tile + i64{model.per_level_tile_row} * computed
                          : model.per_tile + i64{model.per_tile_row} * t.num_rows;
  if (!levels && item.partial_row >= 0)
    cost += model.per_state + i64{model.per_state_row} * t.num_rows;
  for (i32 r = t.run_begin; r < t.run_end; ++r) {
    const i32 columns =
        std::min(plan.runs[r].end, item.col_end) - std::max(plan.runs[r].begin, item.col_begin);
    if (columns > 0) cost += ceil_div(columns, keys) * tile;
  }
  return cost;
}

}  // namespace

Balance cost_of_plan(const PlanConfig& config, const PlanView& plan) {
  std::vector<i64> loads(static_cast<std::size_t>(plan.num_workers), 0);
  for (i32 w = 0; w < plan.num_workers; ++w)
    for (i32 i = plan.queue_indptr[w]; i < plan.queue_indptr[w + 1]; ++i)
      loads[static_cast<std::size_t>(w)] += cost_of_item(config, plan, plan.items[i]);
  for (i32 i = plan.queue_indptr[plan.num_workers]; i < plan.num_items; ++i)  // drawn
    *std::min_element(loads.begin(), loads.end()) += cost_of_item(config, plan, plan.items[i]);
  return Balance{*std::max_element(loads.begin(), loads.end()),
                 std::accumulate(loads.begin(), loads.end(), i64{0})};
}

}  // namespace raddle::plan_testing
