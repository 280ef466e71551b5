// The ring of K and V of long queries: which slots hold the tile that is computed, when they are
// filled, and what is loaded when all warps have used one.
#pragma once

#include "raddle/engine/kernel/mma/tile_stream.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// The slots hold K and V of the tiles in turns. Load n goes to slot n % slots, once use n - slots
/// of that slot is over. A warp issues the load when its own use n - slots + lag is over: by then
/// the other warps are usually done with use n - slots, too.
///
/// Slots follow from the tile's number at every use, because long queries lack registers. The
/// stream is an argument, not a member: a reference kept here made NVRTC's loop two thirds longer.
template <class Kernel, class Layout>
class TileRing {
  using Stream = TileStream<Kernel, Layout>;
  static constexpr i32 lag = Layout::slots > 2 ? 1 : 0;
  static constexpr i32 tiles_in_ring = Layout::slots / 2;
  static_assert(Layout::slots % 2 == 0);

 public:
  RADDLE_DEVICE void create_barriers() const {
    const i32 i = ptx::thread_index();
    if (i < Layout::slots) {
      ptx::barrier_create(Layout::filled(i), num_threads);
      ptx::barrier_create(Layout::freed(i), num_warps);
    }
    if (i < Layout::found_slots) ptx::barrier_create(Layout::found(i), Stream::barrier_arrivals);
  }
  RADDLE_DEVICE void destroy_barriers() const {
    const i32 i = ptx::thread_index();
    if (i < Layout::slots) {
      ptx::barrier_destroy(Layout::filled(i));
      ptx::barrier_destroy(Layout::freed(i));
    }
    if (i < Layout::found_slots) ptx::barrier_destroy(Layout::found(i));
  }

  /// Issues the first loads.
  RADDLE_DEVICE void fill(Stream& stream) const {
    RADDLE_ROLLED
    for (i32 n = 0; n < Layout::slots - lag; ++n) load(stream, n % 2, n, n / 2);
  }

  /// The number of the tile that is computed, its slots, and the facts of its keys.
  RADDLE_DEVICE i32 tile_number() const { return tile_number_; }
  RADDLE_DEVICE i32 k_slot() const { return 2 * ring_slot(tile_number_, tiles_in_ring); }
  RADDLE_DEVICE i32 v_slot() const { return k_slot() + 1; }
  RADDLE_DEVICE const typename Layout::Keys& keys() const {
    return Layout::keys_at(ring_slot(tile_number_, Layout::key_slots));
  }

  RADDLE_DEVICE void wait_keys() const { ptx::barrier_wait(Layout::filled(k_slot()), parity()); }
  RADDLE_DEVICE void wait_values() const { ptx::barrier_wait(Layout::filled(v_slot()), parity()); }

  /// This warp has used K: once all warps have used the slot that is loaded next, its load begins.
  RADDLE_DEVICE void release_keys_and_load_next(Stream& stream) const {
    // Before the first tile there is no V to wait for: a barrier answers at once for the round
    // before the first.
    release_and_load_next(stream, k_slot(), lag, lag == 0 ? k_slot() : v_before(),
                          k_slot() < 2 * lag ? parity() ^ 1 : parity());
  }
  /// The same after V.
  RADDLE_DEVICE void release_values_and_load_next(Stream& stream) const {
    release_and_load_next(stream, v_slot(), 1 - lag, lag == 0 ? v_slot() : k_slot(), parity());
  }
  RADDLE_DEVICE void next_tile() { ++tile_number_; }

  /// Makes the compiler compute again whatever follows from the tile's number, rather than keep it
  /// in registers.
  RADDLE_DEVICE void recompute_from_tile_number() { tile_number_ = ptx::renewed(tile_number_); }

 private:
  RADDLE_DEVICE i32 v_before() const { return (k_slot() == 0 ? Layout::slots : k_slot()) - 1; }
  /// The parity of the ring's round, for which barriers wait.
  RADDLE_DEVICE i32 parity() const { return ring_round(tile_number_, tiles_in_ring) & 1; }

  /// Starts loading K (`which` 0) or V of tile number `nth`, if there is such a tile.
  RADDLE_DEVICE void load(Stream& stream, i32 which, i32 slot, i32 nth) const {
    const bool loads = which == 0 ? stream.load_keys(slot, nth) : stream.load_values(slot, nth);
    if (loads) ptx::barrier_arrive_after_copies(Layout::filled(slot));
  }

  /// Says that this warp has used slot `used`, waits until all warps have used `slot`, and starts
  /// loading the next K or V into that one.
  RADDLE_DEVICE void release_and_load_next(Stream& stream, i32 used, i32 which, i32 slot,
                                           i32 parity) const {
    ptx::sync_warp();
    if (ptx::lane_index() == 0) ptx::barrier_arrive(Layout::freed(used));
    ptx::barrier_wait(Layout::freed(slot), parity);
    load(stream, which, slot, tile_number_ + (which == 0 ? tiles_in_ring : 1));
  }

  i32 tile_number_ = 0;  // of the item's tiles: the one that is computed
};

}  // namespace mma

RADDLE_ENGINE_END
