// The loop for items of few fused rows, as decoding has them: bound by memory. Two warpgroups
// compute the tiles of an item in turns, each for all of its rows, while the loading warps keep the
// rings full, of the next items, too. At an item's end the first warpgroup composes both states
// (short_output.h).
#pragma once

#include "raddle/engine/kernel/wgmma/short_item.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

template <class Kernel, class Variant>
class ShortQueries {
  using Block = ShortMemory<Kernel>;
  /// Whether items of one fragment of rows have code of their own: what an item takes beside
  /// reading its keys grows with the fragments.
  static constexpr bool has_few_rows = Kernel::row_fragments >= 4;

 public:
  RADDLE_DEVICE ShortQueries(const GpuLaunch& launch, const Variant& variant)
      : launch_(launch), variant_(variant) {}

  /// Computes the items that are named; returns whether some of them stored states. Before, while
  /// no keys are there, it rehearses the end of an item of either kind: most workers have one item
  /// or two, and instructions that run for the first time come from memory. What it would send is
  /// dropped; `first_partial_row` is where the first item's rows go.
  RADDLE_DEVICE bool run(i32 first_partial_row) {
    bool any_states = false;
    RADDLE_ROLLED
    for (i32 nth = -rehearsals;; ++nth) {
      const auto place = block().items.place(max(nth, 0));
      const auto& facts = block().item[place.slot];
      SentRows rows{nth == -1 ? Kernel::tile_rows : 8, 0, first_partial_row, facts.row};
      if (nth >= 0) {
        wait(block().items.full[place.slot], place.parity);
        if (facts.item < 0) break;
        rows.num_rows = rows.num_sent = facts.num_rows, rows.partial_row = facts.partial_row;
      }
      if (has_few_rows && rows.num_rows <= 8)
        attend_item<OfFewRows<Kernel>>(facts, nth, rows);
      else
        attend_item<Kernel>(facts, nth, rows);
      if (nth < 0) continue;
      any_states = any_states | (facts.partial_row >= 0);
      mark<Kernel>(launch_, TimelineStage::stored, facts.item);
      if (facts.partial_row < 0) mark<Kernel>(launch_, TimelineStage::finished, facts.item);
      release_of_warp(block().items.free[place.slot]);
    }
    if (lane_.group == 1) ShortOutput<Kernel, Variant>::wait_until_taken();
    return any_states;
  }

 private:
  static constexpr i32 rehearsals = has_few_rows ? 2 : 1;

  template <class OfItem, class Facts>
  RADDLE_DEVICE void attend_item(const Facts& facts, i32 nth, const SentRows& rows) {
    ShortItem<OfItem, Variant> item(launch_, variant_, lane_);
    if (nth >= 0) {
      item.attend(facts, nth, tiles_);
      mark<Kernel>(launch_, TimelineStage::computed, facts.item);
    } else {
      item.attend_nothing();
    }
    item.send(rows, nth == -rehearsals);
  }

  RADDLE_DEVICE static Block& block() { return Block::get(); }

  const GpuLaunch& launch_;
  const Variant& variant_;
  const ShortLane lane_;
  i32 tiles_ = 0;  ///< of this group, so far
};

}  // namespace wgmma

RADDLE_ENGINE_END
