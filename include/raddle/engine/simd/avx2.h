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

}  // namespace simd

RADDLE_ENGINE_END
