// A team: the four warps that compute one worker's queue. Where two fit a multiprocessor and all
// items are of short queries, they are two teams of one block, which know nothing of each other
// until both come to their last item: if these are the two halves of a unit, they are composed in
// shared memory. Else a half is stored, said to be there, and composed by whoever comes last
// (arrive.h), to the same bits, but 4 µs and more later.
#pragma once

#include "raddle/engine/kernel/mma/launch.h"
#include "raddle/engine/ptx/instructions.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// Whose queue this team computes. Teams of a block are those of w and w + blocks, whom the plan
/// seats beside each other (plan/pairing.h).
template <class K>
RADDLE_DEVICE i32 worker_index() {
  return ptx::block_index() + (K::teams > 1 ? ptx::team_index() * ptx::block_count() : 0);
}

/// Waits for the team's threads.
template <class K>
RADDLE_DEVICE void sync_team() {
  if constexpr (K::teams > 1)
    ptx::sync_team<num_threads>();
  else
    ptx::sync_block();
}

/// Whether this team's item and the other team's are the halves of a unit, and both teams' last.
template <class K>
RADDLE_DEVICE bool ends_jointly(const WorkItem& item) {
  return K::joins && item.paired_half != 0 && ptx::team_count() == 2;
}

}  // namespace mma

RADDLE_ENGINE_END
