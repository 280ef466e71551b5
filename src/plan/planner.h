// The host side of planning: drives the pure functions of engine/plan and owns what they write.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "raddle/engine/layout/layout.h"
#include "raddle/engine/plan/bounds.h"
#include "raddle/engine/plan/plan.h"

namespace raddle {

/// What a mask keeps, as functions of a tile; null: everything is kept.
struct CoverFns {
  const void* self = nullptr;
  KvSpan (*kv_span)(const void* self, const Tile& tile) = nullptr;
  Coverage (*coverage)(const void* self, const Tile& tile) = nullptr;
};

/// How a plan was chosen. Costs are in the units of the CostModel, contraction included.
struct PlanStats {
  /// A candidate schedule that was worked out.
  struct Tried {
    const char* name;
    i64 time;
  };
  static constexpr i32 most_tried = 10;

  i64 heaviest = 0;  ///< planned cost of the heaviest queue
  i64 time = 0;      ///< when the last worker is done: less where workers share bandwidth
  i64 total = 0;     ///< planned cost of all queues
  i64 uncut = 0;     ///< cost of the same work without any cut
  i32 num_workers = 0;
  const char* schedule = "";  ///< the candidate that was taken (plan/chooser.cpp)
  const char* reason = "";
  Tried tried[most_tried]{};  ///< in the order in which they were worked out
  i32 num_tried = 0;
  bool pairs_halves = false;  ///< paired workers have the halves of units

  double heaviest_over_mean() const {
    return total == 0 ? 1.0
                      : static_cast<double>(heaviest) * num_workers / static_cast<double>(total);
  }
  /// The schedule that was taken, its estimated time and those of the others: lines of text for
  /// people (explain.cpp).
  std::string explain() const;
};

/// A plan: all arrays in one block of memory, laid out by plan_offsets. An immutable value; copies
/// share the block.
class PlanArrays {
 public:
  PlanArrays() = default;
  PlanArrays(std::shared_ptr<const std::byte[]> block, const PlanSizes& sizes,
             const PlanConfig& config, const PlanStats& stats)
      : block_(std::move(block)), sizes_(sizes), config_(config), stats_(stats) {}

  PlanView view() const { return view_at(block_.get(), sizes_, config_); }
  /// The view of a copy of the block at `base`, for example in device memory.
  PlanView view_of_copy(const void* base) const { return view_at(base, sizes_, config_); }
  const std::byte* data() const { return block_.get(); }
  std::size_t bytes() const { return static_cast<std::size_t>(plan_offsets(sizes_).bytes); }
  const PlanSizes& sizes() const { return sizes_; }
  const PlanConfig& config() const { return config_; }
  const PlanStats& stats() const { return stats_; }

 private:
  std::shared_ptr<const std::byte[]> block_;
  PlanSizes sizes_{};
  PlanConfig config_{};
  PlanStats stats_;
};

/// Plans a layout. Reads only what is on the host: lengths, row lists and block descriptions, never
/// keys. The caller has checked layout and config; batch invariance on several levels is refused
/// there. Where `otherwise` is not null, a plan with that config is made if that is done earlier by
/// more than least_gain (heuristics.h).
PlanArrays make_plan(const LayoutView& layout, const PlanConfig& config, const CoverFns& cover = {},
                     const PlanConfig* otherwise = nullptr);

}  // namespace raddle
