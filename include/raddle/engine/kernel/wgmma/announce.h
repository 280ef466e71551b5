// The end of a worker's queue, first part: other workers learn that its states are stored.
#pragma once

#include "raddle/engine/kernel/gpu/queue_end.h"
#include "raddle/engine/kernel/wgmma/memory.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

/// Announces the states of items, at most as many as the team has warps, to the contractions of
/// several levels that wait for them. Each warp announces those of one item, each lane to one
/// contraction at a time. The team composes shares that other workers gave up waiting for.
template <class Kernel, class Variant>
RADDLE_COLD void announce_to_levels(const GpuLaunch& launch, const Variant& variant, i32 begin,
                                    i32 end) {
  auto& block = Memory<Kernel>::get();
  const PlanView& plan = launch.plan;
  const i32 mine = begin + ConsumerTeam::warp();
  QueryTile tile{};
  if (mine < end && plan.items[mine].partial_row >= 0)
    tile = plan.query_tiles[plan.items[mine].query_tile];
  const i32 count = tile.dependents_end - tile.dependents_begin;
  ConsumerTeam::sync();  // every thread has stored its part of the states
  bool goes_on = true;
  RADDLE_ROLLED
  for (i32 first = 0; goes_on; first += 32) {
    const i32 nth = first + ptx::lane_index();
    i32 due = 0;
    if (nth < count) {
      const i32 at =
          counter_of(plan, plan.dependents[tile.dependents_begin + nth], plan.items[mine].kv_head);
      ptx::fence_device();  // makes the block's states visible before their arrival
      const Arrivals before{ptx::atomic_add(launch.arrived + at, 1)};
      if (before.left() > 0 && before.count() + 1 == plan.expected[at]) due = before.left();
    }
    goes_on =
        ptx::sync_threads_any(consumers, ConsumerTeam::num_threads, due > 0 || first + 32 < count);
    if (!goes_on) return;
    for (i32 i; (i = ConsumerTeam::first(due > 0, block.completed)) >= 0;) {
      ptx::fence_device();  // makes the other blocks' states visible after their arrivals
      const bool takes = ConsumerTeam::thread() == i;
      if (takes) --due;
      const WorkItem& item = plan.items[begin + i / 32];
      const i32 dependent = plan.query_tiles[item.query_tile].dependents_begin + first + i % 32;
      contract_left<Kernel>(launch, variant, plan.dependents[dependent], item.kv_head, takes,
                            block.completed, block.vector[ConsumerTeam::warp()]);
    }
  }
}

/// Announces the states of a queue in a layout of several levels.
template <class Kernel, class Variant>
RADDLE_DEVICE void announce_all_to_levels(const GpuLaunch& launch, const Variant& variant,
                                          i32 begin, i32 end) {
  RADDLE_ROLLED
  for (i32 first = begin; first < end; first += ConsumerTeam::num_warps)
    announce_to_levels<Kernel>(launch, variant, first, end);
}

/// Announces the states of a queue in a layout of one level; a worker whose state is the last of a
/// tile with few rows composes it. Workers do this at the queue's end, because a call in the loop
/// of long queries would have that loop spill.
template <class Kernel, class Variant>
RADDLE_DEVICE void announce_all(const GpuLaunch& launch, const Variant& variant, i32 begin,
                                i32 end) {
  auto& block = Memory<Kernel>::get();
  RADDLE_ROLLED
  for (i32 i = begin; i < end; ++i) {
    const WorkItem& item = launch.plan.items[i];
    if (item.partial_row < 0) continue;
    arrive<Kernel>(launch, variant, item, look_up_ticket(launch, item, ConsumerTeam::thread()),
                   block.completed, block.vector[ConsumerTeam::warp()]);
  }
}

}  // namespace wgmma

RADDLE_ENGINE_END
