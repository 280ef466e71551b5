// The element types of Q, K, V and O, and their conversions to and from fp32 (round to nearest,
// ties to even).
#pragma once

#include "raddle/engine/core/config.h"

namespace raddle {

enum class DType : i32 { float32, float16, bfloat16 };

struct f16 {
  u16 bits;
};
struct bf16 {
  u16 bits;
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

RADDLE_FN constexpr i32 dtype_bytes(DType t) { return t == DType::float32 ? 4 : 2; }

RADDLE_FN float bits_to_float(u32 u) { return __builtin_bit_cast(float, u); }
RADDLE_FN u32 float_to_bits(float f) { return __builtin_bit_cast(u32, f); }

RADDLE_FN float to_float(float x) { return x; }
RADDLE_FN float to_float(bf16 x) { return bits_to_float(static_cast<u32>(x.bits) << 16); }

RADDLE_FN float to_float(f16 x) {
  const u32 sign = static_cast<u32>(x.bits & 0x8000u) << 16;
  const u32 body = static_cast<u32>(x.bits & 0x7fffu) << 13;
  // Shifting the exponent field into place leaves it 112 too small; one multiplication by 2^112
  // mends normal and subnormal numbers alike. Infinities and NaN keep their all-ones exponent.
  const float scaled = bits_to_float(body) * bits_to_float((127u + 112u) << 23);
  const u32 bits = (x.bits & 0x7c00u) == 0x7c00u ? body | 0x7f800000u : float_to_bits(scaled);
  return bits_to_float(sign | bits);
}

template <class T>
RADDLE_FN T from_float(float x);

template <>
RADDLE_FN float from_float<float>(float x) {
  return x;
}

template <>
RADDLE_FN bf16 from_float<bf16>(float x) {
  const u32 u = float_to_bits(x);
  const u32 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const u32 quiet_nan = (u >> 16) | 0x40u;
  return bf16{static_cast<u16>((u & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded)};
}

template <>
RADDLE_FN f16 from_float<f16>(float x) {
  const u32 u = float_to_bits(x);
  const u32 sign = (u >> 16) & 0x8000u;
  const u32 mag = u & 0x7fffffffu;
  // Numbers at or above 2^16 - 2^4 round to infinity.
  const u32 special = mag > 0x7f800000u ? 0x7e00u : 0x7c00u;
  // Normal results: drop 13 bits with rounding, and rebias the exponent by -112.
  const u32 normal = (mag + 0xfffu + ((mag >> 13) & 1u) - (112u << 23)) >> 13;
  // Subnormal results: adding 0.5 makes the fp32 adder round to a multiple of 2^-24.
  const u32 subnormal = float_to_bits(bits_to_float(mag) + 0.5f) - float_to_bits(0.5f);
  const u32 body = mag >= 0x477ff000u ? special : mag >= 0x38800000u ? normal : subnormal;
  return f16{static_cast<u16>(sign | body)};
}

template <class T>
struct dtype_of;
template <>
struct dtype_of<float> {
  static constexpr DType value = DType::float32;
};
template <>
struct dtype_of<f16> {
  static constexpr DType value = DType::float16;
};
template <>
struct dtype_of<bf16> {
  static constexpr DType value = DType::bfloat16;
};

/// Calls f(T{}) with the element type that `t` names.
template <class F>
RADDLE_FN decltype(auto) dispatch_dtype(DType t, F&& f) {
  switch (t) {
    case DType::float16:
      return f(f16{});
    case DType::bfloat16:
      return f(bf16{});
    default:
      return f(float{});
  }
}

RADDLE_ENGINE_END
