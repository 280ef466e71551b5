// The linear split by a block: what cut_evenly and the packer do on the host, with a thread for
// each worker.
#pragma once

#include "raddle/engine/kernel/gpu_planner/states.h"

RADDLE_ENGINE_BEGIN

namespace planner {

template <bool prefixes>
class LinearSpans {
 public:
  /// Whether a request may not be computed in tiles of another shape than those that its rows ask
  /// for.
  static constexpr bool keeps_shapes = false;

  RADDLE_DEVICE explicit LinearSpans(Context& context)
      : context_(context), scratch_(context.scratch) {}

  /// Computes where every worker's span and queue begin, and marks the tiles that are cut.
  RADDLE_DEVICE void divide(const Units& units) {
    const i32 workers = context_.config.num_workers;
    const Shares shares = shares_of(units, workers);
    for (i32 w = context_.thread; w <= workers; w += context_.threads)
      scratch_.cuts[w] = even_cut(units, shares, w, [this](i32 t) { return context_.group_of(t); });
    ptx::sync_block();
    i32* queue_indptr = context_.template out<i32>(context_.launch.at.queue_indptr);
    for (i32 base = 0; base < workers; base += context_.threads) {
      const i32 w = base + context_.thread;
      Sums<3, i32> mine{};
      bool chunk = false;
      if (w < workers) {
        chunk = w > 0 && cut_adds(scratch_.cuts, w).chunk;
        mine = Sums<3, i32>{{span_items(scratch_.cuts[w], scratch_.cuts[w + 1]),
                             w > 0 ? cut_rows(units, scratch_.cuts, w) : 0, chunk ? 1 : 0}};
      }
      const Sums<3, i32> before = context_.scan.exclusive(mine, cuts_, workers - base);
      if (w >= workers) continue;
      scratch_.queue[w] = queue_indptr[w] = before.of[0];
      scratch_.row_at[w] = before.of[1];
      scratch_.rank[w] = before.of[2] + (chunk ? 1 : 0);
      if (chunk) scratch_.tiles[scratch_.cuts[w].at.tile].split = 0;
      RADDLE_ROLLED
      for (i32 i = 0; i < mine.of[0]; ++i) scratch_.owners[before.of[0] + i] = static_cast<u16>(w);
    }
    if (context_.thread == 0)
      scratch_.queue[workers] = queue_indptr[workers] = queue_indptr[workers + 1] = cuts_.of[0];
    ptx::sync_block();
    // What CutWalk numbers on the way: the chunk that begins at a cut.
    for (i32 w = 1 + context_.thread; w < workers; w += context_.threads) {
      Cut& c = scratch_.cuts[w];
      if (c.k == 0) continue;
      const Cut& p = scratch_.cuts[w - 1];
      const bool is_first = p.unit != c.unit || p.k == 0;
      c.chunk = is_first ? 1
                         : scratch_.rank[w] -
                               scratch_.rank[first_cut_behind(scratch_.cuts, workers, c.unit)] + 1;
    }
  }

  /// Places the partial states, and writes the contractions.
  RADDLE_DEVICE PlanSizes place_states(const Units& units) {
    return prefixes && units.all_partial ? place_two_levels(units) : place_one_level(units);
  }

  RADDLE_DEVICE i32 owner_of(i32 item) const { return scratch_.owners[item]; }

  /// Writes item number `number`, which is worker w's.
  RADDLE_DEVICE void write(const Units& units, const Divider& heads, i32 number, i32 w,
                           WorkItem& item) const {
    const Cut* cuts = scratch_.cuts + w;
    const i32 unit = cuts[0].unit + number - scratch_.queue[w];
    write_item(units, scratch_.splits, cuts[0], cuts[1], unit, context_.unit_at(heads, unit), item);
  }

 private:
  RADDLE_DEVICE PlanSizes place_one_level(const Units& units) {
    const i64 n = place_cut_states(context_, units);
    const i64 all = n * units.num_kv_heads;
    return PlanSizes{.splits = all,
                     .contractions = n,
                     .expected = all,
                     .sources = n,
                     .dependents = n,
                     .partial_rows = cuts_.of[1]};
  }

  RADDLE_DEVICE PlanSizes place_two_levels(const Units& units) {
    const i64 rows = place_all_states(context_, units);
    const i64 sources = contract_two_levels(context_, units);
    const i64 n = units.num_tiles - scratch_.group_tile[context_.num_prefixes];
    const i64 heads = units.num_kv_heads;
    return PlanSizes{.splits = heads * units.num_tiles,
                     .contractions = n,
                     .expected = heads * n,
                     .sources = sources,
                     .dependents = sources,
                     .partial_rows = rows};
  }

  Context& context_;
  const ScratchArrays& scratch_;
  Sums<3, i32> cuts_{};  // items, rows, chunks
};

}  // namespace planner

RADDLE_ENGINE_END
