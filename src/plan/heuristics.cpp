#include "plan/heuristics.h"

namespace raddle {
namespace {

/// Rates of one worker thread, rounded from measurements on two-core AVX-512 machines. Only their
/// ratios matter: they say how a long-query tile weighs against a decode tile.
constexpr double bytes_per_ns = 12.0;  // K and V streamed from memory
constexpr double flops_per_ns = 80.0;  // fp32 multiply-adds, softmax included
constexpr double item_ns = 800.0;      // taking an item, starting its tile walk
constexpr double units_per_ns = 4.0;   // CostModel counts quarters of a nanosecond

CostModel costs(const AttentionSpec& spec, TileShape shape) {
  const double dims = spec.head_dim_qk + spec.head_dim_vo;
  const double element = spec.dtype == DType::float32 ? 4.0 : 2.0;
  const auto units = [](double ns) { return static_cast<i32>(ns * units_per_ns) + 1; };
  CostModel cost;
  cost.per_item = units(item_ns);
  cost.per_item_row = units(dims / 4.0);
  cost.per_tile = units(shape.keys * dims * element / bytes_per_ns);
  cost.per_tile_row = units(shape.keys * dims * 2.0 / flops_per_ns);
  cost.per_merge_row = units(20.0 + 2.0 * spec.head_dim_vo * 4.0 / bytes_per_ns);
  return cost;
}

}  // namespace

PlanConfig cpu_plan_config(const AttentionSpec& spec, i32 num_workers, Schedule schedule) {
  PlanConfig config{};
  config.num_workers = num_workers;
  config.num_kv_heads = spec.num_kv_heads;
  config.group_size = spec.group_size();
  // Short queries: as many rows as the in-place products take. Their KV tile is small, so that a
  // plan can cut finely. Long queries: enough rows to pay for transposing K, few enough to stay in
  // a 1 MiB L2.
  config.shapes[0] = TileShape{16, 64};
  config.shapes[1] = TileShape{128, 128};
  for (int i = 0; i < 2; ++i) config.costs[i] = costs(spec, config.shapes[i]);
  config.schedule = schedule;
  config.batch_invariant = spec.batch_invariant;
  config.invariant_chunk = 2048;
  return config;
}

}  // namespace raddle
