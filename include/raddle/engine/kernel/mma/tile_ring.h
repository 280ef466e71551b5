// The ring of K and V of long queries. TileStream finds tiles and copies their rows: all warps copy
// their share of every tile, and take turns in finding where the rows of a whole tile lie. TileRing
// knows which slots hold the tile that is computed, when they are filled, and what is loaded when
// all warps have used one.
#pragma once

#include "raddle/engine/kernel/mma/rows.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// The tiles of one item. Warp n % num_warps finds tile n, `ahead` tiles before it is computed. The
/// table of its addresses is kept until its V has been requested; the facts of its keys, until it
/// has been computed.
template <class Kernel, class Memory>
class TileStream {
  static constexpr i32 tile_keys = Memory::tile_keys;
  static constexpr i32 lane_keys = ceil_div(tile_keys, 32);

 public:
  static constexpr i32 ahead = 2;
  static_assert(Memory::found_slots > ahead && Memory::key_slots > ahead + 1);

  RADDLE_DEVICE explicit TileStream(const GpuLaunch& launch)
      : launch_(launch), source_(Memory::source(ptx::warp_index())) {}

  /// Called before anything else.
  RADDLE_DEVICE void open(const WorkItem& item) {
    Span rest = open_item<Kernel>(launch_, item, source_);
    skip_tiles(rest, ptx::warp_index());
    remember_next_tile(rest);
  }

  static constexpr i32 barrier_arrivals = Kernel::quantized ? 33 : 1;

  /// Finds tile number nth, if it is this warp's turn. By now all warps have requested V of the
  /// tile before the one being computed (nth - ahead), and have computed the tile before that.
  RADDLE_DEVICE void find(i32 nth) {
    if (ring_slot(nth, num_warps) != ptx::warp_index()) return;
    auto& keys = Memory::keys_at(ring_slot(nth, Memory::key_slots));
    Span rest = source_.rest;
    const i32 begin = rest.begin;
    i32 flags = nth == 0 ? TileFlags::empty | TileFlags::last : TileFlags::none;
    const bool there = rest.begin < rest.end;
    if (there) {
      const Span tile = take_tile(rest, tile_keys);
      if (rest.begin == rest.end) rest = next_run(source_);
      flags = tile_flags(source_, tile, tile_keys, rest.begin == rest.end);
      find_rows(tile, keys, Memory::row_table(ring_slot(nth, Memory::found_slots)));
    }
    if (ptx::lane_index() == 0) keys.flags[0] = flags, keys.begin = begin;
    const u32 barrier = Memory::found(ring_slot(nth, Memory::found_slots));
    if constexpr (Kernel::quantized) ptx::barrier_arrive_after_copies(barrier);
    ptx::sync_warp();
    if (ptx::lane_index() == 0) ptx::barrier_arrive(barrier);
    if (!there) return;  // other warps wait for the barrier above, not for what follows
    skip_tiles(rest, num_warps - 1);
    remember_next_tile(rest);
  }

  /// Starts copying this warp's share of K of tile number nth, once that tile has been found.
  /// Returns false where there is nothing to copy.
  RADDLE_DEVICE bool load_keys(i32 slot, i32 nth) {
    ptx::barrier_wait(Memory::found(ring_slot(nth, Memory::found_slots)),
                      ring_round(nth, Memory::found_slots) & 1);
    const i32 flags = Memory::keys_at(ring_slot(nth, Memory::key_slots)).flags[0];
    copies_ = !(flags & (TileFlags::empty | TileFlags::none));
    if (copies_) copy<typename Kernel::KeyRows, Kernel::dim_qk, Kernel::narrow_keys>(slot, nth, 0);
    return copies_;
  }

  /// Starts copying this warp's share of the same tile's V.
  RADDLE_DEVICE bool load_values(i32 slot, i32 nth) {
    if (copies_)
      copy<typename Kernel::ValueRows, Kernel::dim_vo, Kernel::narrow_values>(slot, nth, 1);
    return copies_;
  }

 private:
  /// Finds where the rows of a tile lie, and writes the facts of its keys.
  RADDLE_DEVICE void find_rows(const Span& tile, typename Memory::Keys& keys,
                               typename Memory::Table& table) const {
    const Span read = columns_read(source_, tile);
    if (lies_in_pages(source_)) {
      // Everything is read from shared memory first: stores in between would make the compiler read
      // it again.
      const i32 mask = (1 << source_.page_shift) - 1, first_index = source_.first_index;
      Column key[lane_keys];
      RADDLE_UNROLL
      for (i32 i = 0; i < lane_keys; ++i) {
        const i32 column = tile.begin + 32 * i + ptx::lane_index();
        const i32 existing = existing_column(read, column);
        const i32 index = first_index + existing;
        key[i] = Column{next_page_[i], existing & mask, index, index,
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

  /// Writes addresses and facts of the tile's keys `first`, `first` + 32 ….
  template <i32 count>
  RADDLE_DEVICE void put_rows(i32 tile_begin, const Column (&key)[count], i32 first,
                              typename Memory::Keys& keys, typename Memory::Table& table) const {
    const u8* row[2][count];
    RADDLE_UNROLL
    for (i32 which = 0; which < 2; ++which) {
      RADDLE_UNROLL
      for (i32 i = 0; i < count; ++i) row[which][i] = row_address<Kernel>(source_, which, key[i]);
    }
    RADDLE_UNROLL
    for (i32 i = 0; i < count; ++i) {
      const i32 j = first + 32 * i;
      if (tile_keys % 32 != 0 && j >= tile_keys) continue;
      describe_key(keys, j, tile_begin + j, key[i]);
      if constexpr (Kernel::quantized) load_scales(source_, keys, j, key[i]);
      RADDLE_UNROLL
      for (i32 which = 0; which < 2; ++which) table.row[which][j] = row[which][i];
    }
  }

  /// Skips `count` tiles, which other warps find.
  RADDLE_DEVICE void skip_tiles(Span& rest, i32 count) {
    RADDLE_ROLLED
    while (count > 0 && rest.begin < rest.end) {
      const i32 skipped = min(count, ceil_div(rest.end - rest.begin, tile_keys));
      count -= skipped;
      rest.begin = min(rest.end, rest.begin + skipped * tile_keys);
      if (rest.begin == rest.end) rest = next_run(source_);
    }
  }

  /// Stores where this warp's next tile begins, and reads its entries of the page table. Other
  /// layouts are looked up when a tile is found.
  RADDLE_DEVICE void remember_next_tile(const Span& rest) {
    ptx::sync_warp();  // all lanes have read
    if (ptx::lane_index() == 0) source_.rest = rest;
    ptx::sync_warp();
    if (rest.begin < rest.end && lies_in_pages(source_)) look_up_pages(source_, rest, next_page_);
  }

  /// Long queries have few free registers: addresses are read four at a time.
  template <class Rows, i32 dim, bool narrow>
  RADDLE_DEVICE void copy(i32 slot, i32 nth, i32 which) const {
    const i32 warp = ptx::warp_index();
    copy_rows<Kernel, Rows, dim, narrow, Memory::warp_keys, 4>(
        Memory::slot_address(slot) + static_cast<u32>(Memory::template part_of<Rows>(warp)),
        Memory::first_of_part(warp),
        Memory::row_table(ring_slot(nth, Memory::found_slots)).row[which] +
            warp * Memory::warp_keys);
  }

  const GpuLaunch& launch_;
  typename Memory::Source& source_;
  i32 next_page_[lane_keys] = {};  // pages of this lane's rows in the warp's next tile
  bool copies_ = false;            // the tile whose K was requested last has rows
};

/// The slots hold K and V of the tiles in turns. Load n goes to slot n % slots, once use n - slots
/// of that slot is over. A warp issues the load when its own use n - slots + lag is over: by then
/// the other warps are usually done with use n - slots, too.
///
/// Slots follow from the tile's number at every use, because long queries lack registers. The
/// stream is an argument, not a member: a reference kept here made NVRTC's loop two thirds longer.
template <class Kernel, class Memory>
class TileRing {
  using Stream = TileStream<Kernel, Memory>;
  static constexpr i32 lag = Memory::slots > 2 ? 1 : 0;
  static constexpr i32 tiles_in_ring = Memory::slots / 2;
  static_assert(Memory::slots % 2 == 0);

 public:
  RADDLE_DEVICE void create_barriers() const {
    const i32 i = ptx::thread_index();
    if (i < Memory::slots) {
      ptx::barrier_create(Memory::filled(i), num_threads);
      ptx::barrier_create(Memory::freed(i), num_warps);
    }
    if (i < Memory::found_slots) ptx::barrier_create(Memory::found(i), Stream::barrier_arrivals);
  }
  RADDLE_DEVICE void destroy_barriers() const {
    const i32 i = ptx::thread_index();
    if (i < Memory::slots) {
      ptx::barrier_destroy(Memory::filled(i));
      ptx::barrier_destroy(Memory::freed(i));
    }
    if (i < Memory::found_slots) ptx::barrier_destroy(Memory::found(i));
  }

  /// Issues the first loads.
  RADDLE_DEVICE void fill(Stream& stream) const {
    RADDLE_ROLLED
    for (i32 n = 0; n < Memory::slots - lag; ++n) load(stream, n % 2, n, n / 2);
  }

  /// The slots of the tile that is computed, and the facts of its keys.
  RADDLE_DEVICE i32 k_slot() const { return 2 * ring_slot(tile_number_, tiles_in_ring); }
  RADDLE_DEVICE i32 v_slot() const { return k_slot() + 1; }
  RADDLE_DEVICE const typename Memory::Keys& keys() const {
    return Memory::keys_at(ring_slot(tile_number_, Memory::key_slots));
  }
  /// The flags of that tile. They are read right behind a product, across which nothing that
  /// follows from the tile's number is to be kept in registers.
  RADDLE_DEVICE i32 flags_after_product() {
    recompute_from_tile_number();
    return keys().flags[0];
  }

  /// Waits until K of the tile is there, and finds a tile that comes later, if it is this warp's
  /// turn.
  RADDLE_DEVICE void wait_k_and_find_next(Stream& stream) {
    ptx::barrier_wait(Memory::filled(k_slot()), parity());
    stream.find(tile_number_ + Stream::ahead);
    recompute_from_tile_number();
  }
  RADDLE_DEVICE void wait_v() {
    ptx::barrier_wait(Memory::filled(v_slot()), parity());
    recompute_from_tile_number();
  }

  /// This warp has used K. Once all warps have used the slot that is loaded next, its load begins.
  RADDLE_DEVICE void release_k_and_load_next(Stream& stream) {
    // Before the first tile there is no V to wait for: a barrier answers at once for the round
    // before the first.
    release_and_load_next(stream, k_slot(), lag, lag == 0 ? k_slot() : v_before(),
                          k_slot() < 2 * lag ? parity() ^ 1 : parity());
    recompute_from_tile_number();
  }
  /// This warp has used V, and goes on with the next tile.
  RADDLE_DEVICE void release_v_and_load_next(Stream& stream) {
    release_and_load_next(stream, v_slot(), 1 - lag, lag == 0 ? v_slot() : k_slot(), parity());
    ++tile_number_;
  }

 private:
  RADDLE_DEVICE i32 v_before() const { return (k_slot() == 0 ? Memory::slots : k_slot()) - 1; }
  /// The parity of the ring's round, for which barriers wait.
  RADDLE_DEVICE i32 parity() const { return ring_round(tile_number_, tiles_in_ring) & 1; }

  /// Starts loading K (`which` 0) or V of tile number `nth`, if there is such a tile.
  RADDLE_DEVICE void load(Stream& stream, i32 which, i32 slot, i32 nth) const {
    const bool loads = which == 0 ? stream.load_keys(slot, nth) : stream.load_values(slot, nth);
    if (loads) ptx::barrier_arrive_after_copies(Memory::filled(slot));
  }

  /// Says that this warp has used slot `used`, waits until all warps have used `slot`, and starts
  /// loading the next K or V into that one.
  RADDLE_DEVICE void release_and_load_next(Stream& stream, i32 used, i32 which, i32 slot,
                                           i32 parity) const {
    ptx::sync_warp();
    if (ptx::lane_index() == 0) ptx::barrier_arrive(Memory::freed(used));
    ptx::barrier_wait(Memory::freed(slot), parity);
    load(stream, which, slot, tile_number_ + (which == 0 ? tiles_in_ring : 1));
  }

  /// Makes the compiler compute again whatever follows from the tile's number, rather than keep it
  /// in registers.
  RADDLE_DEVICE void recompute_from_tile_number() { tile_number_ = ptx::renewed(tile_number_); }

  i32 tile_number_ = 0;  // of the item's tiles: the one that is computed
};

}  // namespace mma

RADDLE_ENGINE_END
