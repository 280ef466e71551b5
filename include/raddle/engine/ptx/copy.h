// What is put into shared memory: asynchronous copies from device memory, in groups that complete
// in order, and pairs of numbers. sm_75 has no such copies: there they are done when they are
// started.
#pragma once

#include "raddle/engine/core/config.h"

RADDLE_ENGINE_BEGIN

namespace ptx {

#if __CUDA_ARCH__ >= 800
/// Starts writing 16 bytes to shared memory: `bytes`, a multiple of 4, that are copied, then zeros.
RADDLE_DEVICE void copy_async(u32 to, const void* from, i32 bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(bytes)
               : "memory");
}

/// Starts copying four bytes.
RADDLE_DEVICE void copy_word_async(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to),
               "l"(__cvta_generic_to_global(from))
               : "memory");
}

/// Closes a group of this thread's copies; it may be empty.
RADDLE_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most `pending` of this thread's groups, the newest, are under way.
template <i32 pending>
RADDLE_DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}
#else
/// Loads and stores. The assembler moves the loads of several calls in a row to the front, so that
/// one wait serves all.
RADDLE_DEVICE void copy_async(u32 to, const void* from, i32 bytes) {
  const u64 at = __cvta_generic_to_global(from);
  u32 x[4] = {};
  // An equality with 16 is read off the minimum that made it on sm_90, whose assembler then takes 0
  // for 16.
  if (bytes > 12) {
    asm volatile("ld.global.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "l"(at)
                 : "memory");
  } else {
    RADDLE_UNROLL
    for (i32 i = 0; i < 4; ++i)
      if (4 * i < bytes)
        asm volatile("ld.global.u32 %0, [%1];" : "=r"(x[i]) : "l"(at + 4 * i) : "memory");
  }
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}

RADDLE_DEVICE void copy_word_async(u32 to, const void* from) {
  u32 x;
  asm volatile("ld.global.u32 %0, [%1];"
               : "=r"(x)
               : "l"(__cvta_generic_to_global(from))
               : "memory");
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

RADDLE_DEVICE void copy_commit() {}
template <i32 pending>
RADDLE_DEVICE void copy_wait() {}
#endif

/// Two numbers to shared memory, at a multiple of 8 bytes.
RADDLE_DEVICE void store_two(float* to, float x, float y) {
  const u32 at = static_cast<u32>(__cvta_generic_to_shared(to));
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x), "f"(y) : "memory");
}

}  // namespace ptx

RADDLE_ENGINE_END
