// The shape of the sampling kernel's blocks, of which each works on a row.
#pragma once

#include "raddle/engine/kernel/sampling/view.h"

RADDLE_ENGINE_BEGIN

namespace sampling {

constexpr i32 num_warps = 16;
constexpr i32 num_threads = 32 * num_warps;
/// So many numbers are combined over a block at once, each from all warps.
constexpr i32 max_combined = 4;
constexpr i32 shared_bytes = num_warps * max_combined * 8;

}  // namespace sampling

RADDLE_ENGINE_END
