#include "variant/index_checks.h"

#include <array>
#include <sstream>
#include <vector>

#include "raddle/engine/plan/coverage.h"
#include "variant/positions.h"

namespace raddle {
namespace {

/// Parts of a batch's pairs that are looked at before the search gives up, and the index is
/// clamped. The first pair outside of a 2^20 x 2^20 problem takes 80.
constexpr i32 max_parts = 256;

Tile no_pairs(Range request, i32 num_qo_heads) {
  return Tile{request, everything, no_positions, {0, num_qo_heads - 1}, everything, no_positions};
}

bool is_empty(const Tile& t) { return is_empty(t.q_pos) || is_empty(t.kv_pos); }

/// Hulls over all requests together.
Tile all_pairs(const IndexedBatch& batch) {
  const LayoutView& layout = batch.layout;
  Tile all = no_pairs({0, layout.num_requests - 1}, batch.num_qo_heads);
  for (i32 i = 0; i < layout.num_requests; ++i) widen(all.q_pos, positions_of_rows(layout, i));
  visit_keys(layout, [&all](i32, Range keys) { widen(all.kv_pos, keys); });
  return all;
}

std::vector<Tile> pairs_by_request(const IndexedBatch& batch) {
  const LayoutView& layout = batch.layout;
  std::vector<Tile> all;
  for (i32 i = 0; i < layout.num_requests; ++i) {
    Tile one = no_pairs({i, i}, batch.num_qo_heads);
    const i32 rows = layout.qo_indptr[i + 1] - layout.qo_indptr[i];
    one.q_pos = positions_of_rows(layout, i);
    one.q_index = Range{layout.kv_len[i] - rows, layout.kv_len[i] - 1};
    one.kv_index = Range{0, layout.kv_len[i] - 1};
    all.push_back(one);
  }
  visit_keys(layout, [&all](i32 request, Range keys) {
    widen(all[static_cast<std::size_t>(request)].kv_pos, keys);
  });
  return all;
}

/// Explicit positions leave gaps: a part of a hull may hold none.
bool has_pairs(const LayoutView& layout, const Tile& part) {
  bool row = !layout.qo_pos, key = false;
  const i32 request = part.request.first;
  for (i32 r = layout.qo_indptr[request]; !row && r < layout.qo_indptr[request + 1]; ++r)
    row = !is_empty(intersect(part.q_pos, Range{layout.qo_pos[r], layout.qo_pos[r]}));
  for (i32 l = 0; l < layout.num_levels; ++l) {
    const LevelView& level = layout.levels[l];
    for (i32 g = 0; g < level.num_groups && !key; ++g) {
      bool mine = level.groups_are_requests && g == request;
      for (i32 i = 0; !level.groups_are_requests && !mine && i < group_rows(level, g); ++i)
        mine = request_of(layout, level, g, query_row(level, g, i)) == request;
      for (i32 c = 0; mine && !key && c < level.columns[g]; ++c) {
        const Column column = column_at(level, g, c);
        key =
            column.valid && column.kv_pos >= part.kv_pos.first && column.kv_pos <= part.kv_pos.last;
      }
    }
  }
  return row && key;
}

/// A part of the pairs halved along its longest side; the upper half stays in `part`. False where
/// it is one pair.
bool halve(Tile& part, Tile& lower) {
  Range Tile::*longest = &Tile::q_pos;
  const auto size = [&part](Range Tile::*side) {
    return i64{(part.*side).last} - (part.*side).first;
  };
  for (Range Tile::*side : {&Tile::kv_pos, &Tile::q_head, &Tile::request})
    if (size(side) > size(longest)) longest = side;
  if (size(longest) == 0) return false;
  const i32 middle = static_cast<i32>((part.*longest).first + size(longest) / 2);
  lower = part;
  (lower.*longest).last = middle;
  (part.*longest).first = middle + 1;
  return true;
}

struct Search {
  const TracedFunction& function;
  const TracedMember* members;
  const IndexedBatch* batch;  ///< null: every pair of the tile is there
  i32 parts_left = max_parts;

  Coverage kept(const Tile& part) const {
    if (!batch || !batch->coverage) return Coverage::full;
    Tile asked = part;  // indices are positions, unless the layout has explicit ones
    if (!batch->layout.qo_pos) asked.q_index = part.q_pos;
    if (!has_explicit_keys()) asked.kv_index = part.kv_pos;
    return batch->coverage(batch->masks, asked);
  }
  bool has_explicit_keys() const {
    const LayoutView& layout = batch->layout;
    for (i32 l = 0; l < layout.num_levels; ++l)
      if (!is_affine(layout.levels[l])) return true;
    return false;
  }

  /// Whether the result for some kept pair depends on an element that is not there.
  bool finds(const Tile& pairs) {
    std::array<Tile, 128> parts;  // NOLINT: each is written before it is read
    std::size_t count = 0;
    parts[count++] = pairs;
    while (count > 0 && parts_left-- > 0) {
      Tile part = parts[--count];
      const Outside outside = function.outside(part, members);
      if (outside == Outside::never) continue;
      const Coverage coverage = kept(part);
      if (coverage == Coverage::empty) continue;
      if (outside == Outside::always && coverage == Coverage::full &&
          (!batch || has_pairs(batch->layout, part)))
        return true;
      Tile lower = part;
      if (count + 2 > parts.size() || !halve(part, lower)) continue;
      parts[count++] = lower;
      parts[count++] = part;  // looked at first: indices grow with positions
    }
    return false;
  }
};

std::string text(Range range) {
  return range.first == range.last
             ? std::to_string(range.first)
             : std::to_string(range.first) + " to " + std::to_string(range.last);
}

std::string describe(const std::string& name, const TracedFunction& function,
                     const TracedMember* members, const Tile& pairs, bool has_request) {
  const OutsideIndex worst = function.worst_index(pairs, members);
  std::string from;
  const auto add = [&from](bool used, const char* argument, Range range) {
    if (used) from += (from.empty() ? "" : ", ") + (argument + (" = " + text(range)));
  };
  add(worst.of_request, "b", pairs.request);
  add(worst.of_head, "h", pairs.q_head);
  add(worst.of_q, "q_idx", pairs.q_pos);
  add(worst.of_kv, "kv_idx", pairs.kv_pos);
  const std::string& array = function.members()[worst.member];
  const std::string dimension =
      worst.dimension > 0 ? ", dimension " + std::to_string(worst.dimension) + "," : "";
  const std::string request =
      has_request ? " for request " + std::to_string(pairs.request.first) : "";
  const std::string expected = worst.index >= 0
                                   ? "at least " + std::to_string(worst.index + 1) + " elements"
                                   : "no index below -" + std::to_string(worst.extent);
  std::ostringstream message;
  const auto write = [&message](const auto&... parts) { (message << ... << parts); };
  write(name, ": captured array ", array, dimension, " has ", worst.extent,
        " elements and is indexed with ", worst.index, request,
        from.empty() ? "" : " (" + from + ")", "; expected ", expected,
        ", or an index that is clamped: raddle.flex.ops.clamp(index, 0, ", worst.extent - 1, ")");
  return message.str();
}

}  // namespace

std::optional<std::string> find_short_array(const std::string& name, const TracedFunction& function,
                                            const TracedMember* members,
                                            const IndexedBatch& batch) {
  const Tile all = all_pairs(batch);
  if (is_empty(all) || !function.may_index_outside(all, members)) return {};
  Search search{function, members, &batch};
  for (const Tile& pairs : pairs_by_request(batch))
    if (!is_empty(pairs) && function.may_index_outside(pairs, members) && search.finds(pairs))
      return describe(name, function, members, pairs, true);
  return {};
}

std::optional<std::string> find_short_array(const std::string& name, const TracedFunction& function,
                                            const TracedMember* members, const Tile& pairs) {
  if (is_empty(pairs) || !function.may_index_outside(pairs, members)) return {};
  if (!Search{function, members, nullptr}.finds(pairs)) return {};
  return describe(name, function, members, pairs, false);
}

}  // namespace raddle
