// Eight lanes: AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

#include "raddle/engine/core/dtype.h"

RADDLE_ENGINE_BEGIN

namespace simd {

constexpr i32 lanes = 8;
constexpr i32 registers = 16;
typedef float Vec __attribute__((vector_size(lanes * 4)));

RADDLE_FN Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
RADDLE_FN Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }

RADDLE_FN Vec load(const f16* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

}  // namespace simd

RADDLE_ENGINE_END
