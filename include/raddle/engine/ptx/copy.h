// What is put into shared memory: asynchronous copies from device memory (sm_80 on), in groups that
// complete in order, and pairs of numbers.
#pragma once

#include "raddle/engine/core/config.h"

RADDLE_ENGINE_BEGIN

namespace ptx {

/// Starts writing 16 bytes to shared memory: `bytes` that are copied, then zeros.
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

/// Two numbers to shared memory, at a multiple of 8 bytes.
RADDLE_DEVICE void store_two(float* to, float x, float y) {
  const u32 at = static_cast<u32>(__cvta_generic_to_shared(to));
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x), "f"(y) : "memory");
}

/// Closes a group of this thread's copies; it may be empty.
RADDLE_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most `pending` of this thread's groups, the newest, are under way.
template <i32 pending>
RADDLE_DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

}  // namespace ptx

RADDLE_ENGINE_END
