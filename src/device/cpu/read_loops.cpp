#include "device/cpu/read_loops.h"

namespace raddle::cpu {
namespace {

typedef u64 Pair
    __attribute__((vector_size(16)));  // every 64-bit machine has registers of this size

constexpr std::size_t pairs_per_line = line_bytes / sizeof(Pair);
constexpr std::size_t lines_per_page = read_page_bytes / line_bytes;

/// Keeps the loads alive; four of them hide the adds' latency.
struct Sums {
  Pair pairs[pairs_per_line] = {};

  void add_line(const char* at) {
    const Pair* line = static_cast<const Pair*>(__builtin_assume_aligned(at, line_bytes));
    for (std::size_t p = 0; p < pairs_per_line; ++p) pairs[p] += line[p];
  }
  u64 total() const {
    u64 sum = 0;
    for (const Pair& pair : pairs) sum += pair[0] + pair[1];
    return sum;
  }
};

/// Reads lines [0, count) of each of `streams` equal parts of a span side by side. `ahead` lines
/// are prefetched; 0: none.
template <std::size_t streams, std::size_t ahead>
u64 read_span(const char* begin, std::size_t lines) {
  const std::size_t count = lines / streams;
  Sums sums;
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t s = 0; s < streams; ++s) {
      const char* at = begin + (s * count + i) * line_bytes;
      if constexpr (ahead > 0) __builtin_prefetch(at + ahead * line_bytes);
      sums.add_line(at);
    }
  }
  return sums.total();
}

/// Reads `in_flight` pages side by side, and prefetches `ahead` lines along each page and on into
/// those that come next; 0: none.
template <std::size_t in_flight, std::size_t ahead>
u64 read_pages(const char* begin, const std::vector<u32>& order) {
  static_assert(ahead < lines_per_page);
  const std::size_t groups = order.size() / in_flight;
  const auto page = [&](std::size_t group, std::size_t s) {
    return begin + std::size_t{order[group * in_flight + s]} * read_page_bytes;
  };
  Sums sums;
  for (std::size_t group = 0; group < groups; ++group) {
    const char* now[in_flight];
    const char* next[in_flight];
    for (std::size_t s = 0; s < in_flight; ++s) {
      now[s] = page(group, s);
      next[s] = page(group + 1 < groups ? group + 1 : group, s);
    }
    for (std::size_t i = 0; i < lines_per_page - ahead; ++i) {
      for (std::size_t s = 0; s < in_flight; ++s) {
        if constexpr (ahead > 0) __builtin_prefetch(now[s] + (i + ahead) * line_bytes);
        sums.add_line(now[s] + i * line_bytes);
      }
    }
    for (std::size_t i = 0; i < ahead; ++i) {
      for (std::size_t s = 0; s < in_flight; ++s) {
        __builtin_prefetch(next[s] + i * line_bytes);
        sums.add_line(now[s] + (lines_per_page - ahead + i) * line_bytes);
      }
    }
  }
  return sums.total();
}

}  // namespace

const std::vector<SequentialLoop>& sequential_loops() {
  static const std::vector<SequentialLoop> loops = {
      read_span<1, 0>,  read_span<1, 32>, read_span<4, 0>, read_span<4, 8>,
      read_span<4, 16>, read_span<4, 32>, read_span<4, 64>};
  return loops;
}

const std::vector<PageLoop>& page_loops() {
  static const std::vector<PageLoop> loops = {read_pages<4, 0>,  read_pages<8, 0>,
                                              read_pages<16, 0>, read_pages<4, 16>,
                                              read_pages<8, 8>,  read_pages<16, 4>};
  return loops;
}

}  // namespace raddle::cpu
