// Finds where a running sum over the tokens, in the order of their logits, reaches a target: what
// top-k and top-p have in common. Nothing is sorted: the range of the logits' bits is narrowed by
// passes over the row until one value is left.
#pragma once

#include "raddle/engine/kernel/sampling/logits.h"

RADDLE_ENGINE_BEGIN

namespace sampling {

/// Keys of [begin, end) that the row has: all lie from `least` to `most`, `sum` is their measure.
struct KeyRange {
  u64 sum;
  u32 least, most;

  RADDLE_FN void add(u32 key, u64 measure) {
    sum += measure;
    least = min(least, key);
    most = max(most, key);
  }
};
RADDLE_FN KeyRange no_keys() { return {0, 0xffffffffu, 0}; }

/// So many parts of a range are summed in one pass.
constexpr i32 num_parts = 4;

/// The value at which the sum from above reaches the target.
struct Threshold {
  u32 key;
  u64 missing;  ///< what its tokens have to contribute
  u64 at;       ///< what they could: missing <= at
};

/// Sums of the parts of [least, most], each [bound of part, bound of the next).
template <class Candidates, class Row, class Measure>
RADDLE_FN void sum_parts(const Candidates& candidates, const Row& row, const Prefix& within,
                         u32 least, u32 most, const Measure& measure,
                         KeyRange (&parts)[num_parts]) {
  const u64 width = u64{most} - least + 1;
  u32 bound[num_parts];
  RADDLE_UNROLL
  for (i32 p = 0; p < num_parts; ++p) {
    bound[p] = least + static_cast<u32>(width * static_cast<u64>(p) / num_parts);
    parts[p] = no_keys();
  }
  candidates.each(row, [&](i32 i, float x) {
    const u32 key = key_of(x);
    if (key < least || key > most || !within.contains(key, i)) return;
    const u64 m = measure(x);
    i32 part = 0;
    RADDLE_UNROLL
    for (i32 p = 1; p < num_parts; ++p) part += key >= bound[p];
    RADDLE_UNROLL
    for (i32 p = 0; p < num_parts; ++p)
      if (p == part) parts[p].add(key, m);
  });
  candidates.combine(parts);
}

/// `target(total)` is a number from 1 to total, the measure of all tokens within the prefix. Their
/// keys lie from least to most.
template <class Team, class Row, class Measure, class Target>
RADDLE_FN Threshold find_threshold(const Team& team, i32 vocab, const Row& row,
                                   const Prefix& within, u32 least, u32 most,
                                   const Measure& measure, const Target& target) {
  auto candidates = team.candidates(vocab);
  u64 missing = 0, at = 0;
  for (bool first = true; first || least < most; first = false) {
    KeyRange parts[num_parts];
    sum_parts(candidates, row, within, least, most, measure, parts);
    if (first) {
      u64 total = 0;
      RADDLE_UNROLL
      for (i32 p = 0; p < num_parts; ++p) total += parts[p].sum;
      missing = target(total);
    }
    bool found = false;
    RADDLE_UNROLL
    for (i32 p = num_parts - 1; p >= 0; --p) {
      if (found) continue;
      found = parts[p].sum >= missing;
      if (found)
        at = parts[p].sum, least = parts[p].least, most = parts[p].most;
      else
        missing -= parts[p].sum;
    }
    candidates.narrow(row, least, most);
  }
  return {most, missing, at};
}

/// The shortest prefix within `within` whose measure reaches the target.
template <class Team, class Row, class Measure, class Target>
RADDLE_FN Prefix shortest_prefix(const Team& team, i32 vocab, const Row& row, const Prefix& within,
                                 u32 least, u32 most, const Measure& measure,
                                 const Target& target) {
  const Threshold t = find_threshold(team, vocab, row, within, least, most, measure, target);
  const i32 end = t.key == within.key ? within.end : vocab;
  if (t.missing == t.at) return {t.key, end};
  // Equal logits have equal measures, so the sum tells how many of them, by index, are needed.
  const u64 one = measure(value_of(t.key));
  const u64 needed = (t.missing + one - 1) / one;
  const auto is_at = [&](i32 i, float x) { return u64{key_of(x) == t.key && i < end}; };
  return {t.key, team.find(vocab, row, is_at, [&](u64) { return needed - 1; }) + 1};
}

}  // namespace sampling

RADDLE_ENGINE_END
