// Scores of pages by their summaries (Quest), in the instruction set that a unit is compiled for.
// Plain data: it crosses from there to the host's.
#pragma once

#include "raddle/engine/kernel/kv/select.h"

namespace raddle {

/// Some pages of one list.
struct ScoreJob {
  const SelectView*
      view;  ///< its q is fp32 and parted: [rows, heads, 2, D], max(q, 0) and min(q, 0)
  i32 row_begin, row_end;
  i32 head_begin, head_end;
  const i32* pages;  ///< [count]
  i32 count;
  u32* keys;  ///< [count] to write: see score_key
};
using ScorePages = void (*)(const ScoreJob& job);

/// Of each dtype of summaries.
struct PageScores {
  ScorePages float32, float16, bfloat16;
};

}  // namespace raddle
