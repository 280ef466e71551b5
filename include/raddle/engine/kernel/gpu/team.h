// A team: the warps that compute one worker's queue together. Kernels name theirs Kernel::Team, and
// code that all families share learns from it alone how many warps there are and which one this is,
// and waits at its barrier.
#pragma once

#include "raddle/engine/kernel/gpu/launch.h"
#include "raddle/engine/ptx/instructions.h"

RADDLE_ENGINE_BEGIN

namespace gpu_kernel {

template <bool condition, class A, class B>
struct Either {
  using Type = A;
};
template <class A, class B>
struct Either<false, A, B> {
  using Type = B;
};

/// How the threads of a team, which has a barrier, decide something together.
template <class Team>
struct TeamVotes {
  /// The first thread of the team for which `yes` is true; -1: none. `bits`, in shared memory, has
  /// a word a warp.
  RADDLE_DEVICE static i32 first(bool yes, u32* bits) {
    const u32 of_warp = ptx::ballot(yes);
    if (ptx::lane_index() == 0) bits[Team::warp()] = of_warp;
    Team::sync();
    i32 found = -1;
    for (i32 w = Team::num_warps - 1; w >= 0; --w)
      if (bits[w] != 0) found = 32 * w + ptx::lowest_bit(bits[w]);
    Team::sync();  // every warp has read the words
    return found;
  }

  /// Hands `what` from the thread with `tells` to all threads of the team.
  RADDLE_DEVICE static i32 tell(bool tells, i32 what, u32* bits) {
    if (tells) bits[0] = static_cast<u32>(what);
    Team::sync();
    const i32 told = static_cast<i32>(bits[0]);
    Team::sync();
    return told;
  }
};

/// `warps` warps of a block that has `teams` such teams, each with its own thread numbers.
template <i32 warps, i32 teams>
struct BlockTeam : TeamVotes<BlockTeam<warps, teams>> {
  static constexpr i32 num_warps = warps;
  static constexpr i32 num_threads = 32 * warps;
  static constexpr i32 num_teams = teams;  ///< of a block

  /// This warp's and this thread's number in the team.
  RADDLE_DEVICE static i32 warp() { return ptx::warp_index(); }
  RADDLE_DEVICE static i32 thread() { return ptx::thread_index(); }

  /// The worker whose queue the team computes. The teams of block w have workers w and w + blocks,
  /// which the plan pairs.
  RADDLE_DEVICE static i32 worker() {
    return ptx::block_index() + (teams > 1 ? ptx::team_index() * ptx::block_count() : 0);
  }

  /// A barrier for the threads of the team.
  RADDLE_DEVICE static void sync() {
    if constexpr (teams > 1)
      ptx::sync_team<num_threads>();
    else
      ptx::sync_block();
  }
};

}  // namespace gpu_kernel

RADDLE_ENGINE_END
