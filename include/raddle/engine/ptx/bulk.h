// Hopper's bulk copies (sm_90): one thread has the hardware copy a box of a tensor in device memory
// to shared memory. A barrier counts the bytes; a phase of it ends when all threads have arrived
// and all bytes that were announced are there.
//
// Bulk copies and matrix instructions read and write shared memory through another proxy than loads
// and stores. What threads have written is seen through it behind `fence_proxy`; what copies have
// written is seen by whichever thread waits for their barrier.
#pragma once

#include "raddle/engine/core/tensor_map.h"
#include "raddle/engine/ptx/barrier.h"

RADDLE_ENGINE_BEGIN

namespace ptx {

using raddle::TensorMap;

/// Has the constant cache fetch the map.
RADDLE_DEVICE void prefetch(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// What this thread has written to shared memory is seen by bulk copies and matrix instructions
/// that a later barrier orders behind this.
RADDLE_DEVICE void fence_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// Barriers that this thread has created are seen by bulk copies.
RADDLE_DEVICE void fence_created_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// Arrives, and announces so many bytes of bulk copies in the open phase.
RADDLE_DEVICE void barrier_arrive_expecting(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

/// Announces so many bytes of bulk copies in the open phase, which ends no sooner than some thread
/// arrives.
RADDLE_DEVICE void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

/// How long lines stay in the L2 cache: as others do, shorter than others, or longer.
enum class Keep : u64 {
  usual = 0x1000000000000000,
  once = 0x12f0000000000000,
  again = 0x14f0000000000000
};

/// Whether this is the one lane of the warp that the hardware chooses. Behind this, unlike behind a
/// comparison of lane numbers, the assembler knows that a single lane starts copies, and needs no
/// loop over lanes.
RADDLE_DEVICE bool elected() {
  u32 is;
  asm volatile(
      "{\n.reg .pred one;\nmov.u32 %0, 0;\nelect.sync _|one, 0xffffffff;\n@one mov.u32 %0, 1;\n}"
      : "=r"(is));
  return is != 0;
}

/// Starts copying the box at `column`, `row`, `head`, `page` (dimensions 0 to 3; elements, not
/// bytes) to `to`, a multiple of 128 bytes, and of 1,024 if the map swizzles. Elements outside of
/// the tensor are zeros, and count as copied.
RADDLE_DEVICE void copy_box(u32 to, const TensorMap* map, u32 barrier, i32 column, i32 row,
                            i32 head, i32 page, Keep keep) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(page),
      "l"(static_cast<u64>(keep))
      : "memory");
}

/// Starts copying shared memory from `from` on, as copy_box would have written it, to the box at
/// `column`, `row`, `head`, `page`. Elements outside of the tensor are not written.
RADDLE_DEVICE void store_box(u32 from, const TensorMap* map, i32 column, i32 row, i32 head,
                             i32 page) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          map),
      "r"(from), "r"(column), "r"(row), "r"(head), "r"(page)
      : "memory");
}

/// Waits until the shared memory of all boxes that this thread has had stored has been read.
RADDLE_DEVICE void wait_stored() {
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}

}  // namespace ptx

RADDLE_ENGINE_END
