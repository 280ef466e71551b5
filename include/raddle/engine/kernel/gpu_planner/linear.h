// The linear split by a block: what cut_line and the packer do on the host, with a thread for
// each cut or worker.
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

  /// Computes where every span and every worker's queue begin, and marks the tiles that are cut.
  RADDLE_DEVICE void divide(const Units& units) {
    const i32 workers = context_.config.num_workers;
    each_ = workers_of_span(context_.config, units);
    const Units line = line_of(units, each_);
    const Shares shares = shares_of(
        context_.config, line, each_ > 1 ? quotient(workers, each_) : workers,
        [](i32 begin, i32 end, const auto& holds) { return first_lane(begin, end, holds); });
    num_in_step_ = shares.in_step.spans;
    spans_ = shares.num_spans;
    for (i32 s = context_.thread; s <= spans_; s += context_.threads)
      scratch_.cuts[s] = even_cut(line, shares, s, [this](i32 t) { return context_.group_of(t); });
    ptx::sync_block();
    i32* queue_indptr = context_.template out<i32>(context_.launch.at.queue_indptr);
    const i32 busy = (spans_ - num_in_step_) * each_;
    for (i32 base = 0; base < busy; base += context_.threads) {
      const i32 w = base + context_.thread;
      const i32 s = span_of(w);
      const bool is_first = w == (s - num_in_step_) * each_;  // of the span's: it counts the cut
      Sums<3, i32> mine{};
      bool chunk = false;
      if (w < busy) {
        const bool counts = is_first && s > 0;
        chunk = counts && cut_adds(scratch_.cuts, s).chunk;
        const i32 items = span_items(scratch_.cuts[s], scratch_.cuts[s + 1]);
        mine = Sums<3, i32>{
            {chunks_of(w) + items, counts ? cut_rows(line, scratch_.cuts, s) : 0, chunk ? 1 : 0}};
      }
      const Sums<3, i32> before = context_.scan.exclusive(mine, cuts_, busy - base);
      if (w >= busy) continue;
      scratch_.queue[w] = queue_indptr[w] = before.of[0];
      if (is_first) {
        scratch_.row_at[s] = before.of[1];
        scratch_.rank[s] = before.of[2] + (chunk ? 1 : 0);
      }
      if (chunk) scratch_.tiles[scratch_.cuts[s].at.tile].split = 0;
      RADDLE_ROLLED
      for (i32 i = 0; i < mine.of[0]; ++i) scratch_.owners[before.of[0] + i] = static_cast<u16>(w);
    }
    for (i32 w = busy + context_.thread; w <= workers; w += context_.threads)
      scratch_.queue[w] = queue_indptr[w] = cuts_.of[0];
    if (context_.thread == 0) queue_indptr[workers + 1] = cuts_.of[0];
    ptx::sync_block();
    // What CutWalk numbers on the way: the chunk that begins at a cut. Those in step are numbered.
    for (i32 s = num_in_step_ + 1 + context_.thread; s < spans_; s += context_.threads) {
      Cut& c = scratch_.cuts[s];
      if (c.k == 0) continue;
      const Cut& p = scratch_.cuts[s - 1];
      const bool is_first = p.unit != c.unit || p.k == 0;
      c.chunk = is_first ? 1
                         : scratch_.rank[s] -
                               scratch_.rank[first_cut_behind(scratch_.cuts, spans_, c.unit)] + 1;
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
    const i32 s = span_of(w);
    const i32 nth = number - scratch_.queue[w];
    const i32 chunks = chunks_of(w);
    const Cut* cuts = scratch_.cuts + (nth < chunks ? w : s);
    const i32 unit = cuts[0].unit + (nth < chunks ? nth : nth - chunks);
    // Where workers share a span, units of the line are query tiles.
    const UnitAt at = each_ == 1 ? context_.unit_at(heads, unit) : UnitAt{0, w - s * each_, unit};
    write_item(units, scratch_.splits, cuts[0], cuts[1], unit, at.tile, at.head, item);
  }

 private:
  /// Chunks in step that worker w has: none or one, before its span.
  RADDLE_DEVICE i32 chunks_of(i32 w) const { return w < num_in_step_ ? 1 : 0; }

  /// The first i of [begin, end) for which holds(i), or end; each lane of the warp asks for one.
  template <class Holds>
  RADDLE_DEVICE static i32 first_lane(i32 begin, i32 end, const Holds& holds) {
    RADDLE_ROLLED
    for (; begin < end; begin += 32) {
      const i32 i = begin + ptx::lane_index();
      const u32 found = ptx::ballot(i < end && holds(min(i, end - 1)));
      if (found != 0) return begin + ptx::lowest_bit(found);
    }
    return end;
  }

  /// The span that worker w computes, alone or with the workers of other KV heads, after the chunk
  /// in step that it may have.
  RADDLE_DEVICE i32 span_of(i32 w) const {
    return each_ > 1 ? quotient(w, each_) : num_in_step_ + w;
  }

  RADDLE_DEVICE PlanSizes place_one_level(const Units& units) {
    const i64 n = place_cut_states(context_, units, spans_, each_, cuts_.of[1]);
    const i64 all = n * units.num_kv_heads;
    return PlanSizes{.splits = all,
                     .contractions = n,
                     .expected = all,
                     .sources = n,
                     .dependents = n,
                     .partial_rows = each_ * i64{cuts_.of[1]}};
  }

  RADDLE_DEVICE PlanSizes place_two_levels(const Units& units) {
    const i64 rows = place_all_states(context_, units, spans_);
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
  i32 each_ = 1;         // workers of a span
  i32 num_in_step_ = 0;  // spans that are chunks in step: Shares::in_step
  i32 spans_ = 0;
  Sums<3, i32> cuts_{};  // items; rows and chunks of the line
};

}  // namespace planner

RADDLE_ENGINE_END
