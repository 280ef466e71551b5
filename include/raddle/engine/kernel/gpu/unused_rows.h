// Rows that the tensors of a reservation's run have beyond those of the batch.
#pragma once

#include "raddle/engine/kernel/gpu/finish.h"

RADDLE_ENGINE_BEGIN

namespace gpu_kernel {

/// Gives these rows what a row without keys has, O = 0 and LSE = -inf, if the caller asked for it.
/// The warps of all workers share them, a row of a head each.
template <class Kernel>
RADDLE_DEVICE void zero_unused_rows(const GpuLaunch& launch) {
  if (!launch.unused_rows_begin) return;
  using T = typename Kernel::T;
  using Lanes = LaneRow<Kernel::dim_vo>;
  using Team = typename Kernel::Team;
  const i32 begin = *launch.unused_rows_begin;
  const i32 num_heads = launch.plan.num_kv_heads * launch.plan.group_size;
  const i32 count = (launch.query_rows - begin) * num_heads;
  RADDLE_ROLLED
  for (i32 i = Team::worker() * Team::num_warps + Team::warp(); i < count;
       i += launch.plan.num_workers * Team::num_warps) {
    Row row{};
    row.row = begin + i / num_heads;
    row.q_head = i % num_heads;
    const i64 at = out_offset(launch, row);
    Lanes::each([&](i32, i32 d) {
      if (launch.state_only)
        *reinterpret_cast<Four*>(static_cast<float*>(launch.out.data) + at + d) = Four{};
      else
        store_four(static_cast<T*>(launch.out.data) + at + d, Four{});
    });
    if (ptx::lane_index() == 0) store_lse(launch, row, -math::infinity);
  }
}

}  // namespace gpu_kernel

RADDLE_ENGINE_END
