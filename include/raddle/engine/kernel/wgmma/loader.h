// The warps that load the keys and the values of a block: each walks the tiles of all items and has
// copies fill a ring. The keys' one also says what is known of each tile.
#pragma once

#include "raddle/engine/kernel/wgmma/boxes.h"
#include "raddle/engine/kernel/wgmma/gather.h"
#include "raddle/engine/kernel/wgmma/tile_parts.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

/// Loads K (`which` 0) or V.
template <class Kernel, i32 which, class Variant>
class TileLoader {
  using Block = Memory<Kernel>;
  using Flags = TileFlagsOfRing;
  static constexpr i32 tile_keys = Kernel::tile_keys;

 public:
  /// Copies of the first `started` tiles are under way (first_tiles.h).
  RADDLE_DEVICE TileLoader(const Launch& launch, const Variant& variant, i32 started)
      : launch_(launch),
        variant_(variant),
        asks_(!Kernel::finds_intervals || !knows_spans(variant)),
        started_(started) {}

  /// Loads the tiles of all items that are named. Of long queries, an item that is none has a tile
  /// that is none, in whose step the computing warpgroups send the last item.
  RADDLE_DEVICE void run() {
    RADDLE_ROLLED
    for (i32 nth = 0;; ++nth) {
      const auto place = block().items.place(nth);
      auto& facts = block().item[place.slot];
      ptx::barrier_wait(address(block().items.full[place.slot]), place.parity);
      if (facts.item < 0) break;
      ring_ = nth % Kernel::rings;
      if constexpr (which == 0 && Kernel::asks_parts)
        if (asks_) strip_ = strip_of_lane<Kernel>(launch_, facts);
      load_item(facts.source[which], facts.kv_head);
    }
    if constexpr (which == 0 && Kernel::tiles_end_items)
      put_keys(nullptr, Span{}, Flags::first | Flags::none, no_rows_, 0);
  }

 private:
  /// Those of tiles without keys.
  struct NoRows {
    using Found = i32;
    static constexpr bool clears_missing = false;
    static constexpr bool leaves_time = false;
    RADDLE_DEVICE void copy(const Span&, Found, u32, u32) const {}
  };

  RADDLE_DEVICE void load_item(KeySource& source, i32 kv_head) {
    if (source.rest.begin == source.rest.end) {
      if constexpr (Kernel::tiles_end_items)
        put(&source, source.rest, Flags::first | Flags::last | Flags::empty, no_rows_, 0);
    } else if (!Kernel::copies_rows || launch_.in_boxes[source.level]) {
      load_tiles(source, Boxes<Kernel, which>(launch_, source, kv_head));
    } else if constexpr (Kernel::copies_rows) {
      load_tiles(source, Gather<Kernel, which>(launch_, source));
    }
  }
  /// The rows of the next tile are looked up before the current one's slot is free: page numbers
  /// come from device memory.
  template <class Rows>
  RADDLE_DEVICE void load_tiles(KeySource& source, Rows&& rows) {
    Span rest = source.rest;
    const i32 begin = source.col_begin, end = source.col_end;
    const i32 always = source.holes ? Flags::ragged : 0;
    Span tile = take(rest);
    auto found = rows.find(tile);
    RADDLE_ROLLED
    for (i32 flags = Flags::first | always;; flags = always) {
      rows.prepare(tile, found);
      if (rest.begin == rest.end) rest = next_run<Kernel::reads_from_end>(source);
      const bool last = rest.begin == rest.end;
      const Span next = last ? tile : take(rest);
      const auto next_found = rows.find(next);
      if (tile.begin < begin || min(tile.end, end) < tile.begin + tile_keys) flags |= Flags::ragged;
      if (tile.partial) flags |= Flags::partial | (source.bits ? Flags::bits : 0);
      put(&source, tile, flags | (last ? Flags::last : 0), rows, found);
      if (last) break;
      tile = next, found = next_found;
    }
  }
  RADDLE_DEVICE static Span take(Span& run) {
    return Kernel::reads_from_end ? take_last_tile(run, tile_keys) : take_tile(run, tile_keys);
  }
  template <class Rows, class Found>
  RADDLE_DEVICE void put(const KeySource* source, const Span& tile, i32 flags, Rows& rows,
                         const Found& found) {
    if constexpr (which == 0)
      put_keys(source, tile, flags, rows, found);
    else
      put_values(source, tile, flags, rows, found);
    tiles_ += ring_ == 0 ? 1 : 0, tiles_of_other_ += ring_ == 0 ? 0 : 1;
    ring_ = (ring_ + 1) % Kernel::rings;
  }

  RADDLE_DEVICE static Block& block() { return Block::get(); }
  RADDLE_DEVICE static u32 address(const u64& barrier) { return ptx::shared_address(&barrier); }
  RADDLE_DEVICE static bool has_keys(i32 flags) { return !(flags & (Flags::empty | Flags::none)); }
  RADDLE_DEVICE TilePlace<Kernel> place() const {
    return {ring_, ring_ == 0 ? tiles_ : tiles_of_other_};
  }
  RADDLE_DEVICE bool is_started() const {
    return !Kernel::reads_from_end && tiles_ + tiles_of_other_ < started_;
  }
  /// Nothing is computed before the first keys and queries are there, so other tiles are asked for
  /// after these.
  RADDLE_DEVICE static void wait_begun() { ptx::barrier_wait(address(block().begun), 0); }
  /// Describes a tile and has its keys copied. The facts' slot is free by now: its last tile came
  /// twice as many tiles ago as the ring has slots, and the groups have begun the products of the
  /// one that had the slot of the tile before this one, and so are done with the facts of all
  /// before.
  template <class Rows, class Found>
  RADDLE_DEVICE void put_keys(const KeySource* source, const Span& tile, i32 flags, Rows& rows,
                              const Found& found) {
    const TilePlace<Kernel> at = place();
    if constexpr (Kernel::asks_parts && Rows::leaves_time)
      flags |= ask(*source, tile, flags, at.facts);
    if (has_keys(flags) && (asks_for_keys(*source) || flags & (Flags::partial | Flags::ragged)))
      describe_keys(block().keys_and_team.keys[at.facts], *source, tile);
    if (ptx::lane_index() == 0) block().tile[at.facts] = facts_of(source, tile, flags);
    const bool started = is_started();
    if (Kernel::queries_first && tiles_ == 1) wait_begun();
    if (!started) ptx::barrier_wait(address(block().key_slots.free[at.slot]), at.parity ^ 1);
    ptx::sync_warp();  // the facts are written
    const u32 full = address(block().key_slots.full[at.slot]);
    if (has_keys(flags) && !started)
      rows.copy(tile, found, ptx::shared_address(block().k[at.slot]), full);
    else if (ptx::lane_index() == 0)
      ptx::barrier_arrive(full);
  }
  /// Whether the facts of keys are read where no mask cuts a tile. Long queries know keys that
  /// count up.
  RADDLE_DEVICE static bool asks_for_keys(const KeySource& source) {
    return Kernel::asks_for_keys && !(Kernel::tiles_end_items && source.plain);
  }
  /// Asks about the parts of a tile if masks cut it; returns the flag that says so.
  RADDLE_DEVICE i32 ask(const KeySource& source, const Span& tile, i32 flags, i32 slot) const {
    if (!asks_ || !(flags & Flags::partial) || flags & Flags::bits || !source.plain) return 0;
    ask_parts<Kernel>(variant_, strip_, source, tile, block().parts[slot]);
    return Flags::parts;
  }
  /// Describes a tile's keys, which count up unless the layout says otherwise.
  template <class Keys>
  RADDLE_DEVICE void describe_keys(Keys& keys, const KeySource& source, const Span& tile) const {
    const Span read = columns_read(source, tile);
    RADDLE_ROLLED
    for (i32 j = ptx::lane_index(); j < tile_keys; j += 32) {
      const i32 column = tile.begin + j;
      const i32 index = source.first_index + existing_column(read, column);
      const bool valid = column >= read.begin && column < read.end;
      describe_key(keys, j, column,
                   source.plain ? Column{0, 0, index, index, valid}
                                : find_key(launch_, source, tile, column, 0));
    }
  }
  RADDLE_DEVICE static TileFacts facts_of(const KeySource* source, const Span& tile, i32 flags) {
    if (!(flags & (Flags::partial | Flags::ragged))) return {flags, tile.begin, 0, 0};
    const Span read = columns_read(*source, tile);
    return {flags, tile.begin, source->holes ? KeptColumns::unknown : read.begin, read.end};
  }

  /// Has the values of a tile copied. A weight of zero does not remove NaN, so that values of keys
  /// that do not exist are cleared; of short queries, whose copies must not wait for that, by those
  /// that compute.
  template <class Rows, class Found>
  RADDLE_DEVICE void put_values(const KeySource* source, const Span& tile, i32 flags, Rows& rows,
                                const Found& found) {
    const TilePlace<Kernel> at = place();
    const u32 full = address(block().value_slots.full[at.slot]);
    const i32 nth_tail = at.slot % Block::tails;
    const u32 tail = address(block().tail[nth_tail]);
    if (is_started()) {
      if (ptx::lane_index() == 0) ptx::barrier_arrive(full);
      return;
    }
    if (Kernel::queries_first && tiles_ == 0) wait_begun();
    ptx::barrier_wait(address(block().value_slots.free[at.slot]), at.parity ^ 1);
    u8* values = block().v[at.slot];
    const bool clears = Kernel::tiles_end_items && !(rows.clears_missing && has_keys(flags)) &&
                        flags & (Flags::ragged | Flags::empty);
    if (has_keys(flags)) rows.copy(tile, found, ptx::shared_address(values), clears ? tail : full);
    if (!clears) return;
    if (has_keys(flags)) {
      ptx::barrier_wait(tail, tails_ >> nth_tail & 1);
      tails_ ^= 1 << nth_tail;
    }
    clear_rows(values, source, tile, has_keys(flags));
    ptx::fence_proxy();
    ptx::sync_warp();
    if (ptx::lane_index() == 0) ptx::barrier_arrive(full);
  }
  /// Of a tile's rows, those without a key.
  RADDLE_DEVICE void clear_rows(u8* values, const KeySource* source, const Span& tile,
                                bool has_keys) const {
    if (!has_keys) return clear_rows(values, 0, tile_keys);
    const Span read = columns_read(*source, tile);
    const i32 first = read.begin - tile.begin, end = read.end - tile.begin;
    clear_rows(values, 0, first);
    clear_rows(values, end, tile_keys);
    RADDLE_ROLLED
    for (i32 j = first; source->holes && j < end; ++j)
      if (!find_key(launch_, *source, tile, tile.begin + j, 0).valid) clear_rows(values, j, j + 1);
  }
  RADDLE_DEVICE static void clear_rows(u8* values, i32 begin, i32 end) {
    constexpr i32 chunks = 8 * Kernel::vo_halves;
    RADDLE_ROLLED
    for (i32 at = begin * chunks + ptx::lane_index(); at < end * chunks; at += 32)
      *reinterpret_cast<Packed8*>(values + Block::Values::at(at / chunks, at % chunks)) = Packed8{};
  }

  const Launch& launch_;
  const Variant& variant_;
  const bool asks_;  ///< a mask about parts of tiles, where it does not know what rows keep
  const i32 started_;
  Strip strip_ = {};
  NoRows no_rows_;
  i32 ring_ = 0;  ///< of the next tile; an item's tiles begin at either in turn
  i32 tiles_ = 0, tiles_of_other_ = 0;  ///< so far, of ring 0 and of ring 1
  i32 tails_ = 0;                       ///< of each tail a bit, the parity of its phase
};

}  // namespace wgmma

RADDLE_ENGINE_END
