// Which tile shapes and costs a plan is made with. Pure functions of the spec; ask `raddle explain`
// why.
#pragma once

#include "raddle/attention.h"
#include "raddle/engine/kernel/cpu/config.h"

namespace raddle {

/// CostModel counts quarters of a nanosecond.
constexpr double cost_units_per_ns = 4.0;

/// Bytes of one key and value of a KV head that a kernel reads: of wide heads, which are MLA's as a
/// rule, V is a part of K.
i32 read_bytes(i32 head_dim_qk, i32 head_dim_vo, DType stored);

/// Tile shapes, tile rates and chunk size for the CPU kernels of an instruction set.
PlanConfig cpu_plan_config(const AttentionSpec& spec, CpuIsa isa, i32 num_workers,
                           Schedule schedule);

/// Tile shapes, tile rates and memory costs of the GPU kernel on mma.sync of an architecture (80,
/// 90 …); a worker is a thread block.
PlanConfig gpu_plan_config(const AttentionSpec& spec, i32 arch, i32 num_workers, Schedule schedule);

}  // namespace raddle
