// Sliding window: a row at position p keeps the keys at positions p - left … p + right. A negative
// number means no bound on that side. Mistral and Gemma count the row itself in their window: a
// window of 4096 tokens is left = 4095.
#pragma once

#include "raddle/engine/variant/contract.h"

RADDLE_ENGINE_BEGIN

struct SlidingWindow {
  i32 left;
  i32 right;

  RADDLE_FN bool mask(const Row& r, const Key& c) const {
    const i32 behind = r.q_pos - c.kv_pos;
    return (left < 0 || behind <= left) && (right < 0 || -behind <= right);
  }

  RADDLE_FN KvSpan kv_span(const Tile& t) const { return around(t.q_pos); }

  RADDLE_FN KvSpan row_span(const Row& r, Range) const { return around({r.q_pos, r.q_pos}); }

  RADDLE_FN Coverage coverage(const Tile& t) const {
    const KvSpan span = kv_span(t);
    if (is_empty(intersect(t.kv_pos, span.pos))) return Coverage::empty;
    const bool left_full = left < 0 || t.q_pos.last - t.kv_pos.first <= left;
    const bool right_full = right < 0 || t.kv_pos.last - t.q_pos.first <= right;
    return left_full && right_full ? Coverage::full : Coverage::partial;
  }

  /// What rows at these positions keep.
  RADDLE_FN KvSpan around(Range pos) const {
    const i32 first = left < 0 || pos.first < int_min + left ? int_min : pos.first - left;
    const i32 last = right < 0 || pos.last > int_max - right ? int_max : pos.last + right;
    return KvSpan{everything, {first, last}};
  }
};
RADDLE_VARIANT(SlidingWindow, "window", RADDLE_PLAN_MEMBER(SlidingWindow, left),
               RADDLE_PLAN_MEMBER(SlidingWindow, right));

RADDLE_ENGINE_END
