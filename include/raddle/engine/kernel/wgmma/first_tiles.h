// A worker's first tiles, whose copies start as soon as its opening is there, while another warp
// describes the item. They are few: what else a kernel reads at its beginning,
// its own instructions above all, comes from memory, too, and waits behind all keys that are asked
// for.
#pragma once

#include "raddle/engine/kernel/wgmma/memory.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

/// As many bytes are under way for each multiprocessor as its part of the memory's rate asks for,
/// until the next copies start.
constexpr i32 most_first_tiles = 1;

/// Starts copying K (`which` 0) or V (1) of the first tiles, each lane one box of one tile; returns
/// how many tiles. Their barriers expect the bytes, and that a thread arrives.
template <class Kernel>
RADDLE_DEVICE i32 start_first_tiles(const Launch& launch, const Opening& opening, i32 which) {
  constexpr i32 keys = Kernel::tile_keys;
  static_assert(most_first_tiles <= Kernel::slots);
  static_assert(most_first_tiles * keys <= 32 * least_box_rows);
  // In registers: what follows may write to memory, for all that the compiler knows.
  const i32 level_index = opening.level, kv_head = opening.kv_head;
  const LevelView& level = launch.levels[level_index];
  const bool in_pages = level.blocks != nullptr;
  const i32 page_size = in_pages ? level.block_size : keys;
  const i32 rows = box_rows(page_size, keys), rows_shift = log2_of(rows);
  const i32 first = rows * ptx::lane_index(), tile = first / keys;  // this lane's box, and its tile
  const i32 column = opening.span_begin + first, end = min(opening.span_end, opening.col_end);
  const bool exists =
      opening.item >= 0 && launch.in_boxes[level_index] && tile < most_first_tiles && column < end;
  i32 page = 0, row = opening.first_entry + column;
  if (in_pages) {
    const i32 shift = log2_of(page_size);
    if (exists) page = level.blocks[opening.first_entry + (column >> shift)];
    row = column & (page_size - 1);
  }
  auto& block = Memory<Kernel>::get();
  const i32 halves = which == 0 ? Kernel::qk_halves : Kernel::vo_halves;
  const TilePlace<Kernel> at(tile % Kernel::rings, tile / Kernel::rings);
  const i32 slot = exists ? at.slot : 0;
  const u32 barrier =
      ptx::shared_address(which == 0 ? &block.key_slots.full[slot] : &block.value_slots.full[slot]);
  if (exists && first % keys == 0) {  // of all boxes of the tile
    const i32 boxes = (min(end - column, keys) + rows - 1) >> rows_shift;
    ptx::barrier_expect(barrier, static_cast<u32>(128 * halves * (boxes << rows_shift)));
  }
  ptx::sync_warp();  // no box may end before its bytes are expected
  if (exists) {
    const u32 to = ptx::shared_address(which == 0 ? block.k[slot] : block.v[slot]) +
                   static_cast<u32>(128 * (first % keys));
    RADDLE_UNROLL
    for (i32 half = 0; half < max(Kernel::qk_halves, Kernel::vo_halves); ++half)
      if (half < halves)
        ptx::copy_box(to + static_cast<u32>(128 * half * keys), &launch.map[level_index][which],
                      barrier, 64 * half, row, kv_head, page, Kernel::keeps(launch));
  }
  return (ptx::count_bits(ptx::ballot(exists)) * rows + keys - 1) / keys;
}

}  // namespace wgmma

RADDLE_ENGINE_END
