// A team: the four warps that compute one worker's queue. Where two fit a multiprocessor and all
// items are of short queries, they are two teams of one block, which know nothing of each other
// until both come to their last item: if these are pieces of one unit, as neighbours' often are,
// the warps of both add up their states at once, in shared memory. A piece that has no such
// neighbour is stored, said to be there, and composed by whoever comes last (arrive.h): 8 µs.
#pragma once

#include "raddle/engine/kernel/mma/launch.h"
#include "raddle/engine/ptx/instructions.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// Whose queue this team computes.
RADDLE_DEVICE i32 worker_index() {
  return ptx::team_count() * ptx::block_index() + ptx::team_index();
}

/// Waits for the team's threads.
template <class K>
RADDLE_DEVICE void sync_team() {
  if constexpr (K::teams > 1)
    ptx::sync_team<num_threads>();
  else
    ptx::sync_block();
}

/// The item that comes `at` in a queue that ends at `end`. The second of two teams has its first
/// item last: that is what follows the first team's last one.
template <class K>
RADDLE_DEVICE i32 item_at(const MmaLaunch& launch, i32 at, i32 end) {
  if (!K::joins || ptx::team_index() == 0) return at;
  return at + 1 < end ? at + 1 : launch.plan.queue_indptr[worker_index()];
}

/// Whether a team's last item and the other team's are pieces of one unit.
template <class K>
RADDLE_DEVICE bool ends_jointly(const MmaLaunch& launch, const WorkItem& item, i32 number) {
  if (!K::joins || !launch.joins || ptx::team_count() == 1) return false;
  const PlanView& plan = launch.plan;
  const i32 worker = worker_index(), second = ptx::team_index();
  const i32 other = second ? worker - 1 : worker + 1;
  if (other >= plan.num_workers || plan.queue_indptr[other] == plan.queue_indptr[other + 1])
    return false;
  const WorkItem& theirs = plan.items[second ? number - 1 : number + 1];
  return theirs.query_tile == item.query_tile && theirs.kv_head == item.kv_head;
}

}  // namespace mma

RADDLE_ENGINE_END
