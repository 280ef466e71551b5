// One query tile: what its mask keeps and what it costs. The host goes through the tiles in order,
// a GPU has a thread for each.
#pragma once

#include "raddle/engine/plan/coverage.h"
#include "raddle/engine/plan/units.h"

namespace raddle {

struct CoveredTile {
  QueryTile tile;  ///< run_begin is 0 and run_end how many runs it has
  Run only;        ///< its run, if it is one and `spans` was not needed
  bool in_spans;   ///< its runs lie in `spans`
  i32 kv_tiles;
  i64 cost;
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

/// A tile from make_tile with its runs. `hull(tile)` finds the hulls over its rows; `spans` is
/// scratch of max_spans entries.
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
