// Threads of a block: their numbers, how they wait for one another, how they exchange registers.
#pragma once

#include "raddle/engine/core/config.h"

RADDLE_ENGINE_BEGIN

namespace ptx {

/// Read anew at every call, so that no compiler keeps what follows from it in registers throughout.
RADDLE_DEVICE i32 thread_index() {
  i32 x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}
RADDLE_DEVICE i32 lane_index() { return thread_index() & 31; }
RADDLE_DEVICE i32 warp_index() { return thread_index() >> 5; }
RADDLE_DEVICE i32 block_index() { return static_cast<i32>(blockIdx.x); }
/// A block may be several teams of as many threads each, which have thread numbers of their own.
RADDLE_DEVICE i32 team_index() { return static_cast<i32>(threadIdx.y); }
RADDLE_DEVICE i32 team_count() { return static_cast<i32>(blockDim.y); }

struct alignas(128) SharedUnit {
  u8 bytes[128];
};

/// The block's dynamic shared memory.
RADDLE_DEVICE void* shared_memory() {
  extern __shared__ SharedUnit memory[];
  return memory;
}

RADDLE_DEVICE void sync_block() { asm volatile("bar.sync 0;" ::: "memory"); }
/// The same for a team of so many threads.
template <i32 num_threads>
RADDLE_DEVICE void sync_team() {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + team_index()), "n"(num_threads) : "memory");
}
RADDLE_DEVICE void sync_warp() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }
/// The same for some lanes of the warp, a bit each.
RADDLE_DEVICE void sync_lanes(u32 lanes) {
  asm volatile("bar.warp.sync %0;" ::"r"(lanes) : "memory");
}

/// Nanoseconds on a clock that all multiprocessors share.
RADDLE_DEVICE i64 global_time() {
  i64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

/// Orders this thread's accesses to device memory, before and after, for all threads of the device.
RADDLE_DEVICE void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

/// The value that lane (this lane ^ mask) holds; all of `lanes` take part, a bit each.
RADDLE_DEVICE float shuffle_xor(float x, i32 mask, u32 lanes = 0xffffffffu) {
  float y;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, %3;"
               : "=f"(y)
               : "f"(x), "r"(mask), "r"(lanes));
  return y;
}

RADDLE_DEVICE u32 shuffle_xor(u32 x, i32 mask) {
  u32 y;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(y) : "r"(x), "r"(mask));
  return y;
}

/// The value that lane `lane` holds.
RADDLE_DEVICE float shuffle(float x, i32 lane) {
  float y;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=f"(y) : "f"(x), "r"(lane));
  return y;
}

/// x, which is the same in all lanes. The assembler learns of it here, and keeps what follows from
/// x in registers that a warp's lanes share.
RADDLE_DEVICE u32 uniform(u32 x) {
  u32 y;
  asm volatile("shfl.sync.idx.b32 %0, %1, 0, 0x1f, 0xffffffff;" : "=r"(y) : "r"(x));
  return y;
}

template <class T>
RADDLE_DEVICE T* shuffle(T* x, i32 lane) {
  T* y;
  asm volatile(
      "{\n.reg .b32 lo, hi;\nmov.b64 {lo, hi}, %1;\n"
      "shfl.sync.idx.b32 lo, lo, %2, 0x1f, 0xffffffff;\n"
      "shfl.sync.idx.b32 hi, hi, %2, 0x1f, 0xffffffff;\nmov.b64 %0, {lo, hi};\n}"
      : "=l"(y)
      : "l"(x), "r"(lane));
  return y;
}

/// Adds to a counter in device memory; returns what it held before.
RADDLE_DEVICE i32 atomic_add(i32* counter, i32 x) {
  i32 before;
  asm volatile("atom.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(x) : "memory");
  return before;
}

/// The same; what the threads that added before had written by then, this thread sees afterwards.
RADDLE_DEVICE i32 atomic_add_acquire(i32* counter, i32 x) {
  i32 before;
  asm volatile("atom.acquire.gpu.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(x)
               : "memory");
  return before;
}

/// A word of device memory, asked for here, where the compiler might ask later.
RADDLE_DEVICE i32 load_now(const i32* word) {
  i32 x;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(x) : "l"(__cvta_generic_to_global(word)));
  return x;
}

/// A word that other multiprocessors write. What they wrote before it is seen behind a fence; until
/// then, what was read stays in this one's cache.
RADDLE_DEVICE i32 load_relaxed(const i32* word) {
  i32 x;
  asm volatile("ld.relaxed.gpu.b32 %0, [%1];" : "=r"(x) : "l"(word) : "memory");
  return x;
}

/// Has the L2 cache fetch the 128 bytes around an address.
RADDLE_DEVICE void prefetch(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(p)));
}

/// x, of which the compiler forgets what it knew: what follows from x is worked out anew, and does
/// not take registers meanwhile.
RADDLE_DEVICE i32 renewed(i32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

/// x, which the compiler has to have worked out by here.
RADDLE_DEVICE float settled(float x) {
  asm volatile("" : "+f"(x)::"memory");
  return x;
}

/// Keeps the assembler from moving instructions across this place, which barriers for the compiler
/// do not: a signal for performance monitors, which costs one instruction and has no other effect.
RADDLE_DEVICE void keep_order() { asm volatile("pmevent 15;" ::: "memory"); }

RADDLE_DEVICE void sleep(i32 ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns)); }

}  // namespace ptx

RADDLE_ENGINE_END
