// Partial states and counters of an attention on a GPU: one set a stream, since the kernels of one
// stream run one after another.
#pragma once

#include <deque>
#include <mutex>

#include "device/cuda/memory.h"
#include "raddle/engine/kernel/run.h"
#include "raddle/engine/plan/plan.h"

namespace raddle::cuda {

/// Points `view` to scratch for so many rows of partial states and counters, which lies at `base`.
void point_to_scratch(void* base, i64 rows, i64 counters, i32 dim_vo, RunView& view);

class StreamScratch {
 public:
  StreamScratch(const Device& device, i32 dim_vo) : device_(&device), dim_vo_(dim_vo) {}

  /// Points `view` to the scratch that `plan` needs on `stream`; grows it in stream order. Counters
  /// are zeroed once: kernels leave them zero. Needs a ContextScope. Hold the lock until the kernel
  /// is launched: another thread may grow the same set.
  [[nodiscard]] std::unique_lock<std::mutex> provide(const PlanView& plan, StreamHandle stream,
                                                     RunView& view);

 private:
  struct Set {
    StreamId stream;
    Block block;
    i64 rows = -1, counters = -1;  ///< that there is room for
  };
  /// More streams than programs have: the one that was new first has its set taken away. Callers
  /// may destroy streams, whose sets nothing would use again.
  static constexpr std::size_t most_sets = 64;
  const Device* device_;
  i32 dim_vo_;
  std::mutex mutex_;
  std::deque<Set> sets_;
};

}  // namespace raddle::cuda
