// Conversions between dtypes, two or four numbers at a time.
#pragma once

#include "raddle/engine/core/dtype.h"

RADDLE_ENGINE_BEGIN

namespace ptx {

#if __CUDA_ARCH__ >= 800
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
#else
RADDLE_DEVICE u32 pack(float low, float high, f16) {
  u32 y;
  asm("{\n.reg .b16 l, h;\ncvt.rn.f16.f32 l, %2;\ncvt.rn.f16.f32 h, %1;\nmov.b32 %0, {l, h};\n}"
      : "=r"(y)
      : "f"(high), "f"(low));
  return y;
}

RADDLE_DEVICE u32 pack(float low, float high, bf16) {
  return from_float<bf16>(low).bits | static_cast<u32>(from_float<bf16>(high).bits) << 16;
}
#endif

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

/// Byte i of the result is the one that nibble i of `which` names: 0 to 3 of x, 4 a zero.
template <u32 which>
RADDLE_DEVICE u32 select_bytes(u32 x) {
  u32 y;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(y) : "r"(x), "n"(which));
  return y;
}

/// Whether e4m3_to_f16 is one instruction (sm_89 on).
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
constexpr bool converts_e4m3 = true;

/// Four e4m3 as f16: bytes 0 and 1, and bytes 2 and 3.
RADDLE_DEVICE void e4m3_to_f16(u32 (&y)[2], u32 x) {
  asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, lo;\ncvt.rn.f16x2.e4m3x2 %1, hi;\n}"
      : "=r"(y[0]), "=r"(y[1])
      : "r"(x));
}
#else
constexpr bool converts_e4m3 = false;
RADDLE_DEVICE void e4m3_to_f16(u32 (&)[2], u32) {}
#endif

/// The products of two pairs of f16.
RADDLE_DEVICE u32 multiply_pair(u32 x, u32 y) {
  u32 product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(x), "r"(y));
  return product;
}

/// The differences of two pairs of f16.
RADDLE_DEVICE u32 subtract_pair(u32 x, u32 y) {
  u32 difference;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(x), "r"(y));
  return difference;
}

}  // namespace ptx

RADDLE_ENGINE_END
