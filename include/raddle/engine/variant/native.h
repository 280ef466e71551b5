// Functions that variants take from the hardware. A GPU's special function unit computes each
// approximation in one instruction; its last bits differ from a CPU's.
#pragma once

#include "raddle/engine/core/math.h"
#if defined(__CUDACC_RTC__)
#include "raddle/engine/ptx/math.h"
#endif

RADDLE_ENGINE_BEGIN

namespace native {

#if !defined(__CUDACC_RTC__)

/// x · y + z, rounded once where a CPU has an instruction for it.
RADDLE_FN float multiply_add(float x, float y, float z) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(x, y, z);
#else
  return x * y + z;
#endif
}

/// 1 + 2^t for |t| <= 32, or NaN, within 8e-8 of its value.
RADDLE_FN float one_plus_exp2(float t) {
  // Adding this leaves the nearest integer plus a float's exponent bias in the low bits.
  constexpr float shift = math::round_shift + 127.0f;
  const float shifted = t + shift;
  const float f = t - (shifted - shift);
  float p = 1.327647245e-3f;  // minimax for the relative error of 2^f, |f| <= 1/2
  p = multiply_add(p, f, 9.675541893e-3f);
  p = multiply_add(p, f, 5.550713092e-2f);
  p = multiply_add(p, f, 2.402212024e-1f);
  p = multiply_add(p, f, 6.931469440e-1f);
  p = multiply_add(p, f, 1.0f);
  return multiply_add(p, bits_to_float(float_to_bits(shifted) << 23), 1.0f);
}

/// 1 / x for x in [1, 2^33], or NaN, within 2e-7 of its value, in fewer cycles than a division: a
/// wide vector's takes longer than a whole soft cap does otherwise.
RADDLE_FN float reciprocal(float x) {
  // Subtracting the bits negates the exponent, and the significand roughly: within 5.1 %.
  const float guess = bits_to_float(0x7ef311c7u - float_to_bits(x));
  const float e = multiply_add(-x, guess, 1.0f);
  const float closer = multiply_add(guess, multiply_add(e, e, e), guess);  // cubes the error
  return multiply_add(closer, multiply_add(-x, closer, 1.0f), closer);     // squares it
}

#endif

/// tanh(x / y) within 2^-21, an absolute error: the nonlinear part of a soft cap.
RADDLE_FN float tanh_ratio(float x, float y) {
#if defined(__CUDACC_RTC__)
  const float e = ptx::exp2(x * (2.0f * math::log2e * ptx::reciprocal(y)));
  return ptx::fma(-2.0f, ptx::reciprocal(e + 1.0f), 1.0f);
#else
  // The quotient is a constant of the loop over keys; a division for each key would not be.
  const float t = x * (2.0f * math::log2e / y);
  const float held = t < -32.0f ? -32.0f : t > 32.0f ? 32.0f : t;  // NaN passes
  return multiply_add(-2.0f, reciprocal(one_plus_exp2(held)), 1.0f);
#endif
}

/// tanh(x) within 2^-21, an absolute error.
RADDLE_FN float tanh(float x) { return tanh_ratio(x, 1.0f); }

}  // namespace native

RADDLE_ENGINE_END
