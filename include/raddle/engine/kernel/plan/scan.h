// Prefix sums over the threads of a block.
//
// Loops here and in the planner stay loops (RADDLE_ROLLED). It runs once: what it waits for is its
// own instructions, and every copy of a loop's body is fetched for a single use.
#pragma once

#include "raddle/engine/kernel/plan/memory.h"
#include "raddle/engine/ptx/instructions.h"

RADDLE_ENGINE_BEGIN

namespace planner {

/// Several sums at once.
template <i32 n>
struct Sums {
  i64 of[n];
  RADDLE_FN Sums operator+(const Sums& other) const {
    Sums sum;
    for (i32 i = 0; i < n; ++i) sum.of[i] = of[i] + other.of[i];
    return sum;
  }
};

RADDLE_DEVICE i64 join_words(i32 low, i32 high) {
  return static_cast<i64>(static_cast<u64>(static_cast<u32>(high)) << 32 | static_cast<u32>(low));
}

template <i32 n>
RADDLE_DEVICE Sums<n> shuffle_up(const Sums<n>& x, i32 delta) {
  Sums<n> y;
  RADDLE_UNROLL
  for (i32 i = 0; i < n; ++i)
    y.of[i] = join_words(ptx::shuffle_up(static_cast<i32>(x.of[i]), delta),
                         ptx::shuffle_up(static_cast<i32>(x.of[i] >> 32), delta));
  return y;
}

template <i32 n>
RADDLE_DEVICE Sums<n> shuffle(const Sums<n>& x, i32 lane) {
  Sums<n> y;
  RADDLE_UNROLL
  for (i32 i = 0; i < n; ++i)
    y.of[i] = join_words(ptx::shuffle(static_cast<i32>(x.of[i]), lane),
                         ptx::shuffle(static_cast<i32>(x.of[i] >> 32), lane));
  return y;
}

/// Sums over the lanes up to and with this one.
template <i32 n>
RADDLE_DEVICE Sums<n> scan_warp(Sums<n> x) {
  const i32 lane = ptx::thread_index() % 32;
  RADDLE_ROLLED
  for (i32 delta = 1; delta < 32; delta *= 2) {
    const Sums<n> before = shuffle_up(x, delta);
    if (lane >= delta) x = x + before;
  }
  return x;
}

/// Scans of a block of at most 1,024 threads.
class BlockScan {
 public:
  RADDLE_DEVICE explicit BlockScan(ScanMemory& memory) : memory_(memory) {}

  /// Sums over the threads before this one, added to `total`; then adds all threads' to `total`.
  /// Every thread calls it. All that threads wrote before is seen by all after it.
  template <i32 n>
  RADDLE_DEVICE Sums<n> exclusive(const Sums<n>& mine, Sums<n>& total) {
    static_assert(n <= ScanMemory::max_sums);
    const i32 lane = ptx::thread_index() % 32;
    const i32 warp = ptx::thread_index() / 32;
    i64* of_warps = memory_.of[turn_];
    turn_ ^= 1;
    const Sums<n> here = scan_warp(mine);
    if (lane == 31)
      for (i32 i = 0; i < n; ++i) of_warps[n * warp + i] = here.of[i];
    ptx::sync_block();
    Sums<n> warps{};
    if (lane < ptx::thread_count() / 32)
      for (i32 i = 0; i < n; ++i) warps.of[i] = of_warps[n * lane + i];
    warps = scan_warp(warps);
    const Sums<n> all = shuffle(warps, 31);
    const Sums<n> others = shuffle(warps, warp > 0 ? warp - 1 : 0);
    Sums<n> before = total;
    for (i32 i = 0; i < n; ++i)
      before.of[i] += here.of[i] - mine.of[i] + (warp > 0 ? others.of[i] : 0);
    total = total + all;
    return before;
  }

 private:
  ScanMemory& memory_;
  i32 turn_ = 0;
};

}  // namespace planner

RADDLE_ENGINE_END
