// The loop for items of many fused rows, on a warpgroup that computes 64 of them (FlashAttention-3,
// algorithm 2): scores of a tile and values of the tile before are multiplied at a time, while this
// warpgroup weighs the scores of one and the other warpgroup's products wait for the tensor cores.
//
// One loop runs over the tiles of all items. Step n multiplies Q·K of tile n and P·V of tile n - 1,
// whichever items they belong to; where tile n opens an item, the step sends the item before. So no
// product is issued behind a branch, which would have the compiler wait for each of them.
#pragma once

#include "raddle/engine/kernel/gpu/variant.h"
#include "raddle/engine/kernel/wgmma/long_output.h"
#include "raddle/engine/kernel/wgmma/products.h"
#include "raddle/engine/kernel/wgmma/rings.h"
#include "raddle/engine/kernel/wgmma/softmax.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

template <class Kernel, class Variant>
class LongQueries {
  using T = typename Kernel::T;
  using Flags = TileFlagsOfRing;
  static constexpr i32 key_fragments = Kernel::key_fragments;
  using Apply = ApplyVariant<Variant, 1, key_fragments, 2>;
  static constexpr Scan scan = scan_of<Variant>();
  /// Whether logits are scaled here, not by the softmax. A scale that is not positive turns the
  /// queries (queries.h).
  static constexpr bool scales_here = has_logits<Variant> || scan == Scan::sum;

 public:
  RADDLE_DEVICE LongQueries(const Launch& launch, const Variant& variant)
      : launch_(launch),
        variant_(variant),
        group_(ptx::warp_index() / group_warps),
        warp_row_(16 * ptx::warp_index()),
        lane_(ptx::lane_index()),
        to_log2_((scales_here || launch.scale == 0.0f ? 1.0f : math::abs(launch.scale)) *
                 math::log2e) {}

  RADDLE_DEVICE void run() {
    Turns turns(group_);
    TilesReader<Kernel> tiles;
    clear(o_);
    weighing_.clear();
    tiles.begin();
    RADDLE_ROLLED
    for (;;) {
      const u32 queries = ptx::uniform(tiles.queries() + row_bytes(group_ * group_rows));
      const u32 keys = ptx::uniform(tiles.keys()), values = ptx::uniform(tiles.values());
      tiles.wait_queries();
      turns.take();
      multiply_keys<Kernel, key_fragments>(s_, queries, keys);
      tiles.wait_values();  // which may still come while S is computed
      multiply_values<Kernel, key_fragments>(o_, p_, values, keep_);
      turns.pass();
      ptx::products_wait<1>(s_[0]);
      tiles.release_keys();
      tiles.release_queries();
      const RowStats<1> ended = weighing_.stats;
      if (tiles.opens_item()) {
        weighing_.clear();
        grows_ = false;
        near_ = true;
      }
      float factor[2] = {1.0f, 1.0f};
      const bool shrinks = weigh_tile(tiles, factor);
      keep_ = tiles.opens_item() ? 0 : 1;
      if (tiles.opens_item() | shrinks) {
        if (tiles.opens_item())
          send(tiles, ended);
        else
          shrink(o_, factor);
        if (tiles.at_end()) break;
        if (sends_first(tiles)) tiles.wait_next();
      }
      tiles.next();
    }
    turns.end();
  }

 private:
  /// Whether the item before the tile's is sent before the next tile is waited for, which may be
  /// that of an item that is named only then.
  template <class Tiles>
  RADDLE_DEVICE static bool sends_first(const Tiles& tiles) {
    return Kernel::is_tight && tiles.opens_item();
  }
  RADDLE_DEVICE static u32 row_bytes(i32 row) { return static_cast<u32>(128 * row); }
  RADDLE_DEVICE i32 lane_row() const { return warp_row_ + lane_ / 4; }

  /// Waits for the next tile, if there is one and nothing must be sent before.
  template <class Tiles>
  RADDLE_DEVICE static void wait_next(Tiles& tiles) {
    if (!tiles.at_end() && !sends_first(tiles)) tiles.wait_next();
  }

  /// S -> weights -> P. Returns whether O shrinks by `factor` first. Weights, waits and rounding
  /// follow one another in the order that was measured to be the fastest (docs/lab/hopper.md);
  /// keep_order stands where the assembler would choose another.
  template <class Tiles>
  RADDLE_DEVICE bool weigh_tile(Tiles& tiles, float (&factor)[2]) {
    constexpr i32 early = Kernel::early_fragments;
    TileSums sums;
    bool raises = scan == Scan::softmax && (weighing_.searches | grows_);
    RADDLE_ROLLED
    for (bool again = false;; again = true) {
      bool is_near = true;
      sums = {};
      if (is_common(tiles, raises)) {
        is_near = weigh_common(tiles, sums);
      } else {
        const bool changes = scales_here || tiles.flags() & Flags::masked;
        if (changes | raises) {
          if (changes) change_logits(tiles);
          if (raises) weighing_.raise(s_, factor, to_log2_);
        }
        weigh<0, early>(sums);
      }
      if (!Kernel::waits_for_keys_last) wait_next(tiles);
      if (early < key_fragments) ptx::keep_order();
      ptx::products_wait<0>(o_[0]);
      tiles.release_values(!again);
      weigh<early, key_fragments>(sums);
      round_weights<T>(s_, p_);
      if (Kernel::waits_for_keys_last) {
        ptx::keep_order();
        wait_next(tiles);
      }
      const bool overflows = !raises & sums.exceed(most_weight<T>);
      if (scan == Scan::sum || !ptx::any(overflows | !is_near)) break;
      if (ptx::any(!is_near))
        near_ = false;
      else
        raises = grows_ = true;
      multiply_keys_again<Kernel, Variant>(s_, launch_, tiles.item(), tiles.facts().begin,
                                           warp_row_);
    }
    weighing_.add(sums);
    return raises;
  }

  /// Whether the tile's keys are known by counting: the loading warp writes no facts about them.
  template <class Tiles>
  RADDLE_DEVICE static bool keys_count_up(const Tiles& tiles) {
    return !(tiles.flags() & Flags::masked) && tiles.item().source[0].plain;
  }
  template <class Tiles>
  RADDLE_DEVICE static CountedKeys counted_keys(const Tiles& tiles) {
    return {tiles.item().source[0].first_index + tiles.facts().begin};
  }
  /// Whether a tile's scores are changed and weighed at once, so that the exponentials of some are
  /// computed under the arithmetic of others: all but few tiles of variants with scores, where keys
  /// count up.
  template <class Tiles>
  RADDLE_DEVICE bool is_common(const Tiles& tiles, bool raises) const {
    if constexpr (!has_logits<Variant> || scan == Scan::sum) return false;
    return !raises & near_ & keys_count_up(tiles);
  }
  /// Returns whether near_logits, if that is what is applied, holds for the lane's logits.
  template <class Tiles>
  RADDLE_DEVICE bool weigh_common([[maybe_unused]] const Tiles& tiles,
                                  [[maybe_unused]] TileSums& sums) {
    if constexpr (!has_logits<Variant> || scan == Scan::sum) {
      return true;
    } else {
      const CountedKeys keys = counted_keys(tiles);
      if constexpr (has_distance_slope<Variant>) {
        weigh_by_distance(tiles.item(), keys.first + lane_ % 4 * 2, sums);
        return true;
      } else {
        const bool is_near = apply_logits<has_near_logits<Variant>>(tiles, keys);
        weigh<0, key_fragments>(sums);
        return is_near;
      }
    }
  }
  /// A score that is a multiple of the distance is one of the column in the tile, and what a row
  /// adds to all of the tile's exponents. `position`: the lane's first key's.
  template <class Facts>
  RADDLE_DEVICE void weigh_by_distance(const Facts& facts, i32 position, TileSums& sums) {
    float slope[2], from[2];
    RADDLE_UNROLL
    for (i32 half = 0; half < 2; ++half) {
      const Row& row = facts.row[lane_row() + 8 * half];
      slope[half] = variant_.distance_slope(row) * math::log2e;
      const float distance = static_cast<float>(position - row.q_pos);
      from[half] = ptx::fma(slope[half], distance, -weighing_.product[half]);
    }
    weighing_.weigh<0, key_fragments>(
        s_, sums, launch_.scale * math::log2e, [&](i32 half, i32 column) {
          return ptx::fma(slope[half], static_cast<float>(column), from[half]);
        });
  }
  template <i32 begin, i32 end>
  RADDLE_DEVICE void weigh(TileSums& sums) {
    if constexpr (scan == Scan::softmax) weighing_.weigh<begin, end>(s_, sums, to_log2_);
  }
  /// Applies scale and f_logits; returns whether near_logits, if that is what is applied, holds for
  /// the lane's logits.
  template <bool near, class Tiles, class Keys>
  RADDLE_DEVICE bool apply_logits(const Tiles& tiles, const Keys& keys) {
    const auto& facts = tiles.item();
    const Apply apply(launch_, variant_, facts.item);
    float reach = 0.0f;
    apply.template apply_logits<near>(
        s_, keys, 0, facts, [&](i32) { return lane_row(); }, 2, reach);
    return !near || apply.is_near(reach);
  }

  /// Variant and mask of a tile's logits. Both change S in place: where branches gave it values of
  /// their own, the compiler would move all of S to other registers at every tile.
  template <class Tiles>
  RADDLE_DEVICE void change_logits(const Tiles& tiles) {
    const i32 flags = tiles.flags();
    const auto& facts = tiles.item();
    const bool has_keys = !(flags & (Flags::empty | Flags::none));
    const Apply apply(launch_, variant_, facts.item);
    const auto row_of = [&](i32) { return lane_row(); };
    if constexpr (scales_here)
      if (has_keys)
        apply_logits<false>(tiles,
                            AnyKeys{keys_count_up(tiles), counted_keys(tiles), tiles.keys_facts()});
    if (!(flags & Flags::masked)) {
      if constexpr (scan == Scan::sum) note_all_kept(weighing_.stats);
      return;
    }
    u32 kept[1][2] = {};
    if (has_keys && !find_intervals(tiles, kept)) {
      u32 groups = Apply::all_groups;
      if (Kernel::asks_parts && flags & Flags::parts)
        groups = keep_parts(tiles, kept);
      else
        apply.keep_existing(kept, tiles.keys_facts(), 0, flags);
      apply.drop_masked(kept, groups, tiles.keys_facts(), 0, flags, facts, row_of);
    }
    if constexpr (scan == Scan::sum) note_kept<key_fragments>(weighing_.stats, kept);
    Apply::drop(s_, kept);
  }

  /// Finds which keys are kept, a bit each, where those of every row are an interval.
  template <class Tiles>
  RADDLE_DEVICE bool find_intervals(const Tiles& tiles, u32 (&kept)[1][2]) const {
    const TileFacts& tile = tiles.facts();
    KeptColumns of_row[2] = {{int_min, int_max}, {int_min, int_max}};
    if (has_mask<Variant> && tile.flags & Flags::partial) {
      if (!Kernel::finds_intervals) return false;
      of_row[0] = tiles.item().kept[lane_row()];
      of_row[1] = tiles.item().kept[lane_row() + 8];
    }
    if (tile.flags & Flags::bits) return false;
    if (ptx::any(tile.first == KeptColumns::unknown || of_row[0].first == KeptColumns::unknown ||
                 of_row[1].first == KeptColumns::unknown))
      return false;
    RADDLE_UNROLL
    for (i32 half = 0; half < 2; ++half)
      kept[0][half] =
          bits_between(tile, max(of_row[half].first, tile.first), min(of_row[half].end, tile.end));
    return true;
  }
  /// Keeps the pairs of the parts of this warp's rows of which some are kept; returns which of the
  /// parts the mask must be asked about, a bit each.
  template <class Tiles>
  RADDLE_DEVICE u32 keep_parts(const Tiles& tiles, u32 (&kept)[1][2]) const {
    const TileFacts& tile = tiles.facts();
    const i32 strip = warp_row_ / TileParts<Kernel>::size;
    const u32 partial = tiles.parts().partial[strip];
    u32 bits = tiles.parts().whole[strip] | partial;  // 4 of this lane's keys for each bit
    static_assert(Apply::group_keys == 4);
    bits = (bits | bits << 12) & 0x000f000fu;
    bits = (bits | bits << 6) & 0x03030303u;
    bits = ((bits | bits << 3) & 0x11111111u) * 15u;
    kept[0][0] = kept[0][1] = bits & bits_between(tile, tile.first, tile.end);
    return partial;
  }
  /// A bit for each of the lane's keys whose column lies in [first, end).
  RADDLE_DEVICE u32 bits_between(const TileFacts& tile, i32 first, i32 end) const {
    return gpu_kernel::bits_between<Kernel::tile_keys>(tile.begin + lane_ % 4 * 2, first, end);
  }

  /// Sends O of the item before the one that the current tile opens.
  template <class Tiles>
  RADDLE_DEVICE void send(Tiles& tiles, const RowStats<1>& ended) {
    if (!tiles.has_item_before()) return;
    const auto& facts = tiles.item_before();
    clear_empty_rows<scan>(ended, o_, 2);
    LongOutput<Kernel, Variant> output(launch_, variant_, facts, warp_row_, lane_);
    if (Kernel::stages_output && ptx::any(facts.stages))
      output.stage(o_, ended, to_log2_, tiles.queries_before());
    else
      output.send(o_, ended, to_log2_);
    tiles.release_item_before();
  }

  const Launch& launch_;
  const Variant& variant_;
  const i32 group_, warp_row_, lane_;
  const float to_log2_;
  i32 keep_ = 0;
  Logits<1, key_fragments> s_;
  Weights<1, key_fragments> p_ = {};
  Output<Kernel, 1> o_;
  Weighing weighing_;
  /// Weights have exceeded what P holds, and would again, as those of ALiBi, which grow from key to
  /// key: all later tiles of the item are searched. Not those of later items, which a worker may
  /// draw in any order.
  bool grows_ = false;
  /// So far, near_logits has held for all logits of the item's rows of this warp.
  bool near_ = true;
};

}  // namespace wgmma

RADDLE_ENGINE_END
