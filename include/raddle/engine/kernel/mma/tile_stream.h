// The KV tiles of long queries on their way to shared memory. All warps copy their share of every
// tile's rows; where these lie, the warps find in turns, a whole tile each, and a table tells the
// others.
#pragma once

#include "raddle/engine/kernel/mma/key_source.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// The tiles of one item. Tile number n is found by warp n % num_warps, `ahead` tiles before it is
/// computed. Where its rows lie is known until its V is on its way; what there is to say of its
/// keys, until it has been computed.
template <class K, class Layout>
class TileStream {
  static constexpr i32 tile_keys = Layout::tile_keys;
  static constexpr i32 lane_keys = ceil_div(tile_keys, 32);

 public:
  static constexpr i32 ahead = 2;
  static_assert(Layout::found_slots > ahead && Layout::key_slots > ahead + 1);

  RADDLE_DEVICE explicit TileStream(const MmaLaunch& launch)
      : launch_(launch), source_(Layout::source(ptx::warp_index())) {}

  /// Before anything else.
  RADDLE_DEVICE void open(const WorkItem& item) {
    Span rest = open_item<K>(launch_, item, source_);
    skip(rest, ptx::warp_index());
    keep(rest);
  }

  static constexpr i32 barrier_arrivals = K::quantized ? 33 : 1;

  /// Finds tile number nth, if it is this warp's turn. All warps have started loading V of the tile
  /// before the one that is computed, nth - ahead, and have computed the one before that.
  RADDLE_DEVICE void find(i32 nth) {
    if (ring_slot(nth, num_warps) != ptx::warp_index()) return;
    auto& keys = Layout::keys_at(ring_slot(nth, Layout::key_slots));
    Span rest = source_.rest;
    i32 flags = nth == 0 ? TileFlags::empty | TileFlags::last : TileFlags::none;
    const bool there = rest.begin < rest.end;
    if (there) {
      const Span tile = take_tile(rest, tile_keys);
      if (rest.begin == rest.end) rest = next_run(source_);
      flags = tile_flags(source_, tile, tile_keys, rest.begin == rest.end);
      find_rows(tile, keys, Layout::row_table(ring_slot(nth, Layout::found_slots)));
    }
    if (ptx::lane_index() == 0) keys.flags[0] = flags;
    const u32 barrier = Layout::found(ring_slot(nth, Layout::found_slots));
    if constexpr (K::quantized) ptx::barrier_arrive_after_copies(barrier);
    ptx::sync_warp();
    if (ptx::lane_index() == 0) ptx::barrier_arrive(barrier);
    if (!there) return;  // others wait for what is above, not for what this warp finds next
    skip(rest, num_warps - 1);
    keep(rest);
  }

  /// Starts copying this warp's share of tile number nth's K, once that was found. False where
  /// there is nothing to copy.
  RADDLE_DEVICE bool load_keys(i32 slot, i32 nth) {
    ptx::barrier_wait(Layout::found(ring_slot(nth, Layout::found_slots)),
                      ring_round(nth, Layout::found_slots) & 1);
    const i32 flags = Layout::keys_at(ring_slot(nth, Layout::key_slots)).flags[0];
    copies_ = !(flags & (TileFlags::empty | TileFlags::none));
    if (copies_) copy<typename K::KeyRows, K::dim_qk, K::narrow_keys>(slot, nth, 0);
    return copies_;
  }

  /// Starts copying that tile's V.
  RADDLE_DEVICE bool load_values(i32 slot, i32 nth) {
    if (copies_) copy<typename K::ValueRows, K::dim_vo, K::narrow_values>(slot, nth, 1);
    return copies_;
  }

 private:
  /// Where the rows of a tile lie, and what there is to say of its keys.
  RADDLE_DEVICE void find_rows(const Span& tile, typename Layout::Keys& keys,
                               typename Layout::Table& table) const {
    const Span read = columns_read(source_, tile);
    if (asks_ahead()) {
      // All that is read of shared memory first: stores between would have it read again.
      const i32 mask = (1 << source_.block_shift) - 1, first_index = source_.first_index;
      Column key[lane_keys];
      RADDLE_UNROLL
      for (i32 i = 0; i < lane_keys; ++i) {
        const i32 column = tile.begin + 32 * i + ptx::lane_index();
        const i32 existing = existing_column(read, column);
        const i32 index = first_index + existing;
        key[i] = Column{next_block_[i], existing & mask, index, index,
                        column >= read.begin && column < read.end};
      }
      put_rows<lane_keys>(tile.begin, key, ptx::lane_index(), keys, table);
    } else {
      RADDLE_ROLLED
      for (i32 j = ptx::lane_index(); j < tile_keys; j += 32) {
        const i32 column = tile.begin + j;
        Column key[1] = {
            column_at(launch_.levels[source_.level], source_.group, existing_column(read, column))};
        key[0].valid = key[0].valid && column >= read.begin && column < read.end;
        put_rows<1>(tile.begin, key, j, keys, table);
      }
    }
  }

  /// Says that of the tile's keys `first`, `first` + 32 ….
  template <i32 count>
  RADDLE_DEVICE void put_rows(i32 tile_begin, const Column (&key)[count], i32 first,
                              typename Layout::Keys& keys, typename Layout::Table& table) const {
    const u8* row[2][count];
    RADDLE_UNROLL
    for (i32 which = 0; which < 2; ++which) {
      RADDLE_UNROLL
      for (i32 i = 0; i < count; ++i) row[which][i] = row_address<K>(source_, which, key[i]);
    }
    RADDLE_UNROLL
    for (i32 i = 0; i < count; ++i) {
      const i32 j = first + 32 * i;
      if (tile_keys % 32 != 0 && j >= tile_keys) continue;
      describe_key(keys, j, tile_begin + j, key[i]);
      if constexpr (K::quantized) load_scales(source_, keys, j, key[i]);
      RADDLE_UNROLL
      for (i32 which = 0; which < 2; ++which) table.row[which][j] = row[which][i];
    }
  }

  /// Whether the page table is asked a tile of this warp ahead. Other layouts are looked up when a
  /// tile is found.
  RADDLE_DEVICE bool asks_ahead() const { return source_.plain && source_.block_shift >= 0; }

  /// Drops the tiles that others find.
  RADDLE_DEVICE void skip(Span& rest, i32 count) {
    RADDLE_ROLLED
    while (count > 0 && rest.begin < rest.end) {
      const i32 skipped = min(count, ceil_div(rest.end - rest.begin, tile_keys));
      count -= skipped;
      rest.begin = min(rest.end, rest.begin + skipped * tile_keys);
      if (rest.begin == rest.end) rest = next_run(source_);
    }
  }

  /// Keeps where this warp's next tile begins, and asks the page table about it.
  RADDLE_DEVICE void keep(const Span& rest) {
    ptx::sync_warp();  // all lanes have read
    if (ptx::lane_index() == 0) source_.rest = rest;
    ptx::sync_warp();
    if (rest.begin == rest.end || !asks_ahead()) return;
    const Span read = columns_read(source_, rest);
    RADDLE_UNROLL
    for (i32 i = 0; i < lane_keys; ++i)
      next_block_[i] =
          source_.blocks[existing_column(read, rest.begin + 32 * i + ptx::lane_index()) >>
                         source_.block_shift];
  }

  /// Long queries have few registers: addresses are read four at a time.
  template <class Rows, i32 dim, bool narrow>
  RADDLE_DEVICE void copy(i32 slot, i32 nth, i32 which) const {
    const i32 warp = ptx::warp_index();
    copy_rows<K, Rows, dim, narrow, Layout::warp_keys, 4>(
        Layout::slot_address(slot) + static_cast<u32>(Layout::template part_of<Rows>(warp)),
        Layout::first_of_part(warp),
        Layout::row_table(ring_slot(nth, Layout::found_slots)).row[which] +
            warp * Layout::warp_keys);
  }

  const MmaLaunch& launch_;
  typename Layout::Source& source_;
  i32 next_block_[lane_keys] = {};  // which this lane's rows of the warp's next tile are in
  bool copies_ = false;             // the tile whose K was loaded last has rows
};

}  // namespace mma

RADDLE_ENGINE_END
