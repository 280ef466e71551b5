// A worker's queue: what is fetched before it, its items, items drawn from the shared queue, and
// the contractions at its end.
#pragma once

#include "raddle/engine/kernel/gpu/keys.h"
#include "raddle/engine/kernel/gpu/queue_end.h"
#include "raddle/engine/kernel/gpu/unused_rows.h"
#include "raddle/engine/plan/opening.h"

RADDLE_ENGINE_BEGIN

namespace gpu_kernel {

/// A thread's number among those of all workers.
template <class Kernel>
RADDLE_DEVICE i32 thread_of_all() {
  return Kernel::Team::num_threads * Kernel::Team::worker() + Kernel::Team::thread();
}

/// Every thread asks the L2 cache to fetch one line of the layout and the plan, so that the chain
/// of queue, item, tile and page table that leads to the first key is short.
template <class Kernel>
RADDLE_DEVICE void prefetch_plan(const GpuLaunch& launch) {
  const i64 line = 128 * i64{thread_of_all<Kernel>()};
  // Decided by vote, so that the compiler knows that a warp stays together.
  if (ptx::any(line < launch.array_bytes))
    ptx::prefetch(launch.arrays + min(line, launch.array_bytes - 1));
}

/// The same, and one line of the queries, which would otherwise wait behind the keys of all
/// workers.
template <class Kernel>
RADDLE_DEVICE void prefetch_inputs(const GpuLaunch& launch) {
  prefetch_plan<Kernel>(launch);
  const i32 thread = thread_of_all<Kernel>();
  constexpr i32 row_bytes = Kernel::dim_qk * static_cast<i32>(sizeof(typename Kernel::T));
  constexpr i32 lines = ceil_div(row_bytes, 128);
  const i32 num_heads = launch.plan.num_kv_heads * launch.plan.group_size;
  const i32 nth = thread / lines;
  if (nth >= launch.query_rows * num_heads)
    return;  // most threads return here, before the division
  const i32 row = nth / num_heads, head = nth % num_heads;
  const auto* query = static_cast<const typename Kernel::T*>(launch.q.data) +
                      row * launch.q.row_stride + head * launch.q.head_stride;
  ptx::prefetch(reinterpret_cast<const u8*>(query) + 128 * (thread % lines));
}

/// Computes one worker's queue: compute(begin, end) computes the items and returns whether some of
/// their rows are composed in shares. These shares are composed last, when the other workers'
/// states are stored.
template <class Kernel, class Memory, class Variant, class Compute>
RADDLE_DEVICE void attend_queue(const GpuLaunch& launch, const Variant& variant, Compute compute) {
  if (Kernel::Team::num_teams > 1 && Kernel::Team::worker() >= launch.plan.num_workers)
    return;  // the second team of the last block, where the number of workers is odd
  // These loads take longest, so they are issued first and waited for last.
  const i32* queue = launch.plan.queue_indptr + Kernel::Team::worker();
  const i32 begin = ptx::load_now(queue), end = ptx::load_now(queue + 1);
  prefetch_inputs<Kernel>(launch);
  // The address of the row of zeros lies in constant memory and arrives before the queue does.
  ptx::prefetch(zeros<Kernel>());
  zero_unused_rows<Kernel>(launch);
  mark<Kernel>(launch, TimelineStage::started, begin);
  if (!compute(begin, end) || begin == end) return;
  // The queue's bounds are loaded again: kept until here, they would take registers from the loops.
  contract_shares<Kernel>(launch, variant, ptx::load_now(queue), ptx::load_now(queue + 1),
                          Memory::completed_bits(), Memory::vector(Kernel::Team::warp()));
  mark<Kernel>(launch, TimelineStage::contracted, end - 1);
}

/// The long item after `item`: first the next one of the worker's own queue, then one of the shared
/// queue, whose numbers come after all own ones; negative if there is none. One thread calls this
/// once an item. The last worker that finds the shared queue empty resets its counters for the next
/// launch.
RADDLE_DEVICE i32 next_long(const GpuLaunch& launch, i32 worker, i32 item) {
  const PlanView& plan = launch.plan;
  const i32* own = plan.queue_indptr + worker;
  for (i32 i = item + 1; i < own[1]; ++i)
    if (plan.query_tiles[plan.items[i].query_tile].shape == long_queries) return i;
  const i32* open = plan.queue_indptr + plan.num_workers;
  if (open[0] == open[1]) return -1;
  const bool shared = all_are_shared(plan.queue_indptr, plan.num_workers);
  const i32 begun = shared ? plan.num_workers : open[0];
  const i32 drawn = begun + ptx::atomic_add(launch.drawn, 1);
  if (drawn < open[1]) return drawn;
  if (ptx::atomic_add(launch.drawn + 1, 1) == plan.num_workers - 1)
    launch.drawn[0] = launch.drawn[1] = 0;
  return -1;
}

/// Finds the block's first long item for all of its threads; each lane of a warp looks at one item.
RADDLE_DEVICE i32 first_long(const GpuLaunch& launch, i32 begin, i32 end) {
  const PlanView& plan = launch.plan;
  i32& first = *static_cast<i32*>(ptx::shared_memory());
  if (ptx::warp_index() == 0) {
    u32 found = 0;
    i32 i = begin;
    for (; i < end && found == 0; i += 32) {
      const i32 mine = i + ptx::lane_index();
      found = ptx::ballot(mine < end &&
                          plan.query_tiles[plan.items[mine].query_tile].shape == long_queries);
    }
    if (ptx::lane_index() == 0) {
      first = -1;
      if (found != 0)
        first = i - 32 + ptx::lowest_bit(found);
      else if (begin == end)
        first = first_item(plan.queue_indptr, plan.num_workers, ptx::block_index());
      if (first < 0) first = next_long(launch, ptx::block_index(), end);
    }
  }
  ptx::sync_block();
  const i32 item = first;
  ptx::sync_block();  // every thread has read it before the memory is used again
  return item;
}

}  // namespace gpu_kernel

RADDLE_ENGINE_END
