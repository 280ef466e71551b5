// Partial states and contractions, on the device: what engine/plan/contraction.h does in one pass
// over the tiles.
#pragma once

#include "raddle/engine/kernel/plan/context.h"

RADDLE_ENGINE_BEGIN

namespace planner {

/// A single level: units that are cut have states, in the order of the cuts. Returns the number of
/// contractions.
RADDLE_DEVICE i32 place_cut_states(Context& b, const Units& units) {
  const i32 heads = b.config.num_kv_heads;
  const i32 workers = b.config.num_workers;
  const PlanOffsets& at = b.launch.at;
  const ContractionMap map{b.out<Contraction>(at.contractions),
                           b.out<i32>(at.expected),
                           b.out<Source>(at.sources),
                           b.out<i32>(at.dependents),
                           0,
                           0,
                           0};
  Sums<1, i32> splits{};
  for (i32 base = 0; base < units.num_tiles; base += b.threads) {
    const i32 t = base + b.thread;
    const bool split = t < units.num_tiles && b.s.tiles[t].split >= 0;
    const i32 c =
        b.scan.exclusive(Sums<1, i32>{{split ? 1 : 0}}, splits, units.num_tiles - base).of[0];
    if (!split) continue;
    b.s.tiles[t].split = heads * c;
    RADDLE_ROLLED
    for (i32 h = 0; h < heads; ++h) b.s.splits[heads * c + h] = Split{-1, 0};
    contract_tile(b.s.tiles, t, c, map);
  }
  ptx::sync_block();
  for (i32 w = 1 + b.thread; w < workers; w += b.threads) {
    const Cut& c = b.s.cuts[w];
    if (c.k == 0) continue;
    Split& s = b.s.splits[b.s.tiles[c.at.tile].split + c.at.head];
    if (cut_adds(b.s.cuts, w).unit) s.partial_row = b.s.row_at[w];
    if (b.s.cuts[w + 1].unit != c.unit) s.num_chunks = c.chunk + 1;
  }
  ptx::sync_block();
  const i32 num = splits.of[0];
  for (i32 i = b.first_of_all(); i < heads * num; i += b.step_of_all())
    map.expected[i] = b.s.splits[i].num_chunks;
  return num;
}

/// Two levels: every unit has a state, in linear order. Returns the rows of all.
RADDLE_DEVICE i64 place_all_states(Context& b, const Units& units) {
  const i32 heads = b.config.num_kv_heads;
  const i32 workers = b.config.num_workers;
  for (i32 t = b.thread; t < units.num_tiles; t += b.threads) {
    b.s.tiles[t].split = heads * t;
    b.s.tiles[t].dependents_end = 0;  // counts dependents first
  }
  ptx::sync_block();
  Sums<1> rows{};
  const Divider by_heads(heads);
  const i32 num_units = heads * units.num_tiles;
  for (i32 base = 0; base < num_units; base += b.threads) {
    const i32 u = base + b.thread;
    i32 chunks = 1;
    UnitAt at{};
    if (u < num_units) {
      at = b.unit_at(by_heads, u);
      const i32 last = first_cut_from(b.s.cuts, workers, u + 1) - 1;
      if (b.s.cuts[last].unit == u && b.s.cuts[last].k > 0) chunks = b.s.cuts[last].chunk + 1;
    }
    const i64 mine = u < num_units ? i64{chunks} * units.tiles[at.tile].num_rows : 0;
    const Sums<1> before = b.scan.exclusive(Sums<1>{{mine}}, rows, num_units - base);
    if (u < num_units)
      b.s.splits[heads * at.tile + at.head] = Split{static_cast<i32>(before.of[0]), chunks};
  }
  ptx::sync_block();
  return rows.of[0];
}

/// Calls f with every source that the prefix of a request's group holds of its query tile t.
template <class F>
RADDLE_DEVICE void for_each_source(const Context& b, i32 t, F&& f) {
  const QueryTile& tile = b.s.tiles[t];
  const i32 rows_before = b.s.row_before[tile.group];
  if (rows_before < 0) return;
  const i32 group = b.s.group[b.s.links[tile.group].leader].number;
  const i32 first = rows_before * b.config.group_size + tile.row_begin;
  const i32 end = b.s.group_tile[group + 1];
  i32 p = b.s.group_tile[group];
  for (i32 hi = end; p < hi;) {  // the first of the prefix's tiles that reaches past `first`
    const i32 middle = p + (hi - p) / 2;
    if (b.s.tiles[middle].row_begin + b.s.tiles[middle].num_rows > first) {
      hi = middle;
    } else {
      p = middle + 1;
    }
  }
  for (; p < end && b.s.tiles[p].row_begin < first + tile.num_rows; ++p) {
    const QueryTile& from = b.s.tiles[p];
    const i32 row = max(first, from.row_begin);
    const i32 row_end = min(first + tile.num_rows, from.row_begin + from.num_rows);
    f(Source{p, row - from.row_begin, row - first, row_end - row});
  }
}

/// Two levels: contraction c composes query tile c of the last level. Returns the number of
/// sources.
RADDLE_DEVICE i32 contract_two_levels(Context& b, const Units& units) {
  const i32 heads = b.config.num_kv_heads;
  const i32 first = b.s.group_tile[b.num_prefixes];  // tile of the last level
  const i32 count = units.num_tiles - first;
  const PlanOffsets& at = b.launch.at;
  // Where a tile stands among those that the requests of its group have on the last level.
  const auto place_in_group = [&b](i32 t) {
    const i32 r = b.s.tiles[t].group;
    return b.s.tiles_before[r] + t - b.s.group_tile[b.num_prefixes + r];
  };
  Sums<1, i32> sources{};
  for (i32 base = 0; base < count; base += b.threads) {
    const i32 c = base + b.thread;
    const i32 t = first + c;
    i32 mine = 0;
    Range held{units.num_tiles, -1};  // tiles of the prefix: neighbours
    if (c < count) {
      mine = 1;
      for_each_source(b, t, [&](const Source& s) {
        ++mine;
        held = hull(held, Range{s.query_tile, s.query_tile});
        ptx::atomic_add(&b.s.tiles[s.query_tile].dependents_end, 1);
        if (s.row == 0) b.s.first_dependent[s.query_tile] = place_in_group(t);
      });
    }
    i32 place = b.scan.exclusive(Sums<1, i32>{{mine}}, sources, count - base).of[0];
    if (c >= count) continue;
    b.out<Contraction>(at.contractions)[c] = Contraction{t, place, place + mine};
    for (i32 h = 0; h < heads; ++h) {
      i32 expected = b.s.splits[heads * t + h].num_chunks;
      for (i32 p = held.first; p <= held.last; ++p)
        expected += b.s.splits[heads * p + h].num_chunks;
      b.out<i32>(at.expected)[c * heads + h] = expected;
    }
    for_each_source(b, t, [&](const Source& s) { b.out<Source>(at.sources)[place++] = s; });
    b.out<Source>(at.sources)[place] = Source{t, 0, 0, b.s.tiles[t].num_rows};
  }
  ptx::sync_block();
  Sums<1, i32> dependents{};
  for (i32 base = 0; base < units.num_tiles; base += b.threads) {
    const i32 t = base + b.thread;
    const i32 mine = t >= units.num_tiles ? 0 : t < first ? b.s.tiles[t].dependents_end : 1;
    const i32 begin =
        b.scan.exclusive(Sums<1, i32>{{mine}}, dependents, units.num_tiles - base).of[0];
    if (t >= units.num_tiles) continue;
    b.s.tiles[t].dependents_begin = begin;
    b.s.tiles[t].dependents_end = begin + mine;
  }
  ptx::sync_block();
  i32* to = b.out<i32>(at.dependents);
  for (i32 c = b.thread; c < count; c += b.threads) {
    const i32 t = first + c;
    to[b.s.tiles[t].dependents_begin] = c;
    for_each_source(b, t, [&](const Source& s) {
      const i32 p = s.query_tile;
      to[b.s.tiles[p].dependents_begin + place_in_group(t) - b.s.first_dependent[p]] = c;
    });
  }
  return sources.of[0];
}

}  // namespace planner

RADDLE_ENGINE_END
