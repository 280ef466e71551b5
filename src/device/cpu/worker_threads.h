// The threads behind the worker pool: how a job is posted to them, and how its end is awaited. One
// job at a time; pool.cpp sees to that.
#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <vector>

#include "raddle/engine/core/config.h"

namespace raddle::cpu {

using JobEntry = void (*)(void* context, i32 thread, i32 num_threads);

class WorkerThreads {
 public:
  /// Room for so many workers; grow() starts them. Raises ValueError for a bad RADDLE_PIN.
  explicit WorkerThreads(i32 max_workers);
  WorkerThreads(const WorkerThreads&) = delete;
  WorkerThreads& operator=(const WorkerThreads&) = delete;

  i32 max_workers() const { return static_cast<i32>(workers_.size()); }
  /// Has up to `wanted` workers running; returns how many a job may count on. The system may refuse
  /// some.
  i32 grow(i32 wanted);
  /// Starts a job on threads 1 … num_threads - 1.
  void post(JobEntry entry, void* context, i32 num_threads);
  /// Runs the current job's body as `thread`, keeping what it throws.
  void take_part(i32 thread);
  /// Waits until all workers have done their part.
  void wait();
  /// The exception of the first body of the job that threw, if any did.
  std::exception_ptr take_error();
  /// Ends all workers.
  void stop_all();

  /// Whether the calling thread is a worker.
  static bool on_worker();

 private:
  // Two lines: the adjacent-line prefetcher couples neighbours.
  static constexpr std::size_t separate = 128;

  struct alignas(separate) Worker {
    std::atomic<u32> mail{0};
    bool slept = false;  ///< when the job was posted: its parent has to wake it
    i32 thread = 0;
    i32 cpu = -1;       ///< pinned there; -1: anywhere
    i32 kept_off = -1;  ///< the CPU that it must not run on; -1: none
    pthread_t handle{};
    WorkerThreads* owner = nullptr;
  };

  static void* serve(void* worker);
  bool start(Worker& worker);
  bool next_job(Worker& worker);
  void wake_children(i32 thread);
  void keep_off_caller(Worker& self);
  Worker& worker(i32 thread) { return workers_[static_cast<std::size_t>(thread - 1)]; }

  JobEntry entry_ = nullptr;
  void* context_ = nullptr;
  i32 num_threads_ = 1;
  i32 started_ = 0;
  std::exception_ptr error_;
  std::atomic<bool> failed_{false};
  const bool pins_;
  const std::vector<i32> cpus_;  ///< that the process may use
  i32 caller_cpu_ = -1;          ///< where the current job was posted
  std::vector<Worker> workers_;
  alignas(separate) std::atomic<u32> pending_{
      0};  ///< workers that have not finished, and a bit for a sleeping caller
};

}  // namespace raddle::cpu
