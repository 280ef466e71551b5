// A schedule worked out for one batch: which worker computes what, and what that costs.
#pragma once

#include "plan/buffer.h"
#include "raddle/engine/plan/assign.h"
#include "raddle/engine/plan/drawn.h"
#include "raddle/engine/plan/linear_split.h"

namespace raddle {

struct Assignment {
  /// How the work is given: as cuts of the line of units, as placements of pieces, or as the shared
  /// queue. None: the schedule was not worked out.
  enum class Form { none, cuts, pieces, queue };

  Form form = Form::none;
  i64 heaviest = 0;  ///< planned cost of the heaviest worker's items
  i64 total = 0;     ///< and of all workers'
  i64 time = 0;  ///< when the last worker is done; less than `heaviest` where bandwidth is shared

  // Form::cuts
  i32 num_spans = 0;
  i32 num_in_step = 0;      ///< the first spans, which are chunks of prefixes: InStep::spans
  i32 workers_of_span = 1;  ///< one, or one for each KV head
  Buffer<Cut> cuts;         ///< [num_spans + 1]
  i64 num_cut_chunks = 0;   ///< chunks that begin at cuts, of all KV heads

  // Form::queue
  Buffer<DrawnUnit> queue;  ///< all units, in the order in which workers draw them

  // Form::pieces
  Buffer<Piece> pieces;
  Buffer<i32> piece_begin;  ///< [num_tiles + 1] by query tile
  i64 num_pieces = 0;
  Buffer<Placement> placements;  ///< of head groups: see head_group
  /// KV heads of a head group, and workers of a worker group: placements count groups of either.
  /// The heads of one go to the workers of the other, one each.
  i32 head_group = 1;
  bool is_paired = false;     ///< workers were numbered anew, so that pairs share a multiprocessor:
  Buffer<i32> numbered;       ///< [num_workers] which worker of the plan a worker becomes
  bool pairs_halves = false;  ///< where a tile is cut in two, a pair of workers has its halves

  /// For Form::pieces: nothing is placed yet.
  void begin_pieces(i64 num_placements, i32 group) {
    form = Form::pieces;
    placements.grow(num_placements);
    head_group = group;
    is_paired = pairs_halves = false;
  }
};

}  // namespace raddle
