// The KV tiles of a work item, in order.
#pragma once

#include "raddle/engine/plan/run_walk.h"

RADDLE_ENGINE_BEGIN

/// Takes a tile of at most `keys` columns off the front of a run.
RADDLE_FN Span take_tile(Span& run, i32 keys) {
  const Span tile{run.begin, min(run.end, run.begin + keys), run.partial};
  run.begin = tile.end;
  return tile;
}

/// Takes the last tile off a run, which has the same tiles as if they were taken off the front.
RADDLE_FN Span take_last_tile(Span& run, i32 keys) {
  const Span tile{run.begin + (run.end - 1 - run.begin) / keys * keys, run.end, run.partial};
  run.end = tile.begin;
  return tile;
}

/// Walks the KV tiles of a work item.
class TileWalk {
 public:
  RADDLE_FN TileWalk(const PlanView& plan, const WorkItem& item)
      : runs_(plan, item, plan.query_tiles[item.query_tile]),
        rest_(runs_.next()),
        keys_(plan.shapes[plan.query_tiles[item.query_tile].shape].keys) {}

  RADDLE_FN bool next(Span& span) {
    if (rest_.begin == rest_.end) return false;
    span = take_tile(rest_, keys_);
    if (rest_.begin == rest_.end) rest_ = runs_.next();
    return true;
  }

 private:
  RunWalk runs_;
  Span rest_;  ///< of the run that the walk is in
  i32 keys_;
};

RADDLE_ENGINE_END
