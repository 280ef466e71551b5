// How the matrix products cut their work into register blocks.
#pragma once

#include "raddle/engine/simd/vec.h"

RADDLE_ENGINE_BEGIN

namespace cpu {

using simd::lanes;
using simd::Vec;

/// Vectors of a panel's row, hence columns of a register block: with `register_block_rows` rows
/// they fill the registers.
constexpr i32 register_block_vecs = simd::registers == 32 ? 4 : 2;
constexpr i32 register_block_rows = 6;
constexpr i32 panel_keys = register_block_vecs * lanes;

/// Calls f(first, Int<count>) for blocks that cover [0, n): as many of `size` as fit, then of half
/// that, … down to 1.
template <i32 size, class F>
RADDLE_FN void for_blocks(i32 n, F f, i32 first = 0) {
  for (; first + size <= n; first += size) f(first, Int<size>{});
  if constexpr (size > 1) for_blocks<size / 2>(n, f, first);
}

}  // namespace cpu

RADDLE_ENGINE_END
