// A team: the four warps that compute the queue of one worker. Where two teams fit a multiprocessor
// and all items are of short queries, a block has two teams. They run independently until both
// reach their last item. If these items are the two halves of a unit, the first team composes them
// in shared memory. Otherwise a half is stored as a partial state, and the worker that stores the
// last state composes it (arrive.h): to the same bits, but 4 µs later or more.
#pragma once

#include "raddle/engine/kernel/mma/launch.h"
#include "raddle/engine/ptx/instructions.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// The worker whose queue this team computes. The teams of block w have workers w and w + blocks,
/// which the plan pairs.
template <class Kernel>
RADDLE_DEVICE i32 worker_index() {
  return ptx::block_index() + (Kernel::teams > 1 ? ptx::team_index() * ptx::block_count() : 0);
}

/// A barrier for the threads of the team.
template <class Kernel>
RADDLE_DEVICE void sync_team() {
  if constexpr (Kernel::teams > 1)
    ptx::sync_team<num_threads>();
  else
    ptx::sync_block();
}

/// Whether the items of both teams are the halves of one unit, and the last items of their queues.
template <class Kernel>
RADDLE_DEVICE bool ends_with_paired_half(const WorkItem& item) {
  return Kernel::pairs_teams && item.paired_half != 0 && ptx::team_count() == 2;
}

}  // namespace mma

RADDLE_ENGINE_END
