// Each worker has a mailbox word of its own:
//
//   idle --(worker has spun too long)--> asleep        idle | asleep --(caller)--> work | stop
//
// The caller's exchange tells it whether the worker slept, so that no call pays for a wake-up that
// isn't needed, and no job can be missed or seen twice. Ends are counted down in one word, on which
// the caller may sleep.
#include "device/cpu/worker_threads.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <utility>

#include "device/cpu/topology.h"
#include "raddle/engine/simd/pause.h"

namespace raddle::cpu {
namespace {

using Clock = std::chrono::steady_clock;

// Long enough to bridge the gap between two launches that follow each other; more would be stolen
// from whatever else computes in the process.
constexpr auto worker_spin = std::chrono::microseconds(20);
// Longer: the workers are about to end, and a sleeping caller costs a wake-up.
constexpr auto caller_spin = std::chrono::microseconds(50);
// A sleeping worker is woken by its parent in a tree of this width, so that a caller with many
// workers starts its own part after a few system calls.
constexpr i32 wake_width = 8;

enum Mail : u32 { idle, asleep, work, stop };
constexpr u32 caller_sleeps = 1u << 31;

thread_local bool is_worker = false;

static_assert(sizeof(std::atomic<u32>) == sizeof(u32), "a futex is a plain word");

void futex_wait(std::atomic<u32>& word, u32 expected) {
  ::syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<u32>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

/// Spins until `done()`, for about `limit` at most. Returns whether it came true.
template <class Done>
bool spin(Clock::duration limit, Done done) {
  const auto end = Clock::now() + limit;
  do {
    for (int i = 0; i < 16; ++i) {
      if (done()) return true;
      simd::pause();
    }
  } while (Clock::now() < end);
  return done();
}

/// Lets the calling thread run on these CPUs except `without`.
void stay_on(const std::vector<i32>& cpus, i32 without = -1) {
  const i32 end = *std::max_element(cpus.begin(), cpus.end()) + 1;
  const std::size_t size = CPU_ALLOC_SIZE(end);
  cpu_set_t* set = CPU_ALLOC(end);
  if (!set) return;
  CPU_ZERO_S(size, set);
  for (const i32 cpu : cpus)
    if (cpu != without) CPU_SET_S(static_cast<std::size_t>(cpu), size, set);
  sched_setaffinity(0, size, set);  // best effort: the mask may have shrunk meanwhile
  CPU_FREE(set);
}

}  // namespace

WorkerThreads::WorkerThreads(i32 max_workers)
    : pins_(pinning_wanted()),
      cpus_(allowed_cpus()),
      workers_(static_cast<std::size_t>(max_workers)) {}

bool WorkerThreads::on_worker() { return is_worker; }

i32 WorkerThreads::grow(i32 wanted) {
  wanted = std::min(wanted, max_workers());
  while (started_ < wanted && start(worker(started_ + 1))) ++started_;
  return std::min(started_, wanted);
}

bool WorkerThreads::start(Worker& self) {
  self.owner = this;
  self.thread = started_ + 1;
  if (pins_ && !cpus_.empty())
    self.cpu = cpus_[static_cast<std::size_t>(self.thread) % cpus_.size()];
  // Workers block all signals: the program's own threads handle them.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const bool ok = pthread_create(&self.handle, nullptr, serve, &self) == 0;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return ok;
}

void* WorkerThreads::serve(void* arg) {
  Worker& self = *static_cast<Worker*>(arg);
  WorkerThreads& workers = *self.owner;
  is_worker = true;
  if (self.cpu >= 0) stay_on({self.cpu});
  while (workers.next_job(self)) {
    workers.wake_children(self.thread);
    workers.keep_off_caller(self);
    workers.take_part(self.thread);
    if (workers.pending_.fetch_sub(1, std::memory_order_acq_rel) == (caller_sleeps | 1u)) {
      futex_wake(workers.pending_);
    }
  }
  return nullptr;
}

/// Waits for mail; returns false when it is `stop`.
bool WorkerThreads::next_job(Worker& self) {
  const auto called = [&] { return self.mail.load(std::memory_order_acquire) >= work; };
  if (!spin(worker_spin, called)) {
    u32 expected = idle;
    if (self.mail.compare_exchange_strong(expected, asleep, std::memory_order_acq_rel)) {
      while (!called()) futex_wait(self.mail, asleep);
    }
  }
  // Acquire once more, for the failed exchange above. No other thread writes before this job's end
  // is counted.
  if (self.mail.load(std::memory_order_acquire) == stop) return false;
  self.mail.store(idle, std::memory_order_relaxed);
  return true;
}

/// Linux tends to wake a thread on the CPU of the thread that wakes it. A worker that starts there
/// takes turns with the caller until the scheduler moves one of them, later than a decode step
/// takes.
void WorkerThreads::keep_off_caller(Worker& self) {
  const bool room_for_all = static_cast<std::size_t>(num_threads_) <= cpus_.size();
  if (self.cpu >= 0 || self.kept_off == caller_cpu_ || caller_cpu_ < 0 || !room_for_all) return;
  self.kept_off = caller_cpu_;
  stay_on(cpus_, caller_cpu_);
}

void WorkerThreads::post(JobEntry entry, void* context, i32 num_threads) {
  caller_cpu_ = sched_getcpu();
  entry_ = entry;
  context_ = context;
  num_threads_ = num_threads;
  pending_.store(static_cast<u32>(num_threads - 1), std::memory_order_relaxed);
  // From the last to the first: a parent that starts at once then finds its children's `slept`
  // written.
  for (i32 t = num_threads - 1; t >= 1; --t) {
    Worker& self = worker(t);
    // Read apart from the exchange, for afterwards `slept` could race with the parent. A worker
    // that falls asleep between the two is woken on the spot.
    self.slept = self.mail.load(std::memory_order_relaxed) == asleep;
    const bool slept = self.mail.exchange(work, std::memory_order_acq_rel) == asleep;
    if (slept && !self.slept) futex_wake(self.mail);
  }
  wake_children(0);
}

void WorkerThreads::wake_children(i32 thread) {
  const i32 first = wake_width * thread + 1;
  const i32 end = std::min(num_threads_, first + wake_width);
  for (i32 child = first; child < end; ++child) {
    if (worker(child).slept) futex_wake(worker(child).mail);
  }
}

void WorkerThreads::take_part(i32 thread) {
  try {
    entry_(context_, thread, num_threads_);
  } catch (...) {
    if (!failed_.exchange(true, std::memory_order_relaxed)) error_ = std::current_exception();
  }
}

void WorkerThreads::wait() {
  if (spin(caller_spin, [&] { return pending_.load(std::memory_order_acquire) == 0; })) return;
  u32 now = pending_.fetch_or(caller_sleeps, std::memory_order_acq_rel) | caller_sleeps;
  while (now != caller_sleeps) {
    futex_wait(pending_, now);
    now = pending_.load(std::memory_order_acquire);
  }
}

std::exception_ptr WorkerThreads::take_error() {
  if (!failed_.exchange(false, std::memory_order_relaxed)) return nullptr;
  return std::exchange(error_, nullptr);
}

void WorkerThreads::stop_all() {
  for (i32 t = 1; t <= started_; ++t) {
    if (worker(t).mail.exchange(stop, std::memory_order_acq_rel) == asleep) {
      futex_wake(worker(t).mail);
    }
  }
  for (i32 t = 1; t <= started_; ++t) pthread_join(worker(t).handle, nullptr);
  started_ = 0;
}

}  // namespace raddle::cpu
