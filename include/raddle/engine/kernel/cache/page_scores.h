// Scores of pages by their summaries (Quest), in the instruction set that a unit is compiled for.
// Plain data: it crosses from there to the host's.
#pragma once

#include "raddle/engine/kernel/cache/select.h"

namespace raddle {

/// Some pages of one list.
struct ScoreJob {
  const SelectView* view;
  const u8* queries;  ///< what `arrange` made of all rows, `row_bytes` apart
  i64 row_bytes;
  i32 row_begin, row_end;
  i32 head_begin, head_end;
  const i32* pages;  ///< [count]
  i32 count;
  u32* keys;  ///< [count] to write: see score_key
};

/// For summaries and queries of one dtype. Every page meets every row, so rows are arranged once.
struct PageScorer {
  /// Bytes of an arranged row, which lies on a cache line of its own.
  i64 (*row_bytes)(const SelectView& view);
  /// A row of view.q, with its steps, to `to`.
  void (*arrange)(const SelectView& view, i32 row, u8* to);
  void (*score)(const ScoreJob& job);
};

struct PageScores {
  PageScorer float32, float16, bfloat16;
};

}  // namespace raddle
