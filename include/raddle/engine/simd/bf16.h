// Vectors of bf16 (AVX512_BF16): rounding, rearranging, and products of pairs. Only here and in
// amx_rows.h are there such intrinsics.
#pragma once

#include "raddle/engine/simd/vec.h"

RADDLE_ENGINE_BEGIN

namespace simd {

/// A packed block, one operand of a product, has 16 rows (or columns) and 32 elements of the depth.
constexpr i32 tile_rows = 16;
constexpr i32 tile_depth = 32;

/// 32 numbers of 16 bits.
typedef u16 VecW __attribute__((vector_size(64)));

RADDLE_FN VecW load_words(const bf16* p) {
  VecW v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
RADDLE_FN void store_words(bf16* p, VecW v) { __builtin_memcpy(p, &v, sizeof(v)); }

/// (low, high) rounded to bf16; numbers below 2^-126 become 0, as they do inside a product.
RADDLE_FN VecW round_to_bf16(Vec low, Vec high) {
  return reinterpret_cast<VecW>(_mm512_cvtne2ps_pbh(high, low));
}

/// The elements of `a` and `b` in turn: those of their first halves in `low`, of their second
/// halves in `high`. Unpacking works on quarters of a register, so each quarter is first given the
/// 8 bytes that belong there.
RADDLE_FN void interleave(VecW a, VecW b, VecW& low, VecW& high) {
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  const __m512i x = _mm512_permutexvar_epi64(order, reinterpret_cast<__m512i>(a));
  const __m512i y = _mm512_permutexvar_epi64(order, reinterpret_cast<__m512i>(b));
  low = reinterpret_cast<VecW>(_mm512_unpacklo_epi16(x, y));
  high = reinterpret_cast<VecW>(_mm512_unpackhi_epi16(x, y));
}

/// c + a · b for each lane's pair: `pair` has the left side's two numbers, for all lanes.
/// Numbers below 2^-126 count as 0.
RADDLE_FN Vec dot_pairs(Vec c, u32 pair, VecW b) {
  const __m512i a = _mm512_set1_epi32(static_cast<i32>(pair));
  return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

}  // namespace simd

RADDLE_ENGINE_END
