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

/// The tiles of all items of a block, as a warp of a computing warpgroup reads them. Tile n has
/// slot n % 2 of keys and of values; an item's queries have slot (number of the item) % 2, or their
/// warpgroup's part of the only slot.
template <class Kernel>
class TilesReader {
  using Block = Memory<Kernel>;
  using Flags = TileFlagsOfRing;
  static_assert(Kernel::slots == 2 && Kernel::query_slots <= 2);
  static_assert(Block::fact_slots == 4);

 public:
  RADDLE_DEVICE TilesReader()
      : base_(ptx::shared_address(&Block::get())),
        leads_(ptx::lane_index() == 0),
        leads_group_(ptx::thread_index() % group_threads < Kernel::cluster_size),
        of_cluster_(address_of_cluster(base_)) {}

  /// Waits for the keys and the facts of the first tile.
  RADDLE_DEVICE void begin() {
    wait_next();
    next();
  }
  /// Waits for those of the tile after the current one, which `next` makes the current one.
  RADDLE_DEVICE void wait_next() {
    const i32 tile = tile_ + 1;
    await_tile<Kernel>(base_ + key_slots_full + 8 * (tile & 1), tile >> 1 & 1);
    next_flags_ = block().tile[tile & 3].flags;
  }
  RADDLE_DEVICE void next() {
    ++tile_;
    flags_ = next_flags_;
    if (opens_item()) ++item_;
  }
  /// Waits for the queries of an item at its first tile.
  RADDLE_DEVICE void wait_queries() const {
    if (opens_item() && !at_end())
      ptx::barrier_wait(base_ + queries_full + barrier_of_queries(), of_queries().parity);
  }
  /// Waits for the values of the tile before; at the first tile, whose weights are 0, for none.
  RADDLE_DEVICE void wait_values() const {
    if (tile_ > 0)
      await_tile<Kernel>(base_ + value_slots_full + 8 * (~tile_ & 1), (tile_ - 1) >> 1 & 1);
  }
  /// This warpgroup's products of the tile's keys are done: one thread's are when all are.
  RADDLE_DEVICE void release_keys() const {
    release(leads_group_, key_slots_free + 8 * (tile_ & 1));
  }
  /// The same of the values of the tile before; `once`: the first time at this tile.
  RADDLE_DEVICE void release_values(bool once) const {
    release(leads_group_ && once && tile_ > 0, value_slots_free + 8 * (~tile_ & 1));
  }
  /// This warp's products of the item's queries are done, if the tile is its last. Where O may
  /// leave by way of their slot, release_item_before says so.
  RADDLE_DEVICE void release_queries() const {
    if constexpr (!Kernel::stages_output)
      ptx::barrier_arrive_if(leads_ && flags_ & Flags::last,
                             base_ + queries_free + barrier_of_queries());
  }
  /// This warp needs the facts of the item before the current tile's no more.
  RADDLE_DEVICE void release_item_before() const {
    ptx::sync_warp();
    if (!leads_) return;
    if constexpr (Kernel::stages_output)
      ptx::barrier_arrive(base_ + queries_free + 8 * ((item_ - 1) & 1));
    ptx::barrier_arrive(base_ + items_free + 8 * slot_of_item(item_ - 1));
  }

  RADDLE_DEVICE i32 flags() const { return flags_; }
  RADDLE_DEVICE bool opens_item() const { return (flags_ & Flags::first) != 0; }
  RADDLE_DEVICE bool at_end() const { return (flags_ & Flags::none) != 0; }
  RADDLE_DEVICE bool has_item_before() const { return item_ > 0; }
  RADDLE_DEVICE const TileFacts& facts() const { return block().tile[tile_ & 3]; }
  RADDLE_DEVICE const auto& parts() const { return block().parts[tile_ & 3]; }
  RADDLE_DEVICE const auto& keys_facts() const { return block().keys_and_team.keys[tile_ & 3]; }
  RADDLE_DEVICE const auto& item() const { return block().item[slot_of_item(item_)]; }
  RADDLE_DEVICE const auto& item_before() const { return block().item[slot_of_item(item_ - 1)]; }
  RADDLE_DEVICE u32 queries() const {
    return base_ + q_begin + static_cast<u32>(of_queries().slot * Block::Queries::bytes);
  }
  /// Those of the item before the current tile's, in kernels that stage O there.
  RADDLE_DEVICE u32 queries_before() const {
    return base_ + q_begin + static_cast<u32>(((item_ - 1) & 1) * Block::Queries::bytes);
  }
  RADDLE_DEVICE u32 keys() const {
    return base_ + k_begin + static_cast<u32>((tile_ & 1) * Block::Keys::bytes);
  }
  RADDLE_DEVICE u32 values() const {
    return base_ + v_begin + static_cast<u32>((~tile_ & 1) * Block::Values::bytes);
  }

 private:
  // Where members of the block's memory lie, as constants: NVRTC has no offsetof.
  static constexpr u32 query_barriers = Kernel::query_slots * Kernel::query_parts;
  static constexpr u32 q_begin = 0;
  static constexpr u32 k_begin = Kernel::query_slots * Block::Queries::bytes;
  static constexpr u32 v_begin = k_begin + Kernel::slots * Block::Keys::bytes;
  static constexpr u32 queries_full = v_begin + Kernel::slots * Block::Values::bytes;
  static constexpr u32 queries_free = queries_full + 8 * query_barriers;
  static constexpr u32 key_slots_full = queries_free + 8 * query_barriers;
  static constexpr u32 key_slots_free = key_slots_full + 8 * Kernel::slots;
  static constexpr u32 value_slots_full = key_slots_free + 8 * Kernel::slots;
  static constexpr u32 value_slots_free = value_slots_full + 8 * Kernel::slots;
  static constexpr u32 items_free = value_slots_free + 8 * Kernel::slots + 8 * Kernel::item_slots;
#ifndef __CUDACC_RTC__
  static_assert(__builtin_offsetof(Block, v) == v_begin &&
                __builtin_offsetof(Block, queries.full) == queries_full &&
                __builtin_offsetof(Block, value_slots.free) == value_slots_free &&
                __builtin_offsetof(Block, items.free) == items_free);
#endif
  /// Where the memory of a block of the cluster begins: of each releasing lane, another block's.
  RADDLE_DEVICE static u32 address_of_cluster(u32 base) {
    if constexpr (Kernel::cluster_size == 1) return base;
    return ptx::in_block_of_cluster(base, ptx::lane_index() % Kernel::cluster_size);
  }
  /// Arrives at a slot's barrier, of every block of the cluster: all copy to the slot.
  RADDLE_DEVICE void release(bool leads, u32 free) const {
    if constexpr (Kernel::cluster_size == 1)
      ptx::barrier_arrive_if(leads, of_cluster_ + free);
    else
      ptx::barrier_arrive_in_cluster_if(leads, of_cluster_ + free);
  }
  RADDLE_DEVICE static Block& block() { return Block::get(); }
  RADDLE_DEVICE static i32 slot_of_item(i32 nth) { return nth & (Kernel::item_slots - 1); }
  RADDLE_DEVICE RingPlace<Kernel::query_slots> of_queries() const {
    return RingPlace<Kernel::query_slots>(item_);
  }
  /// Offset of the barrier of this warpgroup's queries.
  RADDLE_DEVICE u32 barrier_of_queries() const {
    const i32 part = Kernel::query_parts > 1 ? ptx::warp_index() / group_warps : 0;
    return static_cast<u32>(8 * Block::barrier_of_queries(of_queries().slot, part));
  }

  const u32 base_;                  ///< where the block's memory begins
  const bool leads_, leads_group_;  ///< one lane of the warp, one of the warpgroup for each block
  const u32 of_cluster_;            ///< base_ of the block whose barriers this lane arrives at
  i32 tile_ = -1, item_ = -1;
  i32 flags_ = 0, next_flags_ = 0;
};

}  // namespace wgmma

RADDLE_ENGINE_END
