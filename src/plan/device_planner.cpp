#include "plan/device_planner.h"

#include "raddle/engine/kernel/gpu_planner/memory.h"
#include "raddle/error.h"

namespace raddle {
namespace {

/// Blocks that look at page tables: enough to read them in the time that planning takes.
constexpr i32 most_readers = 64;

void check_batch(const DeviceBatch& batch, const Maxima& maxima) {
  if (!batch.qo_indptr) fail<ValueError>("qo_indptr is missing");
  if (batch.num_requests < 0 || batch.num_requests > maxima.max_requests)
    fail<ValueError>("num_requests is ", batch.num_requests,
                     "; expected 0 to max_requests = ", maxima.max_requests);
  if (batch.min_prefix > 0 && !batch.pages)
    fail<ValueError>("min_prefix is ", batch.min_prefix,
                     "; expected 0: ragged keys share no pages");
  if (!batch.pages) {
    if (!batch.kv_indptr) fail<ValueError>("kv_indptr is missing: the keys are ragged");
    return;
  }
  if (!batch.kv_len) fail<ValueError>("kv_len is missing");
  if (batch.page_size < 1)
    fail<ValueError>("page_size is ", batch.page_size, "; expected at least 1");
}

}  // namespace

void check_device_planning(const PlanConfig& config, const Maxima& maxima) {
  if (config.num_workers > planner::max_workers)
    fail<ValueError>("num_workers is ", config.num_workers, "; expected at most ",
                     planner::max_workers, " on the device");
  if (config.schedule != Schedule::automatic && config.schedule != Schedule::linear)
    fail<ValueError>("schedule is ",
                     config.schedule == Schedule::algorithm1 ? "'algorithm1'" : "'one-per-request'",
                     "; expected 'linear' or 'auto', which is linear on a device");
  if (maxima.max_levels > 2)
    fail<ValueError>("max_levels is ", maxima.max_levels,
                     "; expected 1, or 2 where prefixes are discovered, for lengths on a device");
  if (config.batch_invariant && maxima.max_levels > 1)
    fail<ValueError>("max_levels is ", maxima.max_levels,
                     "; expected 1 with batch_invariant=True, since which prefixes are shared "
                     "depends on the batch");
}

PlannerMemory planner_memory(const PlanConfig& config, const Maxima& maxima, bool masked) {
  return PlannerMemory{plan_offsets(plan_bounds(config, maxima)).bytes,
                       planner::planned_offsets(maxima).bytes,
                       planner::planner_scratch(config, maxima, masked).device_bytes};
}

bool plans_in_shared(const PlanConfig& config, const Maxima& maxima, bool masked,
                     i32 max_shared_bytes) {
  return planner::shared_header() + planner::planner_scratch(config, maxima, masked).bytes <=
         max_shared_bytes;
}

PlanLaunch plan_launch(const DeviceBatch& batch, const PlanConfig& config, const Maxima& maxima,
                       bool masked, i32 max_shared_bytes) {
  check_batch(batch, maxima);
  check_device_planning(config, maxima);
  const i32 levels = batch.min_prefix > 0 ? 2 : 1;
  if (maxima.max_levels != levels)
    fail<ValueError>("max_levels is ", maxima.max_levels, "; expected ", levels,
                     levels > 1 ? ": prefixes are a level of their own" : " on the device");
  PlanLaunch launch{};
  launch.batch = batch;
  launch.config = config;
  launch.maxima = maxima;
  launch.at = plan_offsets(plan_bounds(config, maxima));
  launch.layout_at = planner::planned_offsets(maxima);
  launch.scratch_at = planner::planner_scratch(config, maxima, masked);
  launch.scratch_in_shared = plans_in_shared(config, maxima, masked, max_shared_bytes);
  launch.num_planners = launch.scratch_in_shared ? planner::most_planners(maxima) : 1;
  return launch;
}

PlannerGrid planner_grid(const PlanLaunch& launch) {
  const bool prefixes = launch.batch.min_prefix > 0;
  const bool reads = launch.batch.pages && (prefixes || launch.batch.num_pages > 0);
  const i32 readers = reads ? min(max(launch.maxima.max_requests, 1), most_readers) : 0;
  const i64 scratch = launch.scratch_in_shared ? launch.scratch_at.bytes : 0;
  return PlannerGrid{(prefixes ? 0 : launch.num_planners) + readers,
                     planner::block_threads(launch.config, launch.maxima),
                     planner::shared_header() + static_cast<i32>(scratch)};
}

std::string describe(const PlanReport& report, const Maxima& maxima) {
  std::string text;
  const auto add = [&](i32 bit, const std::string& words) {
    if ((report.errors & bit) != 0) text += (text.empty() ? "" : "; ") + words;
  };
  const auto beyond = [](const char* what, i64 most, const char* name) {
    return std::string(what) + " than " + name + " = " + std::to_string(most) +
           " of the reservation: the plan is empty";
  };
  add(too_many_requests,
      beyond("num_requests is below 0 or larger", maxima.max_requests, "max_requests") +
          ", as where it exceeds the entries of kv_len");
  add(too_many_rows, beyond("qo_indptr has more rows", maxima.max_qo_tokens, "max_qo_tokens") +
                         ", as where it exceeds num_rows of the layout");
  add(too_many_keys, beyond("kv_len has more keys", maxima.max_kv_tokens, "max_kv_tokens"));
  add(bad_rows, "qo_indptr decreases, or leaves 0 to max_qo_tokens = " +
                    std::to_string(maxima.max_qo_tokens) + ": rows there are left alone");
  add(bad_keys, "kv_len is below 0: taken for no keys");
  add(bad_table,
      "page_indices has fewer pages than kv_len needs, or page_indptr leaves it: taken for no "
      "keys");
  add(bad_page,
      "page_indices names a page that is not in the pool of num_pages, or is -1 where the mask "
      "keeps keys: taken for no keys");
  add(too_long,
      "qo_indptr gives it more rows than max_qo_len = " + std::to_string(maxima.max_qo_len) +
          ", of which tiles would have another shape: its rows are left alone");
  if (!text.empty() && report.request >= 0)
    text = "request " + std::to_string(report.request) + ": " + text;
  return text;
}

}  // namespace raddle
