// ALiBi (Press et al. 2021, arXiv 2108.12409): a logit falls linearly with the distance of its
// key, at a slope of each query head's own.
#pragma once

#include "raddle/engine/variant/contract.h"
#include "raddle/engine/variant/native.h"

RADDLE_ENGINE_BEGIN

struct Alibi {
  Tensor<const float, 1> slopes;  ///< [Hq]

  // A traced Python function of this formula gets equal bits, up to positions of 2^24. Each
  // position is converted by itself, because a compiler can then move a key's conversion out of the
  // loop over rows, and a row's out of the loop over keys.
  RADDLE_FN float logits(float s, const Row& r, const Key& c) const {
    const float distance = static_cast<float>(c.kv_pos) - static_cast<float>(r.q_pos);
    return native::product_sum(slopes.data[r.q_head], distance, s);
  }
  RADDLE_FN float distance_slope(const Row& r) const { return slopes.data[r.q_head]; }
};
RADDLE_VARIANT(Alibi, "alibi", checked(RADDLE_RUN_TENSOR(Alibi, slopes, qo_heads), Check::finite));

RADDLE_ENGINE_END
