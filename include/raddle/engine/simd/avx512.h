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

RADDLE_FN Vec widen_f16(VecH h) {
  // The masked form: gcc 12 warns of its own undefined register in the plain one.
  return _mm512_maskz_cvtph_ps(0xffff, reinterpret_cast<__m256i>(h));
}

}  // namespace simd

RADDLE_ENGINE_END
