// Linear split, the default schedule: the units laid end to end on a line, each as long as it
// costs, and the line cut into equal spans at KV-tile boundaries. A worker finds where its span
// begins by binary search and needs nothing of its neighbours but the other end, so the same
// functions serve a loop on the host and a thread a worker on a GPU.
//
// A span reaches its ideal end to within half a KV tile, or the price of a contraction where the
// cut moved to the nearest unit boundary; each of its two cut pieces costs at most one contraction.
// Hence
//   heaviest ≤ mean + one KV tile + two contractions,
// a contraction being UnitCost::resume.
#pragma once

#include "raddle/engine/plan/units.h"

namespace raddle {

/// Where a worker's span begins.
struct Cut {
  i64 x;      ///< cost of all that lies before, cuts not counted
  UnitAt at;  ///< group is num_groups past the last unit
  i32 unit;   ///< the unit's number in linear order
  i32 k;      ///< KV tiles of the unit that lie before; 0: the cut is between units
  i32 chunk;  ///< which chunk of the unit begins here
};

/// Planned costs of queues.
struct Balance {
  i64 heaviest;
  i64 total;
};

/// A line's cost shared out among workers.
struct Shares {
  i64 whole;
  i64 rest;
  i32 num_workers;
};

/// What a cut adds to the partial states of its unit.
struct CutAdds {
  bool unit;   ///< it is the first cut through the unit
  bool chunk;  ///< a chunk begins here, and at no cut before
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

/// Integer square root, rounded down, of n below 2^62: Newton's steps from the next power of two,
/// for every step is a division.
RADDLE_FN i64 isqrt(i64 n) {
  i64 x = 1;
  while (x * x < n) x *= 2;
  for (i64 y = n < 1 ? x : (x + n / x) / 2; y < x; y = (x + n / x) / 2) x = y;
  return n < 1 ? 0 : x;
}

/// The least number of KV tiles worth a chunk of a unit with n of them. Pieces of p tiles take p ·
/// tile in parallel, and then one worker composes n / p states: p = √(n · merge / tile) balances
/// the two. Only where spans are shorter than that is it asked for; else cuts may fall anywhere.
RADDLE_FN i32 least_piece(const UnitCost& cost, i64 merge, i32 n, i64 span) {
  if (span >= n * cost.tile) return 1;
  const i64 tiles = span / cost.tile;
  const i64 square = n * merge / cost.tile;
  return tiles * tiles >= square ? 1 : static_cast<i32>(max(i64{1}, isqrt(square)));
}

/// KV tiles before the cut of a unit with n of them, ideally at `offset` from its beginning; n
/// means that the cut moves to the unit's end, 0 to its beginning.
RADDLE_FN i32 snap(const UnitCost& cost, i64 merge, i32 n, i64 offset, i64 span) {
  if (offset <= cost.start) return 0;
  i64 k = (offset - cost.start + cost.tile / 2) / cost.tile;
  const i32 piece = least_piece(cost, merge, n, span);
  if (piece > 1) k = (k + piece / 2) / piece * piece;
  k = min(k, i64{n});
  // A last piece that costs less than resuming it would stays with the first. A first piece stays
  // with the last where the state between them is dearer: the item would have to be started for
  // either.
  if ((n - k) * cost.tile <= cost.resume) return n;
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

/// The last group that begins at or before x. Looking from `hint`, a group not far before it, on
/// saves most of the search.
RADDLE_FN i32 group_at(const Units& units, i64 x, i32 hint) {
  i32 lo = units.num_kv_heads * units.prefix[units.group_tile[hint]] <= x ? hint : 0;
  i32 step = 1;
  while (lo + step < units.num_groups &&
         units.num_kv_heads * units.prefix[units.group_tile[lo + step]] <= x) {
    lo += step;
    step *= 2;
  }
  i32 hi = min(lo + step, units.num_groups);
  while (lo + 1 < hi) {
    const i32 middle = lo + (hi - lo) / 2;
    if (units.num_kv_heads * units.prefix[units.group_tile[middle]] <= x) {
      lo = middle;
    } else {
      hi = middle;
    }
  }
  return lo;
}

/// The cut nearest to x; never before the cut nearest to a lesser x. `span` is a worker's share,
/// `hint` any group.
RADDLE_FN Cut cut_at(const Units& units, i64 x, i64 span, i32 hint) {
  if (x <= 0) return first_cut(units);
  if (x >= total_cost(units)) return last_cut(units);
  UnitAt at{group_at(units, x, hint), 0, 0};
  const i32 begin = units.group_tile[at.group];
  const i32 end = units.group_tile[at.group + 1];
  const i64 start = units.prefix[begin];
  const i64 head_cost = units.prefix[end] - start;
  const i64 in_group = x - units.num_kv_heads * start;
  at.head = static_cast<i32>(in_group / head_cost);
  const i64 in_head = in_group - at.head * head_cost;
  i32 hi = end;
  at.tile = begin;
  while (at.tile + 1 < hi) {
    const i32 middle = at.tile + (hi - at.tile) / 2;
    if (units.prefix[middle] - start <= in_head) {
      at.tile = middle;
    } else {
      hi = middle;
    }
  }
  const UnitCost cost = unit_cost(units, at.tile);
  const QueryTile& tile = units.tiles[at.tile];
  const i64 merge = i64{units.costs[tile.shape].per_merge_row} * tile.num_rows;
  const i64 offset = in_head - (units.prefix[at.tile] - start);
  const i32 n = units.kv_tiles[at.tile];
  const i32 k = snap(cost, merge, n, offset, span);
  const i64 length = cost.start + n * cost.tile;
  Cut cut{x - offset, at, units.num_kv_heads * begin + at.head * (end - begin) + (at.tile - begin),
          k, 0};
  if (n > 0 ? k == n : 2 * offset >= length) {  // a unit without keys goes to the nearer side
    cut.x += length;
    cut.at = next_unit(units, at);
    ++cut.unit;
    cut.k = 0;
  } else if (k > 0) {
    cut.x += cost.start + k * cost.tile;
  }
  return cut;
}

/// Cost of the items between two cuts, what the cuts themselves add included.
RADDLE_FN i64 span_cost(const Units& units, const Cut& a, const Cut& b) {
  if (a.unit == b.unit && a.k == b.k) return 0;
  i64 cost = b.x - a.x;
  if (a.k > 0) cost += unit_cost(units, a.at.tile).resume;
  if (b.k > 0 && (a.k == 0 || a.unit != b.unit)) cost += unit_cost(units, b.at.tile).store;
  return cost;
}

/// Items between two cuts.
RADDLE_FN i32 span_items(const Cut& a, const Cut& b) {
  if (a.unit == b.unit) return a.k < b.k ? 1 : 0;
  return b.unit - a.unit + (b.k > 0 ? 1 : 0);
}

RADDLE_FN Balance balance_of(const Units& units, const Cut* cuts, i32 num_workers) {
  Balance b{0, 0};
  for (i32 w = 0; w < num_workers; ++w) {
    const i64 cost = span_cost(units, cuts[w], cuts[w + 1]);
    b.heaviest = max(b.heaviest, cost);
    b.total += cost;
  }
  return b;
}

RADDLE_FN Shares shares_of(const Units& units, i32 num_workers) {
  const i64 total = total_cost(units);
  return Shares{total / num_workers, total % num_workers, num_workers};
}

/// Cut w of num_workers + 1 that make equal spans; `hint` is any group.
RADDLE_FN Cut even_cut(const Units& units, const Shares& shares, i32 w, i32 hint) {
  if (w == 0) return first_cut(units);
  if (w == shares.num_workers) return last_cut(units);
  return cut_at(units, shares.whole * w + shares.rest * w / shares.num_workers, shares.whole, hint);
}

/// Cuts the line into equal spans. `cuts` has num_workers + 1 entries.
RADDLE_FN void cut_evenly(const Units& units, i32 num_workers, Cut* cuts) {
  const Shares shares = shares_of(units, num_workers);
  cuts[0] = first_cut(units);
  for (i32 w = 1; w < num_workers; ++w)
    cuts[w] = even_cut(units, shares, w, min(cuts[w - 1].at.group, units.num_groups - 1));
  cuts[num_workers] = last_cut(units);
}

/// `w` is at least 1.
RADDLE_FN CutAdds cut_adds(const Cut* cuts, i32 w) {
  const Cut& p = cuts[w - 1];
  const Cut& c = cuts[w];
  const bool same_unit = p.unit == c.unit && p.k > 0;
  return CutAdds{c.k > 0 && !same_unit, c.k > 0 && !(same_unit && p.k == c.k)};
}

/// Rows of partial states that cut w adds: a chunk's, and with a unit's first cut those of the
/// chunk before it.
RADDLE_FN i32 cut_rows(const Units& units, const Cut* cuts, i32 w) {
  const CutAdds adds = cut_adds(cuts, w);
  if (!adds.chunk) return 0;
  return (adds.unit ? 2 : 1) * units.tiles[cuts[w].at.tile].num_rows;
}

/// Numbers the chunks that begin at cuts.
RADDLE_FN void number_chunks(Cut* cuts, i32 num_workers) {
  for (i32 w = 1; w < num_workers; ++w) {
    const CutAdds adds = cut_adds(cuts, w);
    cuts[w].chunk = cuts[w].k == 0 ? 0 : adds.unit ? 1 : cuts[w - 1].chunk + (adds.chunk ? 1 : 0);
  }
}

/// The first cut w ≥ 1 that lies behind the beginning of `unit`, or num_workers.
RADDLE_FN i32 first_cut_behind(const Cut* cuts, i32 num_workers, i32 unit) {
  i32 lo = 1;
  i32 hi = num_workers;
  while (lo < hi) {
    const i32 middle = lo + (hi - lo) / 2;
    if (cuts[middle].unit > unit || (cuts[middle].unit == unit && cuts[middle].k > 0)) {
      hi = middle;
    } else {
      lo = middle + 1;
    }
  }
  return lo;
}

/// The first cut w ≥ 1 that does not lie before `unit`, or num_workers.
RADDLE_FN i32 first_cut_from(const Cut* cuts, i32 num_workers, i32 unit) {
  i32 lo = 1;
  i32 hi = num_workers;
  while (lo < hi) {
    const i32 middle = lo + (hi - lo) / 2;
    if (cuts[middle].unit >= unit) {
      hi = middle;
    } else {
      lo = middle + 1;
    }
  }
  return lo;
}

/// The unit of a number in linear order.
RADDLE_FN UnitAt unit_at(const Units& units, i32 unit) {
  i32 lo = 0;
  i32 hi = units.num_groups;
  while (lo + 1 < hi) {
    const i32 middle = lo + (hi - lo) / 2;
    if (units.num_kv_heads * units.group_tile[middle] <= unit) {
      lo = middle;
    } else {
      hi = middle;
    }
  }
  const i32 begin = units.group_tile[lo];
  const i32 tiles = units.group_tile[lo + 1] - begin;
  const i32 rest = unit - units.num_kv_heads * begin;
  return UnitAt{lo, rest / tiles, begin + rest % tiles};
}

/// The item of one unit of the span between cuts a and b.
RADDLE_FN WorkItem make_item(const Units& units, const Split* splits, const Cut& a, const Cut& b,
                             i32 unit, const UnitAt& at) {
  const QueryTile& t = units.tiles[at.tile];
  const i32 k = unit == a.unit ? a.k : 0;
  const bool to_end = unit < b.unit;
  i32 partial = -1;
  if (k > 0 || !to_end || units.all_partial) {
    partial = splits[t.split + at.head].partial_row + (k > 0 ? a.chunk : 0) * t.num_rows;
  }
  const bool any = t.run_end > t.run_begin;
  const i32 first = k > 0 ? unit_column(units, at.tile, k)
                    : any ? units.runs[t.run_begin].begin
                          : 0;
  const i32 last = !to_end ? unit_column(units, at.tile, b.k)
                   : any   ? units.runs[t.run_end - 1].end
                           : 0;
  return WorkItem{at.tile, at.head, first, last, partial};
}

/// Writes the items of the worker whose span lies between cuts a and b; returns how many.
RADDLE_FN i32 write_span(const Units& units, const Split* splits, const Cut& a, const Cut& b,
                         WorkItem* items) {
  const i32 count = span_items(a, b);
  UnitAt at = a.at;
  for (i32 i = 0; i < count;) {
    items[i] = make_item(units, splits, a, b, a.unit + i, at);
    const WorkItem first = items[i++];
    // Groups of one tile: the rest of its KV heads differ in nothing but the head.
    if (first.partial_row < 0 && units.group_tile[at.group + 1] - units.group_tile[at.group] == 1) {
      const i32 more = min(units.num_kv_heads - 1 - at.head, b.unit - a.unit - i);
      for (i32 h = 1; h <= more; ++h) {
        items[i] = first;
        items[i++].kv_head += h;
      }
      at.head += max(more, 0);
    }
    at = next_unit(units, at);
  }
  return count;
}

RADDLE_ENGINE_END
