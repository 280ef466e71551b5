// Two registers of bf16 out of memory: as they lie there, or out of e4m3, each of which is a bf16
// whose bytes are looked up.
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

RADDLE_FN void load_words(const bf16* p, VecW& a, VecW& b) {
  a = load_words(p);
  b = load_words(p + 32);
}

RADDLE_FN void load_words(const e4m3* p, VecW& a, VecW& b) {
  static constexpr E4m3Table table;
  const auto load = [](const u8* bytes) { return _mm512_load_si512(bytes); };
  // Unpacking works on quarters of a register, so each quarter is first given the 8 bytes that
  // belong there.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  const __m512i x = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(p));
  const __m512i sign = _mm512_and_si512(x, _mm512_set1_epi8(-128));
  const __m512i low = _mm512_permutex2var_epi8(load(table.low), x, load(table.low + 64));
  const __m512i high =
      _mm512_or_si512(sign, _mm512_permutex2var_epi8(load(table.high), x, load(table.high + 64)));
  a = reinterpret_cast<VecW>(_mm512_unpacklo_epi8(low, high));
  b = reinterpret_cast<VecW>(_mm512_unpackhi_epi8(low, high));
}

}  // namespace simd

RADDLE_ENGINE_END
