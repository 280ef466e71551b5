// Arithmetic instructions.
#pragma once

#include "raddle/engine/core/dtype.h"

RADDLE_ENGINE_BEGIN

namespace ptx {

/// 2^x within 2^-22.5 of its value; 0 at -inf.
RADDLE_DEVICE float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// 1 / x within 1 ulp; 0 at infinity.
RADDLE_DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// log2(x) within 2^-22 of its value, or of 1 where that is more; -inf at 0.
RADDLE_DEVICE float log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// x · y + z, rounded once. Contraction is off, so that the only ones are those that are asked for.
RADDLE_DEVICE float fma(float x, float y, float z) {
  float r;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(x), "f"(y), "f"(z));
  return r;
}

/// Sine and cosine of |x| <= π, within 2^-20.5: one instruction of the special function unit each.
RADDLE_DEVICE float sin(float x) {
  float y;
  asm("sin.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

RADDLE_DEVICE float cos(float x) {
  float y;
  asm("cos.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#if __CUDA_ARCH__ == 900
/// tanh(x) within 2^-16.9, an absolute error, and 2^-16.5 of its value: measured on an H200
/// (docs/lab/hopper.md), and asked of any GPU by test_soft_caps_of_all_numbers. PTX promises 2^-11
/// alone.
#define RADDLE_HAS_TANH 1
RADDLE_DEVICE float tanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif

/// The larger number; the other one where one is NaN.
RADDLE_DEVICE float max(float x, float y) {
  float r;
  asm("max.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
  return r;
}

}  // namespace ptx

RADDLE_ENGINE_END
