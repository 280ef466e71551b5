// Scales of quantised K and V: an element's value is what is stored times its scale.
#pragma once

#include "raddle/engine/core/config.h"

namespace raddle {

/// One scale for all, one for each KV head, or one for each token and head. The scale of (block,
/// offset, head) lies at block * block_stride + offset * row_stride + head * head_stride, in
/// elements. Scales of tokens lie beside a pool, and a row's place in the pool gives its scale's
/// place. A stride is 0 where scales do not differ.
struct ScaleView {
  float* data;  ///< null: `value` for all. Attention only reads
  i64 block_stride;
  i64 row_stride;
  i64 head_stride;
  float value;
};

/// Of K and V of one level.
struct KvScales {
  ScaleView k;
  ScaleView v;
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

RADDLE_FN bool is_one(const ScaleView& scale) { return !scale.data && scale.value == 1.0f; }

/// Whether each token has its own.
RADDLE_FN bool by_token(const ScaleView& scale) {
  return scale.data && (scale.block_stride != 0 || scale.row_stride != 0);
}

/// Where a scale lies; `data` isn't null.
RADDLE_FN float& scale_in(const ScaleView& scale, i64 block, i64 offset, i64 head) {
  const i64 at = block * scale.block_stride + offset * scale.row_stride + head * scale.head_stride;
  return scale.data[at];
}

RADDLE_FN float scale_at(const ScaleView& scale, i64 block, i64 offset, i64 head) {
  return scale.data ? scale_in(scale, block, offset, head) : scale.value;
}

RADDLE_ENGINE_END
