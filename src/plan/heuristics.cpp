#include "plan/heuristics.h"

#include <algorithm>

#include "raddle/engine/kernel/mma/config.h"
#include "raddle/engine/kernel/wgmma/config.h"

namespace raddle {
namespace {

/// What one worker does in a nanosecond.
struct Rates {
  double bytes;              ///< K and V streamed from memory
  double flops;              ///< two per multiply-add; the softmax between the products is included
  double item_ns;            ///< nanoseconds to take an item and start its tile walk
  double state_ns;           ///< nanoseconds to announce a partial state
  double row_numbers = 4.0;  ///< numbers of query rows that are loaded, scaled and stored
  double level_bytes = bytes;  ///< bytes in plans of several levels
  double level_flops = flops;  ///< flops in plans of several levels
  /// Nanoseconds of an item there, with its state, and of each of its rows; 0: as on one level.
  double level_item_ns = 0.0, level_row_ns = 0.0;
};

/// Rates of a worker thread, rounded from measurements on two-core AVX-512 machines. For the choice
/// of a schedule only their ratios matter: how a long-query tile weighs against a decode tile.
constexpr Rates cpu_rates{12.0, 80.0, 800.0, 0.0};
/// Rates of workers that multiply long queries by pairs of bf16, and of those with tile registers.
constexpr Rates bf16_rates{12.0, 140.0, 800.0, 0.0};
constexpr Rates amx_rates{12.0, 600.0, 800.0, 0.0};
/// Rates of a thread block on an H200 with two on each multiprocessor, rounded from measurements: a
/// tile of 16 × 128 takes 4.5 µs where all blocks decode, one of 128 × 64 takes 3.5 µs where all
/// prefill.
constexpr Rates gpu_rates{15.0, 3000.0, 4000.0, 4000.0};
/// Rates of a block of the wgmma family, which has a multiprocessor for itself, rounded from
/// measurements on an H200. It multiplies whole tiles while the next are read, so that a tile takes
/// as long whatever its rows: 1.9 µs where all prefill, whose keys are in the L2 cache, and 3.5 µs
/// where queries are short and keys come from memory. The latter is for the choice of a family
/// alone. Queries are loaded beside the item before; an item's end takes 2.5 µs in all.
constexpr Rates wgmma_rates{35.0, 1e9, 1500.0, 4000.0, 32.0};
constexpr Rates wgmma_whole_tile_rates{18.5, 1e9, 1500.0, 4000.0, 32.0};
/// Rates of that family's kernels of short queries, rounded from measurements on an H200 and an
/// H100: 132 blocks read 3,800 GB/s, and an item's end, beside which the next item's keys are read,
/// takes 1 µs. A worker announces the states of its queue at the end, all at once, which takes 4 µs
/// with what it waits for; in plans of several levels every worker does. There, where memory is
/// read once for many requests, a worker's own steps take longest: 0.5 µs for a tile of 64 keys and
/// a request's own rows, 0.8 µs for 64 rows; 1 µs for an item of 4 rows, 2.5 µs for one of 64.
constexpr Rates wgmma_short_rates{29.0, 1e9, 1000.0, 4000.0, 32.0, 60.0, 8600.0, 900.0, 25.0};
/// Percent of a KV tile's time that clusters of two blocks save, measured on an H200
/// (docs/lab/hopper.md): copies for both take half of the L2 cache's rate, but the blocks wait for
/// one another. The wider the heads, the more bytes a step takes.
i32 cluster_saves(const AttentionSpec& spec) {
  return max(spec.head_dim_qk, spec.head_dim_vo) <= 192 ? 3 : 6;
}
/// PlanConfig::cached_discount. Two cores share little; on an H200 a single-level layout reads a
/// prefix out of the L2 cache at more than twice the rate of memory.
constexpr i32 cpu_cached_discount = 17, gpu_cached_discount = 55;
/// Bytes of K and V in a wave of the shared queue. An H200's L2 cache has 50 MB, but each of its
/// halves keeps its own copy of what workers on both sides read.
constexpr i32 drawn_bytes = 16 << 20;

/// Bytes of K and V of one token and KV head.
i32 kv_bytes(const AttentionSpec& spec) {
  return (spec.k_columns() + spec.head_dim_vo) * dtype_bytes(spec.stored_dtype());
}

CostModel costs(const AttentionSpec& spec, TileShape shape, const Rates& rates) {
  const double dims = spec.head_dim_qk + spec.head_dim_vo;
  const i32 read =
      read_bytes(spec.head_dim_qk, spec.head_dim_vo, spec.k_extends_v, spec.stored_dtype());
  const auto units = [](double ns) { return static_cast<i32>(ns * cost_units_per_ns) + 1; };
  CostModel cost;
  cost.per_item = units(rates.item_ns);
  cost.per_item_row = units(dims / rates.row_numbers);
  cost.per_tile = units(shape.keys * read / rates.bytes);
  cost.per_tile_row = units(shape.keys * dims * 2.0 / rates.flops);
  cost.per_level_tile = units(shape.keys * read / rates.level_bytes);
  cost.per_level_tile_row = units(shape.keys * dims * 2.0 / rates.level_flops);
  // 20 ns for its maximum and sum; its O is written and read once, in fp32.
  cost.per_state_row = units(20.0 + 2.0 * spec.head_dim_vo * 4.0 / rates.bytes);
  cost.per_state = rates.state_ns > 0.0 ? units(rates.state_ns) : 0;
  const bool own_items = rates.level_item_ns > 0.0;
  cost.per_level_item = own_items ? units(rates.level_item_ns) : cost.per_item + cost.per_state;
  cost.level_rows = own_items ? shape.rows : 0;
  cost.per_level_item_row =
      own_items ? units(rates.level_row_ns) : cost.per_item_row + cost.per_state_row;
  return cost;
}

PlanConfig plan_config(const AttentionSpec& spec, i32 num_workers, Schedule schedule,
                       TileShape short_shape, TileShape long_shape, const Rates& rates) {
  PlanConfig config{};
  config.num_workers = num_workers;
  config.num_kv_heads = spec.num_kv_heads;
  config.group_size = spec.group_size();
  config.shapes[short_queries] = short_shape;
  config.shapes[long_queries] = long_shape;
  for (int i = 0; i < 2; ++i) config.costs[i] = costs(spec, config.shapes[i], rates);
  config.schedule = schedule;
  config.batch_invariant = spec.batch_invariant;
  // A decode of one request of 128k keys still has 64 chunks a KV head.
  config.invariant_chunk = 2048;
  return config;
}

}  // namespace

i32 read_bytes(i32 head_dim_qk, i32 head_dim_vo, bool k_extends_v, DType stored) {
  constexpr i32 widest_with_own_values = 256;
  const i32 widest = std::max(head_dim_qk, head_dim_vo);
  const bool v_is_in_k = k_extends_v || widest > widest_with_own_values;
  return (v_is_in_k ? widest : head_dim_qk + head_dim_vo) * dtype_bytes(stored);
}

PlanConfig cpu_plan_config(const AttentionSpec& spec, CpuIsa isa, i32 num_workers,
                           Schedule schedule) {
  const DType stored = spec.stored_dtype();
  PlanConfig config = plan_config(spec, num_workers, schedule,
                                  short_query_tile(isa, spec.dtype, stored, spec.head_dim_vo),
                                  long_query_tile(isa, spec.dtype, stored), cpu_rates);
  config.reads_whole_rows = spec.num_kv_heads > 1;
  config.cached_discount = cpu_cached_discount;
  if (multiplies_in_bf16(isa, spec.dtype, stored))
    config.costs[long_queries] =
        costs(spec, config.shapes[long_queries], isa == CpuIsa::amx ? amx_rates : bf16_rates);
  return config;
}

KernelConfig gpu_kernel_config(const AttentionSpec& spec, i32 arch, KernelFamily family,
                               i32 short_rows, bool outputs) {
  if (family == KernelFamily::wgmma)
    return short_rows > 0
               ? wgmma::short_kernel_config(short_rows, spec.head_dim_qk, spec.head_dim_vo)
               : wgmma::long_kernel_config(spec.head_dim_qk, spec.head_dim_vo, outputs);
  // Only the compiler knows whether a variant's parts need quantised K or V widened to 16 bits. The
  // planner need not: tiles and memory are as if they did (mma::kernel_config).
  return mma::kernel_config(spec.head_dim_qk, spec.head_dim_vo, arch,
                            {2, 2, has_8_bits(spec.stored_dtype()), spec.k_extends_v});
}

PlanConfig gpu_plan_config(const AttentionSpec& spec, i32 arch, KernelFamily family, i32 short_rows,
                           i32 num_workers, Schedule schedule, bool outputs) {
  const KernelConfig kernel = gpu_kernel_config(spec, arch, family, short_rows, outputs);
  const bool wgmma = family == KernelFamily::wgmma;
  PlanConfig config =
      plan_config(spec, num_workers, schedule, {kernel.short_rows, kernel.short_keys},
                  {kernel.long_rows, kernel.long_keys}, wgmma ? wgmma_rates : gpu_rates);
  if (wgmma)
    config.costs[short_queries] =
        costs(spec, config.shapes[short_queries],
              short_rows > 0 ? wgmma_short_rates : wgmma_whole_tile_rates);
  config.cached_columns = drawn_bytes / kv_bytes(spec);
  config.cached_discount = gpu_cached_discount;
  config.bandwidth_sharers = kernel.blocks_per_multiprocessor;
  config.has_openings = wgmma;
  config.keeps_in_step = wgmma && short_rows > 0;
  return short_rows > 0 ? short_plan_config(config) : config;
}

PlanConfig cluster_plan_config(const AttentionSpec& spec, PlanConfig config) {
  config.num_workers /= 2;
  TileShape& shape = config.shapes[long_queries];
  CostModel& cost = config.costs[long_queries];
  // Blocks load, compute and store their rows side by side.
  for (i32* of_row : {&cost.per_item_row, &cost.per_level_item_row}) *of_row = (*of_row + 1) / 2;
  cost.per_tile -= cost.per_tile_row * shape.rows + cost.per_tile * cluster_saves(spec) / 100;
  shape.rows *= 2;
  return config;
}

PlanConfig short_plan_config(PlanConfig config) {
  config.short_only = true;
  config.shapes[long_queries] = config.shapes[short_queries];
  config.costs[long_queries] = config.costs[short_queries];
  return config;
}

}  // namespace raddle
