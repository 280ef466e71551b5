#include "raddle/limits.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "device/cpu/isa.h"
#include "device/cpu/read_loops.h"
#include "raddle/error.h"

namespace raddle {
namespace {

/// A span of which line i holds i in its first word and zeros elsewhere: a loop that skips a line,
/// or reads one twice, gives another sum.
class ReadLoops : public testing::Test {
 protected:
  static constexpr std::size_t pages = 48;
  static constexpr std::size_t lines = pages * cpu::read_page_bytes / cpu::line_bytes;
  struct alignas(cpu::line_bytes) Line {
    u64 words[8] = {};
  };
  void SetUp() override {
    for (std::size_t i = 0; i < lines; ++i) span_[i].words[i % 8] = i;
  }
  const char* begin() const { return reinterpret_cast<const char*>(span_.data()); }
  static constexpr u64 sum = lines * (lines - 1) / 2;
  std::vector<Line> span_ = std::vector<Line>(lines);
};

TEST_F(ReadLoops, ReadEveryLineOnce) {
  for (const cpu::SequentialLoop loop : cpu::sequential_loops())
    EXPECT_EQ(loop(begin(), lines), sum);
}

TEST_F(ReadLoops, ReadEveryPageOnceInAnyOrder) {
  std::vector<u32> order(pages);
  for (std::size_t i = 0; i < pages; ++i) order[i] = static_cast<u32>(i * 29 % pages);
  for (const cpu::PageLoop loop : cpu::page_loops()) EXPECT_EQ(loop(begin(), order), sum);
}

TEST(Limits, ReadingIsPlausible) {
  for (const auto measure : {read_bandwidth_gbps, read_pages_gbps}) {
    const double gbps = measure(std::size_t{8} << 20, 1);
    EXPECT_GT(gbps, 0.01);
    EXPECT_LT(gbps, 10000);
    EXPECT_THROW(measure(0, 1), ValueError);
    EXPECT_THROW(measure(std::size_t{1} << 20, -1), ValueError);
    EXPECT_THROW(measure(std::size_t{1} << 20, 1 << 20), ValueError);
  }
}

TEST(Limits, ArithmeticIsPlausible) {
  for (const ComputeLimit limit : {ComputeLimit::fma, ComputeLimit::exp2}) {
    EXPECT_GT(compute_rate(limit, 1), 0.001);
    EXPECT_LT(compute_rate(limit, 1), 10000);
    EXPECT_THROW(compute_rate(limit, -1), ValueError);
  }
  EXPECT_EQ(compute_rate(ComputeLimit::bf16, 1) > 0, cpu::selected_isa() >= cpu::Isa::avx512_bf16);
}

TEST(Limits, LoopsCountTheirWork) {
  for (const cpu::Isa isa : {cpu::Isa::generic, cpu::Isa::avx2, cpu::Isa::avx512,
                             cpu::Isa::avx512_bf16, cpu::Isa::amx}) {
    if (!cpu::supported(isa)) continue;
    const ComputeLoops& loops = cpu::compute_loops(isa);
    EXPECT_EQ(loops.bf16 != nullptr, isa >= cpu::Isa::avx512_bf16);
    for (const ComputeLoop loop : {loops.fma, loops.exp2, loops.bf16}) {
      if (!loop) continue;
      EXPECT_GT(loop(1).work, 0);
      EXPECT_EQ(loop(3).work, 3 * loop(1).work);
    }
    // The mean of 2^x for x in (-20, 0] is 1 / (20 ln 2).
    const auto [work, sum] = loops.exp2(10);
    EXPECT_NEAR(static_cast<double>(sum) / work, 1 / (20 * 0.693147), 0.001) << cpu::to_string(isa);
  }
}

}  // namespace
}  // namespace raddle
