// The memory of the planner kernel: pure functions of the launch, for host and device.
#pragma once

#include "raddle/engine/kernel/plan/launch.h"
#include "raddle/engine/plan/contraction.h"
#include "raddle/engine/plan/prefixes.h"

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

/// A group of requests that share a prefix; stored at the leader's index.
struct PrefixGroup {
  i32 number;  ///< in the level
  i32 members;
  i32 rows;
  i32 row_begin;  ///< where its rows begin among those of all groups
  i32 leader;     ///< leader of the group whose number is this index
};

/// Hulls over the rows of a query tile.
struct RowHull {
  Range request;
  Range q_index;
};

/// The arrays of the layout that the kernel writes.
struct LayoutArrays {
  i32 *qo_indptr, *kv_len, *block_begin;
  i32 *row_request, *suffix, *kv_begin;
  i32 *prefix_indptr, *prefix_rows, *prefix_len, *prefix_begin;
};

/// The planner's scratch arrays.
struct ScratchArrays {
  i32* candidates;  ///< [groups + 1] query tiles of the groups before, of one level
  i32* group_tile;  ///< [groups of all levels + 1]
  i64* prefix;      ///< as in Units
  i32* kv_tiles;
  QueryTile* tiles;
  Cut* cuts;
  i32* rank;    ///< [num_workers + 1] chunks that begin at cuts up to this one
  i32* row_at;  ///< [num_workers + 1] partial rows before this cut's
  i32* queue;   ///< [num_workers + 1] queue_indptr
  u16* owners;  ///< [items] the worker whose queue has the item
  Split* splits;
  i32* qo_indptr;  ///< [requests + 1]
  i32* kv_len;     ///< [requests]
  // With prefixes. [requests]:
  PrefixLink* links;   ///< link to a leader; pages is 0 where no other request shares
  i32* depth;          ///< of a leader: pages that all requests linked to it share
  PrefixGroup* group;  ///< of a leader: its group
  i32* row_before;     ///< rows of the group before the request's
  i32* tiles_before;   ///< query tiles of the group's earlier requests, on the last level
  i32* prefix_tiles;   ///< [requests + 1] candidates of the first level
  // [query tiles]:
  i32* first_dependent;  ///< place of a prefix's tile's first dependent among its group's
  RowHull* hulls;
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

/// Places arrays one after another.
class Placer {
 public:
  RADDLE_FN i64 place(i64 count, i64 size) {
    const i64 begin = end_;
    end_ = round_up(begin + count * size, i64{16});
    return begin;
  }
  RADDLE_FN i64 end() const { return end_; }

 private:
  i64 end_ = 0;
};

RADDLE_FN PlannedOffsets planned_offsets(const Maxima& m) {
  const i64 requests = m.max_requests;
  const bool prefixes = m.max_levels > 1;
  Placer to;
  PlannedOffsets at{};
  at.qo_indptr = to.place(requests + 1, sizeof(i32));
  at.kv_len = to.place(requests, sizeof(i32));
  at.block_begin = to.place(requests, sizeof(i32));
  const i64 shared = prefixes ? requests : 0;
  const i64 rows = prefixes ? m.max_qo_tokens : 0;
  at.row_request = to.place(rows, sizeof(i32));
  at.suffix = to.place(shared, sizeof(i32));
  at.kv_begin = to.place(shared, sizeof(i32));
  at.prefix_indptr = to.place(shared + 1, sizeof(i32));
  at.prefix_rows = to.place(rows, sizeof(i32));
  at.prefix_len = to.place(shared, sizeof(i32));
  at.prefix_begin = to.place(shared, sizeof(i32));
  at.bytes = to.end();
  return at;
}

/// `masked`: the composition has a mask, so coverage may need refining.
RADDLE_FN PlannerScratch planner_scratch(const PlanConfig& config, const Maxima& m, bool masked) {
  const PlanSizes n = plan_bounds(config, m);
  const i64 groups = i64{m.max_requests} * m.max_levels;
  const i64 cuts = i64{config.num_workers} + 1;
  Placer to;
  PlannerScratch at{};
  at.candidates = to.place(m.max_requests + 1, sizeof(i32));
  at.group_tile = to.place(groups + 1, sizeof(i32));
  at.prefix = to.place(n.query_tiles + 1, sizeof(i64));
  at.kv_tiles = to.place(n.query_tiles, sizeof(i32));
  at.tiles = to.place(n.query_tiles, sizeof(QueryTile));
  at.cuts = to.place(cuts, sizeof(Cut));
  at.rank = to.place(cuts, sizeof(i32));
  at.row_at = to.place(cuts, sizeof(i32));
  at.queue = to.place(cuts, sizeof(i32));
  at.owners = to.place(n.items, sizeof(u16));
  at.splits = to.place(n.splits, sizeof(Split));
  at.qo_indptr = to.place(m.max_requests + 1, sizeof(i32));
  at.kv_len = to.place(m.max_requests, sizeof(i32));
  const bool prefixes = m.max_levels > 1;
  const i64 shared = prefixes ? m.max_requests : 0;
  const i64 tiles = prefixes ? max_level_tiles(config, m) : 0;
  at.links = to.place(shared, sizeof(PrefixLink));
  at.depth = to.place(shared, sizeof(i32));
  at.group = to.place(shared, sizeof(PrefixGroup));
  at.row_before = to.place(shared, sizeof(i32));
  at.tiles_before = to.place(shared, sizeof(i32));
  at.prefix_tiles = to.place(shared + 1, sizeof(i32));
  at.first_dependent = to.place(tiles, sizeof(i32));
  at.hulls = to.place(tiles, sizeof(RowHull));
  at.bytes = to.end();
  at.marks = to.place(2 + m.max_requests, sizeof(i32));
  at.found = to.place(shared, sizeof(PrefixLink));
  const i64 planning = i64{most_planners(m)} * block_threads(config, m);
  at.spans = to.place(masked ? planning * max_spans : 0, sizeof(Run));
  at.device_bytes = to.end();
  return at;
}

RADDLE_FN LayoutArrays layout_arrays(const PlanLaunch& launch) {
  const PlannedOffsets& at = launch.layout_at;
  const auto array = [&launch](i64 offset) {
    return reinterpret_cast<i32*>(launch.layout + offset);
  };
  return LayoutArrays{array(at.qo_indptr),     array(at.kv_len),      array(at.block_begin),
                      array(at.row_request),   array(at.suffix),      array(at.kv_begin),
                      array(at.prefix_indptr), array(at.prefix_rows), array(at.prefix_len),
                      array(at.prefix_begin)};
}

RADDLE_FN ScratchArrays scratch_arrays(const PlannerScratch& at, u8* base) {
  ScratchArrays a;
  a.candidates = reinterpret_cast<i32*>(base + at.candidates);
  a.group_tile = reinterpret_cast<i32*>(base + at.group_tile);
  a.prefix = reinterpret_cast<i64*>(base + at.prefix);
  a.kv_tiles = reinterpret_cast<i32*>(base + at.kv_tiles);
  a.tiles = reinterpret_cast<QueryTile*>(base + at.tiles);
  a.cuts = reinterpret_cast<Cut*>(base + at.cuts);
  a.rank = reinterpret_cast<i32*>(base + at.rank);
  a.row_at = reinterpret_cast<i32*>(base + at.row_at);
  a.queue = reinterpret_cast<i32*>(base + at.queue);
  a.owners = reinterpret_cast<u16*>(base + at.owners);
  a.splits = reinterpret_cast<Split*>(base + at.splits);
  a.qo_indptr = reinterpret_cast<i32*>(base + at.qo_indptr);
  a.kv_len = reinterpret_cast<i32*>(base + at.kv_len);
  a.links = reinterpret_cast<PrefixLink*>(base + at.links);
  a.depth = reinterpret_cast<i32*>(base + at.depth);
  a.group = reinterpret_cast<PrefixGroup*>(base + at.group);
  a.row_before = reinterpret_cast<i32*>(base + at.row_before);
  a.tiles_before = reinterpret_cast<i32*>(base + at.tiles_before);
  a.prefix_tiles = reinterpret_cast<i32*>(base + at.prefix_tiles);
  a.first_dependent = reinterpret_cast<i32*>(base + at.first_dependent);
  a.hulls = reinterpret_cast<RowHull*>(base + at.hulls);
  return a;
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
