// What the host knows of a kernel on Hopper's wgmma before it is compiled, and which levels of a
// layout it can read.
#pragma once

#include "raddle/engine/core/math.h"
#include "raddle/engine/kernel/gpu/config.h"
#include "raddle/engine/plan/plan.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

/// Two warpgroups compute; a third loads what they need.
constexpr i32 group_threads = 128, consumer_groups = 2;
constexpr i32 num_threads = group_threads * (consumer_groups + 1);
constexpr i32 long_rows = 128;  ///< of a tile of long queries
constexpr i32 group_rows = 64;  ///< of those, a warpgroup computes so many; a box has as many of Q
/// The keys of a tile of short queries, which one warpgroup computes: the rows of its products.
constexpr i32 short_keys = 64;
/// A block has its multiprocessor for itself, and all of its shared memory.
constexpr i32 shared_bytes = 227 * 1024;

/// What a kernel serves beside plans of one level whose keys boxes copy. Each is much code to
/// compile: together they take more than half of the time of a kernel of short queries.
struct Serves {
  bool levels = false;    ///< plans of several levels; a kernel of long queries serves them anyway
  bool rows = false;      ///< keys that boxes cannot copy
  bool clusters = false;  ///< long queries, by clusters of two blocks; serves no others
};

/// Boxes have at least as many rows as the swizzle's pattern, and at most as many as a tile.
constexpr i32 least_box_rows = 8;
RADDLE_FN constexpr i32 box_rows(i32 page_size, i32 tile_keys) { return min(page_size, tile_keys); }

/// Whether boxes of pages can be copied: each a whole part of a tile, or a tile a whole part of it.
RADDLE_FN constexpr bool is_boxed(i32 page_size) {
  return page_size >= least_box_rows && is_power_of_two(page_size);
}

/// Whether there is a kernel of long queries for such heads. Rows of O are written in pieces of 32
/// columns.
RADDLE_FN constexpr bool has_long_kernel(i32 dim_qk, i32 dim_vo) {
  return dim_qk <= 256 && dim_qk % 8 == 0 && dim_vo <= 256 && dim_vo % 32 == 0;
}
/// Whether two slots of K and of V, 128 keys each, and one of Q leave 19 KB for facts about items
/// and tiles. `outputs`: the variant has an output part, whose rows take 4 KB of them.
RADDLE_FN constexpr bool has_tight_tiles(i32 dim_qk, i32 dim_vo, bool outputs) {
  return dim_qk > 128 && dim_qk <= 192 && dim_vo <= 128 && !outputs;
}
/// The keys of a tile of long queries: of wider heads as many as leave room for two slots of K and
/// of V, and registers for O, of which a thread has 128 numbers where V has 256 columns.
RADDLE_FN constexpr i32 long_keys(i32 dim_qk, i32 dim_vo, bool outputs) {
  return max(dim_qk, dim_vo) <= 128 || has_tight_tiles(dim_qk, dim_vo, outputs) ? 128 : 64;
}
/// Slots of Q: two where they leave room for two of K, two of V and 35 KB of facts about items and
/// tiles. With one, a warpgroup's queries are loaded when its products of those before are done.
RADDLE_FN constexpr i32 long_query_slots(i32 dim_qk, i32 dim_vo, bool outputs) {
  const i32 qk = ceil_div(dim_qk, 64), vo = ceil_div(dim_vo, 64);
  const i32 rows_of_halves = qk * long_rows + (qk + vo) * long_keys(dim_qk, dim_vo, outputs);
  return 2 * 128 * rows_of_halves <= 192 * 1024 ? 2 : 1;
}
/// Whether there are kernels of short queries.
RADDLE_FN constexpr bool has_short_kernels(i32 dim_qk, i32 dim_vo) {
  return dim_qk <= 256 && dim_qk % 8 == 0 && dim_vo <= 256 && dim_vo % 8 == 0;
}
/// The most rows that a kernel of short queries has for heads of V and O this wide: of wider ones,
/// 64 rows fit neither the registers nor the shared memory.
RADDLE_FN constexpr i32 most_short_rows(i32 dim_vo) { return dim_vo <= 128 ? 64 : 32; }
/// The fused rows of the smallest tile of short queries that holds so many: 8, 16, 32 or 64, each
/// a kernel of its own, whose products have as many columns. 0: there is none.
RADDLE_FN constexpr i32 short_rows_for(i32 rows, i32 dim_vo) {
  for (i32 of_tile = 8; of_tile <= most_short_rows(dim_vo); of_tile *= 2)
    if (rows <= of_tile) return of_tile;
  return 0;
}

/// Slots of keys of short queries, and of values, both rings together. 128 KB of keys and values
/// are under way or in use: in a prototype, a quarter less was slower, and half as much again no
/// faster. Heads of 192 by 128 take 160 KB, for which tiles of many rows leave no room; they
/// have 80.
RADDLE_FN constexpr i32 short_slots(i32 dim_qk, i32 dim_vo, i32 rows) {
  const i32 halves = ceil_div(dim_qk, 64) + ceil_div(dim_vo, 64);
  const bool wide = halves > 5 || (halves == 5 && rows > 16);
  return halves <= 2 ? 8 : wide ? 2 : 4;
}

/// The kernel of long queries, which takes fewer rows than a tile's as a whole tile.
RADDLE_FN constexpr KernelConfig long_kernel_config(i32 dim_qk, i32 dim_vo, bool outputs) {
  return {.short_rows = 0,
          .short_keys = long_keys(dim_qk, dim_vo, outputs),
          .long_rows = long_rows,
          .long_keys = long_keys(dim_qk, dim_vo, outputs),
          .short_slots = 0,
          .long_slots = 2,
          .shared_bytes = shared_bytes,
          .blocks_per_multiprocessor = 1,
          .team_threads = num_threads,
          .most_teams = 1};
}

/// A kernel of short queries, all of whose tiles have `rows`; groups with more are cut into such.
RADDLE_FN constexpr KernelConfig short_kernel_config(i32 rows, i32 dim_qk, i32 dim_vo) {
  KernelConfig config = long_kernel_config(dim_qk, dim_vo, false);
  config.short_rows = config.long_rows = rows;
  config.short_keys = config.long_keys = short_keys;
  config.short_slots = short_slots(dim_qk, dim_vo, rows);
  config.long_slots = 0;
  return config;
}

}  // namespace wgmma

RADDLE_ENGINE_END
