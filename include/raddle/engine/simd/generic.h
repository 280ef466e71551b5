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

typedef signed char VecS __attribute__((vector_size(lanes)));
typedef signed char VecS2 __attribute__((vector_size(lanes * 2)));
typedef i32 VecI __attribute__((vector_size(lanes * 4)));
typedef short VecW __attribute__((vector_size(lanes * 2)));
typedef short VecW2 __attribute__((vector_size(lanes * 4)));

RADDLE_FN VecI widen_16(VecH h) { return __builtin_convertvector(h, VecI); }
template <class Bytes>
RADDLE_FN Bytes load_8(const void* p) {
  Bytes b;
  __builtin_memcpy(&b, p, sizeof(b));
  return b;
}
RADDLE_FN VecW load_8_as_16(const void* p) {
  return __builtin_convertvector(load_8<VecS>(p), VecW);
}
RADDLE_FN VecW2 load_twice_8_as_16(const void* p) {
  return __builtin_convertvector(load_8<VecS2>(p), VecW2);
}
RADDLE_FN VecI load_8_as_32(const void* p) {
  return __builtin_convertvector(load_8<VecS>(p), VecI);
}

}  // namespace simd

RADDLE_ENGINE_END
