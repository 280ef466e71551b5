// Attention sinks (gpt-oss): one learned logit per query head, a key without a value in the
// softmax's denominator.
#pragma once

#include "raddle/engine/variant/contract.h"

RADDLE_ENGINE_BEGIN

struct Sinks {
  Tensor<const float, 1> logit;  ///< [Hq]

  RADDLE_FN float sink(const Row& r) const { return logit.data[r.q_head]; }
};
RADDLE_VARIANT(Sinks, "sinks", checked(RADDLE_RUN_TENSOR(Sinks, logit, qo_heads), Check::logit));

RADDLE_ENGINE_END
