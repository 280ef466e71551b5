// What a step of sampling reads and writes. Plain data: the host's compiler and NVRTC lay it out
// alike.
#pragma once

#include "raddle/engine/core/dtype.h"

namespace raddle {

/// A number for all rows, or one a row.
struct RowNumbers {
  const float* data;  ///< null: `value` for all
  i64 step;           ///< entries from one row's to the next's
  float value;
};

/// The same of integers.
struct RowIntegers {
  const void* data;  ///< i32, or i64; null: value + row · by_row
  i64 step;
  i64 value;
  i64 by_row;
  bool is_64bit;
};

struct SampleView {
  const void* logits;  ///< [rows, vocab]
  i64 logits_row;      ///< elements from one row to the next
  RowNumbers temperature, top_p, min_p;
  RowNumbers repetition, presence, frequency;
  RowIntegers top_k, seed, offset;
  i32* counts;  ///< [rows, vocab] how often a token was generated; -1: it stands in the prompt
                ///< alone. Null: nothing is penalised
  i64 counts_row;
  void* tokens;  ///< [rows] written, i32 or i64: the token; -1: the row has none
  i64 tokens_step;
  i32 num_rows;
  i32 vocab;
  bool tokens_are_64bit;
  bool count_drawn;  ///< the drawn token's count goes up by one
};

// Both compilers check this number, so neither can lay the view out in its own way.
static_assert(sizeof(SampleView) == 328);

}  // namespace raddle

RADDLE_ENGINE_BEGIN

namespace sampling {

/// The longest rows: sums of their weights stay below 2^63.
constexpr i32 max_vocab = 1 << 22;

/// What holds for one row.
struct RowParameters {
  float temperature, top_p, min_p;
  float repetition, presence, frequency;
  i64 top_k;
  u64 seed, offset;
};

RADDLE_FN float number_of(const RowNumbers& numbers, i64 row) {
  return numbers.data ? numbers.data[row * numbers.step] : numbers.value;
}

RADDLE_FN i64 integer_of(const RowIntegers& integers, i64 row) {
  if (!integers.data) return integers.value + row * integers.by_row;
  return integers.is_64bit ? static_cast<const i64*>(integers.data)[row * integers.step]
                           : i64{static_cast<const i32*>(integers.data)[row * integers.step]};
}

RADDLE_FN RowParameters parameters_of(const SampleView& view, i64 row) {
  return {number_of(view.temperature, row),
          number_of(view.top_p, row),
          number_of(view.min_p, row),
          number_of(view.repetition, row),
          number_of(view.presence, row),
          number_of(view.frequency, row),
          integer_of(view.top_k, row),
          static_cast<u64>(integer_of(view.seed, row)),
          static_cast<u64>(integer_of(view.offset, row))};
}

constexpr float max_finite = 3.402823466e38f;

// The ranges; comparisons with NaN are false.
RADDLE_FN bool is_temperature(float x) { return x >= 0.0f && x <= max_finite; }
RADDLE_FN bool is_top_p(float x) { return x > 0.0f && x <= 1.0f; }
RADDLE_FN bool is_min_p(float x) { return x >= 0.0f && x <= 1.0f; }
RADDLE_FN bool is_repetition(float x) { return x > 0.0f && x <= max_finite; }
RADDLE_FN bool is_penalty(float x) { return x >= -max_finite && x <= max_finite; }

RADDLE_FN bool are_valid(const RowParameters& p) {
  return is_temperature(p.temperature) && is_top_p(p.top_p) && is_min_p(p.min_p) &&
         is_repetition(p.repetition) && is_penalty(p.presence) && is_penalty(p.frequency);
}

}  // namespace sampling

RADDLE_ENGINE_END
