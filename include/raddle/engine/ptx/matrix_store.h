// Matrices of 16-bit elements from a warp's registers to shared memory (sm_90).
#pragma once

#include "raddle/engine/core/config.h"

RADDLE_ENGINE_BEGIN

namespace ptx {

/// Writes two 8 × 8 matrices, for lane = 4·g + t. x[i] holds elements (2t, g) and, in the upper
/// half, (2t + 1, g) of matrix i: what an accumulator holds of a product is written transposed.
/// Lane 8·i + r gives in `row` where row r of matrix i begins, a multiple of 16; lanes from 16 on
/// give what they like.
RADDLE_DEVICE void store_matrices_transposed(u32 row, const u32 (&x)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row),
               "r"(x[0]), "r"(x[1])
               : "memory");
}

/// Writes four 8 × 8 matrices, for lane = 4·g + t. x[i] holds elements (g, 2t) and, in the upper
/// half, (g, 2t + 1) of matrix i. Lane 8·i + r gives in `row` where row r of matrix i begins, a
/// multiple of 16.
RADDLE_DEVICE void store_matrices(u32 row, const u32 (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

}  // namespace ptx

RADDLE_ENGINE_END
