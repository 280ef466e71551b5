// What warpgroups, four warps each, of one block say to one another on Hopper: registers that
// change hands, and barriers by number.
#pragma once

#include "raddle/engine/core/config.h"

RADDLE_ENGINE_BEGIN

namespace ptx {

/// Every thread of a warpgroup keeps so many registers, a multiple of 8, and gives the others back:
/// of a kernel whose launch bounds say how many each has.
template <i32 count>
RADDLE_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

/// Waits until so many registers a thread are there.
template <i32 count>
RADDLE_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

/// Waits at barrier `id` (1 to 15) until `threads`, a multiple of 32, have come, those included
/// that do not wait.
RADDLE_DEVICE void sync_threads(i32 id, i32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// The same; returns whether the condition holds in some thread.
RADDLE_DEVICE bool sync_threads_any(i32 id, i32 threads, bool condition) {
  i32 some;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.s32 p, %1, 0;\nbar.red.or.pred q, %2, %3, p;\n"
      "selp.s32 %0, 1, 0, q;\n}"
      : "=r"(some)
      : "r"(static_cast<i32>(condition)), "r"(id), "r"(threads)
      : "memory");
  return some != 0;
}

/// Comes to a barrier and goes on.
RADDLE_DEVICE void arrive_threads(i32 id, i32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace ptx

RADDLE_ENGINE_END
