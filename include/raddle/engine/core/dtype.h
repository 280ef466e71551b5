// The element types of Q, K, V and O, and their conversions to and from fp32 (round to nearest,
// ties to even). 8-bit types are for K and V alone. Conversions to them saturate: what is larger
// than the largest finite number, infinities included, becomes that number. NaN stays NaN; int8,
// which has no NaN, gets 0.
#pragma once

#include "raddle/engine/core/config.h"

namespace raddle {

enum class DType : i32 { float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, int8 };

struct f16 {
  u16 bits;
};
struct bf16 {
  u16 bits;
};
/// Four bits of exponent, three of mantissa, no infinities: to ±448 (OCP 8-bit floating point).
struct e4m3 {
  u8 bits;
  static constexpr float max_finite = 448.0f;
};
/// The upper byte of an f16: to ±57344.
struct e5m2 {
  u8 bits;
  static constexpr float max_finite = 57344.0f;
};

/// An integer. Conversions read -128 but never produce it, so that every stored number has an
/// opposite.
struct s8 {
  signed char value;
  static constexpr float max_finite = 127.0f;
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

RADDLE_FN constexpr bool has_8_bits(DType t) {
  return t == DType::float8_e4m3fn || t == DType::float8_e5m2 || t == DType::int8;
}
RADDLE_FN constexpr i32 dtype_bytes(DType t) {
  return t == DType::float32 ? 4 : has_8_bits(t) ? 1 : 2;
}

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

RADDLE_FN float to_float(e5m2 x) { return to_float(f16{static_cast<u16>(x.bits << 8)}); }

RADDLE_FN float to_float(e4m3 x) {
  // Read as an f16, its bits mean 2^-8 of the e4m3's value; NaN is handled apart.
  const u16 body = static_cast<u16>((x.bits & 0x7fu) << 7);
  const u16 sign = static_cast<u16>((x.bits & 0x80u) << 8);
  const u16 nan = body == 0x3f80u ? u16{0x7e00} : u16{0};
  return to_float(f16{static_cast<u16>(sign | body | nan)}) * 256.0f;
}

RADDLE_FN float to_float(s8 x) { return static_cast<float>(x.value); }

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

/// The body of an 8-bit number without its sign, with an exponent bias of `bias`.
template <i32 mantissa_bits, i32 bias, u32 largest>
RADDLE_FN u32 round_to_fp8(u32 mag) {
  constexpr i32 dropped = 23 - mantissa_bits;
  const u32 half = (1u << (dropped - 1)) - 1u + ((mag >> dropped) & 1u);
  const u32 normal = (mag + half - (static_cast<u32>(127 - bias) << 23)) >> dropped;
  // As for f16: the fp32 adder rounds to a multiple of the smallest subnormal number.
  constexpr float shift =
      __builtin_bit_cast(float, static_cast<u32>(127 + 24 - bias - mantissa_bits) << 23);
  const u32 subnormal = float_to_bits(bits_to_float(mag) + shift) - float_to_bits(shift);
  const u32 body = mag >= static_cast<u32>(128 - bias) << 23 ? normal : subnormal;
  return mag > 0x7f800000u ? 0x7fu : body > largest ? largest : body;
}

template <>
RADDLE_FN e4m3 from_float<e4m3>(float x) {
  const u32 u = float_to_bits(x);
  return e4m3{static_cast<u8>(((u >> 24) & 0x80u) | round_to_fp8<3, 7, 0x7eu>(u & 0x7fffffffu))};
}

template <>
RADDLE_FN e5m2 from_float<e5m2>(float x) {
  const u32 u = float_to_bits(x);
  return e5m2{static_cast<u8>(((u >> 24) & 0x80u) | round_to_fp8<2, 15, 0x7bu>(u & 0x7fffffffu))};
}

template <>
RADDLE_FN s8 from_float<s8>(float x) {
  const float limited = x > 127.0f ? 127.0f : x < -127.0f ? -127.0f : x;
  // Adding 1.5 · 2^23 makes the fp32 adder round to an integer, which then stands in its lowest
  // bits.
  const u32 u = float_to_bits(limited + 12582912.0f);
  return s8{static_cast<signed char>(x == x ? u & 0xffu : 0u)};
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

template <>
struct dtype_of<e4m3> {
  static constexpr DType value = DType::float8_e4m3fn;
};
template <>
struct dtype_of<e5m2> {
  static constexpr DType value = DType::float8_e5m2;
};
template <>
struct dtype_of<s8> {
  static constexpr DType value = DType::int8;
};

/// Whether K and V of that element type are quantised, and have scales.
template <class T>
constexpr bool is_quantized = has_8_bits(dtype_of<T>::value);

/// Calls f(T{}) with the element type that `t` names, which isn't one of 8 bits.
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

/// Calls f(T{}) with the element type of K and V, which may have 8 bits.
template <class F>
RADDLE_FN decltype(auto) dispatch_kv_dtype(DType t, F&& f) {
  switch (t) {
    case DType::float8_e4m3fn:
      return f(e4m3{});
    case DType::float8_e5m2:
      return f(e5m2{});
    case DType::int8:
      return f(s8{});
    default:
      return dispatch_dtype(t, f);
  }
}

RADDLE_ENGINE_END
