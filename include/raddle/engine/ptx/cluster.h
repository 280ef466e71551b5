// Clusters (sm_90): blocks that run at the same time on neighbouring multiprocessors and reach one
// another's shared memory.
//
// A thread arrives at another block's barrier without ordering its own writes to memory: a release
// for the cluster would wait for all of them, which takes longer than a KV tile's products.
#pragma once

#include "raddle/engine/ptx/bulk.h"

RADDLE_ENGINE_BEGIN

namespace ptx {

/// This block's number in its cluster.
RADDLE_DEVICE i32 cluster_rank() {
  i32 x;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(x));
  return x;
}
/// Where the block of that rank has what this block has at `address` of its shared memory.
RADDLE_DEVICE u32 in_block_of_cluster(u32 address, i32 rank) {
  u32 x;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(x) : "r"(address), "r"(rank));
  return x;
}

/// Waits for all threads of all blocks of the cluster: what each wrote before, all see. Threads may
/// arrive and not wait.
RADDLE_DEVICE void arrive_cluster() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
RADDLE_DEVICE void sync_cluster() {
  arrive_cluster();
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

/// Where `arrives` holds, arrives at a barrier of any block of the cluster (in_block_of_cluster).
RADDLE_DEVICE void barrier_arrive_in_cluster_if(bool arrives, u32 barrier) {
  asm volatile(
      "{\n.reg .pred arrives;\nsetp.ne.s32 arrives, %1, 0;\n"
      "@arrives mbarrier.arrive.shared::cluster.b64 _, [%0];\n}" ::"r"(barrier),
      "r"(static_cast<i32>(arrives))
      : "memory");
}

/// Writes a word of another block's shared memory, and arrives at a barrier there; told_in_cluster
/// waits for the phase of this parity and reads the word.
RADDLE_DEVICE void tell_block_of_cluster(u32 word, i32 x, u32 barrier) {
  asm volatile(
      "st.shared::cluster.u32 [%0], %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%2];" ::"r"(word),
      "r"(x), "r"(barrier)
      : "memory");
}
RADDLE_DEVICE i32 told_in_cluster(u32 word, u32 barrier, i32 parity) {
  i32 x;
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%2], %3;\n"
      "@!done bra again;\nld.shared.u32 %0, [%1];\n}"
      : "=r"(x)
      : "r"(word), "r"(barrier), "r"(parity)
      : "memory");
  return x;
}

/// copy_box for both blocks of a cluster of two: to the same place of each, at whose barriers, too,
/// the bytes count.
RADDLE_DEVICE void copy_box_to_both(u32 to, const TensorMap* map, u32 barrier, i32 column, i32 row,
                                    i32 head, i32 page, Keep keep) {
  constexpr u16 both = 3;  // a bit for each rank
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %8, %7;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(page),
      "l"(static_cast<u64>(keep)), "h"(both)
      : "memory");
}

}  // namespace ptx

RADDLE_ENGINE_END
