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
  i32 row;          ///< where each begins
  i32 page;         ///< where this lane's lies
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
    // Of several boxes, each is a page.
    row = view.blocks ? tile.begin & (source.page_size - 1)
                      : view.block_begin[source.group] + tile.begin;
    kv_head = head;
    level = source.level;
  }

  /// Starts copying K (`which` 0) or V to a slot; `barrier` expects its bytes.
  template <i32 which>
  RADDLE_DEVICE void copy(const Launch& launch, u32 slot, u32 barrier) const {
    constexpr i32 halves = which == 0 ? Kernel::qk_halves : Kernel::vo_halves;
    const bool starts = ptx::elected();
    const auto& map = launch.map[level][which];
    if (starts)
      ptx::barrier_arrive_expecting(barrier, static_cast<u32>(128 * rows * count * halves));
    constexpr i32 at_a_time = 4;
    RADDLE_ROLLED
    for (i32 first = 0; first < count; first += at_a_time) {
      i32 from[at_a_time];
      RADDLE_UNROLL
      for (i32 i = 0; i < at_a_time; ++i) from[i] = ptx::shuffle(page, first + i);
      RADDLE_UNROLL
      for (i32 i = 0; i < at_a_time; ++i) {
        if (!starts || first + i >= count) continue;
        RADDLE_UNROLL
        for (i32 half = 0; half < halves; ++half)
          ptx::copy_box(slot + static_cast<u32>(128 * (half * tile_keys + (first + i) * rows)),
                        &map, barrier, 64 * half, row, kv_head, from[i], ptx::Keep::again);
      }
    }
  }
};

}  // namespace wgmma

RADDLE_ENGINE_END
