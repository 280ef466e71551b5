// Online softmax on a tile of fp32 logits (FlashAttention-2, algorithm 1): a row's running maximum,
// sum and unnormalised output.
#pragma once

#include "raddle/engine/simd/vec.h"

RADDLE_ENGINE_BEGIN

/// Running statistics of a query row.
struct RowState {
  float max;  ///< of the logits so far; -inf when nothing was kept
  float sum;  ///< Σ exp(s - max)
};

/// Fills s[n …] up to a whole vector, so that row loops need no tail.
RADDLE_FN void pad_row(float* s, i32 n, float value) {
  for (const i32 end = round_up(n, simd::lanes); n < end; ++n) s[n] = value;
}

/// s[j] -> exp(s[j] - max) for one row; updates the row's state and returns the factor by which its
/// output so far must be multiplied. `s` is padded with -inf to a whole vector.
RADDLE_FN float softmax_step(float* s, i32 n, RowState& row) {
  simd::Vec top = simd::broadcast(row.max);
  for (i32 j = 0; j < n; j += simd::lanes) top = simd::max(simd::load(s + j), top);
  const float new_max = simd::reduce_max(top);
  // A row with nothing kept so far: subtracting 0 leaves every logit at -inf, hence every weight at
  // 0.
  const simd::Vec shift = simd::broadcast(new_max == -math::infinity ? 0.0f : new_max);
  simd::Vec total{};
  for (i32 j = 0; j < n; j += simd::lanes) {
    const simd::Vec p = simd::exp2_nonpositive((simd::load(s + j) - shift) * math::log2e);
    simd::store(s + j, p);
    total = total + p;
  }
  const float rescale = row.max == new_max ? 1.0f : math::exp(row.max - new_max);
  row.sum = row.sum * rescale + simd::reduce_sum(total);
  row.max = new_max;
  return rescale;
}

RADDLE_FN void scale_row(float* o, i32 dim, float factor) {
  for (i32 d = 0; d < dim; d += simd::lanes) simd::store(o + d, simd::load(o + d) * factor);
}

/// The same for rows of any length.
RADDLE_FN void multiply_each(float* x, i32 n, float factor) {
#pragma GCC ivdep
  for (i32 j = 0; j < n; ++j) x[j] *= factor;
}

/// x[j] *= factor[j]
RADDLE_FN void multiply_row(float* x, const float* factor, i32 n) {
#pragma GCC ivdep
  for (i32 j = 0; j < n; ++j) x[j] *= factor[j];
}

RADDLE_ENGINE_END
