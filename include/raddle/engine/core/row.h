// What a variant sees: a query row, a key, a tile of both, and what it may answer about a tile.
// Plain data.
#pragma once

#include "raddle/engine/core/config.h"

namespace raddle {

/// One row of a query tile: a token of a request under one query head.
struct Row {
  i32 request;
  i32 row;      ///< row of the ragged query tensor
  i32 q_index;  ///< order in the request: kv_len - qo_len + r
  i32 q_pos;    ///< position in the text; q_index unless the layout says otherwise
  i32 q_head;
  i32 kv_head;
  i32 qo_len;
  i32 kv_len;  ///< over all levels
};

/// One key. On a level whose rows belong to several requests, `request` is -1.
struct Key {
  i32 request;
  i32 kv_index;
  i32 kv_pos;
  i32 kv_head;
};

/// A closed interval of integers; empty when last < first.
struct Range {
  i32 first;
  i32 last;
};

/// The keys that a row may keep. The first one that it does keep may be at `guess`, where that of a
/// row nearby was: a search can begin there.
struct RowKeys : Range {
  i32 guess;
};

/// Hulls over the rows and keys of one query tile and a span of its keys.
struct Tile {
  Range request;
  Range q_index;
  Range q_pos;
  Range q_head;
  Range kv_index;
  Range kv_pos;
};

/// What a mask keeps of a tile: nothing, some pairs, all pairs.
enum class Coverage : i32 { empty, partial, full };

/// Bounds on the indices and positions that a tile can keep.
struct KvSpan {
  Range index;
  Range pos;
};

enum class Scan : i32 {
  softmax,  ///< online softmax; the state is (O, LSE)
  sum       ///< O = Σ f(s)·v; the state is O alone and ⊕ is +
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

constexpr i32 int_max = 0x7fffffff;
constexpr i32 int_min = -int_max - 1;
constexpr Range everything{int_min, int_max};

RADDLE_FN constexpr Range intersect(Range a, Range b) {
  return Range{max(a.first, b.first), min(a.last, b.last)};
}
RADDLE_FN constexpr Range hull(Range a, Range b) {
  return Range{min(a.first, b.first), max(a.last, b.last)};
}
RADDLE_FN constexpr bool is_empty(Range r) { return r.last < r.first; }

/// Coverage of two and-ed masks, then of two or-ed masks, both conservative: Coverage is ordered
/// empty < partial < full.
RADDLE_FN constexpr Coverage both(Coverage a, Coverage b) { return min(a, b); }
RADDLE_FN constexpr Coverage either(Coverage a, Coverage b) { return max(a, b); }
RADDLE_FN constexpr KvSpan both(const KvSpan& a, const KvSpan& b) {
  return KvSpan{intersect(a.index, b.index), intersect(a.pos, b.pos)};
}
RADDLE_FN constexpr KvSpan either(const KvSpan& a, const KvSpan& b) {
  return KvSpan{hull(a.index, b.index), hull(a.pos, b.pos)};
}

RADDLE_ENGINE_END
