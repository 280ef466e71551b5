// Partial states and contractions on the device: what engine/plan/contraction.h does in one pass
// over the tiles.
#pragma once

#include "raddle/engine/kernel/gpu_planner/context.h"

RADDLE_ENGINE_BEGIN

namespace planner {

/// For a single level: units that are cut into spans have states, in the order of the cuts. Where
/// the line was that of one KV head, which took `rows` rows (split_all_heads), `each` is the number
/// of heads, else 1. Returns the number of contractions.
RADDLE_DEVICE i32 place_cut_states(Context& context, const Units& units, i32 num_spans, i32 each,
                                   i32 rows) {
  const i32 heads = context.config.num_kv_heads;
  const PlanOffsets& at = context.launch.at;
  const ContractionMap map{context.out<Contraction>(at.contractions),
                           context.out<i32>(at.expected),
                           context.out<Source>(at.sources),
                           context.out<i32>(at.dependents),
                           0,
                           0,
                           0};
  Sums<1, i32> splits{};
  for (i32 base = 0; base < units.num_tiles; base += context.threads) {
    const i32 t = base + context.thread;
    const bool split = t < units.num_tiles && context.scratch.tiles[t].split >= 0;
    const i32 c =
        context.scan.exclusive(Sums<1, i32>{{split ? 1 : 0}}, splits, units.num_tiles - base).of[0];
    if (!split) continue;
    context.scratch.tiles[t].split = heads * c;
    RADDLE_ROLLED
    for (i32 h = 0; h < heads; ++h) context.scratch.splits[heads * c + h] = Split{-1, 0};
    contract_tile(context.scratch.tiles, t, c, map);
  }
  ptx::sync_block();
  for (i32 w = 1 + context.thread; w < num_spans; w += context.threads) {
    const Cut& c = context.scratch.cuts[w];
    if (c.k == 0) continue;
    Split* s = context.scratch.splits + context.scratch.tiles[c.at.tile].split + c.at.head;
    const bool is_first = cut_adds(context.scratch.cuts, w).unit;
    const bool is_last = context.scratch.cuts[w + 1].unit != c.unit;
    RADDLE_ROLLED
    for (i32 h = 0; h < each; ++h) {
      if (is_first) s[h].partial_row = context.scratch.row_at[w] + h * rows;
      if (is_last) s[h].num_chunks = c.chunk + 1;
    }
  }
  ptx::sync_block();
  const i32 num = splits.of[0];
  for (i32 i = context.first_of_all(); i < heads * num; i += context.step_of_all())
    map.expected[i] = context.scratch.splits[i].num_chunks;
  return num;
}

/// For two levels: every unit has a state, in linear order. Returns the number of partial rows.
RADDLE_DEVICE i64 place_all_states(Context& context, const Units& units, i32 num_spans) {
  const i32 heads = context.config.num_kv_heads;
  for (i32 t = context.thread; t < units.num_tiles; t += context.threads) {
    context.scratch.tiles[t].split = heads * t;
    context.scratch.tiles[t].dependents_end = 0;  // counts dependents at first
  }
  ptx::sync_block();
  Sums<1> rows{};
  const Divider by_heads(heads);
  const i32 num_units = heads * units.num_tiles;
  for (i32 base = 0; base < num_units; base += context.threads) {
    const i32 u = base + context.thread;
    i32 chunks = 1;
    UnitAt at{};
    if (u < num_units) {
      at = context.unit_at(by_heads, u);
      const i32 last = first_cut_from(context.scratch.cuts, num_spans, u + 1) - 1;
      if (context.scratch.cuts[last].unit == u && context.scratch.cuts[last].k > 0)
        chunks = context.scratch.cuts[last].chunk + 1;
    }
    const i64 mine = u < num_units ? i64{chunks} * units.tiles[at.tile].num_rows : 0;
    const Sums<1> before = context.scan.exclusive(Sums<1>{{mine}}, rows, num_units - base);
    if (u < num_units)
      context.scratch.splits[heads * at.tile + at.head] =
          Split{static_cast<i32>(before.of[0]), chunks};
  }
  ptx::sync_block();
  return rows.of[0];
}

/// Calls f with every source that the tiles of the shared prefix hold for query tile t.
template <class F>
RADDLE_DEVICE void for_each_source(const Context& context, i32 t, F&& f) {
  const QueryTile& tile = context.scratch.tiles[t];
  const i32 rows_before = context.scratch.row_before[tile.group];
  if (rows_before < 0) return;
  const i32 group = context.scratch.group[context.scratch.links[tile.group].leader].number;
  const i32 first = rows_before * context.config.group_size + tile.row_begin;
  const i32 end = context.scratch.group_tile[group + 1];
  i32 p = first_where(context.scratch.group_tile[group], end, [&](i32 i) {
    return context.scratch.tiles[i].row_begin + context.scratch.tiles[i].num_rows > first;
  });  // the first of the prefix's tiles that reaches past `first`
  for (; p < end && context.scratch.tiles[p].row_begin < first + tile.num_rows; ++p) {
    const QueryTile& from = context.scratch.tiles[p];
    const i32 row = max(first, from.row_begin);
    const i32 row_end = min(first + tile.num_rows, from.row_begin + from.num_rows);
    f(Source{p, row - from.row_begin, row - first, row_end - row});
  }
}

/// For two levels: contraction c composes query tile c of the last level. Returns the number of
/// sources.
RADDLE_DEVICE i32 contract_two_levels(Context& context, const Units& units) {
  const i32 heads = context.config.num_kv_heads;
  const i32 first = context.scratch.group_tile[context.num_prefixes];  // tile of the last level
  const i32 count = units.num_tiles - first;
  const PlanOffsets& at = context.launch.at;
  // The place of a tile among those of its group's requests on the last level.
  const auto place_in_group = [&context](i32 t) {
    const i32 r = context.scratch.tiles[t].group;
    return context.scratch.tiles_before[r] + t -
           context.scratch.group_tile[context.num_prefixes + r];
  };
  Sums<1, i32> sources{};
  for (i32 base = 0; base < count; base += context.threads) {
    const i32 c = base + context.thread;
    const i32 t = first + c;
    i32 mine = 0;
    Range held{units.num_tiles, -1};  // tiles of the prefix that hold sources; they are neighbours
    if (c < count) {
      mine = 1;
      for_each_source(context, t, [&](const Source& s) {
        ++mine;
        held = hull(held, Range{s.query_tile, s.query_tile});
        ptx::atomic_add(&context.scratch.tiles[s.query_tile].dependents_end, 1);
        if (s.row == 0) context.scratch.first_dependent[s.query_tile] = place_in_group(t);
      });
    }
    i32 place = context.scan.exclusive(Sums<1, i32>{{mine}}, sources, count - base).of[0];
    if (c >= count) continue;
    context.out<Contraction>(at.contractions)[c] = Contraction{t, place, place + mine};
    for (i32 h = 0; h < heads; ++h) {
      i32 expected = context.scratch.splits[heads * t + h].num_chunks;
      for (i32 p = held.first; p <= held.last; ++p)
        expected += context.scratch.splits[heads * p + h].num_chunks;
      context.out<i32>(at.expected)[c * heads + h] = expected;
    }
    for_each_source(context, t,
                    [&](const Source& s) { context.out<Source>(at.sources)[place++] = s; });
    context.out<Source>(at.sources)[place] = Source{t, 0, 0, context.scratch.tiles[t].num_rows};
  }
  ptx::sync_block();
  Sums<1, i32> dependents{};
  for (i32 base = 0; base < units.num_tiles; base += context.threads) {
    const i32 t = base + context.thread;
    const i32 mine = t >= units.num_tiles ? 0
                     : t < first          ? context.scratch.tiles[t].dependents_end
                                          : 1;
    const i32 begin =
        context.scan.exclusive(Sums<1, i32>{{mine}}, dependents, units.num_tiles - base).of[0];
    if (t >= units.num_tiles) continue;
    context.scratch.tiles[t].dependents_begin = begin;
    context.scratch.tiles[t].dependents_end = begin + mine;
  }
  ptx::sync_block();
  i32* to = context.out<i32>(at.dependents);
  for (i32 c = context.thread; c < count; c += context.threads) {
    const i32 t = first + c;
    to[context.scratch.tiles[t].dependents_begin] = c;
    for_each_source(context, t, [&](const Source& s) {
      const i32 p = s.query_tile;
      to[context.scratch.tiles[p].dependents_begin + place_in_group(t) -
         context.scratch.first_dependent[p]] = c;
    });
  }
  return sources.of[0];
}

}  // namespace planner

RADDLE_ENGINE_END
