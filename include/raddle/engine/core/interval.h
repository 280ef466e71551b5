// Interval arithmetic: what an expression can be over a whole tile, given the hulls of its leaves.
// Every answer contains all values that the scalar expression takes there; what is not known is
// everything. Integers are int32 that wrap, carried in 64 bits: a result that leaves int32 is
// unknown. Floats rely on IEEE rounding being monotone, so that corners bound the rounded results
// too; NaN and infinite operands make a result unknown.
#pragma once

#include "raddle/engine/core/index.h"
#include "raddle/engine/core/row.h"

namespace raddle {

struct IntInterval {
  i64 first, last;
};

struct FloatInterval {
  float first, last;
  bool nan;  ///< may be NaN
};

/// A condition over a tile.
struct Truth {
  bool may_hold, may_fail;
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

namespace interval {

constexpr IntInterval any_int{int_min, int_max};
constexpr FloatInterval any_float{-math::infinity, math::infinity, true};

RADDLE_FN constexpr IntInterval of(i32 x) { return IntInterval{x, x}; }
RADDLE_FN constexpr IntInterval of(Range r) { return IntInterval{r.first, r.last}; }
RADDLE_FN constexpr FloatInterval of(float x) {
  return x == x ? FloatInterval{x, x, false} : any_float;
}
RADDLE_FN constexpr Truth of(bool x) { return Truth{x, !x}; }

RADDLE_FN constexpr bool is_point(IntInterval a) { return a.first == a.last; }

/// A result computed in 64 bits: unknown where it leaves int32.
RADDLE_FN constexpr IntInterval fit(i64 first, i64 last) {
  return first < int_min || last > int_max ? any_int : IntInterval{first, last};
}
RADDLE_FN constexpr IntInterval fit_corners(i64 a, i64 b, i64 c, i64 d) {
  return fit(min(min(a, b), min(c, d)), max(max(a, b), max(c, d)));
}

/// Finite bounds, no NaN: operands of arithmetic that can be trusted.
RADDLE_FN constexpr bool is_tame(FloatInterval a) {
  return !a.nan && a.first > -math::infinity && a.last < math::infinity;
}
RADDLE_FN constexpr FloatInterval tame(float first, float last) {
  return first <= last ? FloatInterval{first, last, false} : any_float;
}
RADDLE_FN constexpr FloatInterval tame_corners(float a, float b, float c, float d) {
  return tame(min(min(a, b), min(c, d)), max(max(a, b), max(c, d)));
}

// --- integers ---------------------------------------------------------------------------------

RADDLE_FN constexpr IntInterval add(IntInterval a, IntInterval b) {
  return fit(a.first + b.first, a.last + b.last);
}
RADDLE_FN constexpr IntInterval sub(IntInterval a, IntInterval b) {
  return fit(a.first - b.last, a.last - b.first);
}
RADDLE_FN constexpr IntInterval mul(IntInterval a, IntInterval b) {
  return fit_corners(a.first * b.first, a.first * b.last, a.last * b.first, a.last * b.last);
}
RADDLE_FN constexpr IntInterval neg(IntInterval a) { return fit(-a.last, -a.first); }

// int64: for operands whose results are known to stay within it.
RADDLE_FN constexpr IntInterval wide_add(IntInterval a, IntInterval b) {
  return IntInterval{a.first + b.first, a.last + b.last};
}
RADDLE_FN constexpr IntInterval wide_sub(IntInterval a, IntInterval b) {
  return IntInterval{a.first - b.last, a.last - b.first};
}
RADDLE_FN constexpr IntInterval wide_mul(IntInterval a, IntInterval b) {
  const i64 c[] = {a.first * b.first, a.first * b.last, a.last * b.first, a.last * b.last};
  return IntInterval{min(min(c[0], c[1]), min(c[2], c[3])), max(max(c[0], c[1]), max(c[2], c[3]))};
}
RADDLE_FN constexpr IntInterval wide_neg(IntInterval a) { return IntInterval{-a.last, -a.first}; }

RADDLE_FN constexpr IntInterval abs(IntInterval a) {
  const i64 most = max(-a.first, a.last);
  return fit(a.first > 0 ? a.first : a.last < 0 ? -a.last : 0, most);
}
RADDLE_FN constexpr IntInterval square(IntInterval a) {
  const IntInterval m{a.first > 0 ? a.first : a.last < 0 ? -a.last : 0, max(-a.first, a.last)};
  return fit(m.first * m.first, m.last * m.last);
}
RADDLE_FN constexpr IntInterval minimum(IntInterval a, IntInterval b) {
  return IntInterval{min(a.first, b.first), min(a.last, b.last)};
}
RADDLE_FN constexpr IntInterval maximum(IntInterval a, IntInterval b) {
  return IntInterval{max(a.first, b.first), max(a.last, b.last)};
}
RADDLE_FN constexpr IntInterval hull(IntInterval a, IntInterval b) {
  return IntInterval{min(a.first, b.first), max(a.last, b.last)};
}

/// The quotient rounded down; b is not 0.
RADDLE_FN constexpr i64 floor_quotient(i64 a, i64 b) {
  const i64 q = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? q - 1 : q;
}
RADDLE_FN constexpr IntInterval floor_div(IntInterval a, IntInterval b) {
  if (b.first == 0 && b.last == 0) return of(0);
  if (b.first < 0 && b.last > 0) return any_int;
  const bool zero = b.first == 0 || b.last == 0;  // x // 0 is 0
  const i64 lo = b.first == 0 ? 1 : b.first;
  const i64 hi = b.last == 0 ? -1 : b.last;
  const IntInterval q = fit_corners(floor_quotient(a.first, lo), floor_quotient(a.first, hi),
                                    floor_quotient(a.last, lo), floor_quotient(a.last, hi));
  return zero ? hull(q, of(0)) : q;
}
/// Exact for one divisor as long as the quotient does not change.
RADDLE_FN constexpr IntInterval floor_mod(IntInterval a, IntInterval b) {
  if (is_point(b) && b.first != 0) {
    const i64 q = floor_quotient(a.first, b.first);
    if (q == floor_quotient(a.last, b.first))
      return IntInterval{a.first - q * b.first, a.last - q * b.first};
  }
  const i64 most = max(b.last - 1, i64{0});
  return IntInterval{min(b.first + 1, i64{0}),
                     a.first >= 0 && b.first > 0 ? min(most, a.last) : most};
}
RADDLE_FN constexpr IntInterval shift_left(IntInterval a, IntInterval n) {
  if (!is_point(n)) return any_int;
  if (n.first < 0 || n.first > 31) return of(0);
  return mul(a, IntInterval{i64{1} << n.first, i64{1} << n.first});
}
RADDLE_FN constexpr IntInterval shift_right(IntInterval a, IntInterval n) {
  if (!is_point(n)) return IntInterval{min(a.first, i64{0}), max(a.last, i64{-1})};
  const i64 by = n.first < 0 || n.first > 31 ? 31 : n.first;
  return IntInterval{a.first >> by, a.last >> by};
}

/// The bits in which members of an interval may differ: all below the first in which its ends do.
RADDLE_FN constexpr i64 free_bits(IntInterval a) {
  u64 x = static_cast<u64>(a.first) ^ static_cast<u64>(a.last);
  for (i32 by = 1; by < 64; by *= 2) x |= x >> by;
  return static_cast<i64>(x);
}
RADDLE_FN constexpr bool one_sign(IntInterval a) { return (a.first < 0) == (a.last < 0); }
RADDLE_FN constexpr IntInterval bit_and(IntInterval a, IntInterval b) {
  IntInterval r = any_int;
  if (one_sign(a) && one_sign(b)) {
    const i64 fa = free_bits(a), fb = free_bits(b);
    r = IntInterval{(a.first & ~fa) & (b.first & ~fb), (a.first | fa) & (b.first | fb)};
  }
  if (a.first >= 0) r = IntInterval{max(r.first, i64{0}), min(r.last, a.last)};
  if (b.first >= 0) r = IntInterval{max(r.first, i64{0}), min(r.last, b.last)};
  return r;
}
RADDLE_FN constexpr IntInterval bit_or(IntInterval a, IntInterval b) {
  if (!one_sign(a) || !one_sign(b)) return any_int;
  const i64 fa = free_bits(a), fb = free_bits(b);
  IntInterval r{(a.first & ~fa) | (b.first & ~fb), a.first | fa | b.first | fb};
  if (a.first >= 0 && b.first >= 0) r.first = max(r.first, max(a.first, b.first));
  return r;
}
RADDLE_FN constexpr IntInterval bit_xor(IntInterval a, IntInterval b) {
  if (!one_sign(a) || !one_sign(b)) return any_int;
  const i64 free = free_bits(a) | free_bits(b);
  const i64 fixed = (a.first ^ b.first) & ~free;
  return IntInterval{fixed, fixed | free};
}
RADDLE_FN constexpr IntInterval bit_not(IntInterval a) { return IntInterval{~a.last, ~a.first}; }

// --- conditions -------------------------------------------------------------------------------

RADDLE_FN constexpr Truth less(IntInterval a, IntInterval b) {
  return Truth{a.first < b.last, a.last >= b.first};
}
RADDLE_FN constexpr Truth less_equal(IntInterval a, IntInterval b) {
  return Truth{a.first <= b.last, a.last > b.first};
}
RADDLE_FN constexpr Truth equal(IntInterval a, IntInterval b) {
  return Truth{a.first <= b.last && b.first <= a.last,
               !(is_point(a) && is_point(b) && a.first == b.first)};
}
RADDLE_FN constexpr Truth less(FloatInterval a, FloatInterval b) {
  return Truth{a.first < b.last, a.nan || b.nan || a.last >= b.first};
}
RADDLE_FN constexpr Truth less_equal(FloatInterval a, FloatInterval b) {
  return Truth{a.first <= b.last, a.nan || b.nan || a.last > b.first};
}
RADDLE_FN constexpr Truth equal(FloatInterval a, FloatInterval b) {
  const bool same = a.first == a.last && b.first == b.last && a.first == b.first;
  return Truth{a.first <= b.last && b.first <= a.last, a.nan || b.nan || !same};
}
RADDLE_FN constexpr Truth logical_not(Truth a) { return Truth{a.may_fail, a.may_hold}; }
RADDLE_FN constexpr Truth logical_and(Truth a, Truth b) {
  return Truth{a.may_hold && b.may_hold, a.may_fail || b.may_fail};
}
RADDLE_FN constexpr Truth logical_or(Truth a, Truth b) {
  return Truth{a.may_hold || b.may_hold, a.may_fail && b.may_fail};
}
RADDLE_FN constexpr Truth logical_xor(Truth a, Truth b) {
  return Truth{(a.may_hold && b.may_fail) || (a.may_fail && b.may_hold),
               (a.may_hold && b.may_hold) || (a.may_fail && b.may_fail)};
}
RADDLE_FN constexpr Truth hull(Truth a, Truth b) {
  return Truth{a.may_hold || b.may_hold, a.may_fail || b.may_fail};
}
RADDLE_FN constexpr Coverage coverage(Truth keep) {
  return !keep.may_hold ? Coverage::empty : !keep.may_fail ? Coverage::full : Coverage::partial;
}

// --- what a mask keeps, as bounds on the position of a key ---

/// Positions up to `last`, and from `first` on.
RADDLE_FN constexpr Range at_most(i64 last) {
  return Range{int_min, static_cast<i32>(max(i64{int_min}, min(last, i64{int_max})))};
}
RADDLE_FN constexpr Range at_least(i64 first) {
  return Range{static_cast<i32>(max(i64{int_min}, min(first, i64{int_max}))), int_max};
}
/// Positions that all of them bound.
template <class... Bound>
RADDLE_FN constexpr KvSpan span(Bound... bound) {
  Range all = everything;
  ((all = intersect(all, bound)), ...);
  return KvSpan{everything, all};
}

// --- floats -----------------------------------------------------------------------------------

RADDLE_FN FloatInterval add(FloatInterval a, FloatInterval b) {
  if (!is_tame(a) || !is_tame(b)) return any_float;
  return tame(a.first + b.first, a.last + b.last);
}
RADDLE_FN FloatInterval sub(FloatInterval a, FloatInterval b) {
  if (!is_tame(a) || !is_tame(b)) return any_float;
  return tame(a.first - b.last, a.last - b.first);
}
RADDLE_FN FloatInterval mul(FloatInterval a, FloatInterval b) {
  if (!is_tame(a) || !is_tame(b)) return any_float;
  return tame_corners(a.first * b.first, a.first * b.last, a.last * b.first, a.last * b.last);
}
RADDLE_FN FloatInterval div(FloatInterval a, FloatInterval b) {
  if (!is_tame(a) || !is_tame(b) || (b.first <= 0.0f && b.last >= 0.0f)) return any_float;
  return tame_corners(a.first / b.first, a.first / b.last, a.last / b.first, a.last / b.last);
}
RADDLE_FN FloatInterval neg(FloatInterval a) { return FloatInterval{-a.last, -a.first, a.nan}; }
RADDLE_FN FloatInterval abs(FloatInterval a) {
  return FloatInterval{a.first > 0.0f  ? a.first
                       : a.last < 0.0f ? -a.last
                                       : 0.0f,
                       max(-a.first, a.last), a.nan};
}
RADDLE_FN FloatInterval square(FloatInterval a) {
  const FloatInterval m = abs(a);
  return is_tame(m) ? tame(m.first * m.first, m.last * m.last) : any_float;
}
RADDLE_FN FloatInterval minimum(FloatInterval a, FloatInterval b) {
  return FloatInterval{min(a.first, b.first), min(a.last, b.last), a.nan || b.nan};
}
RADDLE_FN FloatInterval maximum(FloatInterval a, FloatInterval b) {
  return FloatInterval{max(a.first, b.first), max(a.last, b.last), a.nan || b.nan};
}
RADDLE_FN FloatInterval hull(FloatInterval a, FloatInterval b) {
  return FloatInterval{min(a.first, b.first), max(a.last, b.last), a.nan || b.nan};
}
RADDLE_FN FloatInterval floor(FloatInterval a) {
  return is_tame(a) ? tame(math::floor(a.first), math::floor(a.last)) : any_float;
}
RADDLE_FN FloatInterval floor_div(FloatInterval a, FloatInterval b) { return floor(div(a, b)); }
RADDLE_FN FloatInterval floor_mod(FloatInterval a, FloatInterval b) {
  return sub(a, mul(floor_div(a, b), b));
}
RADDLE_FN FloatInterval sqrt(FloatInterval a) {
  return is_tame(a) && a.first >= 0.0f ? tame(math::sqrt(a.first), math::sqrt(a.last)) : any_float;
}

/// Corners of an increasing function whose implementation has rounding errors: pushed apart by
/// far more than those.
RADDLE_FN FloatInterval widen(float first, float last, float by = 1e-5f) {
  return tame(first - (math::abs(first) * by + by), last + (math::abs(last) * by + by));
}
RADDLE_FN FloatInterval exp(FloatInterval a) {
  return is_tame(a) ? widen(math::exp(a.first), math::exp(a.last)) : any_float;
}
RADDLE_FN FloatInterval exp2(FloatInterval a) {
  return is_tame(a) ? widen(math::exp2(a.first), math::exp2(a.last)) : any_float;
}
RADDLE_FN FloatInterval log(FloatInterval a) {
  return is_tame(a) && a.first >= 1e-37f ? widen(math::log(a.first), math::log(a.last)) : any_float;
}
RADDLE_FN FloatInterval log2(FloatInterval a) {
  return is_tame(a) && a.first >= 1e-37f ? widen(math::log2(a.first), math::log2(a.last))
                                         : any_float;
}
RADDLE_FN FloatInterval tanh(FloatInterval a) {
  return is_tame(a) ? widen(math::tanh(a.first), math::tanh(a.last)) : any_float;
}
RADDLE_FN FloatInterval tanh_approx(FloatInterval a) {
  return is_tame(a) ? widen(math::tanh_approx(a.first), math::tanh_approx(a.last), 1e-3f)
                    : any_float;
}
RADDLE_FN FloatInterval sigmoid(FloatInterval a) {
  return is_tame(a) ? widen(math::sigmoid(a.first), math::sigmoid(a.last)) : any_float;
}
RADDLE_FN FloatInterval sin(FloatInterval a) { return is_tame(a) ? widen(-1.0f, 1.0f) : any_float; }
RADDLE_FN FloatInterval cos(FloatInterval a) { return sin(a); }

// --- between kinds ----------------------------------------------------------------------------

RADDLE_FN constexpr FloatInterval to_float(IntInterval a) {
  return FloatInterval{static_cast<float>(a.first), static_cast<float>(a.last), false};
}
RADDLE_FN IntInterval to_int(FloatInterval a) {
  if (a.nan) return any_int;
  return IntInterval{traced::to_int(a.first), traced::to_int(a.last)};
}
RADDLE_FN constexpr IntInterval to_int(Truth a) {
  return IntInterval{a.may_fail ? 0 : 1, a.may_hold ? 1 : 0};
}
template <class Operand>
RADDLE_FN constexpr Operand where(Truth c, Operand a, Operand b) {
  return !c.may_fail ? a : !c.may_hold ? b : hull(a, b);
}

}  // namespace interval

RADDLE_ENGINE_END
