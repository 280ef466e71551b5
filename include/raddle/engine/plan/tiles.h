// Query tiles: the fused rows of every group, cut into tiles of one of two shapes.
#pragma once

#include "raddle/engine/layout/layout.h"
#include "raddle/engine/plan/plan.h"

RADDLE_ENGINE_BEGIN

/// The shape depends on the group's own rows alone, so that a request is tiled alike alone and in a
/// batch.
RADDLE_FN i32 shape_of(const PlanConfig& config, i32 fused_rows) {
  return fused_rows <= config.shapes[short_queries].rows ? short_queries : long_queries;
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

RADDLE_ENGINE_END
