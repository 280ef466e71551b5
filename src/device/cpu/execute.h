// Runs a plan's queues on the worker pool, in scratch memory that is kept from run to run.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

#include "device/cpu/queues.h"
#include "raddle/engine/kernel/cpu/launch.h"

namespace raddle::cpu {

/// Memory of one run: partial states, counters, queue heads, each thread's tiles.
struct Scratch {
  std::vector<float> partial_o, partial_lse;
  std::vector<i32> arrived;  ///< zero between runs
  std::vector<QueueHead> heads;
  std::vector<std::unique_ptr<std::byte[]>> threads;
  std::size_t thread_bytes = 0;

  /// Grows to what `launch` needs on `num_threads` threads, and points the launch at it.
  void prepare(CpuLaunch& launch, const CpuKernels& kernels, i32 num_threads);
  /// The first whole cache line of a thread's memory.
  void* thread_memory(i32 thread) const;
};

/// Hands out scratch to one run at a time, so that concurrent runs never share. No lock that a fork
/// could catch: what a child's parent had taken is lost to the child.
class ScratchPool {
 public:
  ScratchPool() = default;
  ~ScratchPool();
  ScratchPool(const ScratchPool&) = delete;
  ScratchPool& operator=(const ScratchPool&) = delete;
  std::unique_ptr<Scratch> take();
  void give_back(std::unique_ptr<Scratch> scratch);

 private:
  static constexpr std::size_t most = 64;  ///< kept at a time: more runs side by side are rare
  std::array<std::atomic<Scratch*>, most> free_{};
};

/// Computes all items of the launch's plan with up to `num_threads` threads. `busy_us`, where
/// wanted, gets each thread's time from its first item to its last.
void execute(CpuLaunch& launch, const CpuKernels& kernels, i32 num_threads, ScratchPool& scratch,
             std::vector<double>* busy_us);

}  // namespace raddle::cpu
