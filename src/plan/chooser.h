// The second half of planning: candidate schedules, their costs, and the choice among them.
#pragma once

#include "plan/buffer.h"
#include "plan/tiling.h"
#include "raddle/engine/plan/linear_split.h"
#include "raddle/engine/plan/open.h"
#include "raddle/engine/plan/seats.h"

namespace raddle {

/// What hands the work out. All but linear hand out fixed pieces.
enum class Method { linear, open, spans, longest_first, algorithm1, by_group };

struct Outcome {
  Method method;
  i64 heaviest;
  i64 total;
  i64 time;  ///< when the last worker is done: `heaviest`, but where workers share memory
};

struct Chooser {
  Buffer<Cut> cuts;              ///< of the linear split
  Buffer<OpenUnit> open;         ///< the open queue: all units
  Buffer<Piece> pieces;          ///< of the schedules with fixed pieces,
  Buffer<i32> piece_begin;       ///< [num_tiles + 1] by query tile,
  Buffer<Placement> placements;  ///< and who gets which: squads of workers as many heads
  Buffer<i32> seats;             ///< [num_workers] whose queue a worker's is
  bool seated = false;           ///< where it is not his own,
  bool joins = false;            ///< and halves of a tile sit beside each other
  i64 num_pieces = 0;
  i32 squad = 1;  ///< workers of a squad, which placements count in place of workers and of heads
  i64 num_cut_chunks = 0;  ///< of the linear split: those that begin at cuts
  PlanStats stats;

  /// Leaves the chosen schedule in the buffers.
  Outcome choose(const Tiling& tiling, const PlanConfig& config);

 private:
  Outcome choose_automatic();
  Outcome choose_fixed_chunks();
  Outcome try_linear();
  Outcome try_rows();
  Outcome try_open();
  void begin_placements(Method method, i64 count);
  bool only_shape(i32 shape) const;
  bool parts_heads() const;
  i64 shared_time(const Load* loads, i64 num_loads);
  /// Without placements, and with a bound for its time, where that will not be below
  /// `earlier_than`.
  Outcome try_fixed(Method method, Cutting cutting, i64 earlier_than = int_max * i64{int_max});
  i64 cut_pieces(Cutting cutting);
  i64 least_unsplit() const;
  bool may_gain_by_algorithm1(i64 time) const;
  i64 mean() const { return ceil_div(stats.uncut, i64{config_->num_workers}); }
  /// Within three percent of what no schedule can beat.
  bool balanced(i64 heaviest) const { return heaviest * 100 <= mean() * 103; }
  i64 num_units() const { return i64{tiling_->units.num_tiles} * config_->num_kv_heads; }

  const Tiling* tiling_ = nullptr;
  const PlanConfig* config_ = nullptr;
  i32 sharing_ = 1;                    // PlanConfig::sharing, where memory is what is waited for
  Method pieces_of_ = Method::linear;  // whose pieces lie in the buffers
  Buffer<RankedPiece> ranked_, spare_, groups_;
  Buffer<Load> heap_;
  Buffer<i64> loads_;
  Buffer<i32> nth_;
};

}  // namespace raddle
