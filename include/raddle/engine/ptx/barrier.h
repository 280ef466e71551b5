// Barriers in shared memory that threads arrive at without waiting, and that asynchronous copies
// arrive at when they are done (sm_80 on). A phase ends with the expected number of arrivals; who
// waits names the phase by its parity, and may be one phase late.
#pragma once

#include "raddle/engine/core/config.h"

RADDLE_ENGINE_BEGIN

namespace ptx {

/// A new barrier of 8 bytes, whose phases end after `arrivals`; phase 0 is open.
RADDLE_DEVICE void barrier_create(u32 barrier, i32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/// Ends a barrier's life: its memory may be used for something else, or for a new one.
RADDLE_DEVICE void barrier_destroy(u32 barrier) {
  asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

RADDLE_DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier)
               : "memory");
}

/// This thread arrives once all its copies so far are done: one of the expected arrivals.
RADDLE_DEVICE void barrier_arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

/// Waits for the end of the phase of this parity.
RADDLE_DEVICE void barrier_wait(u32 barrier, i32 parity) {
#if __CUDA_ARCH__ >= 900  // which may sleep meanwhile
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#else
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

}  // namespace ptx

RADDLE_ENGINE_END
