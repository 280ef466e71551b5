// How the warpgroups of a block wait for one another: the rings of keys, values and queries, as the
// computing warpgroups read them, and the turns that these take at the tensor cores.
#pragma once

#include "raddle/engine/kernel/wgmma/memory.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

/// While one group's products run, the other weighs its scores: each issues in its turn.
class Turns {
 public:
  RADDLE_DEVICE explicit Turns(i32 group) : group_(group) {
    if (group_ == 1) ptx::arrive_threads(turn_of_group_0, 2 * group_threads);  // group 0 is first
  }
  RADDLE_DEVICE void take() const {
    ptx::sync_threads(turn_of_group_0 + group_, 2 * group_threads);
  }
  RADDLE_DEVICE void pass() const {
    ptx::arrive_threads(turn_of_group_0 + (group_ ^ 1), 2 * group_threads);
  }
  /// Takes the turn that group 1 passed last, so that its barrier is left as it was found.
  RADDLE_DEVICE void end() const {
    if (group_ == 0) take();
  }

 private:
  const i32 group_;
};

/// The tiles of all items of a block, as a computing warpgroup reads them. Tile n has slot n % 2 of
/// keys and of values; an item's queries have slot (number of the item) % 2.
template <class Kernel>
class TilesReader {
  using Block = Memory<Kernel>;
  static_assert(Kernel::slots == 2);

 public:
  /// Waits for the current tile's keys and its facts.
  RADDLE_DEVICE void wait() {
    ptx::barrier_wait(address(block().key_slots.full[slot()]), tile_ >> 1 & 1);
    flags_ = facts().flags[0];
    if (opens_item()) ++item_;
  }
  RADDLE_DEVICE void next() {
    ++tile_;
    wait();
  }
  /// Waits for the queries of an item at its first tile.
  RADDLE_DEVICE void wait_queries() const {
    if (opens_item() && !at_end())
      ptx::barrier_wait(address(block().queries.full[item_ & 1]), item_ >> 1 & 1);
  }
  /// Waits for the values of the tile before; at the first tile, whose weights are 0, for none.
  RADDLE_DEVICE void wait_values() const {
    if (tile_ > 0)
      ptx::barrier_wait(address(block().value_slots.full[slot() ^ 1]), (tile_ - 1) >> 1 & 1);
  }
  RADDLE_DEVICE void release_keys() const { release(block().key_slots.free[slot()]); }
  RADDLE_DEVICE void release_values() const {
    if (tile_ > 0) release(block().value_slots.free[slot() ^ 1]);
  }
  /// The queries and facts of the item before the current tile's are not needed any more.
  RADDLE_DEVICE void release_item_before() const { release(block().queries.free[(item_ - 1) & 1]); }

  RADDLE_DEVICE i32 flags() const { return flags_; }
  RADDLE_DEVICE bool opens_item() const { return (flags_ & TileFlagsOfRing::first) != 0; }
  RADDLE_DEVICE bool at_end() const { return (flags_ & TileFlags::none) != 0; }
  RADDLE_DEVICE bool has_item_before() const { return item_ > 0; }
  RADDLE_DEVICE const auto& facts() const { return block().keys[tile_ & (Block::fact_slots - 1)]; }
  RADDLE_DEVICE const auto& item() const { return block().item[item_ & 1]; }
  RADDLE_DEVICE const auto& item_before() const { return block().item[(item_ - 1) & 1]; }
  RADDLE_DEVICE u32 queries() const { return address(block().q[item_ & 1]); }
  RADDLE_DEVICE u32 keys() const { return address(block().k[slot()]); }
  RADDLE_DEVICE u32 values() const { return address(block().v[slot() ^ 1]); }

 private:
  RADDLE_DEVICE static Block& block() { return Block::get(); }
  RADDLE_DEVICE static u32 address(const void* p) { return ptx::shared_address(p); }
  RADDLE_DEVICE i32 slot() const { return tile_ & 1; }
  /// One thread arrives for its warpgroup, whose products are done when one thread's are.
  RADDLE_DEVICE static void release(const u64& barrier) {
    if (ptx::thread_index() % group_threads == 0) ptx::barrier_arrive(address(&barrier));
  }
  RADDLE_DEVICE static u32 address(const u64& barrier) { return ptx::shared_address(&barrier); }

  i32 tile_ = 0;
  i32 item_ = -1;
  i32 flags_ = 0;
};

}  // namespace wgmma

RADDLE_ENGINE_END
