// Splits loops that prepare or check a replay over the worker pool.
#pragma once

#include "device/cpu/pool.h"

namespace raddle::replay {

/// body(i) for i in [0, n), in equal spans, one a thread.
template <class Body>
void parallel_for(i64 n, const Body& body) {
  cpu::WorkerPool& pool = cpu::WorkerPool::instance();
  const i32 threads = static_cast<i32>(min<i64>(n, pool.threads()));
  if (threads == 0) return;
  pool.run(threads, [&](i32 thread, i32 num_threads) {
    const i64 end = n * (thread + 1) / num_threads;
    for (i64 i = n * thread / num_threads; i < end; ++i) body(i);
  });
}

}  // namespace raddle::replay
