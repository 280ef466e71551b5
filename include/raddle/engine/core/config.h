// What every engine header starts from: integer names, the function qualifier, and the ISA
// namespace.
//
// The engine compiles with a host compiler and with NVRTC, so it includes no standard header. Each
// CPU instruction set is built from the same sources with different compiler flags; all that has a
// function body therefore lives in an inline namespace named after the ISA, so that the linker can
// never pick an AVX-512 copy of an inline function for an older machine. Plain data (no function
// bodies) lives in `raddle` itself: it crosses from the host side into the kernels.
#pragma once

#if defined(__CUDACC_RTC__) || defined(__CUDACC__)
#define RADDLE_FN __host__ __device__ __forceinline__
#define RADDLE_DEVICE __device__ __forceinline__
#define RADDLE_COLD static __device__ __noinline__  // rarely executed code: a call, not inlined
#define RADDLE_ZEROS(T, name, n) __device__ const T name[n] = {}
#define RADDLE_UNROLL _Pragma("unroll")
#define RADDLE_ROLLED _Pragma("unroll 1")  // where unrolled copies would only add code
#else
#define RADDLE_FN inline __attribute__((always_inline))
#define RADDLE_DEVICE inline  // GPU code that a test runs on emulated threads
#define RADDLE_COLD inline
#define RADDLE_ZEROS(T, name, n) inline const T name[n] = {}
#define RADDLE_UNROLL
#define RADDLE_ROLLED
#endif

#ifndef RADDLE_ISA
#define RADDLE_ISA host
#endif

#define RADDLE_ENGINE_BEGIN \
  namespace raddle {        \
  inline namespace RADDLE_ISA {
#define RADDLE_ENGINE_END \
  }                       \
  }

namespace raddle {

using u8 = unsigned char;
using u16 = unsigned short;
using i32 = int;
using u32 = unsigned int;
using i64 = long;  // LP64: the same type as std::int64_t on every supported platform
using u64 = unsigned long;
static_assert(sizeof(i64) == 8 && sizeof(i32) == 4, "Raddle needs an LP64 platform");

}  // namespace raddle

RADDLE_ENGINE_BEGIN

/// A number as a type, to pass compile-time sizes to generic lambdas.
template <i32 n>
struct Int {
  static constexpr i32 value = n;
};

template <class T>
RADDLE_FN constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
RADDLE_FN constexpr T max(T a, T b) {
  return a < b ? b : a;
}
template <class T>
RADDLE_FN constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}
RADDLE_FN constexpr bool is_power_of_two(i32 n) { return n > 0 && (n & (n - 1)) == 0; }
template <class T>
RADDLE_FN constexpr T round_up(T a, T b) {
  return ceil_div(a, b) * b;
}

/// a / b of numbers that are not negative, which is cheaper than with signs.
RADDLE_FN constexpr i32 quotient(i32 a, i32 b) {
  return static_cast<i32>(static_cast<u32>(a) / static_cast<u32>(b));
}

/// a / b of 64-bit numbers that are not negative. Nearly all of them fit 32 bits, and a 32-bit
/// division takes a third of the time on a CPU, a fifth on a GPU.
RADDLE_FN constexpr i64 quotient(i64 a, i64 b) {
  const bool is_small = (static_cast<u64>(a | b) >> 32) == 0;
  return is_small ? static_cast<i64>(static_cast<u32>(a) / static_cast<u32>(b)) : a / b;
}

/// a / b, without a division where a < b, which is the usual case for its callers.
RADDLE_FN constexpr i32 quotient_of_few(i32 a, i32 b) { return a < b ? 0 : quotient(a, b); }

RADDLE_ENGINE_END
