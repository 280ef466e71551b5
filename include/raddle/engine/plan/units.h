// Query tiles, units and their costs. The fused rows of every group are cut into query tiles of one
// of two shapes; a unit is one (query tile, KV head). Schedules order units by level, group, KV
// head, tile: the tiles of a KV head follow each other, so that its keys are still in the cache.
#pragma once

#include "raddle/engine/plan/plan.h"

namespace raddle {

/// What a unit costs: start + (KV tiles) · tile, plus store and resume for a cut through it.
struct UnitCost {
  i64 start;
  i64 tile;
  i64 store;   ///< added to the chunk before the first cut: its partial state
  i64 resume;  ///< added to the chunk after each cut: one more item and its partial state
};

struct Units {
  const QueryTile* tiles;
  const Run* runs;
  const i32* kv_tiles;     ///< [num_tiles] KV tiles of a query tile
  const i64* cost_before;  ///< [num_tiles + 1] cost of all tiles before one, for one KV head
  const i32* group_tile;   ///< [num_groups + 1] first tile of a group, counted over all levels
  i32 num_tiles;
  i32 num_groups;
  i32 num_kv_heads;
  bool all_partial;  ///< more than one level: every item stores a partial state
  TileShape shapes[2];
  CostModel costs[2];
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

/// The shape depends on the group's own rows alone, so that a request is tiled alike alone and in a
/// batch.
RADDLE_FN i32 shape_of(const PlanConfig& config, i32 fused_rows) {
  const bool is_short = config.short_only || fused_rows <= config.shapes[short_queries].rows;
  return is_short ? short_queries : long_queries;
}

RADDLE_FN i32 count_tiles(const PlanConfig& config, i32 fused_rows) {
  const i32 rows = config.shapes[shape_of(config, fused_rows)].rows;
  return quotient_of_few(fused_rows - 1, rows) + (fused_rows > 0 ? 1 : 0);
}

/// The nth query tile of a group, without its runs.
RADDLE_FN QueryTile make_tile(const PlanConfig& config, i32 level, i32 group, i32 fused_rows,
                              i32 nth) {
  const i32 shape = shape_of(config, fused_rows);
  const i32 begin = nth * config.shapes[shape].rows;
  return QueryTile{level, group, begin, min(config.shapes[shape].rows, fused_rows - begin),
                   shape, 0,     0,     0,
                   0,     -1,    0,     0};
}

/// KV tiles in a tile's runs.
RADDLE_FN i32 count_kv_tiles(const Run* runs, i32 begin, i32 end, i32 keys) {
  i32 total = 0;
  RADDLE_ROLLED
  for (i32 i = begin; i < end; ++i) total += quotient(runs[i].end - runs[i].begin + keys - 1, keys);
  return total;
}

/// The column at which the kth KV tile of a tile's runs begins; the end of the last run for k past
/// the end.
RADDLE_FN i32 column_of(const Run* runs, i32 begin, i32 end, i32 keys, i32 k) {
  RADDLE_ROLLED
  for (i32 i = begin; i < end; ++i) {
    const i32 tiles = quotient(runs[i].end - runs[i].begin + keys - 1, keys);
    if (k < tiles) return runs[i].begin + k * keys;
    k -= tiles;
  }
  return end > begin ? runs[end - 1].end : 0;
}

RADDLE_FN UnitCost cost_of(const CostModel& model, i32 rows, bool all_partial) {
  if (all_partial) {
    const i64 item = max(i64{1}, model.per_level_item + i64{model.per_level_item_row} * rows);
    const i32 computed = rows > few_rows ? max(rows, model.level_rows) : rows;
    const i64 tile = max(i64{1}, model.per_level_tile + i64{model.per_level_tile_row} * computed);
    return UnitCost{item, tile, 0, item};
  }
  const i64 item = max(i64{1}, model.per_item + i64{model.per_item_row} * rows);
  const i64 tile = max(i64{1}, model.per_tile + i64{model.per_tile_row} * rows);
  const i64 merge = model.per_state + i64{model.per_state_row} * rows;
  return UnitCost{item, tile, merge, item + merge};
}

RADDLE_FN UnitCost unit_cost(const Units& units, i32 tile) {
  const QueryTile& t = units.tiles[tile];
  return cost_of(units.costs[t.shape], t.num_rows, units.all_partial);
}

/// In plans of several levels: rows of a query tile that one worker composes. Those of a prefix are
/// of many requests, which workers compose side by side.
constexpr i32 most_rows_composed = 8;

/// What storing and composing a state of the rows of `tile` costs that one worker composes.
RADDLE_FN i64 rows_merge(const Units& units, i32 tile) {
  const QueryTile& t = units.tiles[tile];
  const i32 rows = units.all_partial ? min(t.num_rows, most_rows_composed) : t.num_rows;
  return i64{units.costs[t.shape].per_state_row} * rows;
}

/// Integer square root, rounded down, of n below 2^62: Newton's steps from the next power of two,
/// for every step is a division.
RADDLE_FN i64 isqrt(i64 n) {
  i64 x = 1;
  while (x * x < n) x *= 2;
  for (i64 y = n < 1 ? x : (x + n / x) / 2; y < x; y = (x + n / x) / 2) x = y;
  return n < 1 ? 0 : x;
}

/// How many KV tiles p a chunk of a unit with n of them should have. Workers compute the chunks
/// side by side, in p · tile; then one worker composes their n / p states, in n / p · compose. Both
/// take as long where p = √(n · compose / tile).
RADDLE_FN i32 balanced_piece(const UnitCost& cost, i64 compose, i32 n) {
  return static_cast<i32>(max(i64{1}, isqrt(quotient(n * compose, cost.tile))));
}

RADDLE_FN i64 total_cost(const Units& units) {
  return units.num_kv_heads * units.cost_before[units.num_tiles];
}

RADDLE_FN i32 tile_keys(const Units& units, i32 tile) {
  return units.shapes[units.tiles[tile].shape].keys;
}

/// First column of a unit's kth KV tile; the end of its last run for k past the end.
RADDLE_FN i32 unit_column(const Units& units, i32 tile, i32 k) {
  const QueryTile& t = units.tiles[tile];
  const Run* run = units.runs + t.run_begin;
  if (k >= units.kv_tiles[tile]) return t.run_end > t.run_begin ? units.runs[t.run_end - 1].end : 0;
  const i32 keys = units.shapes[t.shape].keys;
  if (k * keys < run->end - run->begin) return run->begin + k * keys;  // no division
  return column_of(units.runs, t.run_begin, t.run_end, keys, k);
}

/// Which unit: its group, KV head and query tile.
struct UnitAt {
  i32 group;
  i32 head;
  i32 tile;
};

/// The unit after `at`; past the last one, group is num_groups.
RADDLE_FN UnitAt next_unit(const Units& units, UnitAt at) {
  if (++at.tile < units.group_tile[at.group + 1]) return at;
  if (++at.head < units.num_kv_heads) {
    at.tile = units.group_tile[at.group];
    return at;
  }
  at.head = 0;
  do ++at.group;
  while (at.group < units.num_groups &&
         units.group_tile[at.group + 1] == units.group_tile[at.group]);
  return at;
}

RADDLE_ENGINE_END
