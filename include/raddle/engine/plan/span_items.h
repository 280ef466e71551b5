// The items and the states of finished cuts (linear_split.h). On the host a loop over the workers
// calls these functions, on a GPU a thread for each worker.
#pragma once

#include "raddle/engine/plan/linear_split.h"

RADDLE_ENGINE_BEGIN

/// Rows of partial states that cut w adds: a chunk's, and with a unit's first cut those of the
/// chunk before it.
RADDLE_FN i32 cut_rows(const Units& units, const Cut* cuts, i32 w) {
  const CutAdds adds = cut_adds(cuts, w);
  if (!adds.chunk) return 0;
  return (adds.unit ? 2 : 1) * units.tiles[cuts[w].at.tile].num_rows;
}

/// The first cut w ≥ 1 that lies behind the beginning of `unit`, or num_spans.
RADDLE_FN i32 first_cut_behind(const Cut* cuts, i32 num_spans, i32 unit) {
  return first_where(1, num_spans,
                     [&](i32 w) { return cuts[w].unit + (cuts[w].k > 0 ? 1 : 0) > unit; });
}

/// The first cut w ≥ 1 that does not lie before `unit`, or num_spans.
RADDLE_FN i32 first_cut_from(const Cut* cuts, i32 num_spans, i32 unit) {
  return first_where(1, num_spans, [&](i32 w) { return cuts[w].unit >= unit; });
}

/// The item of one unit of the span between cuts a and b, for a KV head of its tile. Its fields are
/// written where they stay, after all have been computed: to copy a temporary item, a CPU would
/// load as one what it has just stored as several, which store-to-load forwarding does not cover.
RADDLE_FN void write_item(const Units& units, const Split* splits, const Cut& a, const Cut& b,
                          i32 unit, i32 tile, i32 head, WorkItem& item) {
  const QueryTile& t = units.tiles[tile];
  const i32 k = unit == a.unit ? a.k : 0;
  const bool to_end = unit < b.unit;
  const bool any = t.run_end > t.run_begin;
  const i32 begin = k > 0 ? unit_column(units, tile, k) : any ? units.runs[t.run_begin].begin : 0;
  const i32 end = !to_end ? unit_column(units, tile, b.k) : any ? units.runs[t.run_end - 1].end : 0;
  i32 partial = -1;
  if (k > 0 || !to_end || units.all_partial)
    partial = splits[t.split + head].partial_row + (k > 0 ? a.chunk : 0) * t.num_rows;
  item.query_tile = tile;
  item.kv_head = head;
  item.col_begin = begin;
  item.col_end = end;
  item.partial_row = partial;
  item.paired_half = 0;
}

/// Writes the items of the worker whose span lies between cuts a and b; returns how many.
RADDLE_FN i32 write_span(const Units& units, const Split* splits, const Cut& a, const Cut& b,
                         WorkItem* items) {
  const i32 count = span_items(a, b);
  UnitAt at = a.at;
  for (i32 i = 0; i < count;) {
    const WorkItem& item = items[i];
    write_item(units, splits, a, b, a.unit + i, at.tile, at.head, items[i]);
    ++i;
    // Groups of one tile: the rest of its KV heads differ in nothing but the head.
    if (item.partial_row < 0 && units.group_tile[at.group + 1] - units.group_tile[at.group] == 1) {
      const i32 more = min(units.num_kv_heads - 1 - at.head, b.unit - a.unit - i);
      const i32 begin = item.col_begin;
      const i32 end = item.col_end;
      for (i32 h = 1; h <= more; ++h)
        items[i++] = WorkItem{at.tile, at.head + h, begin, end, -1, 0};
      at.head += max(more, 0);
    }
    at = next_unit(units, at);
  }
  return count;
}

/// The same of a span on the line of one KV head, where units are query tiles, for KV head `head`.
RADDLE_FN i32 write_head_span(const Units& units, const Split* splits, const Cut& a, const Cut& b,
                              i32 head, WorkItem* items) {
  const i32 count = span_items(a, b);
  for (i32 i = 0; i < count; ++i)
    write_item(units, splits, a, b, a.unit + i, a.unit + i, head, items[i]);
  return count;
}

RADDLE_ENGINE_END
