// What the lanes of a warp say together.
#pragma once

#include "raddle/engine/core/config.h"

RADDLE_ENGINE_BEGIN

namespace ptx {

/// Whether the condition holds on some lane of the warp.
RADDLE_DEVICE bool any(bool condition) {
  i32 some;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.s32 p, %1, 0;\nvote.sync.any.pred q, p, 0xffffffff;\n"
      "selp.s32 %0, 1, 0, q;\n}"
      : "=r"(some)
      : "r"(static_cast<i32>(condition)));
  return some != 0;
}

/// Bit i is what lane i says.
RADDLE_DEVICE u32 ballot(bool yes) {
  u32 votes;
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %1, 0;\nvote.sync.ballot.b32 %0, p, 0xffffffff;\n}"
               : "=r"(votes)
               : "r"(yes ? 1u : 0u));
  return votes;
}

/// The largest of what the lanes hold.
RADDLE_DEVICE u32 max_of_warp(u32 x) {
#if __CUDA_ARCH__ >= 800
  u32 most;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(most) : "r"(x));
  return most;
#else
  RADDLE_UNROLL
  for (i32 distance = 16; distance > 0; distance /= 2) {
    u32 other;
    asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;"
                 : "=r"(other)
                 : "r"(x), "r"(distance));
    x = max(x, other);
  }
  return x;
#endif
}

RADDLE_DEVICE i32 count_bits(u32 x) {
  u32 n;
  asm("popc.b32 %0, %1;" : "=r"(n) : "r"(x));
  return static_cast<i32>(n);
}

/// The number of the lowest bit that is set.
RADDLE_DEVICE i32 lowest_bit(u32 x) { return count_bits((x & (0u - x)) - 1u); }

/// `count` bits from number `first` on, both 0 or more; beyond bit 31 there are none.
RADDLE_DEVICE u32 bit_mask(i32 first, i32 count) {
  u32 mask;
  asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(mask) : "r"(first), "r"(count));
  return mask;
}

}  // namespace ptx

RADDLE_ENGINE_END
