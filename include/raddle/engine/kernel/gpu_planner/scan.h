// Prefix sums over the threads of a block.
//
// Loops here and in the planner stay loops (RADDLE_ROLLED). The kernel runs once, so it mostly
// waits for its own instructions, and every copy of a loop's body would be fetched for a single
// use.
#pragma once

#include "raddle/engine/kernel/gpu_planner/memory.h"
#include "raddle/engine/ptx/instructions.h"

RADDLE_ENGINE_BEGIN

namespace planner {

/// Several sums at once, of i32 or i64.
template <i32 n, class T = i64>
struct Sums {
  T of[n];
  RADDLE_FN Sums operator+(const Sums& other) const {
    Sums sum;
    for (i32 i = 0; i < n; ++i) sum.of[i] = of[i] + other.of[i];
    return sum;
  }
};

RADDLE_DEVICE i64 join_words(i32 low, i32 high) {
  return static_cast<i64>(static_cast<u64>(static_cast<u32>(high)) << 32 | static_cast<u32>(low));
}

RADDLE_DEVICE i32 shuffle_up(i32 x, i32 delta) { return ptx::shuffle_up(x, delta); }
RADDLE_DEVICE i64 shuffle_up(i64 x, i32 delta) {
  return join_words(ptx::shuffle_up(static_cast<i32>(x), delta),
                    ptx::shuffle_up(static_cast<i32>(x >> 32), delta));
}

/// Sums over the lanes up to and including this one; all lanes call it.
template <i32 n, class T>
RADDLE_DEVICE Sums<n, T> scan_warp(Sums<n, T> x, i32 lanes = 32) {
  const i32 lane = ptx::lane_index();
  RADDLE_ROLLED
  for (i32 delta = 1; delta < lanes; delta *= 2) {
    Sums<n, T> before;
    RADDLE_UNROLL
    for (i32 i = 0; i < n; ++i) before.of[i] = shuffle_up(x.of[i], delta);
    if (lane >= delta) x = x + before;
  }
  return x;
}

/// Scans of a block of at most 1,024 threads.
class BlockScan {
 public:
  RADDLE_DEVICE explicit BlockScan(ScanMemory& memory) : memory_(memory) {}

  /// Returns the sums over the threads before this one, plus `total`, and adds the sums of all
  /// threads to `total`. Every thread calls it; threads from `count` on have nothing to add. What
  /// any thread wrote before, all threads see afterwards.
  ///
  /// One warp adds up the warps' sums for all. If each warp did, their shuffles would compete for
  /// longer than a second barrier takes.
  template <i32 n, class T>
  RADDLE_DEVICE Sums<n, T> exclusive(const Sums<n, T>& mine, Sums<n, T>& total, i32 count) {
    static_assert(n <= ScanMemory::max_sums);
    const i32 lane = ptx::lane_index();
    const i32 warp = ptx::warp_index();
    const i32 warps =
        (min(count, ptx::thread_count()) + 31) / 32;  // warps that have something to add
    T* of_warps = reinterpret_cast<T*>(memory_.of[turn_]);
    turn_ ^= 1;
    Sums<n, T> here{};
    if (warp < warps) here = scan_warp(mine);
    if (warps <= 1) {  // only the first warp's sums are needed
      if (warp == 0 && lane == 31)
        for (i32 i = 0; i < n; ++i) of_warps[i] = here.of[i];
      ptx::sync_block();
    } else {
      if (lane == 31 && warp < warps)
        for (i32 i = 0; i < n; ++i) of_warps[n * warp + i] = here.of[i];
      ptx::sync_block();
      if (warp == 0) {
        Sums<n, T> sum{};
        if (lane < warps)
          for (i32 i = 0; i < n; ++i) sum.of[i] = of_warps[n * lane + i];
        sum = scan_warp(sum, warps);
        if (lane < warps)
          for (i32 i = 0; i < n; ++i) of_warps[n * lane + i] = sum.of[i];
      }
      ptx::sync_block();
    }
    Sums<n, T> before = total;
    for (i32 i = 0; i < n; ++i) {
      before.of[i] += here.of[i] - mine.of[i];
      if (warp > 0 && warp < warps) before.of[i] += of_warps[n * (warp - 1) + i];
      if (warps > 0) total.of[i] += of_warps[n * (warps - 1) + i];
    }
    return before;
  }

 private:
  ScanMemory& memory_;
  i32 turn_ = 0;
};

}  // namespace planner

RADDLE_ENGINE_END
