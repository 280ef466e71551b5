// Rows on their way in and out of fp32 scratch: widening, rounding, padding to whole vectors.
#pragma once

#include "raddle/engine/simd/vec.h"

RADDLE_ENGINE_BEGIN

/// dst[0, padded) = the row in fp32, zero past dim.
template <class T>
RADDLE_FN void widen_row(const T* src, float* dst, i32 dim, i32 padded) {
  i32 d = 0;
  for (; d + simd::lanes <= dim; d += simd::lanes) simd::store(dst + d, simd::load(src + d));
  for (; d < dim; ++d) dst[d] = to_float(src[d]);
  for (; d < padded; ++d) dst[d] = 0.0f;
}

/// Rounds a transformed row once to the matrix dtype, in place.
template <class T>
RADDLE_FN void round_row(float* x, i32 dim) {
  for (i32 d = 0; d < dim; ++d) x[d] = to_float(from_float<T>(x[d]));
}

template <class T>
RADDLE_FN void narrow_row(const float* src, T* dst, i32 dim) {
#pragma GCC ivdep
  for (i32 d = 0; d < dim; ++d) dst[d] = from_float<T>(src[d]);
}

RADDLE_ENGINE_END
