// What the steps of the planner share: the block, its memory, and the batch's arrays.
#pragma once

#include "raddle/engine/core/search.h"
#include "raddle/engine/kernel/gpu_planner/memory.h"
#include "raddle/engine/kernel/gpu_planner/requests.h"
#include "raddle/engine/kernel/gpu_planner/scan.h"

RADDLE_ENGINE_BEGIN

namespace planner {

/// The last of n ascending numbers that is at most x; the first is.
RADDLE_FN i32 last_at_most(const i32* numbers, i32 n, i32 x) {
  return first_where(1, n, [&](i32 i) { return numbers[i] > x; }) - 1;
}

/// Divides by the same number many times: one multiplication, whose result is at most one too low.
class Divider {
 public:
  RADDLE_FN explicit Divider(i32 by) : by_(static_cast<u32>(by)), factor_(~u32{0} / by_) {}
  RADDLE_FN i32 quotient(i32 x) const {
    const u32 a = static_cast<u32>(x);
    const u32 q = static_cast<u32>(static_cast<u64>(a) * factor_ >> 32);
    return static_cast<i32>(a - q * by_ >= by_ ? q + 1 : q);
  }

 private:
  u32 by_, factor_;
};

/// The number of requests that the batch says it has.
RADDLE_FN i32 given_requests(const DeviceBatch& batch) {
  return batch.num_requests_at ? *batch.num_requests_at : batch.num_requests;
}

class Context {
 public:
  /// `marks`: the marks of the requests' pages, or null. `part`: the number of this block among the
  /// `parts` blocks that make the same plan.
  RADDLE_DEVICE Context(const PlanLaunch& launch_, const i32* marks_, PlannerShared& shared_,
                        u8* memory, i32 part_, i32 parts_)
      : launch(launch_),
        config(launch_.config),
        marks(marks_),
        shared(shared_),
        scratch(arrays_at<ScratchRecord>(launch_.scratch_at, memory)),
        scan(shared_.scan),
        thread(ptx::thread_index()),
        threads(ptx::thread_count()),
        lane(thread % 32),
        warp(thread / 32),
        warps(threads / 32),
        part(part_),
        parts(parts_),
        num_requests(given_requests(launch_.batch)) {}

  template <class T>
  RADDLE_DEVICE T* out(i64 offset) const {
    return reinterpret_cast<T*>(launch.plan + offset);
  }
  RADDLE_DEVICE LayoutArrays arrays() const { return layout_arrays(launch); }

  /// The first index and the step of this thread, where the threads of all planning blocks divide a
  /// loop among them.
  RADDLE_DEVICE i32 first_of_all() const { return part * threads + thread; }
  RADDLE_DEVICE i32 step_of_all() const { return parts * threads; }

  RADDLE_DEVICE void note(i32 errors, i32 request) {
    ptx::atomic_or(&shared.report.errors, errors);
    if (request >= 0) ptx::atomic_min(&shared.report.request, request);
  }
  RADDLE_DEVICE bool marked(i32 request, i32 bits) const {
    return marks && (marks[request] & bits) != 0;
  }

  /// Query tiles and rows of a request; to be called after lengths have been read.
  RADDLE_DEVICE i32 tiles_of(i32 r) const {
    return scratch.tile_indptr[r + 1] - scratch.tile_indptr[r];
  }
  RADDLE_DEVICE i32 rows_of(i32 r) const {
    return tiles_of(r) > 0 ? scratch.qo_indptr[r + 1] - scratch.qo_indptr[r] : 0;
  }

  /// The group of a query tile, counted over all levels.
  RADDLE_DEVICE i32 group_of(i32 tile) const {
    const QueryTile& t = scratch.tiles[tile];
    return t.group + (t.level + 1 == launch.maxima.max_levels ? num_prefixes : 0);
  }

  /// The unit with a number in linear order. A group has as many units a head as tiles, so the tile
  /// whose number is the unit's divided by `heads` is in the same group.
  RADDLE_DEVICE UnitAt unit_at(const Divider& heads, i32 unit) const {
    const i32 near = heads.quotient(unit);
    const i32 group = group_of(near);
    const i32 begin = scratch.group_tile[group];
    const i32 tiles = scratch.group_tile[group + 1] - begin;
    const i32 rest = unit - config.num_kv_heads * begin;
    if (tiles == 1) return UnitAt{group, rest, begin};
    const i32 head = quotient(rest, tiles);
    return UnitAt{group, head, begin + rest - head * tiles};
  }

  const PlanLaunch& launch;
  const PlanConfig& config;
  const i32* const marks;
  PlannerShared& shared;
  const ScratchArrays scratch;
  BlockScan scan;
  const i32 thread, threads, lane, warp, warps;
  const i32 part, parts;
  const i32 num_requests;
  i32 num_prefixes = 0;  ///< groups of the first of two levels
};

/// Sum over the lanes of a warp.
RADDLE_DEVICE i32 add_lanes(i32 x) {
  const i32 lane = ptx::thread_index() % 32;
  RADDLE_ROLLED
  for (i32 mask = 1; mask < 32; mask *= 2) x += ptx::shuffle(x, lane ^ mask);
  return x;
}

/// Hull of the lanes' ranges.
RADDLE_DEVICE Range join_lanes(Range r) {
  const i32 lane = ptx::thread_index() % 32;
  RADDLE_ROLLED
  for (i32 mask = 1; mask < 32; mask *= 2)
    r = hull(r, Range{ptx::shuffle(r.first, lane ^ mask), ptx::shuffle(r.last, lane ^ mask)});
  return r;
}

}  // namespace planner

RADDLE_ENGINE_END
