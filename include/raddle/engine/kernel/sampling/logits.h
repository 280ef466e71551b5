// One row of logits as sampling sees them: penalised, in an order that is total, with weights that
// are integers.
//
// Sums of integers do not depend on their order, so any number of threads, on any device, finds the
// same sums, the same filters and the same token.
#pragma once

#include "raddle/engine/core/math.h"
#include "raddle/engine/kernel/sampling/view.h"

RADDLE_ENGINE_BEGIN

namespace sampling {

/// Unsigned integers in the order of the numbers; NaN comes last.
RADDLE_FN u32 key_of(float x) {
  const u32 bits = float_to_bits(x + 0.0f);  // -0 is 0
  const u32 key = bits >> 31 ? ~bits : bits | 0x80000000u;
  return x == x ? key : 0xffffffffu;
}
RADDLE_FN float value_of(u32 key) { return bits_to_float(key >> 31 ? key & 0x7fffffffu : ~key); }

constexpr u32 key_of_infinity = 0xff800000u;
constexpr u32 key_of_minus_infinity = 0x007fffffu;

template <class T>
struct Logits {
  const T* logits;
  const i32* counts;
  float repetition, presence, frequency;

  RADDLE_FN Logits(const SampleView& view, const RowParameters& p, i64 row)
      : logits(static_cast<const T*>(view.logits) + row * view.logits_row),
        counts(view.counts ? view.counts + row * view.counts_row : nullptr),
        repetition(p.repetition),
        presence(p.presence),
        frequency(p.frequency) {}

  /// Logit i, penalised: divided or multiplied by `repetition` where the text has the token, then
  /// less by `presence` and by `frequency` times its count where it was generated.
  RADDLE_FN float operator()(i32 i) const {
    float x = to_float(logits[i]);
    const i32 count = counts ? counts[i] : 0;
    if (count == 0) return x;
    x = x > 0.0f ? x / repetition : x * repetition;
    return count < 0 ? x : x - presence - frequency * static_cast<float>(count);
  }
};

/// e^((x - largest) / temperature) of the row's largest logit, in units of 2^-40, rounded down.
struct Weights {
  float largest, inverse_temperature;

  RADDLE_FN float relative(float x) const { return math::exp((x - largest) * inverse_temperature); }
  RADDLE_FN u64 operator()(float x) const {
    return static_cast<u64>(relative(x) * 1099511627776.0f);
  }
};

/// Tokens in the order of their logits, equal ones by index, as far as one of them: those above
/// `key`, and those of `key` before index `end`.
struct Prefix {
  u32 key;
  i32 end;

  RADDLE_FN bool contains(u32 other, i32 i) const {
    return other > key || (other == key && i < end);
  }
};

}  // namespace sampling

RADDLE_ENGINE_END
