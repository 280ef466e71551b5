#include "device/cpu/pool.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace raddle::cpu {
namespace {

#if defined(__SANITIZE_THREAD__)
constexpr bool thread_sanitizer = true;
#else
constexpr bool thread_sanitizer = false;
#endif

/// Sets the pool's number of threads for one test, whatever the machine has.
class PoolTest : public testing::Test {
 protected:
  static void use_threads(int n) {
    setenv("RADDLE_NUM_THREADS", std::to_string(n).c_str(), 1);
    forget_default_threads();
  }
  void SetUp() override { use_threads(4); }
  void TearDown() override {
    unsetenv("RADDLE_NUM_THREADS");
    forget_default_threads();
  }
  WorkerPool& pool = WorkerPool::instance();
};

TEST_F(PoolTest, CallsEachThreadOnce) {
  for (i32 wanted = -1; wanted <= 6; ++wanted) {
    std::atomic<int> calls[8] = {};
    const i32 n = pool.run(wanted, [&](i32 thread, i32 num_threads) {
      EXPECT_EQ(num_threads, std::clamp(wanted, 1, 4));
      ++calls[thread];
    });
    EXPECT_EQ(n, std::clamp(wanted, 1, 4));
    for (i32 t = 0; t < 8; ++t) EXPECT_EQ(calls[t].load(), t < n ? 1 : 0);
  }
}

TEST_F(PoolTest, CallerIsThreadZeroAndOthersAreNot) {
  const auto caller = std::this_thread::get_id();
  pool.run(4,
           [&](i32 thread, i32) { EXPECT_EQ(std::this_thread::get_id() == caller, thread == 0); });
}

TEST_F(PoolTest, PlainWritesAreVisibleBothWays) {
  std::vector<i64> values(4, 0);
  for (i64 round = 1; round <= 5000; ++round) {
    i64 input = round;  // plain memory on the caller's stack
    const i32 n =
        pool.run(4, [&](i32 thread, i32) { values[static_cast<std::size_t>(thread)] += input; });
    ASSERT_EQ(n, 4);
    input = 0;
    for (const i64 v : values) ASSERT_EQ(v, round * (round + 1) / 2);
  }
}

TEST_F(PoolTest, WorksAfterSleep) {
  for (int round = 0; round < 200; ++round) {
    // Around the spin's end, where falling asleep and being called meet.
    std::this_thread::sleep_for(std::chrono::microseconds(round % 2 ? 5 : 200));
    std::atomic<int> calls{0};
    pool.run(4, [&](i32, i32) { ++calls; });
    ASSERT_EQ(calls, 4);
  }
}

TEST_F(PoolTest, CallerSleepsThroughALongJob) {
  std::atomic<int> ended{0};
  for (int round = 0; round < 20; ++round) {
    pool.run(4, [&](i32 thread, i32) {
      if (thread > 0) std::this_thread::sleep_for(std::chrono::milliseconds(thread));
      ++ended;
    });
    ASSERT_EQ(ended, 4 * (round + 1));
  }
}

TEST_F(PoolTest, NestedCallsRunAlone) {
  std::atomic<int> inner{0};
  pool.run(4, [&](i32, i32) {
    EXPECT_EQ(pool.run(4,
                       [&](i32 thread, i32 n) {
                         EXPECT_EQ(thread, 0);
                         EXPECT_EQ(n, 1);
                         ++inner;
                       }),
              1);
  });
  EXPECT_EQ(inner, 4);
}

TEST_F(PoolTest, SecondCallerRunsAloneAtOnce) {
  std::atomic<bool> started{false}, release{false};
  std::thread first([&] {
    pool.run(4, [&](i32 thread, i32) {
      if (thread > 0) return;
      started = true;
      while (!release) std::this_thread::yield();
    });
  });
  while (!started) std::this_thread::yield();
  EXPECT_EQ(pool.run(4, [](i32, i32 n) { EXPECT_EQ(n, 1); }), 1);
  release = true;
  first.join();
  EXPECT_EQ(pool.run(4, [](i32, i32) {}), 4);
}

TEST_F(PoolTest, RethrowsOnTheCallersSide) {
  for (i32 bad = 0; bad < 4; ++bad) {
    std::atomic<int> ended{0};
    try {
      pool.run(4, [&](i32 thread, i32) {
        if (thread == bad) throw std::runtime_error("thread " + std::to_string(thread));
        ++ended;
      });
      FAIL() << "nothing thrown";
    } catch (const std::runtime_error& error) {
      EXPECT_EQ(error.what(), "thread " + std::to_string(bad));
    }
    EXPECT_EQ(ended, 3) << "the others end first";
    EXPECT_EQ(pool.run(4, [](i32, i32) {}), 4) << "and the pool is free again";
  }
  EXPECT_THROW(pool.run(4, [](i32, i32) { throw 1; }), int);
  EXPECT_THROW(pool.run(1, [](i32, i32) { throw 1; }), int);
}

TEST_F(PoolTest, BadEnvironmentIsNamed) {
  for (const char* value : {"0", "-1", "four", "2 ", "99999"}) {
    setenv("RADDLE_NUM_THREADS", value, 1);
    forget_default_threads();
    try {
      pool.run(2, [](i32, i32) {});
      ADD_FAILURE() << value;
    } catch (const std::exception& error) {
      EXPECT_NE(std::string(error.what()).find("RADDLE_NUM_THREADS"), std::string::npos);
      EXPECT_NE(std::string(error.what()).find(value), std::string::npos);
    }
  }
}

/// A child's exit status; -1 if it hangs: no machine is so busy that it takes ten minutes to end.
int status_of(pid_t child) {
  for (int i = 0; i < 60'000; ++i) {
    int status = 0;
    if (waitpid(child, &status, WNOHANG) == child) {
      return WIFEXITED(status) ? WEXITSTATUS(status) : 100;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  return -1;
}

/// status_of a child that runs `body`: 0 where that is true.
template <class F>
int in_child(F body) {
  std::fflush(nullptr);  // lest a child that calls exit() says it again
  const pid_t child = fork();
  if (child == 0) _exit(body() ? 0 : 1);
  return status_of(child);
}

bool all_four_run() {
  std::atomic<int> calls{0};
  return WorkerPool::instance().run(4, [&](i32, i32) { ++calls; }) == 4 && calls == 4;
}

TEST_F(PoolTest, RunsInForkedChildren) {
  if (thread_sanitizer) GTEST_SKIP() << "ThreadSanitizer has no threads after a fork";
  ASSERT_TRUE(all_four_run());
  EXPECT_EQ(in_child([] { return all_four_run() && all_four_run(); }), 0);
  EXPECT_EQ(in_child([] { return in_child(all_four_run) == 0 && all_four_run(); }), 0);
  EXPECT_TRUE(all_four_run());
}

TEST_F(PoolTest, PinsWorkersWhenAsked) {
  if (thread_sanitizer) GTEST_SKIP() << "ThreadSanitizer has no threads after a fork";
  // In a child, whose workers are yet to be started.
  EXPECT_EQ(in_child([] {
              setenv("RADDLE_PIN", "1", 1);
              std::atomic<int> pinned{0};
              WorkerPool::instance().run(4, [&](i32 thread, i32) {
                if (thread > 0 && allowed_cpus().size() == 1) ++pinned;
              });
              return pinned == 3;
            }),
            0);
}

TEST_F(PoolTest, WorkersKeepOffTheCallersCpu) {
  const std::vector<i32> cpus = allowed_cpus();
  if (cpus.size() < 2) {  // there is nowhere else to be
    EXPECT_EQ(pool.run(4, [](i32, i32) {}), 4);
    return;
  }
  use_threads(2);
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  pool.run(2, [](i32, i32) {});  // starts the workers while the caller may still use all CPUs
  for (const i32 mine : {cpus[0], cpus[1], cpus[0]}) {
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(mine, &only);
    ASSERT_EQ(sched_setaffinity(0, sizeof(only), &only), 0);
    for (int repeat = 0; repeat < 20; ++repeat) {
      std::atomic<int> workers_cpu = -1;
      pool.run(2, [&](i32 thread, i32) {
        if (thread == 1) workers_cpu = sched_getcpu();
      });
      EXPECT_NE(workers_cpu, mine);
      if (repeat % 2 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }
  sched_setaffinity(0, sizeof(before), &before);
}

TEST_F(PoolTest, ForkWhileAnotherThreadHasThePool) {
  if (thread_sanitizer) GTEST_SKIP() << "ThreadSanitizer has no threads after a fork";
  // All threads are under way before the first fork: the address sanitizer's allocator has a lock
  // that starting threads hold, and a child would inherit.
  ASSERT_TRUE(all_four_run());
  std::atomic<bool> started{false}, stop{false};
  std::thread busy([&] {
    started = true;
    while (!stop) pool.run(4, [](i32, i32) {});
  });
  while (!started) std::this_thread::yield();
  for (int i = 0; i < 20; ++i)
    EXPECT_EQ(in_child([] { return all_four_run() && all_four_run(); }), 0);
  stop = true;
  busy.join();
}

TEST_F(PoolTest, ForkInsideABodyDoesNotHang) {
  if (thread_sanitizer) GTEST_SKIP() << "ThreadSanitizer has no threads after a fork";
  for (const bool leave_body : {false, true}) {
    const pid_t parent = getpid();
    pid_t child = -1;
    pool.run(4, [&](i32 thread, i32) {
      if (thread > 0) return std::this_thread::sleep_for(std::chrono::milliseconds(20));
      child = fork();
      if (child == 0 && !leave_body) _exit(all_four_run() ? 0 : 1);
    });
    // The child comes here too, without the other threads.
    if (getpid() != parent) _exit(all_four_run() ? 0 : 1);
    EXPECT_EQ(status_of(child), 0);
  }
}

TEST_F(PoolTest, ExitJoinsIdleAndSkipsBusyWorkers) {
  if (thread_sanitizer) GTEST_SKIP() << "ThreadSanitizer has no threads after a fork";
  EXPECT_EQ(in_child([] {
              all_four_run();
              std::exit(0);
              return false;
            }),
            0);
  EXPECT_EQ(in_child([] {
              WorkerPool::instance().run(4, [](i32 thread, i32) {
                if (thread == 2) std::exit(0);
                std::this_thread::sleep_for(std::chrono::seconds(3));
              });
              return false;
            }),
            0);
}

}  // namespace
}  // namespace raddle::cpu
