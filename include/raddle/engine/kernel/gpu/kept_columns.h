// The columns that a row of queries keeps, where a mask leaves an interval of them: what the
// kernels of long queries ask once an item, instead of asking the mask about each pair of its
// tiles.
#pragma once

#include "raddle/engine/kernel/gpu/facts.h"
#include "raddle/engine/variant/parts.h"

RADDLE_ENGINE_BEGIN

namespace gpu_kernel {

/// The columns that a row keeps, where those are an interval.
struct KeptColumns {
  i32 first, end;
  static constexpr i32 unknown = -1;  ///< `first` where only the mask itself knows
  RADDLE_FN static KeptColumns any() { return {unknown, int_max}; }
};

/// The columns of a source that a row keeps, if the variant can say that they are an interval.
/// `guess`: the first key that a row nearby keeps; becomes this one's.
template <class Variant>
RADDLE_DEVICE KeptColumns columns_kept(const Variant& variant, const Row& row,
                                       const KeySource& source, [[maybe_unused]] i32& guess) {
  const auto kept_of = [](Range keys, const KvSpan& span) {
    return intersect(keys, intersect(span.index, span.pos));
  };
  if (!source.plain || source.bits || !knows_spans(variant)) return KeptColumns::any();
  const i32 first = source.first_index;
  Range keys{first + source.col_begin, first + source.col_end - 1};
  if constexpr (has_row_span<Variant>) {
    keys = kept_of(keys, variant.row_span(row, RowKeys{keys, guess}));
    guess = keys.first;
  } else {
    Tile tile{{row.request, row.request},
              {row.q_index, row.q_index},
              {row.q_pos, row.q_pos},
              {row.q_head, row.q_head},
              keys,
              keys};
    keys = kept_of(keys, variant.kv_span(tile));
    tile.kv_index = tile.kv_pos = keys;
    if (!is_empty(keys) && variant.coverage(tile) != Coverage::full) return KeptColumns::any();
  }
  if (is_empty(keys)) return {0, 0};
  return {keys.first - first, keys.last + 1 - first};
}

/// How many of a lane's keys in a tile of `tile_keys`, two columns of every eight, lie below column
/// `end`; the lane's first column is 0.
template <i32 tile_keys>
RADDLE_DEVICE i32 keys_below(i32 end) {
  const i32 whole = min(max(end, 0), tile_keys);
  return 2 * (whole / 8) + min(whole % 8, 2);
}
/// A bit for each of these keys whose column lies in [first, end), where the lane's first column is
/// `begin`.
template <i32 tile_keys>
RADDLE_DEVICE u32 bits_between(i32 begin, i32 first, i32 end) {
  const i32 below = keys_below<tile_keys>(first - begin);
  return ptx::bit_mask(below, max(keys_below<tile_keys>(end - begin) - below, 0));
}

}  // namespace gpu_kernel

RADDLE_ENGINE_END
