#include "plan/device_planner.h"

#include "raddle/engine/kernel/plan/memory.h"
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
  if (!batch.page_indptr && batch.row_stride * maxima.max_requests > 0x7fffffff)
    fail<ValueError>("page_indices has ", maxima.max_requests, " rows ", batch.row_stride,
                     " entries apart; expected less than 2^31 entries");
}

}  // namespace

PlanLaunch plan_launch(const DeviceBatch& batch, const PlanConfig& config, const Maxima& maxima,
                       bool masked, i32 max_shared_bytes) {
  check_batch(batch, maxima);
  if (config.batch_invariant)
    fail<ValueError>(
        "batch_invariant is True; expected lengths on the host, since chunks of fixed "
        "boundaries are planned there");
  if (config.num_workers > planner::max_workers)
    fail<ValueError>("num_workers is ", config.num_workers, "; expected at most ",
                     planner::max_workers, " on the device");
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
  launch.scratch_in_shared = planner::shared_header() + launch.scratch_at.bytes <= max_shared_bytes;
  return launch;
}

PlannerGrid planner_grid(const PlanLaunch& launch) {
  const bool prefixes = launch.batch.min_prefix > 0;
  const bool reads = launch.batch.pages && (prefixes || launch.batch.num_pages > 0);
  const i32 readers = reads ? min(max(launch.maxima.max_requests, 1), most_readers) : 0;
  const i64 scratch = launch.scratch_in_shared ? launch.scratch_at.bytes : 0;
  return PlannerGrid{(prefixes ? 0 : 1) + readers, planner::num_threads,
                     planner::shared_header() + static_cast<i32>(scratch)};
}

i64 plan_bytes(const PlanLaunch& launch) { return launch.at.bytes; }

PlanView planned_view(const PlanLaunch& launch) {
  return view_at(launch.plan, plan_bounds(launch.config, launch.maxima), launch.config);
}

}  // namespace raddle
