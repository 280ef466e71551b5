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

}  // namespace raddle
