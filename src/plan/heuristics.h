// Which tile shapes and costs a plan is made with. Pure functions of the spec; `raddle explain`
// prints what they give.
#pragma once

#include "raddle/attention.h"
#include "raddle/engine/kernel/cpu/config.h"
#include "raddle/engine/kernel/gpu/config.h"

namespace raddle {

/// CostModel counts quarters of a nanosecond.
constexpr double cost_units_per_ns = 4.0;

/// By how much a plan must be done earlier to be made with another config: 2 µs, what a launch in
/// clusters takes to begin and to end.
constexpr i64 least_gain = static_cast<i64>(2000 * cost_units_per_ns);

/// Bytes of one key and value of a KV head that a kernel reads. Heads above 256 are MLA's as a
/// rule, whose V is a part of K, as it is where K extends V.
i32 read_bytes(i32 head_dim_qk, i32 head_dim_vo, bool k_extends_v, DType stored);

/// Tile shapes, tile rates and chunk size for the CPU kernels of an instruction set.
PlanConfig cpu_plan_config(const AttentionSpec& spec, CpuIsa isa, i32 num_workers,
                           Schedule schedule);

/// The kernel of a family for an architecture (80, 90 …); `short_rows`: the wgmma family's of short
/// queries with tiles of so many rows, not that of long ones; `outputs`: the variant has an output
/// part. Planning, compiling and launching all ask this one function, so that they agree. Beside it
/// and plan/kernel_choice.cpp, only jit/gpu_kernel.cpp knows families: the text of their sources.
KernelConfig gpu_kernel_config(const AttentionSpec& spec, i32 arch, KernelFamily family,
                               i32 short_rows, bool outputs = false);

/// Tile shapes, tile rates and memory costs of that kernel; a worker is a team of warps.
PlanConfig gpu_plan_config(const AttentionSpec& spec, i32 arch, KernelFamily family, i32 short_rows,
                           i32 num_workers, Schedule schedule, bool outputs = false);

/// The same for the kernel of short queries alone: groups with more rows are cut into its tiles.
PlanConfig short_plan_config(PlanConfig config);

/// The same where each worker is a cluster of two blocks, each of which computes half of a tile of
/// long queries, and copies half of its keys to both (kernel/wgmma).
PlanConfig cluster_plan_config(const AttentionSpec& spec, PlanConfig config);

}  // namespace raddle
