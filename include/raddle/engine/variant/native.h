// Functions that variants take from the hardware. A GPU's special function unit computes each
// approximation in one instruction; its last bits differ from a CPU's.
#pragma once

#include "raddle/engine/core/math.h"
#if defined(__CUDACC_RTC__)
#include "raddle/engine/ptx/math.h"
#endif

RADDLE_ENGINE_BEGIN

namespace native {

/// x · y + z, rounded once where the processor has an instruction for it.
RADDLE_FN float multiply_add(float x, float y, float z) {
#if defined(__CUDACC_RTC__)
  return ptx::fma(x, y, z);
#elif defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(x, y, z);
#else
  return x * y + z;
#endif
}

#if !defined(__CUDACC_RTC__)

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

/// x / y, a few bits less exact where a division takes many instructions.
RADDLE_FN float quotient(float x, float y) {
#if defined(__CUDACC_RTC__)
  return x * ptx::reciprocal(y);
#else
  return x / y;
#endif
}

/// (2^t - 1) / (2^t + 1), which is tanh(t / (2 log2 e)), within 2^-21, an absolute error.
RADDLE_FN float tanh_of_exponent(float t) {
#if defined(__CUDACC_RTC__)
  return multiply_add(-2.0f, ptx::reciprocal(ptx::exp2(t) + 1.0f), 1.0f);
#else
  const float held = t < -32.0f ? -32.0f : t > 32.0f ? 32.0f : t;  // NaN passes
  return multiply_add(-2.0f, reciprocal(one_plus_exp2(held)), 1.0f);
#endif
}

/// tanh(x) within 2^-21, an absolute error.
RADDLE_FN float tanh(float x) { return tanh_of_exponent(x * (2.0f * math::log2e)); }

/// tanh(x / y) within 2^-21, an absolute error, on Hopper within 2^-16.9: the nonlinear part of a
/// soft cap. The quotient is a constant of the loop over keys; a division for each key would not
/// be.
RADDLE_FN float tanh_ratio(float x, float y) {
#if defined(RADDLE_HAS_TANH)
  return ptx::tanh(x * quotient(1.0f, y));
#else
  return tanh_of_exponent(x * quotient(2.0f * math::log2e, y));
#endif
}

/// x · y + z, in one instruction of a GPU, and rounded twice on a CPU: what traced Python and C++
/// variants both use, so that they give equal bits.
RADDLE_FN float product_sum(float x, float y, float z) {
#if defined(__CUDACC_RTC__)
  return ptx::fma(x, y, z);
#else
  return x * y + z;
#endif
}

/// The largest |s| for which near_soft_cap holds; negative: there is none. On Hopper, infinity.
RADDLE_FN float near_soft_cap_limit(float scale, float cap) {
  const float size = math::abs(scale), limit = quotient(0.55f * math::abs(cap), size);
  const bool is_tame = limit > 1e-5f && limit < 1e5f && size > 1e-5f && size < 1e5f;
#if defined(RADDLE_HAS_TANH)
  return is_tame ? math::infinity : -1.0f;
#else
  return is_tame ? limit : -1.0f;
#endif
}

/// cap · tanh(s · scale / cap) for small |s|, with the tanh within 2^-21 as well: an odd
/// polynomial, by seven instructions and no special function. A softmax takes one of these a logit,
/// tanh two more; but one, and two instructions, on Hopper.
RADDLE_FN float near_soft_cap(float s, float scale, float cap) {
  const float k = quotient(scale, cap);
#if defined(RADDLE_HAS_TANH)
  return cap * ptx::tanh(s * k);
#else
  const float k2 = k * k;
  // Minimax for the absolute error of tanh(t) / t · t, |t| <= 0.55. What is of launch members alone
  // is computed once a tile.
  const float c0 = 9.999953e-1f * scale, c1 = -3.3311898e-1f * (scale * k2);
  const float c2 = 1.3068742e-1f * (scale * k2 * k2), c3 = -4.151867e-2f * (scale * k2 * k2 * k2);
  const float u = s * s;
  return s * multiply_add(multiply_add(multiply_add(c3, u, c2), u, c1), u, c0);
#endif
}

}  // namespace native

RADDLE_ENGINE_END
