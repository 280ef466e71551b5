// The memory of the planner kernel: pure functions of the launch, for host and device.
#pragma once

#include "raddle/engine/kernel/gpu_planner/launch.h"
#include "raddle/engine/plan/contraction.h"

namespace raddle {

/// Memory for prefix sums over a block's threads.
struct ScanMemory {
  static constexpr i32 max_sums = 3;
  i64 of[2][32 * max_sums];  ///< used in turns, so that a scan needs one barrier
};

/// Dynamic shared memory begins with this; scratch follows where it fits.
struct PlannerShared {
  ScanMemory scan;
  PlanReport report;
  i32 word;  ///< a word from one thread to all
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

namespace planner {

/// The largest number of threads of a block.
constexpr i32 num_threads = 512;

/// Threads of a block. On a single level one for each request and cut, because more would only wait
/// at barriers; on two levels, where one block plans, all.
RADDLE_FN i32 block_threads(const PlanConfig& config, const Maxima& m) {
  if (m.max_levels > 1) return num_threads;
  const i32 wanted = max(m.max_requests, config.num_workers + 1);
  return max(min(round_up(wanted, 32), num_threads), 128);  // at least one warp a scheduler
}

/// Blocks that make the same plan (PlanLaunch::num_planners). With four, the part that they divide
/// is short beside the rest.
RADDLE_FN constexpr i32 most_planners(const Maxima& m) { return m.max_levels > 1 ? 1 : 4; }

/// The most workers that ScratchArrays::owners can name.
constexpr i32 max_workers = 1 << 16;

/// Marks of a request's pages, as bits.
constexpr i32 page_missing = 1;  ///< some entry is -1, which is an error only where keys are kept
constexpr i32 page_outside = 2;

RADDLE_FN constexpr i32 shared_header() {
  return round_up(static_cast<i32>(sizeof(PlannerShared)), 16);
}

RADDLE_FN PlannedOffsets planned_offsets(const Maxima& m) {
  const i64 requests = m.max_requests;
  const bool prefixes = m.max_levels > 1;
  const i64 shared = prefixes ? requests : 0;
  const i64 rows = prefixes ? m.max_qo_tokens : 0;
  Carver<16> carve;
  PlannedOffsets at{};
  static_cast<PlannedRecord<NumberOf>&>(at) =
      offsets_of(PlannedRecord<NumberOf>{.qo_indptr = requests + 1,
                                         .kv_len = requests,
                                         .block_begin = requests,
                                         .row_request = rows,
                                         .suffix = shared,
                                         .kv_begin = shared,
                                         .prefix_indptr = shared + 1,
                                         .prefix_rows = rows,
                                         .prefix_len = shared,
                                         .prefix_begin = shared},
                 carve);
  at.bytes = carve.used();
  return at;
}

/// How many entries the scratch arrays have.
RADDLE_FN ScratchRecord<NumberOf> scratch_counts(const PlanConfig& config, const Maxima& m) {
  const PlanSizes n = plan_bounds(config, m);
  const i64 requests = m.max_requests;
  const i64 workers = i64{config.num_workers} + 1;
  // Levels in step have as many cuts again.
  const i64 cuts = config.batch_invariant ? 0 : (m.max_levels > 1 ? 2 : 1) * workers;
  const i64 pieces = config.batch_invariant ? quotient(n.items, i64{config.num_kv_heads}) : 0;
  const bool prefixes = m.max_levels > 1;
  const i64 shared = prefixes ? requests : 0;
  const i64 prefix_tile_indptr = prefixes ? max_level_tiles(config, m) : 0;
  return {.tile_indptr = requests + 1,
          .group_tile = requests * m.max_levels + 1,
          .cost_before = n.query_tiles + 1,
          .kv_tiles = n.query_tiles,
          .tiles = n.query_tiles,
          .cuts = cuts,
          .rank = cuts,
          .row_at = cuts,
          .owners = config.batch_invariant ? 0 : n.items,
          .pieces = pieces,
          .piece_begin = config.batch_invariant ? n.query_tiles + 1 : 0,
          .piece_cost_before = config.batch_invariant ? pieces + 1 : 0,
          .queue = workers,
          .splits = n.splits,
          .qo_indptr = requests + 1,
          .kv_len = requests,
          .links = shared,
          .depth = shared,
          .group = shared,
          .row_before = shared,
          .tiles_before = shared,
          .prefix_tile_indptr = shared + 1,
          .first_dependent = prefix_tile_indptr,
          .hulls = prefix_tile_indptr};
}

/// `masked`: the composition has a mask, so coverage may need refining.
RADDLE_FN PlannerScratch planner_scratch(const PlanConfig& config, const Maxima& m, bool masked) {
  Carver<16> carve;
  PlannerScratch at{};
  static_cast<ScratchRecord<NumberOf>&>(at) = offsets_of(scratch_counts(config, m), carve);
  at.bytes = carve.used();
  at.marks = carve.place<i32>(2 + i64{m.max_requests});
  at.found = carve.place<PrefixLink>(m.max_levels > 1 ? m.max_requests : 0);
  const i64 planning = i64{most_planners(m)} * block_threads(config, m);
  at.spans = carve.place<Run>(masked ? planning * max_spans : 0);
  at.device_bytes = carve.used();
  return at;
}

RADDLE_FN LayoutArrays layout_arrays(const PlanLaunch& launch) {
  return arrays_at<PlannedRecord>(launch.layout_at, launch.layout);
}

/// The layout as attention kernels see it, levels included; `levels` has max_levels entries. Counts
/// that only the device knows are given as their maxima.
RADDLE_FN LayoutView planned_layout(const PlanLaunch& launch, LevelView* levels) {
  const DeviceBatch& batch = launch.batch;
  const LayoutArrays a = layout_arrays(launch);
  const i32 last = launch.maxima.max_levels - 1;
  LevelView level{};
  level.num_groups = launch.maxima.max_requests;
  level.block_size = batch.pages ? batch.page_size : 1;
  level.block_rows = 1;
  level.blocks = batch.pages;
  level.groups_are_requests = true;
  level.row_indptr = a.qo_indptr;
  level.columns = last > 0 ? a.suffix : a.kv_len;
  level.kv_begin = last > 0 ? a.kv_begin : nullptr;
  level.block_begin = a.block_begin;
  levels[last] = level;
  if (last > 0) {
    level.groups_are_requests = false;
    level.keys_are_shared = true;
    level.row_indptr = a.prefix_indptr;
    level.rows = a.prefix_rows;
    level.columns = a.prefix_len;
    level.kv_begin = nullptr;
    level.block_begin = a.prefix_begin;
    levels[0] = level;
  }
  LayoutView layout{};
  layout.num_requests = launch.maxima.max_requests;
  layout.num_rows = launch.maxima.max_qo_tokens;
  layout.num_levels = launch.maxima.max_levels;
  layout.qo_indptr = a.qo_indptr;
  layout.kv_len = a.kv_len;
  layout.row_request = last > 0 ? a.row_request : nullptr;
  layout.levels = levels;
  return layout;
}

}  // namespace planner

RADDLE_ENGINE_END
