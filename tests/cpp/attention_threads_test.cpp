// Attention on several threads: the one that comes last composes partial states, and
// which one that is must show nowhere.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "attention_testing.h"
#include "device/cpu/topology.h"

namespace raddle {
namespace {

using namespace testing_attention;

/// Two requests that decode and one chunk of a prompt, so long that one thread would not do.
LayoutPtr long_pages() {
  static const i32 qo[] = {0, 1, 2, 34}, len[] = {2400, 1300, 800}, indptr[] = {0, 600, 925, 1125};
  static const std::vector<i32> list = [] {
    std::vector<i32> pages(1125);
    for (std::size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<i32>(i * 7 % 40);
    return pages;
  }();
  PagedArgs args;
  args.qo_indptr = IndexRef(qo, 4);
  args.page_indptr = IndexRef(indptr, 4);
  args.page_indices = IndexRef(list.data(), static_cast<i64>(list.size()));
  args.kv_len = IndexRef(len, 3);
  args.page_size = 4;
  return paged_kv(args);
}

class AttentionThreads : public testing::Test {
 protected:
  static void use_threads(int n) {
    setenv("RADDLE_NUM_THREADS", std::to_string(n).c_str(), 1);
    cpu::forget_default_threads();
  }
  void TearDown() override {
    unsetenv("RADDLE_NUM_THREADS");
    cpu::forget_default_threads();
  }

  AttentionThreads() {
    AttentionSpec spec;
    spec.num_qo_heads = qo_heads;
    spec.num_kv_heads = kv_heads;
    spec.head_dim_qk = dim_qk;
    spec.head_dim_vo = dim_vo;
    spec.dtype = DType::bfloat16;
    spec.variant = {causal()};
    attention_ = std::make_unique<Attention>(spec);
    layout_ = long_pages();
    PlanOptions options;
    options.num_workers = 7;  // more than threads, so that items are stolen and states are split
    plan_ = attention_->plan(layout_, options);
  }

  /// Runs into `t`'s outputs; returns how many threads took part.
  std::size_t run(Tensors& t) const {
    RunArgs args;
    args.q = t.q.ref;
    args.kv = {{t.k.ref, t.v.ref}};
    args.out = t.out.ref;
    args.lse = t.lse.ref;
    RunStats stats;
    attention_->run(*plan_, args, &stats);
    return stats.busy_us.size();
  }

  Tensors tensors() const {
    std::mt19937 random(5);
    return Tensors(random, DType::bfloat16, layout_->num_rows());
  }

  static bool same(const Tensors& a, const Tensors& b) {
    return a.out.bytes == b.out.bytes && a.lse.bytes == b.lse.bytes;
  }

  std::unique_ptr<Attention> attention_;
  LayoutPtr layout_;
  PlanPtr plan_;
};

TEST_F(AttentionThreads, TheSameBitsOnAnyNumberOfThreads) {
  use_threads(1);
  Tensors alone = tensors();
  ASSERT_EQ(run(alone), 1u);
  for (const int threads : {2, 4, 6}) {
    use_threads(threads);
    for (int round = 0; round < 20; ++round) {
      Tensors together = tensors();
      ASSERT_EQ(run(together), static_cast<std::size_t>(threads));
      ASSERT_TRUE(same(together, alone)) << threads;
    }
  }
}

TEST_F(AttentionThreads, SeveralCallersShareAnAttention) {
  use_threads(1);
  Tensors alone = tensors();
  run(alone);
  use_threads(4);
  std::vector<std::thread> callers;
  for (int c = 0; c < 3; ++c) {
    callers.emplace_back([&] {
      Tensors own = tensors();
      for (int round = 0; round < 10; ++round) {
        std::memset(own.out.bytes.data(), 0xff, own.out.bytes.size());
        run(own);
        ASSERT_TRUE(same(own, alone));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

}  // namespace
}  // namespace raddle
