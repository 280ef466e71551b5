#include "device/cpu/queues.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "device/cpu/pool.h"

namespace raddle::cpu {
namespace {

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
        for (i32 item; items.next(thread, item);) ++seen[static_cast<std::size_t>(item)];
        i32 none = -7;
        EXPECT_FALSE(items.next(thread, none));
      });
      for (std::size_t i = 0; i < seen.size(); ++i) ASSERT_EQ(seen[i].load(), i < 5 ? 0 : 1);
    }
  }
}

TEST_F(QueuesTest, ServeTheirOwnFirstAndTheFullestNext) {
  const std::vector<i32> indptr{0, 2, 3, 4, 9};
  std::vector<QueueHead> heads(4);
  ItemQueues items(indptr.data(), 4, 2, heads.data());
  std::vector<i32> order;
  for (i32 item; items.next(0, item);) order.push_back(item);
  // Own queues 0 and 2, then queue 3 with five left until it ties with queue 1.
  EXPECT_EQ(order, (std::vector<i32>{0, 1, 3, 4, 5, 6, 7, 2, 8}));
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
          for (i32 item; items.next(thread, item);) ++seen[static_cast<std::size_t>(item)];
        });
        for (const auto& count : seen) ASSERT_EQ(count.load(), 1);
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace
}  // namespace raddle::cpu
