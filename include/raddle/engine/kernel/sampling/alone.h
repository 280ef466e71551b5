// A single thread that works on a row.
#pragma once

#include "raddle/engine/kernel/sampling/sample.h"

RADDLE_ENGINE_BEGIN

namespace sampling {

struct Alone {
  static constexpr i32 span = 256;  ///< tokens that have a sum
  i32* indices;                     ///< room for a vocabulary
  u64* sums;                        ///< room for its spans

  /// use(i, row(i)) for every i below n.
  template <class Row, class Use>
  RADDLE_FN void each(i32 n, const Row& row, const Use& use) const {
    for (i32 i = 0; i < n; ++i) use(i, row(i));
  }

  /// What all threads have found, in all threads.
  RADDLE_FN void combine(Extremes&) const {}

  /// The tokens below n of which a search may still find one.
  struct Candidates {
    i32* indices;
    i32 count;
    bool are_listed = false;

    template <class Row, class Use>
    RADDLE_FN void each(const Row& row, const Use& use) const {
      for (i32 n = 0; n < count; ++n) {
        const i32 i = are_listed ? indices[n] : n;
        use(i, row(i));
      }
    }
    RADDLE_FN void combine(KeyRange (&)[num_parts]) const {}
    /// Keeps those with keys from least to most.
    template <class Row>
    RADDLE_FN void narrow(const Row& row, u32 least, u32 most) {
      i32 kept = 0;
      each(row, [&](i32 i, float x) {
        const u32 key = key_of(x);
        indices[kept] = i;
        kept += key >= least && key <= most;
      });
      count = kept, are_listed = true;
    }
  };
  RADDLE_FN Candidates candidates(i32 n) const { return {indices, n}; }

  /// The first i at which the sum of measure(i, row(i)) over 0 to i is above target(total), which
  /// is below the total.
  template <class Row, class Measure, class Target>
  RADDLE_FN i32 find(i32 n, const Row& row, const Measure& measure, const Target& target) const {
    u64 total = 0;
    for (i32 begin = 0; begin < n; begin += span) {
      u64 sum = 0;
      for (i32 i = begin; i < min(begin + span, n); ++i) sum += measure(i, row(i));
      sums[begin / span] = sum;
      total += sum;
    }
    if (total == 0) return no_token;
    u64 left = target(total);
    i32 i = 0;
    for (; left >= sums[i / span]; i += span) left -= sums[i / span];
    for (;; ++i) {
      const u64 m = measure(i, row(i));
      if (left < m) return i;
      left -= m;
    }
  }
};

}  // namespace sampling

RADDLE_ENGINE_END
