// Positions of a batch's rows and keys, as checks of captured values see them.
#pragma once

#include "raddle/engine/layout/layout.h"
#include "raddle/engine/plan/coverage.h"

namespace raddle {

/// No position at all.
constexpr Range no_positions{int_max, int_min};

/// `all` becomes the hull of itself and `more`, which may be empty.
inline void widen(Range& all, Range more) {
  if (!is_empty(more)) all = hull(all, more);
}

/// Hull of the positions of a request's query rows.
inline Range positions_of_rows(const LayoutView& layout, i32 request) {
  const i32 begin = layout.qo_indptr[request], end = layout.qo_indptr[request + 1];
  if (begin == end) return no_positions;
  if (!layout.qo_pos)
    return Range{layout.kv_len[request] - (end - begin), layout.kv_len[request] - 1};
  Range all = no_positions;
  for (i32 row = begin; row < end; ++row) widen(all, Range{layout.qo_pos[row], layout.qo_pos[row]});
  return all;
}

/// Calls `found(request, positions of its keys)` for each group of each level, once for each row
/// where a group is no request.
template <class Found>
void visit_keys(const LayoutView& layout, const Found& found) {
  for (i32 l = 0; l < layout.num_levels; ++l) {
    const LevelView& level = layout.levels[l];
    for (i32 g = 0; g < level.num_groups; ++g) {
      const i32 rows = group_rows(level, g);
      if (rows == 0 || level.columns[g] <= 0) continue;
      const Range keys = kv_hull(level, g, 0, level.columns[g]).pos;
      for (i32 i = 0; i < (level.groups_are_requests ? 1 : rows); ++i)
        found(request_of(layout, level, g, query_row(level, g, i)), keys);
    }
  }
}

}  // namespace raddle
