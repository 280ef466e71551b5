// Linear split, the default schedule: the units laid end to end on a line, each as long as it
// costs, and the line cut into equal spans at KV-tile boundaries. Where a span begins is found by
// binary search, without the cuts before it; it ends where the next one begins. So these functions
// serve a loop on the host and, on a GPU, one thread per worker.
//
// Each end of a span lies within half a KV tile of its ideal place, and cutting a unit there adds
// at most UnitCost::resume to the span; or the cut moved to a unit boundary, at most that much
// further. Hence, on a line that is not cut in step,
//   heaviest ≤ mean + one KV tile + 2 · resume,
// or p KV tiles where cuts fall on multiples of p (least_piece).
//
// An example: three workers and two units, A of 6 KV tiles and B of 3, where starting an item costs
// 2, a KV tile 1, and a partial state 1. The line is 8 + 5 = 13 long, so that spans ideally end at
// 4 and 8.
//
//   x       0       2   3   4   5   6   7   8      10  11  12  13
//   A       | start |a0 |a1 |a2 |a3 |a4 |a5 |
//   B                                       | start |b0 |b1 |b2 |
//   cuts    0               1               2                   3
//
//   Cut 1: x = 4, unit 0 (A), k = 2 (a0 and a1 lie before it), chunk = 1 (the second chunk of A)
//   Cut 2: x = 8, unit 1 (B), k = 0: between units, so that no chunk begins there
//   Cut 3: x = 13, unit 2, past the last one
//
// Worker 0 computes A's tiles [0, 2) as chunk 0, worker 1 its tiles [2, 6) as chunk 1, and worker 2
// all of B, which it writes through. The two chunks of A are contracted.
//
// Of several levels, those of shared prefixes may be cut in step (in_step.h); then the line of the
// last one is cut so that each worker has as much to do.
//
// With PlanConfig::keeps_in_step, on a single level, the line is that of one KV head, and
// each of its spans is computed by as many neighbouring workers as there are KV heads, a head each.
// Those workers read the same rows of K and V at the same time, each row's heads from one stretch
// of memory, which takes an H200 4 to 12 % less time than reading spans that lie far apart.
#pragma once

#include "raddle/engine/plan/in_step.h"

namespace raddle {

/// Where a worker's span begins.
struct Cut {
  i64 x;      ///< cost of all that lies before, cuts not counted
  UnitAt at;  ///< group is num_groups past the last unit
  i32 unit;   ///< the unit's number in linear order
  i32 k;      ///< KV tiles of the unit that lie before; 0: the cut is between units
  i32 chunk;  ///< which chunk of the unit begins here
};

/// What the spans of a line cost.
struct LinearSplit {
  i64 heaviest;    ///< planned cost of the heaviest queue, with what the cuts add
  i64 total;       ///< planned cost of all queues, with what the cuts add
  i64 num_chunks;  ///< chunks that begin at cuts; every unit has one more
};

/// How a line is divided.
struct Shares {
  i64 whole;  ///< cost of the line by the number of workers, rounded down; in step InStep::level
  i64 rest;   ///< the remainder
  i32 num_workers;
  i32 num_spans;  ///< of the levels in step, and behind these as many as there are workers
  InStep in_step;
};

/// Where the units of a query tile may be cut.
struct CutGrid {
  UnitCost cost;
  i32 n;      ///< KV tiles
  i32 piece;  ///< cuts fall on multiples of this many of them
};

/// Where a group lies on the line.
struct GroupSpan {
  i32 group;
  i32 begin, end;  ///< its query tiles
  i32 unit;        ///< the first of its units
  i64 x;           ///< where that begins
  i64 head_cost;   ///< of the units of one KV head
};

/// Where a unit lies on the line.
struct UnitSpan {
  UnitAt at;
  i32 unit;  ///< its number in linear order
  i64 x, end;
};

/// What a cut adds to the partial states of its unit.
struct CutAdds {
  bool unit;   ///< it is the first cut through the unit
  bool chunk;  ///< a chunk begins here, and at no cut before
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

/// How many workers compute each span of the line: one, or one for each KV head. Workers that are
/// left over then have nothing to do, at most a sixteenth of all: memory is read as fast without
/// them.
RADDLE_FN i32 workers_of_span(const PlanConfig& config, const Units& units) {
  const i32 heads = units.num_kv_heads, workers = config.num_workers;
  const bool in_step = config.keeps_in_step && !units.all_partial && heads <= workers &&
                       16 * (workers % heads) <= workers;
  return in_step ? heads : 1;
}

/// The line of units whose spans are computed by `workers` workers each: of all KV heads, or of
/// one.
RADDLE_FN Units line_of(Units units, i32 workers) {
  units.num_kv_heads /= workers;
  return units;
}

/// The fewest KV tiles that a chunk of a unit with n of them should have; cuts fall on multiples of
/// it. It is 1, so that cuts may fall at every KV tile, unless workers' shares are shorter than a
/// balanced chunk: then composing their states would take longer than computing one of them.
RADDLE_FN i32 least_piece(const UnitCost& cost, i64 merge, i32 n, i64 span) {
  // The last comparison is span ≥ balanced_piece(…) · tile, squared. A span above int_max, whose
  // square might overflow, is not short.
  if (span >= n * cost.tile || span > int_max || span * span >= n * merge * cost.tile) return 1;
  return balanced_piece(cost, merge, n);
}

/// Where the units of `tile` may be cut. `span` is a worker's share of the line.
RADDLE_FN CutGrid cut_grid_of(const Units& units, i32 tile, i64 span) {
  CutGrid grid{unit_cost(units, tile), units.kv_tiles[tile], 1};
  grid.piece = least_piece(grid.cost, rows_merge(units, tile), grid.n, span);
  return grid;
}

/// KV tiles before the cut of a unit that is ideally at `offset` from its beginning; n means that
/// the cut moves to the unit's end, 0 to its beginning.
RADDLE_FN i32 snap(const CutGrid& grid, i64 offset) {
  const UnitCost& cost = grid.cost;
  if (offset <= cost.start) return 0;
  i64 k = quotient(offset - cost.start + cost.tile / 2, cost.tile);
  if (grid.piece > 1) k = quotient(k + grid.piece / 2, i64{grid.piece}) * grid.piece;
  k = min(k, i64{grid.n});
  // KV tiles behind the cut that cost no more than resuming the unit there stay with those before
  // it. KV tiles before the cut stay with those behind it where they cost no more than the state
  // that would be stored: the unit has to be started once in any case.
  if ((grid.n - k) * cost.tile <= cost.resume) return grid.n;
  return k * cost.tile <= cost.resume - cost.start ? 0 : static_cast<i32>(k);
}

RADDLE_FN Cut first_cut(const Units& units) {
  Cut cut{0, {0, 0, 0}, 0, 0, 0};
  while (cut.at.group < units.num_groups && units.group_tile[cut.at.group + 1] == 0) ++cut.at.group;
  return cut;
}

RADDLE_FN Cut last_cut(const Units& units) {
  return Cut{total_cost(units),
             {units.num_groups, 0, units.num_tiles},
             units.num_kv_heads * units.num_tiles,
             0,
             0};
}

RADDLE_FN GroupSpan span_of(const Units& units, i32 group) {
  const i32 begin = units.group_tile[group];
  const i32 end = units.group_tile[group + 1];
  const i64 start = units.cost_before[begin];
  return GroupSpan{group,
                   begin,
                   end,
                   units.num_kv_heads * begin,
                   units.num_kv_heads * start,
                   units.cost_before[end] - start};
}

/// The unit in which the point x of the line lies, 0 < x < total_cost; it is one of `group`'s.
RADDLE_FN UnitSpan unit_around(const Units& units, i64 x, const GroupSpan& group) {
  const i64 start = units.cost_before[group.begin];
  const i64 in_group = x - group.x;
  const i32 head = static_cast<i32>(quotient(in_group, group.head_cost));
  const i64 head_x = group.x + head * group.head_cost;
  const i64 in_head = x - head_x;
  const i32 tile = first_where(group.begin + 1, group.end,
                               [&](i32 t) { return units.cost_before[t] - start > in_head; }) -
                   1;
  return UnitSpan{{group.group, head, tile},
                  group.unit + head * (group.end - group.begin) + (tile - group.begin),
                  head_x + (units.cost_before[tile] - start),
                  head_x + (units.cost_before[tile + 1] - start)};
}

/// The cut nearest to a point x of a unit. It never falls as x grows. `grid` is that of the unit's
/// tile.
RADDLE_FN Cut cut_near(const Units& units, i64 x, const UnitSpan& unit, const CutGrid& grid) {
  const i32 k = snap(grid, x - unit.x);
  // A unit without keys is not cut: the cut goes to its nearer end.
  if (grid.n > 0 ? k == grid.n : 2 * x >= unit.x + unit.end)
    return Cut{unit.end, next_unit(units, unit.at), unit.unit + 1, 0, 0};
  return Cut{unit.x + (k > 0 ? grid.cost.start + k * grid.cost.tile : 0), unit.at, unit.unit, k, 0};
}

/// Items between two cuts.
RADDLE_FN i32 span_items(const Cut& a, const Cut& b) {
  if (a.unit == b.unit) return a.k < b.k ? 1 : 0;
  return b.unit - a.unit + (b.k > 0 ? 1 : 0);
}

template <class First>
RADDLE_FN Shares shares_of(const PlanConfig& config, const Units& units, i32 num_workers,
                           const First& first) {
  const InStep part = config.keeps_in_step ? part_in_step(units, num_workers, first) : InStep{};
  if (part.spans > 0) return Shares{part.level, 0, num_workers, part.spans + num_workers, part};
  const i64 total = total_cost(units);
  const i64 whole = quotient(total, i64{num_workers});
  return Shares{whole, total - whole * num_workers, num_workers, num_workers, part};
}

/// Where the span of the last level that worker w has begins, if levels are cut in step.
RADDLE_FN i64 own_begin(const Units& units, const InStep& part, i32 w) {
  return min(part.x + taken_before(units, part, w), total_cost(units));
}

/// Where span w begins, which is one of those in step.
RADDLE_FN Cut cut_in_step(const Units& units, const InStep& part, i32 w) {
  Cut cut{};
  for_groups_in_step(units, part, [&](const GroupInStep& g) {
    if (w >= g.spans) {
      w -= g.spans;
      return true;
    }
    const GroupSpan group = span_of(units, g.group);
    const i32 unit = quotient(w, g.chunks);  // of the group
    const i32 tiles = group.end - group.begin;
    const i32 head = quotient(unit, tiles), tile = group.begin + unit - head * tiles;
    const i32 chunk = w - unit * g.chunks;
    const i32 k = static_cast<i32>(quotient(i64{units.kv_tiles[tile]} * chunk, i64{g.chunks}));
    const UnitCost cost = unit_cost(units, tile);
    const i64 x =
        group.x + head * group.head_cost + units.cost_before[tile] - units.cost_before[group.begin];
    cut = Cut{x + (k > 0 ? cost.start + k * cost.tile : 0),
              {g.group, head, tile},
              group.unit + unit,
              k,
              chunk};
    return false;
  });
  return cut;
}

/// Where span s begins, for s ≤ Shares::num_spans, found without the others. `group_of(tile)` is
/// the group of a query tile.
template <class GroupOf>
RADDLE_FN Cut even_cut(const Units& units, const Shares& shares, i32 s, const GroupOf& group_of) {
  const InStep& part = shares.in_step;
  if (s < part.spans) return cut_in_step(units, part, s);
  const i32 w = s - part.spans;
  if (w == shares.num_workers) return last_cut(units);
  const i64 x = part.spans > 0
                    ? own_begin(units, part, w)
                    : shares.whole * w + quotient(shares.rest * w, i64{shares.num_workers});
  if (x == 0) return first_cut(units);
  if (x == total_cost(units)) return last_cut(units);
  // A group of all KV heads begins at num_kv_heads times its place on the line of one KV head: one
  // search in `prefix` finds the group, though not yet the tile.
  const i64 in_head = quotient(x, i64{units.num_kv_heads});
  const i32 tile =
      first_where(1, units.num_tiles, [&](i32 t) { return units.cost_before[t] > in_head; }) - 1;
  const GroupSpan group = span_of(units, group_of(tile));
  const UnitSpan unit = unit_around(units, x, group);
  return cut_near(units, x, unit, cut_grid_of(units, unit.at.tile, shares.whole));
}

/// What cut c adds, p being the one before it.
RADDLE_FN CutAdds cut_adds(const Cut& p, const Cut& c) {
  const bool same_unit = p.unit == c.unit && p.k > 0;
  return CutAdds{c.k > 0 && !same_unit, c.k > 0 && !(same_unit && p.k == c.k)};
}

/// `w` is at least 1.
RADDLE_FN CutAdds cut_adds(const Cut* cuts, i32 w) { return cut_adds(cuts[w - 1], cuts[w]); }

/// What the chunk between two cuts in step costs.
RADDLE_FN i64 span_cost(const Units& units, const Cut& a, const Cut& b) {
  const UnitCost cost = unit_cost(units, a.at.tile);
  const i32 end = b.unit == a.unit ? b.k : units.kv_tiles[a.at.tile];
  return cost.start + (end - a.k) * cost.tile;
}

/// Goes along the cuts in order, numbers their chunks, and adds up what the spans cost.
class CutWalk {
 public:
  RADDLE_FN explicit CutWalk(const Cut& first) : last_(first) {}

  /// Takes the next cut and numbers its chunk; `cost` is that of the unit that it cuts, if it cuts
  /// one. Returns the cost of the span before it. `beside` is what its worker has to do otherwise.
  RADDLE_FN i64 step(Cut& cut, const UnitCost& cost, i64 beside = 0) {
    const CutAdds adds = cut_adds(last_, cut);
    const bool is_empty = cut.unit == last_.unit && cut.k == last_.k;
    const i64 span = is_empty ? 0 : cut.x - last_.x + resume_ + (adds.unit ? cost.store : 0);
    cut.chunk = cut.k == 0 ? 0 : (adds.unit ? 0 : last_.chunk) + (adds.chunk ? 1 : 0);
    split_.heaviest = max(split_.heaviest, span + beside);
    split_.total += span;
    split_.num_chunks += adds.chunk ? 1 : 0;
    resume_ = cut.k > 0 ? cost.resume : 0;
    last_.x = cut.x;
    last_.unit = cut.unit;
    last_.k = cut.k;
    last_.chunk = cut.chunk;
    return span;
  }
  RADDLE_FN LinearSplit split() const { return split_; }

 private:
  Cut last_;
  i64 resume_ = 0;  // what the last cut adds to the span behind it
  LinearSplit split_{0, 0, 0};
};

/// Goes along the line, to find units and cuts that follow each other without a search.
class LineWalk {
 public:
  RADDLE_FN LineWalk(const Units& units, i64 span) : units_(units), span_(span) {}

  /// The cut nearest to x, which is greater than 0 and does not fall.
  RADDLE_FN Cut cut_at(i64 x) {
    if (x >= unit_.end) {
      while (group_.x + units_.num_kv_heads * group_.head_cost <= x)
        group_ = span_of(units_, group_.group + 1);
      const i32 tile = unit_.at.tile;
      unit_ = unit_around(units_, x, group_);
      if (unit_.at.tile != tile) grid_ = cut_grid_of(units_, unit_.at.tile, span_);
    }
    return cut_near(units_, x, unit_, grid_);
  }
  /// Of the unit in which the last cut lies.
  RADDLE_FN const UnitCost& cost() const { return grid_.cost; }

 private:
  const Units& units_;
  i64 span_;
  GroupSpan group_{-1, 0, 0, 0, 0, 0};
  UnitSpan unit_{{-1, 0, -1}, 0, 0, 0};
  CutGrid grid_{};
};

/// All cuts in order, of a line that is not cut in step. Each is looked for from the one before it,
/// where even_cut needs a search. `cuts` has num_workers + 1 entries.
RADDLE_FN LinearSplit cut_evenly(const Units& units, const Shares& shares, Cut* cuts) {
  cuts[0] = first_cut(units);
  CutWalk walk(cuts[0]);
  LineWalk line(units, shares.whole);
  const i32 workers = shares.num_workers;
  i64 x = 0;
  i64 rest = 0;  // the fraction of the ideal cut, in parts of `workers`; x is its whole part
  for (i32 w = 1; w < workers; ++w) {
    rest += shares.rest;
    const bool carry = rest >= workers;  // added, not branched on: a CPU cannot predict it
    rest -= carry ? workers : 0;
    x += shares.whole + carry;
    if (x == 0) {
      cuts[w] = cuts[0];
      continue;
    }
    Cut cut = line.cut_at(x);
    walk.step(cut, line.cost());
    cuts[w] = cut;
  }
  cuts[workers] = last_cut(units);
  walk.step(cuts[workers], line.cost());
  return walk.split();
}

/// The same of one whose first levels are cut in step: Shares::num_spans + 1 cuts.
RADDLE_FN LinearSplit cut_levels(const Units& units, const Shares& shares, Cut* cuts) {
  const InStep& part = shares.in_step;
  CutWalk walk(first_cut(units));
  for (i32 s = 0; s < part.spans; ++s) {
    cuts[s] = cut_in_step(units, part, s);
    if (s > 0) walk.step(cuts[s], unit_cost(units, cuts[s].at.tile));
  }
  LineWalk line(units, shares.whole);
  const i64 total = total_cost(units);
  Cut* own = cuts + part.spans;
  for (i32 w = 0; w <= shares.num_workers; ++w) {
    const i64 x = own_begin(units, part, w);
    own[w] = w == shares.num_workers || x == total ? last_cut(units) : line.cut_at(x);
    const bool has_chunk = w > 0 && w <= part.spans;
    walk.step(own[w], line.cost(), has_chunk ? span_cost(units, cuts[w - 1], cuts[w]) : 0);
  }
  return walk.split();
}

/// All cuts of a line.
RADDLE_FN LinearSplit cut_line(const Units& units, const Shares& shares, Cut* cuts) {
  return shares.in_step.spans > 0 ? cut_levels(units, shares, cuts)
                                  : cut_evenly(units, shares, cuts);
}

RADDLE_ENGINE_END
