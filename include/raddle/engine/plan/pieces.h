// Pieces, for schedules that first cut the KV of every query tile and then assign what they have
// cut to workers. All KV heads of a tile are cut alike.
#pragma once

#include "raddle/engine/plan/units.h"

namespace raddle {

/// One chunk of a query tile's KV, for every KV head.
struct Piece {
  i32 tile;
  i32 col_begin;
  i32 col_end;
  i32 kv_tiles;
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

/// The limit of Algorithm 1 (arXiv:2501.01005) on a chunk's columns: all columns / workers.
RADDLE_FN i64 chunk_limit(const Units& units, i32 num_workers) {
  i64 columns = 0;
  for (i32 t = 0; t < units.num_tiles; ++t) columns += i64{units.kv_tiles[t]} * tile_keys(units, t);
  return max(i64{1}, ceil_div(columns * units.num_kv_heads, i64{num_workers}));
}

/// KV tiles of one chunk under a limit in columns; those of the unit where it is not cut. A chunk
/// is no shorter than a balanced one (balanced_piece), with composing taken as a quarter of what
/// storing and composing a state costs.
RADDLE_FN i32 limit_tiles(const Units& units, i32 tile, i64 limit) {
  const QueryTile& t = units.tiles[tile];
  const i64 compose = i64{units.costs[t.shape].per_state_row} * t.num_rows / 4;
  const i32 n = units.kv_tiles[tile];
  const i32 keys = tile_keys(units, tile);
  if (limit > (i64{n} - 1) * keys) return max(n, 1);  // no division
  const i32 step = static_cast<i32>(ceil_div(limit, i64{keys}));
  return min(max(step, balanced_piece(unit_cost(units, tile), compose, n)), n);
}

/// How many chunks of `step` KV tiles a unit with n of them has, at least one.
RADDLE_FN i32 count_chunks(i32 n, i32 step) { return step >= n ? 1 : ceil_div(n, step); }

/// Columns between absolute cuts of a group of `num_tiles` query tiles. Many tiles are parallel
/// enough by themselves, so their chunks are longer: partial states grow with the keys, not with
/// rows times keys.
RADDLE_FN i64 absolute_chunk(i32 invariant_chunk, i32 keys, i32 num_tiles) {
  return i64{round_up(max(invariant_chunk, 1), keys)} * num_tiles;
}

/// Cuts one tile's KV after every `step` of its KV tiles; returns the number of pieces, at least
/// one. `pieces` may be null, to count only.
RADDLE_FN i32 cut_in_steps(const Units& units, i32 tile, i32 step, Piece* pieces) {
  const i32 n = units.kv_tiles[tile];
  const i32 count = count_chunks(n, step);
  for (i32 i = 0; pieces && i < count; ++i) {
    const i32 begin = i * step, end = i + 1 < count ? begin + step : n;
    pieces[i] =
        Piece{tile, unit_column(units, tile, begin), unit_column(units, tile, end), end - begin};
  }
  return count;
}

/// Cuts one tile's KV at absolute multiples of `length` columns (batch invariance); returns the
/// number of pieces, at least one. `pieces` may be null, to count only.
RADDLE_FN i32 cut_at_absolute_columns(const Units& units, i32 tile, i64 length, Piece* pieces) {
  const QueryTile& t = units.tiles[tile];
  const i32 n = units.kv_tiles[tile];
  if (n == 0) return cut_in_steps(units, tile, 1, pieces);
  const i32 first = unit_column(units, tile, 0);
  const i32 last = unit_column(units, tile, n);
  const i32 keys = tile_keys(units, tile);
  i32 count = 0;
  i32 run = t.run_begin;
  for (i64 begin = first / length * length; begin < last; begin += length) {
    const i64 end = begin + length;
    i32 tiles = 0;
    for (; run < t.run_end; ++run) {
      const Run& r = units.runs[run];
      const i64 from = max(i64{r.begin}, begin);
      const i64 to = min(i64{r.end}, end);
      if (from < to) tiles += static_cast<i32>(ceil_div(to - from, i64{keys}));
      if (r.end > end) break;
    }
    if (tiles == 0) continue;  // nothing is kept between these cuts
    if (pieces) {
      pieces[count] = Piece{tile, static_cast<i32>(max(begin, i64{first})),
                            static_cast<i32>(min(end, i64{last})), tiles};
    }
    ++count;
  }
  return count;
}

/// Cost of one piece of a tile cut into `chunks` pieces; `cost` is the tile's.
RADDLE_FN i64 piece_cost(const UnitCost& cost, const Piece& piece, i32 chunks) {
  return (chunks > 1 ? cost.resume : cost.start) + piece.kv_tiles * cost.tile;
}
RADDLE_FN i64 piece_cost(const Units& units, const Piece& piece, i32 chunks) {
  return piece_cost(unit_cost(units, piece.tile), piece, chunks);
}

RADDLE_ENGINE_END
