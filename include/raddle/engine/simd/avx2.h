// Eight lanes: AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

#include "raddle/engine/core/dtype.h"

RADDLE_ENGINE_BEGIN

namespace simd {

constexpr i32 lanes = 8;
constexpr i32 registers = 16;
typedef float Vec __attribute__((vector_size(lanes * 4)));
typedef u16 VecH __attribute__((vector_size(lanes * 2)));

RADDLE_FN Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
RADDLE_FN Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }

RADDLE_FN Vec widen_f16(VecH h) { return _mm256_cvtph_ps(reinterpret_cast<__m128i>(h)); }

RADDLE_FN __m256i widen_16(VecH h) { return _mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(h)); }
RADDLE_FN __m128i load_8_as_16(const void* p) { return _mm_cvtepi8_epi16(_mm_loadu_si64(p)); }
RADDLE_FN __m256i load_twice_8_as_16(const void* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
RADDLE_FN __m256i load_8_as_32(const void* p) { return _mm256_cvtepi8_epi32(_mm_loadu_si64(p)); }

}  // namespace simd

RADDLE_ENGINE_END
