// A warp's fragments of logits, weights and outputs. A row fragment is 16 query rows, a key
// fragment 8 keys. A lane holds rows g and g + 8 of a row fragment, and two neighbouring columns of
// each 8: what accumulators of mma.sync and of wgmma have in common.
#pragma once

#include "raddle/engine/kernel/gpu/facts.h"
#include "raddle/engine/kernel/gpu/timeline.h"

RADDLE_ENGINE_BEGIN

namespace gpu_kernel {

/// S: logits, then weights, of 16 · row_fragments rows by 8 · key_fragments keys.
template <i32 row_fragments, i32 key_fragments>
using Logits = float[row_fragments][key_fragments][4];

/// P: weights rounded to the matrix dtype, as A's fragments of 16 keys each.
template <i32 row_fragments, i32 key_fragments>
using Weights = u32[row_fragments][key_fragments / 2][4];

/// O: unnormalised output.
template <class Kernel, i32 row_fragments>
using Output = float[row_fragments][Kernel::out_fragments][4];

template <i32 a, i32 b>
RADDLE_DEVICE void clear(float (&x)[a][b][4]) {
  RADDLE_UNROLL
  for (i32 i = 0; i < a; ++i) {
    RADDLE_UNROLL
    for (i32 j = 0; j < b; ++j) {
      RADDLE_UNROLL
      for (i32 e = 0; e < 4; ++e) x[i][j][e] = 0.0f;
    }
  }
}

/// Rounds S to P; the fragments of S lie as those of P do.
template <class T, i32 row_fragments, i32 key_fragments>
RADDLE_DEVICE void round_weights(const Logits<row_fragments, key_fragments>& s,
                                 Weights<row_fragments, key_fragments>& p) {
  RADDLE_UNROLL
  for (i32 r = 0; r < row_fragments; ++r) {
    RADDLE_UNROLL
    for (i32 n = 0; n < key_fragments; ++n) {
      p[r][n / 2][n % 2 * 2] = ptx::pack(s[r][n][0], s[r][n][1], T{});
      p[r][n / 2][n % 2 * 2 + 1] = ptx::pack(s[r][n][2], s[r][n][3], T{});
    }
  }
}

}  // namespace gpu_kernel

RADDLE_ENGINE_END
