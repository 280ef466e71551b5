// Integer arithmetic as Python and numpy define it for int32: results wrap, division rounds towards
// minus infinity, and nothing traps. Overflow and division by 0 would be undefined in C++, and an
// optimiser that assumes they never happen may drop the bounds of an index.
#pragma once

#include "raddle/engine/core/math.h"
#include "raddle/engine/core/tensor.h"

RADDLE_ENGINE_BEGIN

namespace traced {

RADDLE_FN constexpr i32 add(i32 a, i32 b) {
  return static_cast<i32>(static_cast<u32>(a) + static_cast<u32>(b));
}
RADDLE_FN constexpr i32 sub(i32 a, i32 b) {
  return static_cast<i32>(static_cast<u32>(a) - static_cast<u32>(b));
}
RADDLE_FN constexpr i32 mul(i32 a, i32 b) {
  return static_cast<i32>(static_cast<u32>(a) * static_cast<u32>(b));
}
RADDLE_FN constexpr i32 neg(i32 a) { return sub(0, a); }
RADDLE_FN constexpr i32 abs(i32 a) { return a < 0 ? neg(a) : a; }

/// a / b rounded towards 0, for b other than 0 and -1.
RADDLE_FN constexpr i32 quotient(i32 a, i32 b) {
#if defined(__CUDA_ARCH__)
  return a / b;
#else
  // Doubles vectorise where integer division does not, and are exact: a quotient of int32s that is
  // no integer is further from the next one than a double's rounding.
  return static_cast<i32>(static_cast<double>(a) / static_cast<double>(b));
#endif
}

/// All bits set where the remainder of a division towards 0 has another sign than the divisor;
/// else 0.
RADDLE_FN constexpr i32 below(i32 rest, i32 divisor) {
  return ((rest ^ divisor) & (rest | neg(rest))) >> 31;
}

/// a // b; 0 where b is 0.
RADDLE_FN constexpr i32 floor_div(i32 a, i32 b) {
  const i32 divisor = b == 0 || b == -1 ? 1 : b;
  const i32 q = quotient(a, divisor);
  const i32 rest = sub(a, mul(q, divisor));
  const i32 down = q + below(rest, divisor);
  return b == 0 ? 0 : b == -1 ? neg(a) : down;
}

/// a % b with the sign of b; 0 where b is 0.
RADDLE_FN constexpr i32 floor_mod(i32 a, i32 b) {
  const i32 divisor = b == 0 || b == -1 ? 1 : b;
  const i32 rest = sub(a, mul(quotient(a, divisor), divisor));
  return rest + (divisor & below(rest, divisor));
}

/// a // n for a constant n > 0.
template <i32 n>
RADDLE_FN constexpr i32 floor_div(i32 a) {
  static_assert(n > 0);
  if constexpr (is_power_of_two(n)) {
    constexpr i32 bits = [] {
      i32 k = 0;
      while (n >> k > 1) ++k;
      return k;
    }();
    return a >> bits;
  } else {
    return a / n + ((a % n) >> 31);
  }
}

/// a % n for a constant n > 0.
template <i32 n>
RADDLE_FN constexpr i32 floor_mod(i32 a) {
  static_assert(n > 0);
  if constexpr (is_power_of_two(n)) {
    return a & (n - 1);
  } else {
    const i32 rest = a % n;
    return rest + (n & (rest >> 31));
  }
}

/// a << n; 0 where n is not in [0, 31].
RADDLE_FN constexpr i32 shift_left(i32 a, i32 n) {
  return n < 0 || n > 31 ? 0 : static_cast<i32>(static_cast<u32>(a) << (n & 31));
}

/// a >> n, arithmetic; the sign of a where n is not in [0, 31].
RADDLE_FN constexpr i32 shift_right(i32 a, i32 n) { return a >> (n < 0 || n > 31 ? 31 : n); }

/// Truncation towards 0, held within int32; 0 for NaN.
RADDLE_FN constexpr i32 to_int(float x) {
  const float held = x < -2147483648.0f ? -2147483648.0f : x > 2147483520.0f ? 2147483520.0f : x;
  return x != x ? 0 : x >= 2147483648.0f ? 0x7fffffff : static_cast<i32>(x != x ? 0.0f : held);
}

// int64 as PyTorch has it, where 32 bits would not hold a value: hashes, mostly.

RADDLE_FN constexpr i64 add(i64 a, i64 b) {
  return static_cast<i64>(static_cast<u64>(a) + static_cast<u64>(b));
}
RADDLE_FN constexpr i64 sub(i64 a, i64 b) {
  return static_cast<i64>(static_cast<u64>(a) - static_cast<u64>(b));
}
RADDLE_FN constexpr i64 mul(i64 a, i64 b) {
  return static_cast<i64>(static_cast<u64>(a) * static_cast<u64>(b));
}
RADDLE_FN constexpr i64 neg(i64 a) { return sub(i64{0}, a); }
RADDLE_FN constexpr i64 abs(i64 a) { return a < 0 ? neg(a) : a; }
RADDLE_FN constexpr i64 minimum(i64 a, i64 b) { return min(a, b); }
RADDLE_FN constexpr i64 maximum(i64 a, i64 b) { return max(a, b); }
/// a // b; 0 where b is 0.
RADDLE_FN constexpr i64 floor_div(i64 a, i64 b) {
  if (b == 0) return 0;
  if (b == -1) return neg(a);
  const i64 q = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? q - 1 : q;
}
/// a % b with the sign of b; 0 where b is 0.
RADDLE_FN constexpr i64 floor_mod(i64 a, i64 b) {
  if (b == 0 || b == -1) return 0;
  const i64 rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
/// a << n; 0 where n is not in [0, 63].
RADDLE_FN constexpr i64 shift_left(i64 a, i64 n) {
  return n < 0 || n > 63 ? 0 : static_cast<i64>(static_cast<u64>(a) << (n & 63));
}
/// a >> n, arithmetic; the sign of a where n is not in [0, 63].
RADDLE_FN constexpr i64 shift_right(i64 a, i64 n) { return a >> (n < 0 || n > 63 ? 63 : n); }
/// Truncation towards 0, held within int64; 0 for NaN.
RADDLE_FN constexpr i64 to_long(float x) {
  constexpr float limit = 9223372036854775808.0f;
  if (x != x) return 0;
  if (x >= limit) return 0x7fffffffffffffff;
  return x < -limit ? -0x7fffffffffffffff - 1 : static_cast<i64>(x);
}

/// An index as Python reads it: a negative one counts from the end.
RADDLE_FN constexpr i32 wrap(i32 i, i32 n) { return i < 0 ? i + n : i; }

/// The index in [0, n) nearest to i: no captured tensor is read out of bounds. n is at least 1.
RADDLE_FN constexpr i32 clamp_index(i32 i, i32 n) { return max(0, min(i, n - 1)); }

/// The element of a captured tensor at clamped indices.
template <class Captured>
RADDLE_FN const auto& at(const Captured& t, i32 i) {
  return t.data[clamp_index(i, t.extent[0])];
}
template <class Captured, class... More>
RADDLE_FN const auto& at(const Captured& t, i32 i, More... more) {
  i64 offset = clamp_index(i, t.extent[0]);
  i32 d = 0;
  ((++d, offset = offset * t.extent[d] + clamp_index(more, t.extent[d])), ...);
  return t.data[offset];
}

// Floats as numpy and PyTorch define them.

RADDLE_FN float floor_div(float a, float b) { return math::floor(a / b); }
RADDLE_FN float floor_mod(float a, float b) { return a - math::floor(a / b) * b; }

/// NaN where either is NaN.
RADDLE_FN constexpr float minimum(float a, float b) { return a < b || a != a ? a : b; }
RADDLE_FN constexpr float maximum(float a, float b) { return a > b || a != a ? a : b; }
RADDLE_FN constexpr i32 minimum(i32 a, i32 b) { return min(a, b); }
RADDLE_FN constexpr i32 maximum(i32 a, i32 b) { return max(a, b); }

/// NaN below 0.
RADDLE_FN float log2(float x) { return x < 0.0f ? bits_to_float(0x7fc00000u) : math::log2(x); }
RADDLE_FN float log(float x) { return x < 0.0f ? bits_to_float(0x7fc00000u) : math::log(x); }

}  // namespace traced

RADDLE_ENGINE_END
