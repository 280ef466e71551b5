// Splits loops that prepare or check a replay over threads of their own. The engine's worker pool
// is left alone: what it did last is what the replay reports.
#pragma once

#include <thread>
#include <vector>

#include "raddle/engine/core/config.h"

namespace raddle::replay {

/// body(i) for i in [0, n), in equal spans.
template <class Body>
void parallel_for(i64 n, i32 threads, const Body& body) {
  const i64 workers = max<i64>(1, min<i64>(n, threads));
  const auto span = [&](i64 worker) {
    for (i64 i = n * worker / workers; i < n * (worker + 1) / workers; ++i) body(i);
  };
  std::vector<std::thread> others;
  for (i64 worker = 1; worker < workers; ++worker) others.emplace_back(span, worker);
  span(0);
  for (std::thread& other : others) other.join();
}

}  // namespace raddle::replay
