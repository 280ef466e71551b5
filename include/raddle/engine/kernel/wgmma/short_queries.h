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
  static constexpr bool has_few_rows = ShortOutput<Kernel, Variant>::has_many_rows;

 public:
  RADDLE_DEVICE ShortQueries(const GpuLaunch& launch, const Variant& variant)
      : launch_(launch), variant_(variant) {}

  /// Computes the items that are named; returns whether some of them stored states.
  RADDLE_DEVICE bool run() {
    i32 nth = 0;
    bool any_states = false;
    RADDLE_ROLLED
    for (;; ++nth) {
      const auto place = block().items.place(nth);
      const auto& facts = block().item[place.slot];
      wait(block().items.full[place.slot], place.parity);
      if (facts.item < 0) break;
      if (has_few_rows && facts.num_rows <= few_rows)
        attend_item<OfFewRows<Kernel>>(facts, nth);
      else
        attend_item<Kernel>(facts, nth);
      any_states = any_states | (facts.partial_row >= 0);
      mark<Kernel>(launch_, TimelineStage::stored, facts.item);
      if (facts.partial_row < 0) mark<Kernel>(launch_, TimelineStage::finished, facts.item);
      release_of_warp(block().items.free[place.slot]);
    }
    if (lane_.group == 1 && nth > 0) ShortOutput<Kernel, Variant>::wait_until_taken();
    return any_states;
  }

 private:
  template <class OfItem, class Facts>
  RADDLE_DEVICE void attend_item(const Facts& facts, i32 nth) {
    ShortItem<OfItem, Variant> item(launch_, variant_, lane_);
    item.attend(facts, nth, tiles_);
    mark<Kernel>(launch_, TimelineStage::computed, facts.item);
    item.send(facts, nth);
  }

  RADDLE_DEVICE static Block& block() { return Block::get(); }

  const GpuLaunch& launch_;
  const Variant& variant_;
  const ShortLane lane_;
  i32 tiles_ = 0;  ///< of this group, so far
};

}  // namespace wgmma

RADDLE_ENGINE_END
