// The online softmax of a tile whose O is being multiplied meanwhile: it says by how much O
// shrinks, and the loop shrinks O when the product is there (FlashAttention-3, algorithm 2).
#pragma once

#include "raddle/engine/kernel/gpu/softmax.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

using namespace gpu_kernel;

/// S -> exp(S - max), with the running maximum; the sums so far shrink by `factor`, as O has to. In
/// this loop a vote whether any row grew costs more than shrinking always.
template <i32 key_fragments>
RADDLE_DEVICE void softmax(Logits<1, key_fragments>& s, RowStats<1>& stats, float (&factor)[2],
                           float to_log2) {
  float shift[1][2], product[1][2];
  bool fused = true;
  RADDLE_UNROLL
  for (i32 half = 0; half < 2; ++half) {
    const float before = stats.top[0][half];
    float top = before, other = -math::infinity;  // two chains, of a row's even and odd numbers
    RADDLE_UNROLL
    for (i32 n = 0; n < key_fragments; ++n) {
      top = ptx::max(top, s[0][n][2 * half]);
      other = ptx::max(other, s[0][n][2 * half + 1]);
    }
    top = ptx::max(top, other);
    top = ptx::max(top, ptx::shuffle_xor(top, 1));
    top = ptx::max(top, ptx::shuffle_xor(top, 2));
    stats.top[0][half] = top;
    // For a row that has kept nothing so far, subtracting 0 leaves every logit at -inf, and every
    // weight becomes 0.
    shift[0][half] = top == -math::infinity ? 0.0f : top;
    factor[half] = ptx::exp2((before - shift[0][half]) * to_log2);
    stats.sum[0][half] *= factor[half];
    product[0][half] = shift[0][half] * to_log2;
    fused = fused && math::abs(product[0][half]) <= fused_limit;
  }
  if (ptx::any(!fused)) {
    // Only for rows that need it: the bits of other rows do not depend on them.
    RADDLE_UNROLL
    for (i32 half = 0; half < 2; ++half) {
      const bool exact = !(math::abs(product[0][half]) <= fused_limit);
      shift[0][half] = exact ? shift[0][half] : 0.0f;
      product[0][half] = exact ? 0.0f : product[0][half];
    }
    subtract(s, shift);
  }
  weigh(s, stats, product, to_log2, 2);
}

/// O times the factors of its rows.
template <i32 fragments>
RADDLE_DEVICE void shrink(float (&o)[1][fragments][4], const float (&factor)[2]) {
  RADDLE_UNROLL
  for (i32 i = 0; i < 4 * fragments; ++i) o[0][i / 4][i % 4] *= factor[i % 4 / 2];
}

}  // namespace wgmma

RADDLE_ENGINE_END
