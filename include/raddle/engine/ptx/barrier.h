// Barriers in shared memory that threads arrive at without waiting, and that asynchronous copies
// arrive at when they are done. A phase ends with the expected number of arrivals; a waiting thread
// names the phase by its parity, and may be one phase late.
//
// sm_75 has no such barriers. There a barrier is two words. The lower half of the first counts
// arrivals up to 2^16; the arrival that completes a phase carries into the upper half, which is the
// number of the phase. The second word says how many arrivals a phase takes.
#pragma once

#include "raddle/engine/ptx/thread.h"

RADDLE_ENGINE_BEGIN

namespace ptx {

#if __CUDA_ARCH__ >= 800
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

/// The same where `arrives` holds, without a branch.
RADDLE_DEVICE void barrier_arrive_if(bool arrives, u32 barrier) {
  asm volatile(
      "{\n.reg .pred arrives;\n.reg .b64 state;\nsetp.ne.s32 arrives, %1, 0;\n"
      "@arrives mbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier),
      "r"(static_cast<i32>(arrives))
      : "memory");
}

/// All lanes of a warp arrive, each once all its copies so far are done: 32 of the expected
/// arrivals.
RADDLE_DEVICE void barrier_arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

/// The barrier's phase does not end before all copies of this lane so far are done.
RADDLE_DEVICE void barrier_await_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

/// Whether the phase of this parity has ended.
RADDLE_DEVICE bool barrier_ended(u32 barrier, i32 parity) {
  u32 ended;
  asm volatile(
      "{\n.reg .pred done;\nmbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}"
      : "=r"(ended)
      : "r"(barrier), "r"(parity)
      : "memory");
  return ended != 0;
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
#else
constexpr u32 arrivals_carry = 1 << 16;

RADDLE_DEVICE void barrier_create(u32 barrier, i32 arrivals) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(barrier), "r"(arrivals_carry - arrivals),
               "r"(arrivals)
               : "memory");
}

RADDLE_DEVICE void barrier_destroy(u32) {}

/// Several arrivals. A thread that waits sees what this thread did before, and what this thread has
/// seen of others. The last arrival starts the next phase's count; arrivals of that phase may have
/// come by then.
RADDLE_DEVICE void barrier_arrive(u32 barrier, u32 count) {
  u32 before;
  asm volatile("atom.acq_rel.cta.shared.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(barrier), "r"(count)
               : "memory");
  if ((before & (arrivals_carry - 1)) + count < arrivals_carry) return;
  u32 arrivals;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(arrivals) : "r"(barrier + 4) : "memory");
  asm volatile("red.relaxed.cta.shared.add.u32 [%0], %1;" ::"r"(barrier),
               "r"(arrivals_carry - arrivals)
               : "memory");
}
RADDLE_DEVICE void barrier_arrive(u32 barrier) { barrier_arrive(barrier, 1); }

/// Copies are done when they are started; one lane arrives for all.
RADDLE_DEVICE void barrier_arrive_after_copies(u32 barrier) {
  sync_warp();
  if (lane_index() == 0) barrier_arrive(barrier, 32);
}

RADDLE_DEVICE void barrier_wait(u32 barrier, i32 parity) {
  u32 word;
  do {
    asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(word) : "r"(barrier) : "memory");
  } while ((word / arrivals_carry & 1u) == static_cast<u32>(parity));
}
#endif

}  // namespace ptx

RADDLE_ENGINE_END
