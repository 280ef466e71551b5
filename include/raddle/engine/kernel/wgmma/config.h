// What the host knows of a kernel on Hopper's wgmma before it is compiled, and which levels of a
// layout it can read.
#pragma once

#include "raddle/engine/core/math.h"
#include "raddle/engine/kernel/gpu/config.h"
#include "raddle/engine/plan/plan.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

/// Two warpgroups compute, each 64 of an item's rows; a third loads what they need.
constexpr i32 group_threads = 128, consumer_groups = 2;
constexpr i32 num_threads = group_threads * (consumer_groups + 1);
constexpr TileShape long_tile{128, 128};
/// A block has its multiprocessor for itself, and all of its shared memory.
constexpr i32 shared_bytes = 227 * 1024;

/// Boxes have at least as many rows as the swizzle's pattern, and at most as many as a tile.
constexpr i32 least_box_rows = 8;
RADDLE_FN constexpr i32 box_rows(i32 page_size, i32 tile_keys) { return min(page_size, tile_keys); }

/// Whether boxes of pages can be copied: each a whole part of a tile, or a tile a whole part of it.
RADDLE_FN constexpr bool is_boxed(i32 page_size) {
  return page_size >= least_box_rows && (page_size & (page_size - 1)) == 0;
}

/// Whether there is a kernel for such heads. Rows of O are written in pieces of 32 columns; two
/// slots of Q, of K and of V must fit the shared memory.
RADDLE_FN constexpr bool has_kernel(i32 dim_qk, i32 dim_vo) {
  return dim_qk <= 128 && dim_qk % 8 == 0 && dim_vo <= 128 && dim_vo % 32 == 0;
}

/// There are no short queries: fewer rows than a tile's are computed as a whole tile.
RADDLE_FN constexpr KernelConfig kernel_config() {
  return {.short_rows = 0,
          .short_keys = long_tile.keys,
          .long_rows = long_tile.rows,
          .long_keys = long_tile.keys,
          .short_slots = 0,
          .long_slots = 2,
          .shared_bytes = shared_bytes,
          .blocks_per_multiprocessor = 1,
          .team_threads = num_threads,
          .most_teams = 1};
}

}  // namespace wgmma

RADDLE_ENGINE_END
