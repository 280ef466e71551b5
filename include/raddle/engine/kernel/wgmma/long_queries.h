// The loop for items of many fused rows, on a warpgroup that computes 64 of them (FlashAttention-3,
// algorithm 2): scores of a tile and values of the tile before are multiplied at a time, while this
// warpgroup weighs the scores of one and the other warpgroup's products wait for the tensor cores.
//
// One loop runs over the tiles of all items. Step n multiplies Q·K of tile n and P·V of tile n - 1,
// whichever items they belong to; where tile n opens an item, the step sends the item before. So no
// product is issued behind a branch, which would have the compiler wait for each of them.
#pragma once

#include "raddle/engine/kernel/gpu/arrive.h"
#include "raddle/engine/kernel/gpu/variant.h"
#include "raddle/engine/kernel/wgmma/long_output.h"
#include "raddle/engine/kernel/wgmma/products.h"
#include "raddle/engine/kernel/wgmma/rings.h"
#include "raddle/engine/kernel/wgmma/softmax.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

template <class Kernel, class Variant>
class LongQueries {
  static constexpr i32 key_fragments = Kernel::long_keys / 8;
  static constexpr Scan scan = scan_of<Variant>();

 public:
  RADDLE_DEVICE LongQueries(const Launch& launch, const Variant& variant)
      : launch_(launch), variant_(variant), group_(ptx::warp_index() / group_warps) {}

  RADDLE_DEVICE void run() {
    Turns turns(group_);
    TilesReader<Kernel> tiles;
    clear(o_);
    stats_.clear();
    tiles.wait();
    RADDLE_ROLLED
    for (;;) {
      tiles.wait_queries();
      turns.take();
      tiles.wait_values();
      multiply_keys<Kernel, key_fragments>(s_, tiles.queries() + first_row_bytes(), tiles.keys());
      multiply_values<Kernel, key_fragments>(o_, p_, tiles.values(), keep_);
      turns.pass();
      ptx::products_wait<1>(s_[0]);
      tiles.release_keys();
      const bool opens = tiles.opens_item();
      const RowStats<1> ended = stats_;
      if (opens) stats_.clear();
      float factor[2] = {1.0f, 1.0f};
      weigh_tile(tiles, factor);
      ptx::products_wait<0>(o_[0]);
      tiles.release_values();
      round_weights<typename Kernel::T>(s_, p_);
      if (opens) send(tiles, ended);
      keep_ = opens ? 0 : 1;
      shrink(o_, factor);
      if (tiles.at_end()) break;
      tiles.next();
    }
    turns.end();
  }

 private:
  RADDLE_DEVICE u32 first_row_bytes() const { return static_cast<u32>(group_ * group_rows * 128); }
  RADDLE_DEVICE i32 lane_row() const {
    return group_ * group_rows + 16 * (ptx::warp_index() % group_warps) + ptx::lane_index() / 4;
  }

  /// The variant, the mask and the softmax of a tile's scores.
  template <class Tiles>
  RADDLE_DEVICE void weigh_tile(const Tiles& tiles, float (&factor)[2]) {
    const auto& facts = tiles.item();
    const ApplyVariant<Variant, 1, key_fragments> apply(launch_, variant_, facts.item);
    if (tiles.flags() & (TileFlags::empty | TileFlags::none)) {
      RADDLE_UNROLL
      for (i32 i = 0; i < 4 * key_fragments; ++i)
        s_[0][i / 4][i % 4] = scan == Scan::softmax ? -math::infinity : 0.0f;
    } else {
      apply(
          s_, tiles.facts(), 0, tiles.flags(), facts, [&](i32) { return lane_row(); }, 2);
    }
    if constexpr (scan == Scan::softmax) softmax(s_, stats_, factor, to_log2());
  }

  RADDLE_DEVICE float to_log2() const {
    return ApplyVariant<Variant, 1, key_fragments>(launch_, variant_, 0).to_log2();
  }

  /// Sends O of the item before the one that the current tile opens.
  template <class Tiles>
  RADDLE_DEVICE void send(Tiles& tiles, const RowStats<1>& ended) {
    if (!tiles.has_item_before()) return;
    const auto& facts = tiles.item_before();
    LongOutput<Kernel, Variant> output(launch_, variant_, facts, group_);
    output.send(o_, ended, to_log2());
    if (facts.partial_row >= 0) {
      const WorkItem& item = launch_.plan.items[facts.item];
      arrive<Kernel>(launch_, variant_, item, look_up_ticket(launch_, item, ConsumerTeam::thread()),
                     Memory<Kernel>::get().completed,
                     Memory<Kernel>::get().vector[ConsumerTeam::warp()]);
    }
    tiles.release_item_before();
  }

  const Launch& launch_;
  const Variant& variant_;
  const i32 group_;
  i32 keep_ = 0;
  Logits<1, key_fragments> s_;
  Weights<1, key_fragments> p_ = {};
  Output<Kernel, 1> o_;
  RowStats<1> stats_;
};

}  // namespace wgmma

RADDLE_ENGINE_END
