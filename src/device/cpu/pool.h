// The CPU worker pool: a handful of threads that wait for one job at a time.
//
// Raddle lives beside other pools (OpenMP under torch), so idle workers spin for a few microseconds
// only and then sleep. A caller never waits for the pool: when it is taken, the caller does its job
// alone, and the job's work queues (queues.h) see to it that nothing is left undone.
#pragma once

#include <atomic>
#include <memory>
#include <type_traits>

#include "device/cpu/topology.h"
#include "device/cpu/worker_threads.h"

namespace raddle::cpu {

class WorkerPool {
 public:
  /// The process's pool. Its threads start with the first job that needs them.
  static WorkerPool& instance();

  /// Threads that a job can have at most, the caller included: default_threads().
  i32 threads() const { return default_threads(); }

  /// Calls body(thread, num_threads) once for each thread 0 … num_threads - 1, and returns
  /// num_threads when all calls have. The caller is thread 0. num_threads is at most min(threads,
  /// this->threads()), and 1 where another job has the pool: for a second concurrent caller, and
  /// inside a body.
  ///
  /// The first exception of a body is rethrown here, after all calls have ended. A child made by
  /// fork() starts threads of its own; fork inside a body leaves that job unfinished in the child.
  template <class F>
  i32 run(i32 threads, F&& body) {
    using Body = std::remove_reference_t<F>;
    const void* context = std::addressof(body);
    return run_job(
        threads,
        [](void* body_of_job, i32 thread, i32 num_threads) {
          (*static_cast<Body*>(body_of_job))(thread, num_threads);
        },
        const_cast<void*>(context));
  }

  // There is one a process; public only so that it can be constant-initialised.
  constexpr WorkerPool() = default;
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

 private:
  friend struct PoolLifetime;
  class Lease;

  i32 run_job(i32 threads, JobEntry entry, void* context);
  i32 start_workers(i32 wanted);
  void stop_workers();
  void shut_down();
  void become_child();

  std::atomic<bool> busy_{false};    ///< held for a job's whole length; guards workers_
  std::atomic<bool> closed_{false};  ///< the process is ending: jobs run alone
  std::atomic<u32> forks_{0};        ///< how many forks lie between this process and the first
  WorkerThreads* workers_ = nullptr;
};

}  // namespace raddle::cpu
