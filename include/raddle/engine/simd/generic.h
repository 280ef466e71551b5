// Four lanes: SSE2, NEON, or whatever the compiler makes of a 16-byte vector.
#pragma once

#include "raddle/engine/core/dtype.h"

RADDLE_ENGINE_BEGIN

namespace simd {

constexpr i32 lanes = 4;
constexpr i32 registers = 16;
typedef float Vec __attribute__((vector_size(lanes * 4)));
typedef u16 VecH __attribute__((vector_size(lanes * 2)));

RADDLE_FN Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
RADDLE_FN Vec max(Vec a, Vec b) { return a > b ? a : b; }

RADDLE_FN Vec widen_f16(VecH h) {
  return Vec{to_float(f16{h[0]}), to_float(f16{h[1]}), to_float(f16{h[2]}), to_float(f16{h[3]})};
}

}  // namespace simd

RADDLE_ENGINE_END
