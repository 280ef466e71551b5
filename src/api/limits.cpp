#include "raddle/limits.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <stdexcept>
#include <vector>

#include "device/cpu/pool.h"
#include "raddle/error.h"

namespace raddle {
namespace {

typedef u64 Pair
    __attribute__((vector_size(16)));  // every 64-bit machine has registers of this size

constexpr std::size_t line = 64;
constexpr std::size_t pairs_per_line = line / sizeof(Pair);
constexpr int rounds = 4;
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

/// Reads lines [0, count) of each of `streams` equal parts of a span side by side. The sums keep
/// the loads alive; four of them hide the adds' latency. `ahead` lines are prefetched; 0: none.
template <int streams, int ahead>
u64 read_span(const char* begin, std::size_t lines) {
  const std::size_t count = lines / streams;
  Pair sums[pairs_per_line] = {};
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t s = 0; s < streams; ++s) {
      const char* at = begin + (s * count + i) * line;
      if constexpr (ahead > 0) __builtin_prefetch(at + ahead * line);
      const Pair* pairs = static_cast<const Pair*>(__builtin_assume_aligned(at, line));
      for (std::size_t p = 0; p < pairs_per_line; ++p) sums[p] += pairs[p];
    }
  }
  u64 sum = 0;
  for (const Pair& pair : sums) sum += pair[0] + pair[1];
  return sum;
}

using ReadLoop = u64 (*)(const char* begin, std::size_t lines);

// Which one wins depends on the machine: hardware prefetchers follow few streams on one, more on
// another.
constexpr ReadLoop read_loops[] = {read_span<1, 0>, read_span<1, 32>, read_span<4, 0>,
                                   read_span<4, 8>, read_span<4, 16>, read_span<4, 32>,
                                   read_span<4, 64>};

struct alignas(line) Sum {
  u64 value = 0;
};

/// The pool with all of `threads`, or an error: a figure for fewer would be wrong in silence.
template <class F>
void run_on_all(i32 threads, F&& body) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  while (cpu::WorkerPool::instance().run(threads, [&](i32 thread, i32 n) {
    if (n == threads) body(thread);
  }) != threads) {
    if (std::chrono::steady_clock::now() > end) {
      throw std::runtime_error(
          "read_bandwidth_gbps: other jobs keep the worker pool, or the system "
          "refuses threads");
    }
  }
}

}  // namespace

double read_bandwidth_gbps(std::size_t bytes, i32 threads) {
  auto& pool = cpu::WorkerPool::instance();
  if (threads == 0) threads = pool.threads();
  if (threads < 1 || threads > pool.threads()) {
    fail<ValueError>("threads is ", threads, "; expected 1 to ", pool.threads(), ", or 0 for all");
  }
  const std::size_t lines = bytes / line / static_cast<std::size_t>(threads);
  if (lines < 1024) {
    fail<ValueError>("bytes is ", bytes,
                     "; expected at least 64 KiB a thread, better 1 GiB in all");
  }
  const Mapping buffer(bytes);
  const auto part = [&](i32 thread) {
    return buffer.data() + static_cast<std::size_t>(thread) * lines * line;
  };
  std::vector<Sum> sums(static_cast<std::size_t>(threads));
  // Writing, because untouched pages would all be read from the one zero page.
  run_on_all(threads, [&](i32 thread) { std::fill_n(part(thread), lines * line, char(1)); });
  double best = 0;
  for (const ReadLoop loop : read_loops) {
    for (int round = 0; round < rounds; ++round) {
      const auto start = std::chrono::steady_clock::now();
      run_on_all(threads, [&](i32 thread) {
        sums[static_cast<std::size_t>(thread)].value += loop(part(thread), lines);
      });
      const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
      const double read = static_cast<double>(lines * line) * threads;
      best = std::max(best, read / time.count() * 1e-9);
    }
  }
  u64 sum = 0;
  for (const Sum& s : sums) sum += s.value;
  // Keeps the loops from being optimised away; every byte is 1, so the sum is never 0 but for 2^64.
  volatile u64 sink = sum;
  static_cast<void>(sink);
  return best;
}

}  // namespace raddle
