// Sigmoid attention (FlashSigmoid): O = Σ sigmoid(s + bias)·v, a plain sum instead of a softmax.
#pragma once

#include "raddle/engine/variant/contract.h"

RADDLE_ENGINE_BEGIN

struct Sigmoid {
  static constexpr Scan scan = Scan::sum;
  float bias;

  RADDLE_FN float logits(float s, const Row&, const Key&) const { return math::sigmoid(s + bias); }
};
RADDLE_VARIANT(Sigmoid, "sigmoid", checked(RADDLE_RUN_MEMBER(Sigmoid, bias), Check::finite));

RADDLE_ENGINE_END
