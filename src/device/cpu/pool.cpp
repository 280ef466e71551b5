#include "device/cpu/pool.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace raddle::cpu {
namespace {

thread_local bool leads_job = false;

// Constant-initialised and never destroyed: usable before main and after exit has begun, without a
// guard that a fork could catch half-way.
constinit WorkerPool the_pool;

}  // namespace

WorkerPool& WorkerPool::instance() { return the_pool; }

/// Holds the pool for the length of a job.
class WorkerPool::Lease {
 public:
  explicit Lease(WorkerPool& pool) : pool_(pool), forks_(pool.forks_.load()) { leads_job = true; }
  ~Lease() {
    leads_job = false;
    if (!crossed_fork()) pool_.busy_.store(false, std::memory_order_release);
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  /// Whether the body has forked and this is the child: the job's other threads don't exist here.
  bool crossed_fork() const { return pool_.forks_.load(std::memory_order_relaxed) != forks_; }

 private:
  WorkerPool& pool_;
  u32 forks_;
};

i32 WorkerPool::run_job(i32 wanted, JobEntry entry, void* context) {
  const i32 most = std::min(wanted, threads());
  if (most <= 1 || busy_.load(std::memory_order_relaxed) ||
      busy_.exchange(true, std::memory_order_acquire)) {
    entry(context, 0, 1);
    return 1;
  }
  const Lease lease(*this);
  const i32 num_threads = 1 + (closed_.load() ? 0 : start_workers(most - 1));
  if (num_threads == 1) {
    entry(context, 0, 1);
    return 1;
  }
  WorkerThreads& workers = *workers_;
  workers.post(entry, context, num_threads);
  workers.take_part(0);
  if (!lease.crossed_fork()) workers.wait();
  if (std::exception_ptr error = workers.take_error()) std::rethrow_exception(std::move(error));
  return num_threads;
}

i32 WorkerPool::start_workers(i32 wanted) {
  // Too small only after forget_default_threads().
  if (workers_ && workers_->max_workers() < wanted) stop_workers();
  if (!workers_) workers_ = new WorkerThreads(std::max(wanted, threads() - 1));
  return workers_->grow(wanted);
}

void WorkerPool::stop_workers() {
  if (workers_) workers_->stop_all();
  delete std::exchange(workers_, nullptr);
}

/// Joins the workers, so that a library being unloaded leaves no thread in its code.
void WorkerPool::shut_down() {
  closed_ = true;
  // exit() called in a body: that job cannot end, and the process takes its threads along.
  if (leads_job || WorkerThreads::on_worker()) return;
  // A job of some other thread gets time to end, but must not keep the process from exiting.
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  while (busy_.exchange(true, std::memory_order_acquire)) {
    if (std::chrono::steady_clock::now() > end) return;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  stop_workers();
  busy_.store(false, std::memory_order_release);
}

/// After fork() the child has none of the worker threads, and the thread that held the pool may not
/// exist. The old WorkerThreads is leaked on purpose: its words may be in any state, and no thread
/// can be joined.
void WorkerPool::become_child() {
  workers_ = nullptr;
  forks_.fetch_add(1);
  busy_.store(false);
  forget_default_threads();
}

struct PoolLifetime {
  PoolLifetime() {
    pthread_atfork(nullptr, nullptr, [] { the_pool.become_child(); });
  }
  ~PoolLifetime() { the_pool.shut_down(); }
};

namespace {
const PoolLifetime lifetime;
}

}  // namespace raddle::cpu
