// Elementary functions that inline and vectorise: straight-line code, no tables, no branches.
// Every backend executes the operations in one order and compiles with floating-point contraction
// off, so that all get equal bits.
//
// Errors stated are maxima measured over the range by tests/cpp/math_test.cpp.
#pragma once

#include "raddle/engine/core/dtype.h"

RADDLE_ENGINE_BEGIN

namespace math {

constexpr float infinity = __builtin_bit_cast(float, 0x7f800000u);
constexpr float log2e = 1.44269504088896340736f;
constexpr float ln2 = 0.69314718055994530942f;

#if defined(__CUDACC_RTC__)
RADDLE_FN float floor(float x) { return ::floorf(x); }
RADDLE_FN double floor(double x) { return ::floor(x); }
RADDLE_FN float sqrt(float x) { return ::sqrtf(x); }
#else
RADDLE_FN float floor(float x) { return __builtin_floorf(x); }
RADDLE_FN double floor(double x) { return __builtin_floor(x); }
/// Correctly rounded; NaN below 0.
RADDLE_FN float sqrt(float x) { return __builtin_sqrtf(x); }
#endif

RADDLE_FN float abs(float x) { return bits_to_float(float_to_bits(x) & 0x7fffffffu); }

/// 2^(n + f) for an integer n given as `n + 1.5·2^23` and |f| <= 1/2 (Cephes' polynomial of degree
/// 6).
RADDLE_FN float exp2_split(float shifted_n, float f) {
  float p = 1.535336188e-4f;
  p = p * f + 1.339887440e-3f;
  p = p * f + 9.618437358e-3f;
  p = p * f + 5.550332471e-2f;
  p = p * f + 2.402264791e-1f;
  p = p * f + 6.931472029e-1f;
  p = p * f + 1.0f;
  return bits_to_float(float_to_bits(p) + (float_to_bits(shifted_n) << 23));
}

/// Adding this leaves the nearest integer in the low mantissa bits (|x| < 2^22).
constexpr float round_shift = 12582912.0f;  // 1.5·2^23

/// 2^x, 2 ulp on [-126, 128); 0 below -126 and at -inf; +inf from 128 on; NaN stays NaN.
RADDLE_FN float exp2(float x) {
  const float clamped = x < -127.0f ? -127.0f : x > 128.0f ? 128.0f : x;
  const float shifted = clamped + round_shift;
  const float r = exp2_split(shifted, clamped - (shifted - round_shift));
  return x != x ? x : x < -126.0f ? 0.0f : x >= 128.0f ? infinity : r;
}

/// e^x, 2 ulp; 0, infinity and NaN as exp2 has them. The reduction keeps ln 2 in two parts, so the
/// error does not grow with |x|.
RADDLE_FN float exp(float x) {
  const float t = x * log2e;
  const float shifted = (t < -127.0f ? -127.0f : t > 128.0f ? 128.0f : t) + round_shift;
  const float n = shifted - round_shift;
  const float f = ((x - n * 0.693359375f) + n * 2.12194440e-4f) * log2e;
  const float r = exp2_split(shifted, f < -1.0f ? -1.0f : f > 1.0f ? 1.0f : f);
  return x != x ? x : t < -126.0f ? 0.0f : t >= 128.0f ? infinity : r;
}

/// log2(x) for x > 0 (normal numbers), about 1 ulp of the result away from 1; -inf at 0.
RADDLE_FN float log2(float x) {
  const u32 u = float_to_bits(x) - 0x3f3504f3u;  // sqrt(1/2): mantissas in [sqrt(1/2), sqrt(2))
  const float e = static_cast<float>(static_cast<i32>(u) >> 23);
  const float m = bits_to_float((u & 0x007fffffu) + 0x3f3504f3u);
  const float t = (m - 1.0f) / (m + 1.0f);
  const float t2 = t * t;
  float p = 0.3205989f;
  p = p * t2 + 0.4121985f;
  p = p * t2 + 0.5770780f;
  p = p * t2 + 0.9617967f;
  p = p * t2 + 2.8853900f;
  const float r = e + t * p;
  return x == 0.0f ? -infinity : x == infinity || x != x ? x : r;
}

RADDLE_FN float log(float x) { return log2(x) * ln2; }

/// tanh(x) within 2^-22, an absolute error: near 0 it is no smaller.
RADDLE_FN float tanh(float x) { return 1.0f - 2.0f / (exp2(x * (2.0f * log2e)) + 1.0f); }

/// tanh(x) within 1e-4 everywhere, without an exponential: its continued fraction to x^7 over
/// x^6, clamped where it reaches 1; equal bits on every backend.
RADDLE_FN float tanh_approx(float x) {
  const float b = x < -4.97f ? -4.97f : x > 4.97f ? 4.97f : x;  // NaN passes
  const float x2 = b * b;
  const float over = b * (135135.0f + x2 * (17325.0f + x2 * (378.0f + x2)));
  const float under = 135135.0f + x2 * (62370.0f + x2 * (3150.0f + x2 * 28.0f));
  return over / under;
}

/// 1 / (1 + e^-x).
RADDLE_FN float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }

struct SinCos {
  float sin, cos;
};

/// Sine and cosine of `quadrant` quarter turns and y radians, |y| <= π/4 (Cephes' polynomials).
RADDLE_FN SinCos sincos_quadrant(u32 quadrant, float y) {
  const float y2 = y * y;
  float s = -1.9515295891e-4f;
  s = s * y2 + 8.3321608736e-3f;
  s = s * y2 - 1.6666654611e-1f;
  s = y + y * (y2 * s);
  float c = 2.443315711809948e-5f;
  c = c * y2 - 1.388731625493765e-3f;
  c = c * y2 + 4.166664568298827e-2f;
  c = (1.0f - 0.5f * y2) + (y2 * y2) * c;
  const bool swap = (quadrant & 1u) != 0u;
  const float a = swap ? c : s;
  const float b = swap ? s : c;
  return SinCos{(quadrant & 2u) != 0u ? -a : a, ((quadrant + 1u) & 2u) != 0u ? -b : b};
}

/// Sine and cosine of `turn / 2^32` full turns: the phase is an integer, so its reduction is exact.
RADDLE_FN SinCos sincos_turns(u32 turn) {
  // The nearest quarter turn picks the quadrant; the rest lies in [-1/8, 1/8) turns.
  const u32 quadrant = (turn + 0x20000000u) >> 30;
  const float y = static_cast<float>(static_cast<i32>(turn - (quadrant << 30))) *
                  1.46291807926716e-9f;  // 2π / 2^32
  return sincos_quadrant(quadrant, y);
}

/// `pos` times a frequency of hi·2^-32 + lo·2^-64 turns, modulo one turn, in 2^-32 of a turn.
RADDLE_FN u32 turns(i32 pos, u32 hi, u32 lo) {
  // With a signed lower part, one product serves positions of either sign.
  const i64 carry = (i64{pos} * static_cast<i32>(lo)) >> 32;
  return static_cast<u32>(pos) * (hi + (lo >> 31)) + static_cast<u32>(carry);
}

/// Sine, cosine and product of a head vector's rotations, where every backend must produce equal
/// bits.
struct SameBits {
  RADDLE_FN static SinCos sincos_turns(u32 turn) { return math::sincos_turns(turn); }
  RADDLE_FN static float multiply_add(float x, float y, float z) { return x * y + z; }
};

/// Sine and cosine of x radians, within 1e-7 for |x| <= 2^20; bounded beyond, where the spacing of
/// x itself makes them meaningless; NaN for infinities.
RADDLE_FN SinCos sincos(float x) {
  // The product with 2/π in double has 24 + 29 exact bits, so that no reduction in parts is needed.
  constexpr double shift = 6755399441055744.0;  // 1.5·2^52: adding it rounds to an integer
  const double quarters = static_cast<double>(x) * 0.63661977236758134308;
  const double n = (quarters + shift) - shift;
  const float rest = static_cast<float>((quarters - n) * 1.57079632679489661923);
  const float y = rest < -0.79f ? -0.79f : rest > 0.79f ? 0.79f : rest;  // NaN passes
  const double held = n > -2147483648.0 ? n < 2147483647.0 ? n : 2147483647.0 : -2147483648.0;
  return sincos_quadrant(static_cast<u32>(static_cast<i32>(held)), y);
}

RADDLE_FN float sin(float x) { return sincos(x).sin; }
RADDLE_FN float cos(float x) { return sincos(x).cos; }

}  // namespace math

RADDLE_ENGINE_END
