// What the threads of a block need to compute together, beyond thread.h: integers across lanes, and
// small atomics.
#pragma once

#include "raddle/engine/core/config.h"

RADDLE_ENGINE_BEGIN

namespace ptx {

RADDLE_DEVICE i32 thread_count() { return static_cast<i32>(blockDim.x); }
RADDLE_DEVICE i32 block_count() { return static_cast<i32>(gridDim.x); }

/// The value that lane (this lane - delta) holds; this lane's own where there is none.
RADDLE_DEVICE i32 shuffle_up(i32 x, i32 delta) {
  i32 y;
  asm volatile("shfl.sync.up.b32 %0, %1, %2, 0x0, 0xffffffff;" : "=r"(y) : "r"(x), "r"(delta));
  return y;
}

/// The value that lane `lane` holds.
RADDLE_DEVICE i32 shuffle(i32 x, i32 lane) {
  i32 y;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(y) : "r"(x), "r"(lane));
  return y;
}

/// Sets bits of a word; of shared or device memory.
RADDLE_DEVICE void atomic_or(i32* word, i32 bits) {
  asm volatile("red.or.b32 [%0], %1;" ::"l"(word), "r"(bits) : "memory");
}

/// Lowers a number to x.
RADDLE_DEVICE void atomic_min(i32* number, i32 x) {
  asm volatile("red.min.s32 [%0], %1;" ::"l"(number), "r"(x) : "memory");
}

}  // namespace ptx

RADDLE_ENGINE_END
