// The planner kernel on emulated threads, and a comparison with the host's plan.
#pragma once

#define RADDLE_EMULATED_PTX "emulated_ptx.h"
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "plan/device_planner.h"
#include "plan_batches.h"
#include "raddle/engine/kernel/gpu_planner/kernel.h"

namespace raddle::plan_testing {

/// What the kernel left in device memory.
struct DevicePlan {
  PlanLaunch launch;
  std::vector<u8> plan, layout, scratch;
  PlanSizes sizes{};
  PlanReport report{};

  template <class T>
  const T* array(i64 offset) const {
    return reinterpret_cast<const T*>(plan.data() + offset);
  }
};

template <class V>
class DevicePlanner {
 public:
  DevicePlanner(const V& variant, const DeviceBatch& batch, const PlanConfig& config,
                const Maxima& maxima, bool in_shared = true)
      : variant_(variant) {
    PlanLaunch& launch = result.launch;
    launch = plan_launch(batch, config, maxima, has_mask<V>, in_shared ? 1 << 30 : 0);
    launch.num_planners = std::min(launch.num_planners, 2);  // fibers take their time
    const auto poisoned = [](i64 bytes) {
      return std::vector<u8>(static_cast<std::size_t>(bytes) + 16, 0xee);
    };
    result.plan = poisoned(launch.at.bytes);
    result.layout = poisoned(launch.layout_at.bytes);
    result.scratch = poisoned(launch.scratch_at.device_bytes);
    const i64 marks = launch.scratch_at.marks;
    std::memset(result.scratch.data() + marks, 0,
                static_cast<std::size_t>(launch.scratch_at.found - marks));
    launch.plan = result.plan.data();
    launch.layout = result.layout.data();
    launch.scratch = result.scratch.data();
    launch.sizes = &result.sizes;
    launch.report = &result.report;
  }
  DevicePlanner(const DevicePlanner&) = delete;

  /// Blocks run one after another, in an order that the kernel may not rely on.
  void run(std::mt19937& random, i32 threads = 64, i32 max_blocks = 4) {
    result.report = PlanReport{};
    const PlannerGrid grid = planner_grid(result.launch);
    const i32 blocks = std::min(grid.blocks, max_blocks);
    std::vector<i32> order;
    for (i32 b = 0; b < blocks; ++b) order.push_back(b);
    std::shuffle(order.begin(), order.end(), random);
    for (const i32 b : order) {
      emulated::Block block(b, threads, grid.shared_bytes, blocks);
      block.run([&] { result.launch.scratch_in_shared ? plan<true>() : plan<false>(); });
    }
    const auto* marks =
        reinterpret_cast<const i32*>(result.scratch.data() + result.launch.scratch_at.marks);
    for (i32 i = 0; i < 2 + result.launch.maxima.max_requests; ++i)
      EXPECT_EQ(marks[i], 0) << "mark " << i << " is not ready for the next launch";
  }

  DevicePlan result;

 private:
  template <bool in_shared>
  void plan() const {
    using planner::PlannerKind;
    const PlanLaunch& launch = result.launch;
    if (launch.batch.min_prefix > 0)
      planner::plan_batch<PlannerKind{.prefixes = true, .in_shared = in_shared}>(launch, variant_);
    else if (launch.config.batch_invariant)
      planner::plan_batch<PlannerKind{.in_shared = in_shared, .fixed_chunks = true}>(launch,
                                                                                     variant_);
    else
      planner::plan_batch<PlannerKind{.in_shared = in_shared}>(launch, variant_);
  }

  const V& variant_;
};

/// Where the list of an opening's group begins in the device's table, which need not be where it
/// begins in the host's.
inline i32 first_entry(const PlanLaunch& launch, const Opening& opening) {
  const LayoutArrays arrays = planner::layout_arrays(launch);
  const bool last = opening.level + 1 == launch.maxima.max_levels;
  return (last ? arrays.block_begin : arrays.prefix_begin)[opening.group];
}

/// Byte for byte, array by array: the device's lie where the maxima put them.
inline void expect_equal_plans(const DevicePlan& got, const PlanArrays& plan) {
  i32 nth = 0;
  visit_plan_arrays(
      [&]<class T>(i64 got_count, i64 offset, i64 count, const T* expected) {
        SCOPED_TRACE("array " + std::to_string(nth++) + " of visit_plan_arrays");
        ASSERT_EQ(got_count, count);
        const T* array = got.array<T>(offset);
        for (i64 i = 0; i < count; ++i) {
          T entry = expected[i];
          if constexpr (std::is_same_v<T, Opening>)
            if (entry.item >= 0) entry.first_entry = first_entry(got.launch, entry);
          ASSERT_EQ(std::memcmp(array + i, &entry, sizeof(T)), 0) << "entry " << i;
        }
      },
      got.sizes, got.launch.at, plan.sizes(), plan.view());
  EXPECT_EQ(nth, 10);
  EXPECT_EQ(got.sizes.partial_rows, plan.sizes().partial_rows);
}

}  // namespace raddle::plan_testing
