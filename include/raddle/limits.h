// What this machine can do at best, measured: the yardstick beside every measured speed.
#pragma once

#include <cstddef>

#include "raddle/engine/core/config.h"

namespace raddle {

/// Bandwidth in GB/s (10^9 bytes a second) at which `threads` threads of the worker pool together
/// read `bytes` of main memory: the best of several read loops (one stream; four streams with
/// software prefetch at several distances), each the best of a few rounds. Takes a second or two.
///
/// Give a buffer of 1 GiB at least, else caches take part; the memory is allocated for the call, in
/// huge pages where the system grants them, and first touched by the threads that read it. threads
/// = 0: all of the pool. Raises ValueError for a bad argument, std::bad_alloc where memory is
/// short, and std::runtime_error where other jobs keep the pool.
double read_bandwidth_gbps(std::size_t bytes = std::size_t{1} << 30, i32 threads = 0);

/// The same of pages of 4 KiB in random order, several of them at a time: what a paged KV cache
/// can be read at.
double read_pages_gbps(std::size_t bytes = std::size_t{1} << 30, i32 threads = 0);

/// Rates of arithmetic in registers.
enum class ComputeLimit {
  fma,   ///< fp32 multiply-adds of the chosen instruction set, in GFLOP/s
  exp2,  ///< the kernels' exp2 of fp32 out of the L1 cache, in 10^9 elements a second
  bf16,  ///< products of random bf16, in tile registers or by pairs, in GFLOP/s
};

/// The rate of `threads` threads of the worker pool together, the best of a few rounds of
/// milliseconds; 0 where there is no such unit, or RADDLE_CPU_ISA leaves it out. Raises as
/// read_bandwidth_gbps does.
double compute_rate(ComputeLimit limit, i32 threads = 0);

}  // namespace raddle
