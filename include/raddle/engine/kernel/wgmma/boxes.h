// The boxes of a KV tile: one a page, or one for all keys that lie in one piece.
#pragma once

#include "raddle/engine/kernel/wgmma/memory.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

/// Boxes have at least as many rows as the swizzle's pattern, and at most as many as a tile.
constexpr i32 least_box_rows = 8;
RADDLE_FN constexpr i32 box_rows(i32 page_size, i32 tile_keys) { return min(page_size, tile_keys); }

/// A tile's boxes, a lane each: found before the tile's keys are copied, and used again for its
/// values, which are copied later.
template <class Kernel>
struct Boxes {
  static constexpr i32 tile_keys = Kernel::long_keys;
  i32 count, rows;  ///< boxes of the tile, and the rows of each
  i32 row, page;    ///< where this lane's begins
  i32 kv_head, level;

  /// Finds the boxes of a tile whose first column is a multiple of their rows. Page lists are not
  /// read behind their end.
  RADDLE_DEVICE void find(const GpuLaunch& launch, const KeySource& source, const Span& tile,
                          i32 head) {
    const LevelView& view = launch.levels[source.level];
    rows = box_rows(source.page_size, tile_keys);
    count = ceil_div(columns_read(source, tile).end - tile.begin, rows);
    const i32 column = tile.begin + rows * min(ptx::lane_index(), count - 1);
    page = source.pages[nth_page(source, column)];
    row = view.blocks ? column & (source.page_size - 1) : view.block_begin[source.group] + column;
    kv_head = head;
    level = source.level;
  }

  /// Starts copying K (`which` 0) or V to a slot; `barrier` expects its bytes.
  template <i32 which>
  RADDLE_DEVICE void copy(const Launch& launch, u32 slot, u32 barrier) const {
    constexpr i32 halves = which == 0 ? Kernel::qk_halves : Kernel::vo_halves;
    const i32 lane = ptx::lane_index();
    if (lane == 0)
      ptx::barrier_arrive_expecting(barrier, static_cast<u32>(128 * rows * count * halves));
    ptx::sync_warp();
    if (lane >= count) return;
    RADDLE_UNROLL
    for (i32 half = 0; half < halves; ++half)
      ptx::copy_box(slot + static_cast<u32>(128 * (half * tile_keys + lane * rows)),
                    &launch.map[level][which], barrier, 64 * half, row, kv_head, page,
                    ptx::Keep::again);
  }
};

}  // namespace wgmma

RADDLE_ENGINE_END
