// From a mask's answers about hulls to the coverage runs of one query tile.
//
// A cover answers two questions about a Tile: `KvSpan kv_span(tile)`, asked once, and `Coverage
// coverage(tile)`, asked again for halves of what is partial. It is a variant itself, an evaluator
// of a traced expression, or CoverAll where nothing is masked.
//
// Few tiles need refining, so its loops are not unrolled on a GPU (RADDLE_ROLLED): copies of their
// bodies would lie between the instructions that all tiles need.
#pragma once

#include "raddle/engine/plan/hulls.h"

namespace raddle {

/// A query tile, what its mask keeps of it, and what that costs.
struct CoveredTile {
  QueryTile tile;  ///< run_begin is 0 and run_end how many runs it has
  Run only;        ///< its run, if it is one and `spans` was not needed
  bool in_spans;   ///< its runs lie in `spans`
  i32 kv_tiles;
  i64 cost;
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

constexpr i32 default_max_runs = 64;
/// Spans of columns under refinement. Where a mask is still partial in half as many places, finer
/// questions are not worth asking: the runs would be joined again.
constexpr i32 max_spans = 256;

RADDLE_FN i32 runs_limit(i32 max_runs) {
  return max_runs > 0 ? min(max_runs, max_spans) : default_max_runs;
}

/// No mask: everything is kept.
struct CoverAll {
  RADDLE_FN KvSpan kv_span(const Tile&) const { return KvSpan{everything, everything}; }
  RADDLE_FN Coverage coverage(const Tile&) const { return Coverage::full; }
};

/// The columns [first, last] outside of which no key lies in `span`.
RADDLE_FN Range clip_columns(const LevelView& level, i32 group, const KvSpan& span) {
  const i32 columns = level.columns[group];
  if (is_affine(level)) {
    const i64 base = level.kv_begin ? level.kv_begin[group] : 0;
    const Range keys = intersect(span.index, span.pos);
    return Range{static_cast<i32>(min(max(keys.first - base, i64{0}), i64{columns})),
                 static_cast<i32>(max(min(keys.last - base, i64{columns} - 1), i64{-1}))};
  }
  Range kept{columns, -1};
  for (i32 nth = 0; nth * level.block_size < columns; ++nth) {
    const i32 start = nth * level.block_size;
    const i32 last = min(columns - start, level.block_size) - 1;
    const KvSpan one = block_hull(level, group, nth, 0, last);
    if (is_empty(intersect(one.index, span.index)) || is_empty(intersect(one.pos, span.pos)))
      continue;
    kept = Range{min(kept.first, start), start + last};
  }
  return kept;
}

/// Joins neighbours until at most `max_runs` are left, first those whose joining adds least work.
RADDLE_FN i32 join_surplus(Run* runs, i32 count, i32 max_runs) {
  RADDLE_ROLLED
  while (count > max_runs) {
    i32 best = 0;
    i64 best_loss = 0;
    RADDLE_ROLLED
    for (i32 i = 0; i + 1 < count; ++i) {
      // A column that no row keeps is loaded and computed for nothing; a full one only gains a
      // mask.
      i64 loss = 8 * static_cast<i64>(runs[i + 1].begin - runs[i].end);
      RADDLE_ROLLED
      for (i32 j = i; j < i + 2; ++j) {
        if (runs[j].kind == Coverage::full) loss += runs[j].end - runs[j].begin;
      }
      if (i == 0 || loss < best_loss) {
        best = i;
        best_loss = loss;
      }
    }
    runs[best] = Run{runs[best].begin, runs[best + 1].end, Coverage::partial};
    RADDLE_ROLLED
    for (i32 i = best + 1; i + 1 < count; ++i) runs[i] = runs[i + 1];
    --count;
  }
  return count;
}

/// Joins touching spans of one kind.
RADDLE_FN i32 join_alike(Run* runs, i32 count) {
  i32 n = 0;
  RADDLE_ROLLED
  for (i32 i = 0; i < count; ++i) {
    if (n > 0 && runs[n - 1].end == runs[i].begin && runs[n - 1].kind == runs[i].kind) {
      runs[n - 1].end = runs[i].end;
    } else {
      runs[n++] = runs[i];
    }
  }
  return n;
}

/// Asks for the coverage of columns [begin, end) and appends the span to `spans` unless it is
/// empty.
template <class Cover>
RADDLE_FN i32 append_span(const Cover& cover, Tile& t, const LevelView& level, i32 group, i32 begin,
                          i32 end, Run* spans, i32 count) {
  const KvSpan keys = kv_hull(level, group, begin, end);
  if (is_empty(keys.index)) return count;
  t.kv_index = keys.index;
  t.kv_pos = keys.pos;
  const Coverage kind = cover.coverage(t);
  if (kind == Coverage::empty) return count;
  spans[count] = Run{begin, end, kind};
  return count + 1;
}

/// Halves every partial span of more than one KV tile, round by round. The first round takes only
/// the first KV tile off: for a decode row under a sliding window that settles both parts.
template <class Cover>
RADDLE_FN i32 refine_spans(const Cover& cover, Tile& t, const LevelView& level, i32 group, i32 keys,
                           Run* spans, i32 count) {
  bool first_round = true;
  bool changed = true;
  RADDLE_ROLLED
  while (changed && count <= max_spans / 2) {
    changed = false;
    // In place: a round reads its spans from the end of the array, and writes at most two for each
    // to the beginning.
    const i32 behind = max_spans - count;
    RADDLE_ROLLED
    for (i32 i = count - 1; i >= 0; --i) spans[behind + i] = spans[i];
    i32 n = 0;
    RADDLE_ROLLED
    for (i32 i = behind; i < max_spans; ++i) {
      const Run s = spans[i];
      const i32 tiles = ceil_div(s.end - s.begin, keys);
      if (s.kind != Coverage::partial || tiles < 2) {
        spans[n++] = s;
        continue;
      }
      const i32 middle = s.begin + (first_round ? 1 : tiles / 2) * keys;
      n = append_span(cover, t, level, group, s.begin, middle, spans, n);
      n = append_span(cover, t, level, group, middle, s.end, spans, n);
      changed = true;
    }
    count = n;
    first_round = false;
  }
  return count;
}

/// How many columns at one end of [begin, end) no row keeps, by bisection: at most 7 questions for
/// a KV tile of 128, each about a smaller part, whose hulls are tighter.
template <class Cover>
RADDLE_FN i32 empty_end(const Cover& cover, Tile& t, const LevelView& level, i32 group, i32 begin,
                        i32 end, bool at_front) {
  i32 empty = 0;
  RADDLE_ROLLED
  for (i32 step = (end - begin) / 2; step > 0; step = (end - begin - empty) / 2) {
    const i32 from = at_front ? begin + empty : end - empty - step;
    Run unused[1];
    if (append_span(cover, t, level, group, from, from + step, unused, 0) > 0) {
      if (step == 1) return empty;
      (at_front ? end : begin) = at_front ? from + step : from;  // some key of this part is kept
    } else {
      empty += step;
    }
  }
  return empty;
}

/// Whether a cover has no kv_span of its own.
RADDLE_FN bool is_unbounded(const KvSpan& span) {
  return span.index.first == int_min && span.index.last == int_max && span.pos.first == int_min &&
         span.pos.last == int_max;
}

/// Takes the columns that no row keeps off a tile's first and last run: what kv_span does for a
/// mask that has one.
template <class Cover>
RADDLE_FN void trim_ends(const Cover& cover, Tile& t, const LevelView& level, QueryTile& tile,
                         i32 keys, const Run* runs, i32 count) {
  const Run& first = runs[0];
  const Run& last = runs[count - 1];
  if (first.kind == Coverage::partial)
    tile.col_begin = first.begin + empty_end(cover, t, level, tile.group, first.begin,
                                             min(first.begin + keys, first.end), true);
  if (last.kind == Coverage::partial)
    tile.col_end =
        last.end - empty_end(cover, t, level, tile.group,
                             max((last.end - 1) / keys * keys, last.begin), last.end, false);
}

/// What is known of a query tile's coverage when its whole list of columns has been asked about.
struct CoverStart {
  Tile tile;       ///< the question: hulls of the tile's rows
  Run whole;       ///< what is left of the list
  bool unbounded;  ///< the cover has no kv_span of its own
  bool settled;    ///< `whole` is the only run
};

/// Asks for a query tile's kv_span and for the coverage of all that it leaves. `hull` finds the
/// hulls over the tile's rows. Sets the tile's column bounds; returns whether anything is left.
template <class Cover, class Hull>
RADDLE_FN bool start_cover(const Cover& cover, const Hull& hull, const LevelView& level,
                           QueryTile& tile, i32 keys, CoverStart& start) {
  const i32 group = tile.group;
  const i32 columns = level.columns[group];
  if (columns <= 0) return false;
  Tile& t = start.tile;
  t = hull(tile);
  const KvSpan all = kv_hull(level, group, 0, columns);
  if (is_empty(all.index)) return false;
  t.kv_index = all.index;
  t.kv_pos = all.pos;
  const KvSpan span = cover.kv_span(t);
  start.unbounded = is_unbounded(span);
  const Range kept = clip_columns(level, group, span);
  if (is_empty(kept)) return false;
  tile.col_begin = kept.first;
  tile.col_end = kept.last + 1;
  const i32 begin = quotient_of_few(kept.first, keys) * keys;
  const i32 end = min(columns, (quotient(kept.last, keys) + 1) * keys);

  Run whole[1];
  if (append_span(cover, t, level, group, begin, end, whole, 0) == 0) return false;
  start.whole = whole[0];
  start.settled = whole[0].kind == Coverage::full || end - begin <= keys;
  if (start.settled) {
    if (start.unbounded && whole[0].kind == Coverage::partial)
      trim_ends(cover, t, level, tile, keys, whole, 1);
    if (level.mask_bits) start.whole.kind = Coverage::partial;
  }
  return true;
}

/// The runs of a query tile that is not settled yet: maximal, sorted, disjoint, cut at multiples of
/// `keys`. Returns how many, at most `max_runs`; `spans` has max_spans entries, the rest is
/// scratch.
template <class Cover>
RADDLE_FN i32 finish_cover(const Cover& cover, const LevelView& level, QueryTile& tile, i32 keys,
                           i32 max_runs, CoverStart& start, Run* spans) {
  spans[0] = start.whole;
  i32 count = refine_spans(cover, start.tile, level, tile.group, keys, spans, 1);
  if (count == 0) return 0;
  if (start.unbounded) trim_ends(cover, start.tile, level, tile, keys, spans, count);
  if (level.mask_bits) {
    RADDLE_ROLLED
    for (i32 i = 0; i < count; ++i) spans[i].kind = Coverage::partial;
  }
  count = join_surplus(spans, join_alike(spans, count), max_runs);
  return join_alike(spans, count);
}

/// A tile from make_tile with its runs and its cost. The host goes through the tiles in order, a
/// GPU has a thread for each. `hull(tile)` finds the hulls over its rows; `spans` is scratch of
/// max_spans entries.
template <class Cover, class Hull>
RADDLE_FN CoveredTile make_covered(const Cover& cover, const Hull& hull, const LevelView& level,
                                   const PlanConfig& config, const QueryTile& tile,
                                   bool all_partial, Run* spans) {
  CoveredTile c;
  c.tile = tile;
  c.in_spans = false;
  c.kv_tiles = 0;
  const i32 keys = config.shapes[c.tile.shape].keys;
  CoverStart start;
  if (start_cover(cover, hull, level, c.tile, keys, start)) {
    if (start.settled) {
      c.only = start.whole;
      c.tile.run_end = 1;
      c.kv_tiles = count_kv_tiles(&c.only, 0, 1, keys);
    } else {
      c.in_spans = true;
      c.tile.run_end =
          finish_cover(cover, level, c.tile, keys, runs_limit(config.max_runs), start, spans);
      c.kv_tiles = count_kv_tiles(spans, 0, c.tile.run_end, keys);
    }
  }
  const UnitCost unit = cost_of(config.costs[c.tile.shape], c.tile.num_rows, all_partial);
  c.cost = unit.start + c.kv_tiles * unit.tile;
  return c;
}

RADDLE_ENGINE_END
