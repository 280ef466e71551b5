// Chunks of fixed boundaries by a block, for batch invariance: what the host's "linear over fixed
// chunks" does. A tile's chunks are functions of its request alone; only which worker computes them
// depends on the batch.
#pragma once

#include "raddle/engine/kernel/gpu_planner/context.h"
#include "raddle/engine/plan/contraction.h"
#include "raddle/engine/plan/piece_spans.h"

RADDLE_ENGINE_BEGIN

namespace planner {

class FixedChunks {
 public:
  static constexpr bool keeps_shapes = true;

  RADDLE_DEVICE explicit FixedChunks(Context& context)
      : context_(context), scratch_(context.scratch) {}

  /// Cuts every tile at absolute columns, a thread per tile, and computes where every worker's
  /// queue begins.
  RADDLE_DEVICE void divide(const Units& units) {
    for (i32 base = 0; base < units.num_tiles; base += context_.threads)
      cut_tile(units, base + context_.thread, units.num_tiles - base);
    if (context_.thread == 0) {
      scratch_.piece_begin[units.num_tiles] = num_pieces();
      scratch_.piece_cost_before[num_pieces()] = sums_.of[1];
    }
    ptx::sync_block();
    const i32 workers = context_.config.num_workers;
    const i64 span =
        max(i64{1}, quotient(sums_.of[1] * units.num_kv_heads + workers - 1, i64{workers}));
    i32* queue_indptr = context_.template out<i32>(context_.launch.at.queue_indptr);
    for (i32 w = context_.thread; w <= workers; w += context_.threads)
      scratch_.queue[w] = queue_indptr[w] =
          first_item(units, line(), span, w, [this](i32 t) { return context_.group_of(t); });
    if (context_.thread == 0) queue_indptr[workers + 1] = num_pieces() * units.num_kv_heads;
    ptx::sync_block();
  }

  /// Partial states and contractions were placed with the cuts.
  RADDLE_DEVICE PlanSizes place_states(const Units& units) const {
    const i64 n = num_splits();
    const i64 all = n * units.num_kv_heads;
    return PlanSizes{.splits = all,
                     .contractions = n,
                     .expected = all,
                     .sources = n,
                     .dependents = n,
                     .partial_rows = sums_.of[2]};
  }

  /// An item is found without its worker.
  RADDLE_DEVICE static i32 owner_of(i32) { return 0; }

  RADDLE_DEVICE void write(const Units& units, const Divider& heads, i32 number, i32,
                           WorkItem& item) const {
    const i32 near = heads.quotient(number);
    const PieceGroup group =
        pieces_of(units, line(), context_.group_of(scratch_.pieces[near].tile));
    item = item_of(units, scratch_.splits, line(), piece_at(units, group, near, number));
  }

 private:
  /// Cuts tile t, one of the last `count`, and places its states. All threads call it.
  RADDLE_DEVICE void cut_tile(const Units& units, i32 t, i32 count) {
    const bool is_tile = t < units.num_tiles;
    const i32 heads = units.num_kv_heads;
    i64 length = 0;
    i32 chunks = 0;
    UnitCost cost{};
    Sums<3> mine{};
    if (is_tile) {
      const i32 group = context_.group_of(t);
      length = absolute_chunk(context_.config.invariant_chunk, tile_keys(units, t),
                              units.group_tile[group + 1] - units.group_tile[group]);
      chunks = cut_at_absolute_columns(units, t, length, nullptr);
      cost = unit_cost(units, t);
      const bool split = chunks > 1;
      mine = Sums<3>{{join_words(chunks, split ? 1 : 0),
                      (split ? chunks * cost.resume : cost.start) + units.kv_tiles[t] * cost.tile,
                      split ? i64{heads} * chunks * units.tiles[t].num_rows : 0}};
    }
    const Sums<3> before = context_.scan.exclusive(mine, sums_, count);
    if (!is_tile) return;
    const i32 first = static_cast<i32>(before.of[0]);
    Piece* pieces = scratch_.pieces + first;
    cut_at_absolute_columns(units, t, length, pieces);
    scratch_.piece_begin[t] = first;
    i64 x = before.of[1];
    RADDLE_ROLLED
    for (i32 i = 0; i < chunks; ++i) {
      scratch_.piece_cost_before[first + i] = x;
      x += piece_cost(cost, pieces[i], chunks);
    }
    if (chunks > 1) place(t, static_cast<i32>(before.of[0] >> 32), chunks, before.of[2]);
  }

  /// Places the states of tile t, the cth that is split, from partial row `row` on.
  RADDLE_DEVICE void place(i32 t, i32 c, i32 chunks, i64 row) {
    const i32 heads = context_.config.num_kv_heads;
    const PlanOffsets& at = context_.launch.at;
    const ContractionMap map{context_.template out<Contraction>(at.contractions),
                             context_.template out<i32>(at.expected),
                             context_.template out<Source>(at.sources),
                             context_.template out<i32>(at.dependents),
                             0,
                             0,
                             0};
    scratch_.tiles[t].split = heads * c;
    contract_tile(scratch_.tiles, t, c, map);
    RADDLE_ROLLED
    for (i32 h = 0; h < heads; ++h) {
      scratch_.splits[heads * c + h] = Split{static_cast<i32>(row), chunks};
      map.expected[heads * c + h] = chunks;
      row += i64{chunks} * scratch_.tiles[t].num_rows;
    }
  }

  RADDLE_DEVICE i32 num_pieces() const { return static_cast<i32>(sums_.of[0]); }
  RADDLE_DEVICE i32 num_splits() const { return static_cast<i32>(sums_.of[0] >> 32); }
  RADDLE_DEVICE PieceLine line() const {
    return PieceLine{scratch_.pieces, scratch_.piece_begin, scratch_.piece_cost_before,
                     num_pieces()};
  }

  Context& context_;
  const ScratchArrays& scratch_;
  Sums<3> sums_{};  // pieces and split tiles, joined in one word; costs; partial rows
};

}  // namespace planner

RADDLE_ENGINE_END
