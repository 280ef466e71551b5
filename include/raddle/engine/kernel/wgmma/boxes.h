// The boxes of a KV tile: one a page, or one for all keys that lie in one piece.
#pragma once

#include "raddle/engine/kernel/wgmma/memory.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

/// The boxes of an item's tiles, which begin at multiples of a box's rows. Pages hold a power of
/// two of keys. What a tile's boxes need of the layout is in registers: the warps that load take
/// the instructions that they execute from those that compute.
template <class Kernel, i32 which>
class Boxes {
  static constexpr i32 tile_keys = Kernel::tile_keys;

 public:
  /// What is looked up of a tile before its slot is free: the page of this lane's box.
  using Found = i32;
  /// Boxes copy what lies where rows without a key are.
  static constexpr bool clears_missing = false;
  static constexpr bool leaves_time = true;  ///< to ask about parts of tiles

  RADDLE_DEVICE Boxes(const Launch& launch, const KeySource& source, i32 kv_head)
      : launch_(launch),
        pages_(source.pages + ptx::lane_index()),
        page_shift_(source.page_shift),
        rows_(box_rows(source.page_size, tile_keys)),
        shift_(log2_of(rows_)),
        level_(source.level),
        kv_head_(kv_head),
        end_(source.col_end) {
    const LevelView& view = launch.levels[source.level];
    in_pages_ = view.blocks != nullptr;
    if (!in_pages_) first_row_ = view.block_begin[source.group];
  }

  /// Lists are not read behind their end.
  RADDLE_DEVICE Found find(const Span& tile) const {
    return in_pages_ && ptx::lane_index() < count(tile) ? pages_[tile.begin >> page_shift_] : 0;
  }

  RADDLE_DEVICE void prepare(const Span&, Found) const {}
  /// Starts copying K (`which` 0) or V of a tile to a slot; `barrier` expects its bytes. Of a
  /// cluster of two, each block copies half of them to both.
  RADDLE_DEVICE void copy(const Span& tile, Found page, u32 slot, u32 barrier) const {
    constexpr i32 halves = which == 0 ? Kernel::qk_halves : Kernel::vo_halves;
    const auto& map = launch_.map[level_][which];
    [[maybe_unused]] const i32 rank = rank_in_cluster<Kernel>();
    // Of several boxes, each is a page.
    const i32 row = in_pages_ ? tile.begin & ((1 << page_shift_) - 1) : first_row_ + tile.begin;
    const auto copy_one = [&](i32 i, i32 from) {
      RADDLE_UNROLL
      for (i32 half = 0; half < halves; ++half) {
        const u32 to = slot + static_cast<u32>(128 * (half * tile_keys + i * rows_));
        if constexpr (Kernel::cluster_size == 1) {
          ptx::copy_box(to, &map, barrier, 64 * half, row, kv_head_, from, Kernel::keeps(launch_));
        } else {
          // The blocks copy every other half; of one half, those of every other tile.
          const i32 nth = halves > 1 ? half : tile.begin / tile_keys;
          if (nth % 2 == rank)
            ptx::copy_box_to_both(to, &map, barrier, 64 * half, row, kv_head_, from,
                                  Kernel::keeps(launch_));
        }
      }
    };
    const i32 boxes = count(tile);
    i32* pages = Memory<Kernel>::get().pages[which];
    if (ptx::lane_index() < boxes) pages[ptx::lane_index()] = page;
    ptx::sync_warp();
    // One lane starts all of them: what does not change from box to box stays in registers of the
    // warp then, and a box takes a warp 18 instructions, where 32 fetched its page from a lane.
    if (ptx::elected()) {
      ptx::barrier_arrive_expecting(barrier, static_cast<u32>(128 * halves * (boxes << shift_)));
      constexpr i32 at_once = Kernel::boxes_at_once;
      RADDLE_ROLLED
      for (i32 first = 0; first < boxes; first += at_once) {
        i32 from[at_once];
        RADDLE_UNROLL
        for (i32 i = 0; i < at_once; ++i) from[i] = pages[first + i];
        RADDLE_UNROLL
        for (i32 i = 0; i < at_once; ++i)
          if (i == 0 || first + i < boxes) copy_one(first + i, from[i]);
      }
    }
    ptx::sync_warp();  // the pages have been read
  }

 private:
  RADDLE_DEVICE i32 count(const Span& tile) const {
    return (min(tile.end, end_) - tile.begin + rows_ - 1) >> shift_;
  }

  const Launch& launch_;
  const i32* pages_;  ///< this lane's entry of the page list
  i32 page_shift_, rows_, shift_, level_, kv_head_, end_;
  i32 first_row_ = 0;
  bool in_pages_;
};

}  // namespace wgmma

RADDLE_ENGINE_END
