// The first step of planning: which query tiles there are, what their masks keep, what they cost.
#pragma once

#include "plan/buffer.h"
#include "plan/planner.h"
#include "raddle/engine/plan/units.h"

namespace raddle {

struct Tiling {
  Buffer<QueryTile> tiles;
  Buffer<Run> runs;
  i64 num_runs = 0;
  i64 longest_unit = 0;   ///< cost of the most expensive unit
  i32 longest_tile = 0;   ///< query tile of that unit
  i64 shortest_unit = 0;  ///< cost of the cheapest unit
  Units units{};          ///< views of these buffers

  /// Starts afresh; the buffers keep their memory. In planner.cpp.
  void make(const LayoutView& layout, const PlanConfig& config, const CoverFns& cover);

 private:
  template <class Cover>
  void make_levels(const LayoutView& layout, const PlanConfig& config, const Cover& cover);
  template <class Cover>
  void make_group(const LayoutView& layout, const PlanConfig& config, const Cover& cover, i32 level,
                  i32 group);

  Buffer<i32> kv_tiles_, group_tile_;
  Buffer<i64> cost_before_;
};

}  // namespace raddle
