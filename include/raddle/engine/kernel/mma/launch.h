// What the host hands to the mma.sync kernel, by value as its parameter; pointers are the device's.
// Plain data, laid out alike by the host's compiler and NVRTC.
#pragma once

#include "raddle/engine/kernel/run.h"
#include "raddle/engine/plan/plan.h"

namespace raddle {

struct MmaLaunch : RunView {
  LayoutView layout;  ///< its `levels` is not used:
  LevelView levels[max_levels];
  PlanView plan;
};

// Both compilers see these numbers, so neither can lay the parameter out in its own way.
static_assert(sizeof(LevelView) == 104 && sizeof(LayoutView) == 56 && sizeof(PlanView) == 136);
static_assert(sizeof(KvView) == 64 && sizeof(RunView) == 616 && sizeof(MmaLaunch) == 1640);

}  // namespace raddle

RADDLE_ENGINE_BEGIN

namespace mma {

constexpr i32 num_warps = 4;
constexpr i32 num_threads = 32 * num_warps;
constexpr i32 tile_rows = 16 * num_warps;  ///< of the larger tile shape; the smaller has 16
constexpr i32 tile_keys = 64;

/// Rows in shared memory are 16 bytes longer than they need be, so that the eight rows of a matrix
/// lie in different banks.
RADDLE_FN constexpr i32 pitch(i32 dim) { return (dim + 15) / 16 * 16 + 8; }

/// Dynamic shared memory of a block. K and V take turns in one buffer, so that 256-wide heads fit
/// the 99 KiB that every sm_8x has.
RADDLE_FN constexpr i32 shared_bytes(i32 dim_qk, i32 dim_vo) {
  const i32 wider = dim_qk > dim_vo ? dim_qk : dim_vo;
  return 2 * tile_rows * pitch(dim_qk) + 2 * tile_keys * pitch(wider) + 4 * num_warps * wider +
         (8 + 8 + 4 + 4 + 4) * tile_keys + 16;
}

}  // namespace mma

RADDLE_ENGINE_END
