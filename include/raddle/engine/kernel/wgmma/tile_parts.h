// What a mask keeps of the parts of a tile, 16 rows by 16 keys each. The warp that loads keys asks
// the mask for its coverage of them, so that computing warps ask it for pairs of few parts alone.
#pragma once

#include "raddle/engine/kernel/wgmma/memory.h"
#include "raddle/engine/plan/hulls.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

/// A strip of an item's rows, about which a lane asks: each strip has as many lanes.
struct Strip {
  Tile hull;    ///< over its rows
  i32 columns;  ///< that there are, of the rows' keys
};
template <class Kernel>
RADDLE_DEVICE Strip strip_of_lane(const GpuLaunch& launch, const ItemFacts<Kernel>& item) {
  constexpr i32 size = TileParts<Kernel>::size, lanes = 32 / TileParts<Kernel>::strips;
  const KeySource& source = item.source[0];
  const i32 group_size = launch.plan.group_size;
  const i32 first = min(ptx::lane_index() / lanes * size, item.num_rows - 1);
  QueryTile rows{};
  rows.group = source.group;
  rows.row_begin = item.row_begin + first;
  rows.num_rows = min(size, item.num_rows - first);
  const LevelView& level = launch.levels[source.level];
  Tile hull = query_hull(launch.layout, level, rows, group_size, 1);
  hull.q_head = {item.kv_head * group_size, (item.kv_head + 1) * group_size - 1};
  return {hull, level.columns[source.group]};
}

/// A mask's coverage of the parts of a tile, by a warp, where all columns have keys in order.
template <class Kernel, class Variant>
RADDLE_DEVICE void ask_parts(const Variant& variant, Strip strip, const KeySource& source,
                             const Span& tile, TileParts<Kernel>& parts) {
  constexpr i32 size = TileParts<Kernel>::size, lanes = 32 / TileParts<Kernel>::strips;
  const Span read = columns_read(source, tile);
  u32 whole = 0, partial = 0;
  RADDLE_ROLLED
  for (i32 i = ptx::lane_index() % lanes; i < Kernel::tile_keys / size; i += lanes) {
    const i32 begin = tile.begin + size * i;
    if (begin + size <= read.begin || begin >= read.end) continue;
    const i32 end = min(begin + size, strip.columns);
    strip.hull.kv_index = {source.first_index + begin, source.first_index + end - 1};
    strip.hull.kv_pos = strip.hull.kv_index;
    const Coverage kept = variant.coverage(strip.hull);
    whole |= kept == Coverage::full ? 1u << i : 0;
    partial |= kept == Coverage::partial ? 1u << i : 0;
  }
  RADDLE_UNROLL
  for (i32 step = 1; step < lanes; step *= 2) {
    whole |= ptx::shuffle_xor(whole, step);
    partial |= ptx::shuffle_xor(partial, step);
  }
  parts.whole[ptx::lane_index() / lanes] = static_cast<u8>(whole);
  parts.partial[ptx::lane_index() / lanes] = static_cast<u8>(partial);
}

}  // namespace wgmma

RADDLE_ENGINE_END
