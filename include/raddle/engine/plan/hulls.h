// What a mask is asked about: hulls over the rows of a query tile, and over keys.
#pragma once

#include "raddle/engine/layout/layout.h"
#include "raddle/engine/plan/units.h"

RADDLE_ENGINE_BEGIN

/// Hulls over the heads of every request: what a tile's hulls over rows begin from.
RADDLE_FN Tile open_hull(i32 num_qo_heads) {
  return Tile{{int_max, int_min},    {int_max, int_min}, {int_max, int_min},
              {0, num_qo_heads - 1}, everything,         everything};
}

/// Hulls over the query rows of a tile; the hulls over its keys are left open.
RADDLE_FN Tile query_hull(const LayoutView& layout, const LevelView& level, const QueryTile& tile,
                          i32 group_size, i32 num_kv_heads) {
  Tile t = open_hull(num_kv_heads * group_size);
  const i32 first = quotient_of_few(tile.row_begin, group_size);
  const i32 last = quotient_of_few(tile.row_begin + tile.num_rows - 1, group_size);
  if (level.groups_are_requests && !layout.qo_pos) {  // decode takes this way: O(1)
    const i32 g = tile.group;
    const i32 behind = layout.kv_len[g] - (layout.qo_indptr[g + 1] - layout.qo_indptr[g]);
    t.request = Range{g, g};
    t.q_index = Range{behind + first, behind + last};
    t.q_pos = t.q_index;
    return t;
  }
  for (i32 i = first; i <= last; ++i) {
    const Row r = make_row(layout, level, tile.group, i * group_size, 0, group_size);
    t.request = hull(t.request, Range{r.request, r.request});
    t.q_index = hull(t.q_index, Range{r.q_index, r.q_index});
    t.q_pos = hull(t.q_pos, Range{r.q_pos, r.q_pos});
  }
  return t;
}

/// Columns map to indices and positions by one addition.
RADDLE_FN bool is_affine(const LevelView& level) {
  return !level.blocks || (!level.block_index && !level.block_pos && !level.block_count);
}

/// Hulls of the keys at offsets [first, last] of the nth block of a group's list; holes do not
/// count.
RADDLE_FN KvSpan block_hull(const LevelView& level, i32 group, i32 nth, i32 first, i32 last) {
  const i32 entry = level.block_begin[group] + nth;
  if (level.block_count) last = min(last, level.block_count[entry] - 1);
  const i32 base = level.kv_begin ? level.kv_begin[group] : 0;
  const i32 index = base + (level.block_index ? level.block_index[entry] : nth * level.block_size);
  const i32 pos = level.block_pos ? level.block_pos[entry] : index;
  if (last < first) return KvSpan{{int_max, int_min}, {int_max, int_min}};
  return KvSpan{{index + first, index + last}, {pos + first, pos + last}};
}

/// Hulls of the keys in columns [begin, end) of a group's list; empty where all are holes.
RADDLE_FN KvSpan kv_hull(const LevelView& level, i32 group, i32 begin, i32 end) {
  if (is_affine(level)) {
    const i32 base = level.kv_begin ? level.kv_begin[group] : 0;
    return KvSpan{{base + begin, base + end - 1}, {base + begin, base + end - 1}};
  }
  KvSpan all{{int_max, int_min}, {int_max, int_min}};
  for (i32 nth = begin / level.block_size; nth * level.block_size < end; ++nth) {
    const i32 start = nth * level.block_size;
    const KvSpan one = block_hull(level, group, nth, max(begin - start, 0),
                                  min(end - start, level.block_size) - 1);
    all.index = hull(all.index, one.index);
    all.pos = hull(all.pos, one.pos);
  }
  return all;
}

RADDLE_ENGINE_END
