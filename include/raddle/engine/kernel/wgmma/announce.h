// The end of a worker's queue, first part: other workers learn that its states are stored.
#pragma once

#include "raddle/engine/kernel/gpu/queue_end.h"
#include "raddle/engine/kernel/wgmma/memory.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

/// The contractions of several levels that wait for an item's state.
struct Waiting {
  i32 count = 0;
  i32 first = 0;  ///< in PlanView::dependents
  i32 kv_head = 0;
};

/// Those that wait for the state of item number `number`, if the queue, which ends at `end`, has
/// it.
RADDLE_DEVICE Waiting look_up_waiting(const PlanView& plan, i32 number, i32 end) {
  if (number >= end || plan.items[number].partial_row < 0) return Waiting{};
  const WorkItem& item = plan.items[number];
  const QueryTile& tile = plan.query_tiles[item.query_tile];
  return Waiting{tile.dependents_end - tile.dependents_begin, tile.dependents_begin, item.kv_head};
}

/// The counter of the nth of them; -1: there are fewer.
RADDLE_DEVICE i32 look_up_counter(const PlanView& plan, const Waiting& waiting, i32 nth) {
  return nth < waiting.count
             ? counter_of(plan, plan.dependents[waiting.first + nth], waiting.kv_head)
             : -1;
}

/// Announces the states of items to the contractions of several levels that wait for them. Each
/// warp announces that of one item, or of several, with `lanes`, a power of two, of its lanes for
/// each: each lane to one contraction at a time, first to that of counter `at`. The team composes
/// shares that other workers gave up waiting for.
template <class Kernel, class Variant>
RADDLE_COLD void announce_to_levels(const GpuLaunch& launch, const Variant& variant,
                                    Waiting waiting, i32 at, i32 lanes) {
  auto& block = Memory<Kernel>::get();
  const PlanView& plan = launch.plan;
  ConsumerTeam::sync();  // every thread has stored its part of the states
  RADDLE_ROLLED
  for (i32 first = 0;; first += lanes) {
    const i32 nth = first + (ptx::lane_index() & (lanes - 1));
    if (first > 0) at = look_up_counter(plan, waiting, nth);
    i32 due = 0;
    if (at >= 0) {
      ptx::fence_device();  // makes the block's states visible before their arrival
      const Arrivals before{ptx::atomic_add(launch.arrived + at, 1)};
      if (before.left() > 0 && before.count() + 1 == plan.expected[at]) due = before.left();
    }
    const bool more = first + lanes < waiting.count;
    if (!ptx::sync_threads_any(consumers, ConsumerTeam::num_threads, due > 0 || more)) return;
    for (i32 i; (i = ConsumerTeam::first(due > 0, block.team().completed)) >= 0;) {
      const bool takes = ConsumerTeam::thread() == i;
      if (takes) --due;
      const i32 due_at = ConsumerTeam::tell(takes, at, block.team().completed);
      contract_left<Kernel>(launch, variant, due_at / plan.num_kv_heads, due_at % plan.num_kv_heads,
                            takes, block.team().completed,
                            block.team().vector[ConsumerTeam::warp()]);
    }
  }
}

/// Announces the states of a queue in a layout of several levels.
template <class Kernel, class Variant>
RADDLE_DEVICE void announce_all_to_levels(const GpuLaunch& launch, const Variant& variant,
                                          i32 begin, i32 end) {
  RADDLE_ROLLED
  for (i32 first = begin; first < end; first += ConsumerTeam::num_warps) {
    const Waiting waiting = look_up_waiting(launch.plan, first + ConsumerTeam::warp(), end);
    announce_to_levels<Kernel>(launch, variant, waiting,
                               look_up_counter(launch.plan, waiting, ptx::lane_index()), 32);
  }
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
                   block.team().completed, block.team().vector[ConsumerTeam::warp()]);
  }
}

}  // namespace wgmma

RADDLE_ENGINE_END
