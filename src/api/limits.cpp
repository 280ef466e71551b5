#include "raddle/limits.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "device/cpu/isa.h"
#include "device/cpu/pool.h"
#include "device/cpu/read_loops.h"
#include "raddle/error.h"

namespace raddle {
namespace {

using cpu::line_bytes, cpu::read_page_bytes;

constexpr int read_rounds = 4;
/// Many, and short: on shared machines a tenth of all samples of AMX run at half the rate.
constexpr int compute_rounds = 30;
constexpr double compute_round_seconds = 2e-3;
/// Huge pages of x86; where pages are smaller, the alignment is harmless.
constexpr std::size_t huge_page = std::size_t{2} << 20;

/// An anonymous mapping, not yet backed by memory.
class Mapping {
 public:
  explicit Mapping(std::size_t bytes) : bytes_(bytes + huge_page) {
    base_ = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) throw std::bad_alloc();
    ::madvise(base_, bytes_, MADV_HUGEPAGE);  // a wish; without it the figure is a little lower
  }
  ~Mapping() { ::munmap(base_, bytes_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  char* data() const {
    const u64 at = reinterpret_cast<u64>(base_);
    return static_cast<char*>(base_) + (round_up(at, u64{huge_page}) - at);
  }

 private:
  std::size_t bytes_;
  void* base_;
};

/// A thread's result, on a cache line of its own.
struct alignas(line_bytes) Sum {
  u64 value = 0;
};

/// Keeps loops from being optimised away.
void consume(u64 sum) {
  volatile u64 sink = sum;
  static_cast<void>(sink);
}

i32 checked_threads(i32 threads) {
  const i32 most = cpu::WorkerPool::instance().threads();
  if (threads == 0) return most;
  if (threads < 1 || threads > most)
    fail<ValueError>("threads is ", threads, "; expected 1 to ", most, ", or 0 for all");
  return threads;
}

/// The pool with all of `threads`, or an error: a figure for fewer would be wrong in silence.
template <class F>
void run_on_all(i32 threads, F&& body) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  while (cpu::WorkerPool::instance().run(threads, [&](i32 thread, i32 n) {
    if (n == threads) body(thread);
  }) != threads) {
    if (std::chrono::steady_clock::now() > end) {
      throw std::runtime_error(
          "limits: other jobs keep the worker pool, or the system refuses threads");
    }
  }
}

/// Seconds of one call on all threads.
template <class F>
double seconds(i32 threads, F&& body) {
  const auto start = std::chrono::steady_clock::now();
  run_on_all(threads, body);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Memory with a part of equal size for each thread, which has touched it.
class Parts {
 public:
  Parts(std::size_t bytes, i32 threads)
      : threads_(checked_threads(threads)),
        part_(bytes / static_cast<std::size_t>(threads_) / read_page_bytes * read_page_bytes),
        buffer_(checked(bytes)) {
    // Writing, because untouched pages would all be read from the one zero page.
    run_on_all(threads_, [&](i32 thread) { std::fill_n(part(thread), part_, char(1)); });
  }
  i32 threads() const { return threads_; }
  std::size_t part_bytes() const { return part_; }
  char* part(i32 thread) const { return buffer_.data() + static_cast<std::size_t>(thread) * part_; }

  /// The best rate in GB/s of a few rounds; loop(thread) reads that thread's part.
  template <class F>
  double best_gbps(F&& loop) const {
    std::vector<Sum> sums(static_cast<std::size_t>(threads_));
    double best = 0;
    for (int round = 0; round < read_rounds; ++round) {
      const double time = seconds(threads_, [&](i32 thread) {
        sums[static_cast<std::size_t>(thread)].value += loop(thread);
      });
      best = std::max(best, static_cast<double>(part_) * threads_ / time * 1e-9);
    }
    for (const Sum& sum : sums) consume(sum.value);
    return best;
  }

 private:
  std::size_t checked(std::size_t bytes) const {
    if (part_ < (std::size_t{64} << 10)) {
      fail<ValueError>("bytes is ", bytes,
                       "; expected at least 64 KiB a thread, better 1 GiB in all");
    }
    return bytes;
  }

  i32 threads_;
  std::size_t part_;
  Mapping buffer_;
};

ComputeLoop compute_loop(ComputeLimit limit) {
  const ComputeLoops& loops = cpu::compute_loops(cpu::selected_isa());
  switch (limit) {
    case ComputeLimit::fma:
      return loops.fma;
    case ComputeLimit::exp2:
      return loops.exp2;
    default:
      return loops.bf16;
  }
}

}  // namespace

double read_bandwidth_gbps(std::size_t bytes, i32 threads) {
  const Parts parts(bytes, threads);
  double best = 0;
  for (const cpu::SequentialLoop loop : cpu::sequential_loops()) {
    best = std::max(best, parts.best_gbps([&](i32 thread) {
      return loop(parts.part(thread), parts.part_bytes() / line_bytes);
    }));
  }
  return best;
}

double read_pages_gbps(std::size_t bytes, i32 threads) {
  const Parts parts(bytes, threads);
  std::vector<u32> order(parts.part_bytes() / read_page_bytes);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), std::mt19937(1));
  double best = 0;
  for (const cpu::PageLoop loop : cpu::page_loops()) {
    best = std::max(best,
                    parts.best_gbps([&](i32 thread) { return loop(parts.part(thread), order); }));
  }
  return best;
}

double compute_rate(ComputeLimit limit, i32 threads) {
  threads = checked_threads(threads);
  const ComputeLoop loop = compute_loop(limit);
  if (!loop) return 0;
  std::vector<Sum> sums(static_cast<std::size_t>(threads));
  i64 repeat = 1;
  double work = 0;  // of one thread, the same for all
  const auto round = [&] {
    return seconds(threads, [&](i32 thread) {
      const LoopResult found = loop(repeat);
      sums[static_cast<std::size_t>(thread)].value += found.sum;
      if (thread == 0) work = found.work;
    });
  };
  while (round() < compute_round_seconds) repeat *= 2;
  double best = 0;
  for (int i = 0; i < compute_rounds; ++i) {
    const double time = round();
    best = std::max(best, work * threads / time * 1e-9);
  }
  for (const Sum& sum : sums) consume(sum.value);
  return best;
}

}  // namespace raddle
