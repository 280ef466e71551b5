#include "plan/planner.h"

#include "plan/chooser.h"
#include "plan/heuristics.h"
#include "plan/packer.h"
#include "plan/tiling.h"
#include "raddle/engine/plan/coverage.h"

namespace raddle {
namespace {

struct HostCover {
  CoverFns fns;
  KvSpan kv_span(const Tile& t) const {
    return fns.kv_span ? fns.kv_span(fns.self, t) : KvSpan{everything, everything};
  }
  Coverage coverage(const Tile& t) const {
    return fns.coverage ? fns.coverage(fns.self, t) : Coverage::full;
  }
};

}  // namespace

template <class Cover>
void Tiling::make_group(const LayoutView& layout, const PlanConfig& config, const Cover& cover,
                        i32 level, i32 group) {
  const LevelView& at = layout.levels[level];
  const bool last_level = level + 1 == layout.num_levels;
  const i32 fused = group_rows(at, group) * config.group_size;
  const i32 count = count_tiles(config, fused);
  const i64 used = units.num_tiles;
  tiles.grow(used + count, used);
  kv_tiles_.grow(used + count, used);
  cost_before_.grow(used + count + 1, used + 1);
  const auto hull = [&](const QueryTile& tile) {
    return query_hull(layout, at, tile, config.group_size, config.num_kv_heads);
  };
  for (i32 i = 0; i < count; ++i) {
    Run* spans = runs.grow(num_runs + max_spans, num_runs) + num_runs;
    CoveredTile covered =
        make_covered(cover, hull, at, config, make_tile(config, level, group, fused, i),
                     units.all_partial, spans);
    const i32 num = covered.tile.run_end;
    if (!last_level && num == 0) continue;  // nothing to do, nothing to contract
    if (num > 0 && !covered.in_spans) spans[0] = covered.only;
    const i32 t = units.num_tiles++;
    covered.tile.run_begin = static_cast<i32>(num_runs);
    num_runs += num;
    covered.tile.run_end = static_cast<i32>(num_runs);
    tiles[t] = covered.tile;
    kv_tiles_[t] = covered.kv_tiles;
    const i64 cost = covered.cost;
    cost_before_[t + 1] = cost_before_[t] + cost;
    if (cost > longest_unit) {
      longest_unit = cost;
      longest_tile = t;
    }
    shortest_unit = t == 0 ? cost : min(shortest_unit, cost);
  }
}

template <class Cover>
void Tiling::make_levels(const LayoutView& layout, const PlanConfig& config, const Cover& cover) {
  for (i32 l = 0; l < layout.num_levels; ++l) {
    // Where earlier levels have nothing to do, the last one alone is an ordinary single level.
    units.all_partial = l + 1 < layout.num_levels || units.num_tiles > 0;
    for (i32 g = 0; g < layout.levels[l].num_groups; ++g) {
      make_group(layout, config, cover, l, g);
      group_tile_[++units.num_groups] = units.num_tiles;
    }
  }
}

void Tiling::make(const LayoutView& layout, const PlanConfig& config, const CoverFns& cover) {
  i64 groups = 0;
  for (i32 l = 0; l < layout.num_levels; ++l) groups += layout.levels[l].num_groups;
  units = Units{};
  num_runs = longest_unit = shortest_unit = 0;
  longest_tile = 0;
  group_tile_.grow(groups + 1)[0] = 0;
  cost_before_.grow(groups + 1)[0] = 0;
  if (cover.kv_span || cover.coverage) {
    make_levels(layout, config, HostCover{cover});
  } else {
    make_levels(layout, config, CoverAll{});
  }
  units.tiles = tiles.data();
  units.runs = runs.data();
  units.kv_tiles = kv_tiles_.data();
  units.cost_before = cost_before_.data();
  units.group_tile = group_tile_.data();
  units.num_kv_heads = config.num_kv_heads;
  for (i32 s = 0; s < 2; ++s) {
    units.shapes[s] = config.shapes[s];
    units.costs[s] = config.costs[s];
  }
}

namespace {

/// A plan before it is packed.
struct Draft {
  const PlanConfig* config = nullptr;
  Tiling tiling;
  Chooser chooser;
  PlanStats stats;
  const Assignment* chosen = nullptr;

  void tile(const LayoutView& layout, const PlanConfig& with, const CoverFns& cover) {
    config = &with;
    tiling.make(layout, with, cover);
    chosen = nullptr;
  }
  void choose() {
    stats = PlanStats{};
    chosen = &chooser.choose(tiling, *config, stats);
  }
  /// Whether workers have so many units that all are done at about the same time.
  bool has_many_units() const {
    constexpr i64 many = 8;
    return i64{tiling.units.num_tiles} * tiling.units.num_kv_heads >= many * config->num_workers;
  }
  /// When workers that share the work equally are done.
  i64 equal_share() const {
    const Units& units = tiling.units;
    return units.cost_before[units.num_tiles] * units.num_kv_heads / config->num_workers;
  }
};

/// The draft that is done earlier. Schedules are worked out for both only where their tiles do not
/// tell.
Draft& earlier(Draft& first, Draft& second) {
  if (first.has_many_units() && second.has_many_units())
    return second.equal_share() + least_gain < first.equal_share() ? second : first;
  first.choose();
  second.choose();
  return second.stats.time + least_gain < first.stats.time ? second : first;
}

}  // namespace

PlanArrays make_plan(const LayoutView& layout, const PlanConfig& config, const CoverFns& cover,
                     const PlanConfig* otherwise) {
  struct Memory {
    Draft drafts[2];
    Packer packer;
  };
  static thread_local Memory memory;  // serves a thread's next plan, too
  auto& [first, second] = memory.drafts;
  first.tile(layout, config, cover);
  if (otherwise) second.tile(layout, *otherwise, cover);
  Draft& taken = otherwise ? earlier(first, second) : first;
  if (!taken.chosen) taken.choose();
  return memory.packer.pack(layout, *taken.config, taken.tiling, *taken.chosen, taken.stats);
}

}  // namespace raddle
