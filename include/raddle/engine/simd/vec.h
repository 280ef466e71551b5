// A vector of fp32 lanes, as wide as the ISA this is compiled for. The ISA files hold what needs an
// intrinsic; everything else is written once with the compiler's vector extension.
//
// An ISA file defines: lanes, Vec, VecH, fma, max, registers (how many vector registers there are);
// what widens: widen_f16 (from the bits of f16), widen_16 (to 32 bits, zeros in front), and loads
// of bytes with copies of the sign in front, load_8_as_16, load_8_as_32 and, of 2 · lanes bytes,
// load_twice_8_as_16 (gcc makes halves or even scalars of __builtin_convertvector);
// exp2_nonpositive where it has instructions for it.
#pragma once

#include "raddle/engine/core/math.h"

#if defined(__AVX512F__)
#include "raddle/engine/simd/avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "raddle/engine/simd/avx2.h"
#else
#include "raddle/engine/simd/generic.h"
#endif

RADDLE_ENGINE_BEGIN

namespace simd {

typedef i32 VecI __attribute__((vector_size(lanes * 4)));
typedef u32 VecU __attribute__((vector_size(lanes * 4)));

/// Subtracting 0 changes no number, so that no instruction is left of it; adding 0 changes -0, and
/// would stay.
RADDLE_FN Vec broadcast(float x) { return x - Vec{}; }

RADDLE_FN Vec load(const float* p) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

RADDLE_FN Vec load(const bf16* p) {
  VecH h;
  __builtin_memcpy(&h, p, sizeof(h));
  return reinterpret_cast<Vec>(reinterpret_cast<VecU>(widen_16(h)) << 16);
}

RADDLE_FN Vec load(const f16* p) {
  VecH h;
  __builtin_memcpy(&h, p, sizeof(h));
  return widen_f16(h);
}

RADDLE_FN Vec load(const e5m2* p) {
  return widen_f16(reinterpret_cast<VecH>(load_8_as_16(p)) << 8);
}

/// The bits of e4m3, 16 a lane with copies of the sign in front, as those of f16 256 times smaller.
template <class Bits>
RADDLE_FN Bits e4m3_as_f16(Bits bits) {
  const Bits number = (bits << 7) & 0xbf80;
  // NaN alone has all seven bits, so that one more reaches the bit that makes it f16's.
  return number | ((number + 0x80) & 0x4000);
}

/// In what units load_unit and load_two give elements of type T: of e4m3 they leave out a
/// multiplication by a power of two, which is as exact behind sums.
template <class T>
constexpr float unit = 1.0f;
template <>
inline constexpr float unit<e4m3> = 256.0f;

/// As to_float: by f16, which converts subnormal numbers in hardware.
RADDLE_FN Vec load_unit(const e4m3* p) {
  return widen_f16(e4m3_as_f16(reinterpret_cast<VecH>(load_8_as_16(p))));
}
RADDLE_FN Vec load(const e4m3* p) { return load_unit(p) * unit<e4m3>; }

RADDLE_FN Vec load(const s8* p) {
  return __builtin_convertvector(reinterpret_cast<VecI>(load_8_as_32(p)), Vec);
}

/// load(p) / unit<T>.
template <class T>
RADDLE_FN Vec load_unit(const T* p) {
  return load(p);
}

RADDLE_FN void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof(v)); }

#if !defined(RADDLE_EXP2_NONPOSITIVE)
/// 2^x per lane: math::exp2, lane by lane, without its handling of overflow (x <= 0 here,
/// or -inf).
RADDLE_FN Vec exp2_nonpositive(Vec x) {
  const Vec clamped = max(broadcast(-127.0f), x);  // in this order NaN passes
  const Vec shifted = clamped + math::round_shift;
  const Vec f = clamped - (shifted - math::round_shift);
  Vec p = broadcast(1.535336188e-4f);
  p = fma(p, f, broadcast(1.339887440e-3f));
  p = fma(p, f, broadcast(9.618437358e-3f));
  p = fma(p, f, broadcast(5.550332471e-2f));
  p = fma(p, f, broadcast(2.402264791e-1f));
  p = fma(p, f, broadcast(6.931472029e-1f));
  p = fma(p, f, broadcast(1.0f));
  const VecI bits = reinterpret_cast<VecI>(p) + (reinterpret_cast<VecI>(shifted) << 23);
  const VecI vanishes = x < broadcast(-126.0f);
  return reinterpret_cast<Vec>(bits & ~vanishes);
}
#endif

/// Lane i of the result is lane index[i] of `a` and `b`, one after the other.
RADDLE_FN Vec shuffle(Vec a, Vec b, VecI index) {
#if defined(__clang__)
  Vec result{};
  for (i32 i = 0; i < lanes; ++i) result[i] = index[i] < lanes ? a[index[i]] : b[index[i] - lanes];
  return result;
#else
  return __builtin_shuffle(a, b, index);
#endif
}

/// All lanes combined by `op`, in every lane. Steps are constants, or the indices of a shuffle
/// would be put together lane by lane.
template <i32 step = lanes / 2, class Op>
RADDLE_FN Vec fold(Vec v, Op op) {
  if constexpr (step > 0) {
    VecI swap{};
    for (i32 i = 0; i < lanes; ++i) swap[i] = i ^ step;
    return fold<step / 2>(op(v, shuffle(v, v, swap)), op);
  } else {
    return v;
  }
}

RADDLE_FN float reduce_sum(Vec v) {
  return fold(v, [](Vec a, Vec b) { return a + b; })[0];
}
RADDLE_FN float reduce_max(Vec v) {
  return fold(v, [](Vec a, Vec b) { return max(a, b); })[0];
}

typedef u16 VecH2 __attribute__((vector_size(lanes * 4)));
/// Two vectors of e4m3, whose bits are moved in one register, as load_unit does.
RADDLE_FN void load_both(const e4m3* p, Vec& a, Vec& b) {
  const VecH2 all = e4m3_as_f16(reinterpret_cast<VecH2>(load_twice_8_as_16(p)));
  VecH half[2];
  __builtin_memcpy(half, &all, sizeof(half));
  a = widen_f16(half[0]);
  b = widen_f16(half[1]);
}

/// Whether load_two splits elements into even and odd ones instead of keeping their order. Then
/// `arrange` splits fp32 rows alike, and in_order restores the order of what was computed of them.
template <class T>
constexpr bool loads_apart = false;
/// Splitting bf16 into even and odd elements widens them with one instruction per vector.
template <>
inline constexpr bool loads_apart<bf16> = true;

/// 2 · lanes elements, over unit<T>; see loads_apart.
template <class T>
RADDLE_FN void load_two(const T* p, Vec& a, Vec& b) {
  if constexpr (loads_apart<T>) {
    VecU pairs;
    __builtin_memcpy(&pairs, p, sizeof(pairs));
    a = reinterpret_cast<Vec>(pairs << 16);
    b = reinterpret_cast<Vec>(pairs & 0xffff0000u);
  } else if constexpr (dtype_of<T>::value == DType::float8_e4m3fn) {
    load_both(p, a, b);
  } else {
    a = load(p);
    b = load(p + lanes);
  }
}

/// Whether the two vectors of load_two cost as little one by one: all but e4m3's.
template <class T>
constexpr bool loads_singly = dtype_of<T>::value != DType::float8_e4m3fn;

/// The first or second vector of load_two.
template <i32 nth, class T>
RADDLE_FN Vec load_of_two(const T* p) {
  if constexpr (loads_apart<T>) {
    VecU pairs;
    __builtin_memcpy(&pairs, p, sizeof(pairs));
    return reinterpret_cast<Vec>(nth == 0 ? pairs << 16 : pairs & 0xffff0000u);
  } else {
    return load_unit(p + nth * lanes);
  }
}

/// v, in a register: without this the compiler may load a vector from memory at each of its uses.
RADDLE_FN Vec in_register(Vec v) {
#if defined(__x86_64__)
  asm("" : "+v"(v));
#elif defined(__aarch64__)
  asm("" : "+w"(v));
#endif
  return v;
}

/// Rows of elements of type T as load_two would read them, in place.
template <class T>
RADDLE_FN void arrange(float* x, i32 n) {
  if constexpr (loads_apart<T>) {
    VecI even{}, odd{};
    for (i32 i = 0; i < lanes; ++i) {
      even[i] = 2 * i;
      odd[i] = 2 * i + 1;
    }
    for (i32 d = 0; d + 2 * lanes <= n; d += 2 * lanes) {
      const Vec a = load(x + d);
      const Vec b = load(x + d + lanes);
      store(x + d, shuffle(a, b, even));
      store(x + d + lanes, shuffle(a, b, odd));
    }
  }
}

/// The elements that load_two, and what was computed from it, has in `a` and `b`, in their order.
template <class T>
RADDLE_FN void in_order(Vec& a, Vec& b) {
  if constexpr (loads_apart<T>) {
    VecI low{}, high{};
    for (i32 i = 0; i < lanes; ++i) {
      low[i] = i / 2 + i % 2 * lanes;
      high[i] = (i + lanes) / 2 + i % 2 * lanes;
    }
    const Vec x = shuffle(a, b, low);
    b = shuffle(a, b, high);
    a = x;
  }
}

/// One step of a butterfly over `lanes` vectors: exchanges the halves of blocks of 2·step lanes.
template <i32 step>
RADDLE_FN void exchange(Vec& a, Vec& b) {
  VecI low{}, high{};
  for (i32 i = 0; i < lanes; ++i) {
    low[i] = (i & step) == 0 ? i : lanes + (i ^ step);
    high[i] = (i & step) == 0 ? (i ^ step) : lanes + i;
  }
  const Vec x = shuffle(a, b, low);
  b = shuffle(a, b, high);
  a = x;
}

/// Transposes a matrix of `lanes` vectors in registers.
template <i32 step = lanes / 2>
RADDLE_FN void transpose(Vec (&v)[lanes]) {
  if constexpr (step > 0) {
#pragma GCC unroll 16
    for (i32 i = 0; i < lanes; ++i)
      if ((i & step) == 0) exchange<step>(v[i], v[i + step]);
    transpose<step / 2>(v);
  }
}

/// Halves of blocks of 2·step lanes: those that stay in place when `a` and `b` exchange, and those
/// that cross, combined by `op`. One of the two shuffles is a blend, which any port executes.
template <i32 step, class Op>
RADDLE_FN Vec combine_halves(Vec a, Vec b, Op op) {
  VecI stay{}, cross{};
  for (i32 i = 0; i < lanes; ++i) {
    stay[i] = (i & step) == 0 ? i : lanes + i;
    cross[i] = (i & step) == 0 ? (i ^ step) : lanes + (i ^ step);
  }
  return op(shuffle(a, b, stay), shuffle(a, b, cross));
}

/// Lane i of the result is v[i]'s lanes combined by `op`: a transposition that combines on the way.
template <i32 step = lanes / 2, class Op>
RADDLE_FN Vec fold_each(Vec (&v)[lanes], Op op) {
  if constexpr (step > 0) {
#pragma GCC unroll 16
    for (i32 i = 0; i < step; ++i) v[i] = combine_halves<step>(v[i], v[i + step], op);
    return fold_each<step / 2>(v, op);
  } else {
    return v[0];
  }
}

RADDLE_FN Vec sum_each(Vec (&v)[lanes]) {
  return fold_each(v, [](Vec a, Vec b) { return a + b; });
}
RADDLE_FN Vec max_each(Vec (&v)[lanes]) {
  return fold_each(v, [](Vec a, Vec b) { return max(a, b); });
}

RADDLE_FN void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
RADDLE_FN void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace simd

RADDLE_ENGINE_END
