// Sixteen lanes: AVX-512 F, BW, DQ and VL.
#pragma once

#include <immintrin.h>

#include "raddle/engine/core/dtype.h"

RADDLE_ENGINE_BEGIN

namespace simd {

constexpr i32 lanes = 16;
constexpr i32 registers = 32;
typedef float Vec __attribute__((vector_size(lanes * 4)));
typedef u16 VecH __attribute__((vector_size(lanes * 2)));

RADDLE_FN Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
RADDLE_FN Vec max(Vec a, Vec b) { return _mm512_maskz_max_ps(0xffff, a, b); }  // see widen_f16

/// See simd::broadcast, which comes later.
RADDLE_FN Vec set_all(float x) { return x - Vec{}; }

/// The significand of 2^x for f = x - floor(x).
RADDLE_FN Vec exp2_fraction(Vec x) {
  const Vec f = _mm512_maskz_reduce_ps(0xffff, x, _MM_FROUND_TO_NEG_INF);  // see widen_f16
  // Minimax for the relative error, 8.2e-8, exact at 0.
  Vec p = fma(set_all(1.867141723e-3f), f, set_all(9.017005645e-3f));
  p = fma(p, f, set_all(5.579993076e-2f));
  p = fma(p, f, set_all(2.401644453e-1f));
  p = fma(p, f, set_all(6.931513122e-1f));
  return fma(p, f, set_all(1.0f));
}

/// 2^x per lane for x <= 0 or -inf, 2.4 ulp; 0 below -126, where numbers lose bits and multiplying
/// them is slow; NaN stays NaN. Two instructions do what takes seven elsewhere: finding x -
/// floor(x), and multiplying by 2^floor(x).
#define RADDLE_EXP2_NONPOSITIVE
RADDLE_FN Vec exp2_nonpositive(Vec x) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, set_all(-126.0f), _CMP_NLT_UQ),
                                exp2_fraction(x), x);
}

/// 2^x per lane for any x, with no special case for small x: below -126 results lose bits, and from
/// -150 on they are 0.
RADDLE_FN Vec exp2_unguarded(Vec x) {
  return _mm512_maskz_scalef_ps(0xffff, exp2_fraction(x), x);  // see widen_f16
}

/// False where a lane is larger or NaN.
RADDLE_FN bool all_at_most(Vec v, float limit) {
  return _mm512_cmp_ps_mask(v, set_all(limit), _CMP_NLE_UQ) == 0;
}

RADDLE_FN Vec widen_f16(VecH h) {
  // The masked form: gcc 12 warns of its own undefined register in the plain one.
  return _mm512_maskz_cvtph_ps(0xffff, reinterpret_cast<__m256i>(h));
}

RADDLE_FN __m512i widen_16(VecH h) {
  return _mm512_maskz_cvtepu16_epi32(0xffff, reinterpret_cast<__m256i>(h));
}
RADDLE_FN __m256i load_8_as_16(const void* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
RADDLE_FN __m512i load_twice_8_as_16(const void* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
RADDLE_FN __m512i load_8_as_32(const void* p) {
  return _mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128(static_cast<const __m128i*>(p)));
}

}  // namespace simd

RADDLE_ENGINE_END
