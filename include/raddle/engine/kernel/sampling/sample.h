// The next token of a row: penalties, temperature, then the shortest prefix of the tokens in the
// order of their logits that top-k, of that what top-p, and of that what min-p leaves; then one
// draw by the inverse of the cumulative weights, in the order of the indices.
//
// A team is what works on a row: a thread of a CPU (alone.h), a thread block of a GPU (block.h).
#pragma once

#include "raddle/engine/kernel/sampling/philox.h"
#include "raddle/engine/kernel/sampling/search.h"

RADDLE_ENGINE_BEGIN

namespace sampling {

/// The token of a row that has none: a logit that is NaN or infinite, no logit above -inf, or a
/// parameter that is none.
constexpr i32 no_token = -1;

/// Of a row: where the largest logit is, the first of equal ones, and the smallest.
struct Extremes {
  u64 best;  ///< key, then ~index
  u32 least;

  RADDLE_FN u32 most() const { return static_cast<u32>(best >> 32); }
  RADDLE_FN i32 index() const { return static_cast<i32>(~static_cast<u32>(best)); }
};

template <class Team, class Row>
RADDLE_FN Extremes find_extremes(const Team& team, i32 vocab, const Row& row) {
  Extremes found{0, 0xffffffffu};
  team.each(vocab, row, [&](i32 i, float x) {
    const u32 key = key_of(x);
    found.best = max(found.best, u64{key} << 32 | static_cast<u32>(~static_cast<u32>(i)));
    found.least = min(found.least, key);
  });
  team.combine(found);
  return found;
}

/// The least whole number that is at least `share` of total, and at least 1.
RADDLE_FN u64 share_of(u64 total, float share) {
  const u64 part = static_cast<u64>(share * 4294967296.0f);  // of 2^32; exact from 2^-8 on
  const u64 low = (total & 0xffffffffu) * part;
  const u64 product = (total >> 32) * part + (low >> 32);
  return max(product + ((low & 0xffffffffu) != 0u ? 1u : 0u), u64{1});
}

template <class Team, class Row>
RADDLE_FN i32 draw_token(const Team& team, i32 vocab, const Row& row, const RowParameters& p) {
  if (!are_valid(p)) return no_token;
  const Extremes range = find_extremes(team, vocab, row);
  const u32 most = range.most();
  if (most >= key_of_infinity || most <= key_of_minus_infinity) return no_token;
  // What is too small to divide by is 0.
  if (p.temperature < 1.17549435e-38f) return range.index();

  const Weights weights{value_of(most), 1.0f / p.temperature};
  Prefix kept{0, vocab};
  u32 least = range.least;
  if (p.top_k > 0 && p.top_k < vocab) {
    kept = shortest_prefix(
        team, vocab, row, kept, least, most, [](float) { return u64{1}; },
        [&](u64) { return static_cast<u64>(p.top_k); });
    least = kept.key;
  }
  if (p.top_p < 1.0f)
    kept = shortest_prefix(team, vocab, row, kept, least, most, weights,
                           [&](u64 total) { return share_of(total, p.top_p); });
  const auto weight = [&](i32 i, float x) {
    const bool is_kept = kept.contains(key_of(x), i) && weights.relative(x) >= p.min_p;
    return is_kept ? weights(x) : u64{0};
  };
  const u64 random = random_bits(p.seed, p.offset);
  return team.find(vocab, row, weight, [&](u64 total) { return multiply_high(random, total); });
}

/// Draws the token of a row, whose logits have the type T; writes nothing.
template <class T, class Team>
RADDLE_FN i32 draw_row(const Team& team, const SampleView& view, i64 row) {
  const RowParameters p = parameters_of(view, row);
  return draw_token(team, view.vocab, Logits<T>(view, p, row), p);
}

/// Writes what was drawn: by one thread, when all have read the row.
RADDLE_FN void store_token(const SampleView& view, i64 row, i32 token) {
  if (view.tokens_are_64bit)
    static_cast<i64*>(view.tokens)[row * view.tokens_step] = token;
  else
    static_cast<i32*>(view.tokens)[row * view.tokens_step] = token;
  if (token == no_token || !view.count_drawn) return;
  i32& count = view.counts[row * view.counts_row + token];
  count = max(count, 0) + 1;
}

}  // namespace sampling

RADDLE_ENGINE_END
