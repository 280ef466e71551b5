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

/// The larger number; the other one where one is NaN.
RADDLE_DEVICE float max(float x, float y) {
  float r;
  asm("max.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
  return r;
}

/// Two numbers rounded to nearest: `low` in the lower half, `high` in the upper.
RADDLE_DEVICE u32 pack(float low, float high, f16) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

RADDLE_DEVICE u32 pack(float low, float high, bf16) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

/// The numbers in the lower and in the upper half.
RADDLE_DEVICE void unpack(u32 x, float& low, float& high, f16) {
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
      : "=f"(low), "=f"(high)
      : "r"(x));
}

RADDLE_DEVICE void unpack(u32 x, float& low, float& high, bf16) {
  low = bits_to_float(x << 16);
  high = bits_to_float(x & 0xffff0000u);
}

}  // namespace ptx

RADDLE_ENGINE_END
