// From logits to weights in bf16, 16 rows at a time: what rows need one number for (maximum, sum,
// rescaling) is computed for all of them in one vector.
#pragma once

#include "raddle/engine/simd/amx.h"

RADDLE_ENGINE_BEGIN

namespace cpu {

using simd::lanes;
using simd::tile_rows;
using simd::Vec;

static_assert(lanes == tile_rows);

/// The largest of keys [begin, end), row by row.
RADDLE_FN Vec max_of_rows(const float* s, i32 lds, i32 begin, i32 end) {
  Vec tops[tile_rows];
#pragma GCC unroll 16
  for (i32 i = 0; i < tile_rows; ++i) {
    const float* row = s + i * lds;
    tops[i] = simd::load(row + begin);
    for (i32 j = begin + lanes; j < end; j += lanes)
      tops[i] = simd::max(simd::load(row + j), tops[i]);
  }
  return simd::max_each(tops);
}

/// One step of the online softmax (FlashAttention-2, algorithm 1) for keys [begin, end), multiples
/// of 32: weights exp(scale · s - max) go to `p`, and `max` and `sum` of the rows are brought up to
/// date. The sum is of weights that aren't rounded. Returns what O must be multiplied by. `turn` is
/// called once a row.
template <class Turn>
RADDLE_FN Vec softmax_step_16(const float* s, i32 lds, i32 begin, i32 end, float scale, float* max,
                              float* sum, bf16* p, i32 ldp, Turn turn) {
  const Vec before = simd::load(max);
  const Vec top = simd::max(max_of_rows(s, lds, begin, end) * scale, before);
  // A row with nothing kept so far: subtracting 0 leaves every logit at -inf.
  const Vec shift = top == -math::infinity ? Vec{} : top;
  const Vec rescale = simd::exp2_nonpositive((before - shift) * math::log2e);
  float minus_shift[tile_rows];
  simd::store(minus_shift, shift * -math::log2e);
  const Vec factor = simd::broadcast(scale * math::log2e);
  Vec totals[tile_rows];
  for (i32 i = 0; i < tile_rows; ++i) {
    const float* row = s + i * lds;
    const Vec minus = simd::broadcast(minus_shift[i]);
    Vec total{};
    turn();
    for (i32 j = begin; j < end; j += 2 * lanes) {
      const Vec low = simd::exp2_nonpositive(simd::fma(simd::load(row + j), factor, minus));
      const Vec high =
          simd::exp2_nonpositive(simd::fma(simd::load(row + j + lanes), factor, minus));
      total = total + (low + high);
      simd::store_words(p + i * ldp + j, simd::round_to_bf16(low, high));
    }
    totals[i] = total;
  }
  simd::store(max, top);
  simd::store(sum, simd::fma(simd::load(sum), rescale, simd::sum_each(totals)));
  return rescale;
}

/// Weights of a plain sum: s, rounded.
RADDLE_FN void round_weights(const float* s, i32 lds, i32 begin, i32 end, bf16* p, i32 ldp) {
  for (i32 i = 0; i < tile_rows; ++i)
    for (i32 j = begin; j < end; j += 2 * lanes)
      simd::store_words(p + i * ldp + j, simd::round_to_bf16(simd::load(s + i * lds + j),
                                                             simd::load(s + i * lds + j + lanes)));
}

}  // namespace cpu

RADDLE_ENGINE_END
