// The warp that loads the keys and values of a block: it walks the tiles of all items, describes
// their keys, and has bulk copies fill the rings.
#pragma once

#include "raddle/engine/kernel/wgmma/boxes.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

/// Values of a tile are needed a tile later than its keys, and are copied behind the next one's.
template <class Kernel>
class KeyLoader {
  using Block = Memory<Kernel>;
  using Flags = TileFlagsOfRing;
  static constexpr i32 tile_keys = Kernel::long_keys;

 public:
  RADDLE_DEVICE explicit KeyLoader(const Launch& launch) : launch_(launch) {}

  /// Loads the tiles of all items that are named; then puts a tile that is none, in whose step the
  /// computing warpgroups send the last item.
  RADDLE_DEVICE void run() {
    RADDLE_ROLLED
    for (i32 nth = 0;; ++nth) {
      auto& facts = block().item[nth & 3];
      ptx::barrier_wait(address(block().items.full[nth & 3]), nth >> 2 & 1);
      if (facts.item < 0) break;
      load_item(facts.source, facts.kv_head);
    }
    put_tile(nullptr, Span{0, 0, false}, Flags::first | Flags::none, {});
  }

 private:
  RADDLE_DEVICE static Block& block() { return Block::get(); }
  RADDLE_DEVICE static u32 address(const u64& barrier) { return ptx::shared_address(&barrier); }
  RADDLE_DEVICE static bool has_keys(i32 flags) { return !(flags & (Flags::empty | Flags::none)); }

  /// The boxes of the next tile are found before the current one's slot is free: page numbers come
  /// from device memory.
  RADDLE_DEVICE void load_item(KeySource& source, i32 kv_head) {
    Span rest = source.rest;
    if (rest.begin == rest.end)
      return put_tile(&source, rest, Flags::first | Flags::last | Flags::empty, {});
    Span tile = take_tile(rest, tile_keys);
    Boxes<Kernel> boxes{};
    boxes.find(launch_, source, tile, kv_head);
    RADDLE_ROLLED
    for (i32 first = Flags::first;; first = 0) {
      if (rest.begin == rest.end) rest = next_run(source);
      const bool last = rest.begin == rest.end;
      const Span next = last ? tile : take_tile(rest, tile_keys);
      Boxes<Kernel> next_boxes{};
      next_boxes.find(launch_, source, next, kv_head);
      put_tile(&source, tile, first | tile_flags(source, tile, tile_keys, last), boxes);
      if (last) return;
      tile = next, boxes = next_boxes;
    }
  }

  /// Describes a tile and has its keys copied; then the values of the tile before.
  RADDLE_DEVICE void put_tile(const KeySource* source, const Span& tile, i32 flags,
                              const Boxes<Kernel>& boxes) {
    const i32 slot = tiles_ & 1;
    const u32 full = address(block().key_slots.full[slot]);
    auto& keys = keys_of(tiles_);
    // The facts' slot is free by now: its last tile came fact_slots ago, and the groups have begun
    // the products of the tile but two before this one.
    if (has_keys(flags) && (Kernel::asks_for_keys || flags & (Flags::partial | Flags::ragged)))
      describe(keys, *source, tile);
    if (ptx::lane_index() == 0) block().tile[tiles_ & 3] = facts_of(source, tile, flags);
    ptx::barrier_wait(address(block().key_slots.free[slot]), (tiles_ >> 1 & 1) ^ 1);
    ptx::sync_warp();  // the facts are written
    if (has_keys(flags))
      boxes.template copy<0>(launch_, ptx::shared_address(block().k[slot]), full);
    else if (ptx::lane_index() == 0)
      ptx::barrier_arrive(full);
    if (tiles_ > 0) load_values();
    before_ = boxes, flags_ = flags;
    ++tiles_;
  }
  RADDLE_DEVICE static auto& keys_of(i32 tile) { return block().keys[tile & 3]; }

  RADDLE_DEVICE static TileFacts facts_of(const KeySource* source, const Span& tile, i32 flags) {
    if (!has_keys(flags)) return {flags, 0, 0, 0};
    const Span read = columns_read(*source, tile);
    return {flags, tile.begin, source->holes ? KeptColumns::unknown : read.begin, read.end};
  }
  RADDLE_DEVICE void describe(TileKeys<tile_keys, false, 1>& keys, const KeySource& source,
                              const Span& tile) const {
    RADDLE_ROLLED
    for (i32 j = ptx::lane_index(); j < tile_keys; j += 32)
      describe_key(keys, j, tile.begin + j, find_key(launch_, source, tile, tile.begin + j, 0));
  }

  /// Has the values of the tile before copied. A weight of zero does not remove NaN, so that values
  /// of keys that do not exist are cleared.
  RADDLE_DEVICE void load_values() {
    const i32 tile = tiles_ - 1, slot = tile & 1;
    const u32 full = address(block().value_slots.full[slot]);
    const u32 values = ptx::shared_address(block().v[slot]);
    ptx::barrier_wait(address(block().value_slots.free[slot]), (tile >> 1 & 1) ^ 1);
    if (!(flags_ & (Flags::ragged | Flags::empty)))
      return before_.template copy<1>(launch_, values, full);
    if (has_keys(flags_)) {
      const u32 tail = address(block().tail);
      before_.template copy<1>(launch_, values, tail);
      ptx::barrier_wait(tail, tails_++ & 1);
    }
    clear_values(keys_of(tile), block().v[slot], !has_keys(flags_));
    ptx::fence_proxy();
    ptx::sync_warp();
    if (ptx::lane_index() == 0) ptx::barrier_arrive(full);
  }

  /// Clears the rows of keys that do not exist, or all.
  RADDLE_DEVICE static void clear_values(const TileKeys<tile_keys, false, 1>& keys, u8* values,
                                         bool all) {
    constexpr i32 chunks = 8 * Kernel::vo_halves;
    RADDLE_ROLLED
    for (i32 i = ptx::lane_index(); i < tile_keys * chunks; i += 32)
      if (all || keys.column[i / chunks] < 0)
        *reinterpret_cast<Packed8*>(values + Block::Values::at(i / chunks, i % chunks)) = Packed8{};
  }

  const Launch& launch_;
  i32 tiles_ = 0, tails_ = 0;
  // The tile before, whose values are still to be copied.
  i32 flags_ = 0;
  Boxes<Kernel> before_{};
};

}  // namespace wgmma

RADDLE_ENGINE_END
