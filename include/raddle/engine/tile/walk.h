// The KV tiles of a work item, in order.
#pragma once

#include "raddle/engine/plan/plan.h"

RADDLE_ENGINE_BEGIN

/// A tile of columns and whether it needs element masks.
struct Span {
  i32 begin;
  i32 end;
  bool partial;
};

/// Walks the KV tiles of a work item: its query tile's runs, clipped to the item's columns.
class TileWalk {
 public:
  TileWalk() = default;
  RADDLE_FN TileWalk(const PlanView& plan, const WorkItem& item)
      : runs_(plan.runs),
        run_(plan.query_tiles[item.query_tile].run_begin),
        run_end_(plan.query_tiles[item.query_tile].run_end),
        keys_(plan.shapes[plan.query_tiles[item.query_tile].shape].keys),
        at_(item.col_begin),
        end_(item.col_end) {}

  RADDLE_FN bool next(Span& span) {
    for (; run_ < run_end_ && at_ < end_; ++run_) {
      const Run& run = runs_[run_];
      at_ = max(at_, run.begin);
      const i32 end = min(run.end, end_);
      if (at_ >= end) continue;
      span = Span{at_, min(end, at_ + keys_), run.kind == Coverage::partial};
      at_ = span.end;
      return true;
    }
    return false;
  }

 private:
  const Run* runs_;
  i32 run_, run_end_, keys_, at_, end_;
};

RADDLE_ENGINE_END
