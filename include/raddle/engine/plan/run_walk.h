// The coverage runs of a work item, in order.
#pragma once

#include "raddle/engine/plan/plan.h"

RADDLE_ENGINE_BEGIN

/// A tile of columns and whether it needs element masks.
struct Span {
  i32 begin;
  i32 end;
  bool partial;
};

/// Walks the coverage runs of a work item: its query tile's, clipped to the item's columns.
class RunWalk {
 public:
  RunWalk() = default;
  RADDLE_FN RunWalk(const PlanView& plan, const WorkItem& item, const QueryTile& tile)
      : RunWalk(plan.runs, tile.run_begin, tile.run_end, item.col_begin, item.col_end) {}
  /// Of runs [run, run_end), the columns [begin, end).
  RADDLE_FN RunWalk(const Run* runs, i32 run, i32 run_end, i32 begin, i32 end)
      : runs_(runs), run_(run), run_end_(run_end), begin_(begin), end_(end) {}

  /// The runs that are left: from this one up to `run_end`.
  RADDLE_FN i32 next_run() const { return run_; }
  RADDLE_FN i32 run_end() const { return run_end_; }

  /// The next one that holds columns; an empty span at the end.
  RADDLE_FN Span next() {
    while (run_ < run_end_) {
      const Span span = of(runs_[run_++]);
      if (span.begin < span.end) return span;
    }
    return Span{end_, end_, false};
  }
  /// The last one that holds columns, which is then left no more; an empty span if none is left.
  RADDLE_FN Span last() {
    while (run_ < run_end_) {
      const Span span = of(runs_[--run_end_]);
      if (span.begin < span.end) return span;
    }
    return Span{end_, end_, false};
  }

 private:
  RADDLE_FN Span of(const Run& run) const {
    return Span{max(begin_, run.begin), min(end_, run.end), run.kind == Coverage::partial};
  }

  const Run* runs_;
  i32 run_, run_end_, begin_, end_;
};

RADDLE_ENGINE_END
