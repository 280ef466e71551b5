// Rows of K and V on their way into tiles: bf16 as it lies in memory, or out of e4m3, each of which
// is a bf16 whose bytes are looked up.
#pragma once

#include "raddle/engine/simd/amx.h"

RADDLE_ENGINE_BEGIN

namespace simd {

/// bf16 of every e4m3 without its sign, low and high bytes.
struct alignas(64) E4m3Table {
  u8 low[128], high[128];

  constexpr E4m3Table() : low(), high() {
    for (i32 code = 0; code < 128; ++code) {
      const i32 exponent = code >> 3, mantissa = code & 7;
      i32 bits = (exponent + 120) << 7 | mantissa << 4;
      if (exponent == 0) {  // mantissa · 2⁻⁹, which bf16 has as a normal number
        i32 top = 2;
        while (top > 0 && (mantissa >> top) == 0) --top;
        bits = mantissa == 0 ? 0 : (118 + top) << 7 | ((mantissa << (7 - top)) & 0x7f);
      }
      if (code == 127) bits = 0x7fc0;  // NaN
      low[code] = static_cast<u8>(bits);
      high[code] = static_cast<u8>(bits >> 8);
    }
  }
};

/// Of the 16 e4m3 in each quarter of x, the first 8 in a's quarter, the others in b's.
RADDLE_FN void widen_quarters(__m512i x, VecW& a, VecW& b) {
  static constexpr E4m3Table table;
  const auto load = [](const u8* bytes) { return _mm512_load_si512(bytes); };
  const __m512i sign = _mm512_and_si512(x, _mm512_set1_epi8(-128));
  const __m512i low = _mm512_permutex2var_epi8(load(table.low), x, load(table.low + 64));
  const __m512i high =
      _mm512_or_si512(sign, _mm512_permutex2var_epi8(load(table.high), x, load(table.high + 64)));
  a = reinterpret_cast<VecW>(_mm512_unpacklo_epi8(low, high));
  b = reinterpret_cast<VecW>(_mm512_unpackhi_epi8(low, high));
}

/// 64 elements in their order.
RADDLE_FN void load_words(const bf16* p, VecW& a, VecW& b) {
  a = load_words(p);
  b = load_words(p + 32);
}
RADDLE_FN void load_words(const e4m3* p, VecW& a, VecW& b) {
  // Each quarter is first given the 8 bytes of `a` and of `b` that belong there.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  widen_quarters(_mm512_permutexvar_epi64(order, _mm512_loadu_si512(p)), a, b);
}

/// 32 columns of up to 16 rows of fp32, `ld` apart, as pairs of columns × rows: the right side of a
/// product. Rows past `count` are zero.
RADDLE_FN void pair_columns(const float* x, i64 ld, i32 count, bf16* to) {
  Vec pairs[tile_rows];
#pragma GCC unroll 16
  for (i32 m = 0; m < tile_rows; ++m) {
    const float* at = x + m * ld;
    pairs[m] = m < count ? reinterpret_cast<Vec>(round_to_bf16(load(at), load(at + lanes))) : Vec{};
  }
  transpose(pairs);
#pragma GCC unroll 16
  for (i32 r = 0; r < tile_rows; ++r)
    store_words(to + r * tile_depth, reinterpret_cast<VecW>(pairs[r]));
}

/// 64 columns of two rows as pairs (even[n], odd[n]), 16 pairs in each of `pairs`: those that
/// unpacking quarters of a register brings together. `in_order` undoes that in what is computed of
/// them: once an item there, instead of at every row here.
RADDLE_FN void pair_rows(const bf16* even, const bf16* odd, VecW (&pairs)[4]) {
#pragma GCC unroll 2
  for (i32 i = 0; i < 2; ++i) {
    const auto a = reinterpret_cast<__m512i>(load_words(even + 32 * i));
    const auto b = reinterpret_cast<__m512i>(load_words(odd + 32 * i));
    pairs[2 * i] = reinterpret_cast<VecW>(_mm512_unpacklo_epi16(a, b));
    pairs[2 * i + 1] = reinterpret_cast<VecW>(_mm512_unpackhi_epi16(a, b));
  }
}
RADDLE_FN void pair_rows(const e4m3* even, const e4m3* odd, VecW (&pairs)[4]) {
  const __m512i a = _mm512_loadu_si512(even), b = _mm512_loadu_si512(odd);
  widen_quarters(_mm512_unpacklo_epi8(a, b), pairs[0], pairs[1]);
  widen_quarters(_mm512_unpackhi_epi8(a, b), pairs[2], pairs[3]);
}

/// Four registers of sums, one column for each pair of `pair_rows`, as 64 columns in their order.
RADDLE_FN void in_order(const bf16*, Vec (&x)[4]) {
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
#pragma GCC unroll 2
  for (i32 i = 0; i < 4; i += 2) {
    const auto a = reinterpret_cast<__m512d>(x[i]), b = reinterpret_cast<__m512d>(x[i + 1]);
    x[i] = reinterpret_cast<Vec>(_mm512_permutex2var_pd(a, low, b));
    x[i + 1] = reinterpret_cast<Vec>(_mm512_permutex2var_pd(a, high, b));
  }
}
RADDLE_FN void in_order(const e4m3*, Vec (&x)[4]) {
  constexpr i32 halves_low = 0x44, halves_high = 0xee, even = 0x88, odd = 0xdd;
  const __m512 a = _mm512_shuffle_f32x4(x[0], x[1], halves_low);
  const __m512 b = _mm512_shuffle_f32x4(x[0], x[1], halves_high);
  const __m512 c = _mm512_shuffle_f32x4(x[2], x[3], halves_low);
  const __m512 d = _mm512_shuffle_f32x4(x[2], x[3], halves_high);
  x[0] = _mm512_shuffle_f32x4(a, c, even);
  x[1] = _mm512_shuffle_f32x4(a, c, odd);
  x[2] = _mm512_shuffle_f32x4(b, d, even);
  x[3] = _mm512_shuffle_f32x4(b, d, odd);
}

}  // namespace simd

RADDLE_ENGINE_END
