#include "device/cpu/queues.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "device/cpu/pool.h"

namespace raddle::cpu {
namespace {

/// Runs of up to three items that begin at multiples of three.
i32 run_end(i32 first, i32 end) { return std::min(end, first / 3 * 3 + 3); }

/// Eight threads, whatever the machine has.
class QueuesTest : public testing::Test {
 protected:
  void SetUp() override {
    setenv("RADDLE_NUM_THREADS", "8", 1);
    forget_default_threads();
  }
  void TearDown() override {
    unsetenv("RADDLE_NUM_THREADS");
    forget_default_threads();
  }
  WorkerPool& pool = WorkerPool::instance();
};

TEST_F(QueuesTest, HandOutEachItemOnce) {
  std::mt19937 random(7);
  for (i32 threads = 1; threads <= 8; ++threads) {
    for (int round = 0; round < 50; ++round) {
      std::vector<i32> indptr{5};  // items need not start at 0
      const i32 queues = static_cast<i32>(random() % 12);
      for (i32 q = 0; q < queues; ++q) {
        indptr.push_back(indptr.back() + static_cast<i32>(random() % 20));
      }
      std::vector<QueueHead> heads(12);
      std::vector<std::atomic<int>> seen(static_cast<std::size_t>(indptr.back()));
      ItemQueues items(indptr.data(), queues, threads, heads.data());
      pool.run(threads, [&](i32 thread, i32) {
        ItemRun run{};
        while (items.next(thread, run, run_end))
          for (i32 i = run.first; i < run.end; ++i) ++seen[static_cast<std::size_t>(i)];
        EXPECT_FALSE(items.next(thread, run, run_end));
      });
      for (std::size_t i = 0; i < seen.size(); ++i) ASSERT_EQ(seen[i].load(), i < 5 ? 0 : 1);
    }
  }
}

TEST_F(QueuesTest, ServeTheirOwnInRunsAndTheFullestNextItemByItem) {
  const std::vector<i32> indptr{0, 5, 6, 6, 11};
  std::vector<QueueHead> heads(4);
  ItemQueues items(indptr.data(), 4, 2, heads.data());
  std::vector<std::vector<i32>> taken;
  for (ItemRun run; items.next(0, run, run_end);) taken.push_back({run.first, run.end, run.next});
  // Own queues 0 and 2, then queue 3 with five left until it ties with queue 1.
  const std::vector<std::vector<i32>> expected{{0, 3, 3},  {3, 5, -1},  {6, 7, -1}, {7, 8, -1},
                                               {8, 9, -1}, {9, 10, -1}, {5, 6, -1}, {10, 11, -1}};
  EXPECT_EQ(taken, expected);
}

TEST_F(QueuesTest, ManyCallersStealEveryItemOnce) {
  constexpr int callers = 6, rounds = 300;
  std::vector<std::thread> threads;
  for (int c = 0; c < callers; ++c) {
    threads.emplace_back([&, c] {
      std::mt19937 random(static_cast<unsigned>(c));
      std::vector<QueueHead> heads(8);
      for (int round = 0; round < rounds; ++round) {
        const i32 queues = static_cast<i32>(random() % 8) + 1;
        std::vector<i32> indptr{0};
        for (i32 q = 0; q < queues; ++q)
          indptr.push_back(indptr.back() + static_cast<i32>(random() % 12));
        std::vector<std::atomic<int>> seen(static_cast<std::size_t>(indptr.back()));
        // Made for four threads, though a job may get one only: stealing has to cover the rest.
        ItemQueues items(indptr.data(), queues, 4, heads.data());
        pool.run(4, [&](i32 thread, i32) {
          for (ItemRun run; items.next(thread, run, run_end);)
            for (i32 i = run.first; i < run.end; ++i) ++seen[static_cast<std::size_t>(i)];
        });
        for (const auto& count : seen) ASSERT_EQ(count.load(), 1);
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace
}  // namespace raddle::cpu
