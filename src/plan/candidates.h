// The candidate schedules: for each, a function that works out its assignment of one batch's units
// to workers; for some, a lower bound on its time.
#pragma once

#include "plan/assignment.h"
#include "plan/tiling.h"

namespace raddle {

class Candidates {
 public:
  /// No assignment is done later; the bound of a schedule that does not apply.
  static constexpr i64 never = int_max * i64{int_max};

  void begin(const Tiling& tiling, const PlanConfig& config);

  /// Equal spans of the line of units.
  void make_linear(Assignment& to);
  /// Equal spans of one KV head's line, of which every worker computes all heads.
  void make_whole_rows(Assignment& to);
  /// All units in the shared queue, from which workers draw.
  void make_drawn(Assignment& to);
  /// Uncut tiles, longest first.
  void make_whole_tiles(Assignment& to);
  /// Algorithm 1 (arXiv:2501.01005): chunks under a limit, longest first. Where a lower bound on
  /// its time is not below `earlier_than`, only that bound: Form::none.
  void make_algorithm1(Assignment& to, i64 earlier_than = never);
  /// All pieces of a request by one worker; batch-invariant chunks, if the config says so.
  void make_one_per_request(Assignment& to);
  /// Batch-invariant chunks, each to the worker in whose equal span of the line it lies.
  void make_chunks_in_spans(Assignment& to);
  /// Batch-invariant chunks, longest first.
  void make_chunks_longest_first(Assignment& to);

  /// No assignment of whole units is done earlier than this.
  i64 least_of_whole_tiles() const;
  /// No assignment of Algorithm 1's chunks is done earlier than this, if sorting them takes a
  /// percent.
  i64 least_of_algorithm1() const;

  /// Whether all units are tiles of one shape, on a single level.
  bool has_only(i32 shape) const;
  /// Whether a cut of the linear split parts the KV heads of a query tile.
  bool parts_heads(const Assignment& linear) const;
  i64 num_units() const { return i64{tiling_->units.num_tiles} * config_->num_kv_heads; }
  /// A worker's share of the uncut work.
  i64 mean() const { return ceil_div(uncut_, i64{config_->num_workers}); }
  i64 uncut() const { return uncut_; }
  /// Whether an assignment's time counts how workers share bandwidth.
  bool shares_bandwidth() const { return sharers_ > 1; }
  /// Within three percent of what no schedule can beat that has work for as many workers.
  bool balanced(const Assignment& of) const {
    const bool cut = of.form == Assignment::Form::cuts;
    const i64 workers =
        cut ? i64{of.num_spans - of.num_in_step} * of.workers_of_span : config_->num_workers;
    return of.heaviest * 100 <= ceil_div(uncut_, workers) * 103;
  }

 private:
  template <class CutTile>
  i64 cut_tiles(Assignment& to, const CutTile& cut_tile) const;
  i64 cut_nowhere(Assignment& to) const;
  i64 cut_at_limit(Assignment& to) const;
  i64 cut_at_columns(Assignment& to) const;
  void assign_sorted(Assignment& to, i64 earlier_than = never);
  i64 shared_time(i64 num_loads, i32 group);

  const Tiling* tiling_ = nullptr;
  const PlanConfig* config_ = nullptr;
  i64 uncut_ = 0;    // cost of all units without any cut
  i32 sharers_ = 1;  // PlanConfig::bandwidth_sharers where workers wait for bandwidth; else 1
  Buffer<Ranked> ranked_, spare_, groups_;
  Buffer<Load> heap_;
  Buffer<i64> loads_;
  Buffer<i32> rank_of_;
};

}  // namespace raddle
