// The attention state (O, LSE) over a set of keys and its composition ⊕ (FlashInfer paper,
// section 2.2): states of disjoint key sets compose to the state of their union. LSE is a natural
// logarithm; the empty state is (0, -inf).
#pragma once

#include "raddle/engine/core/math.h"
#include "raddle/engine/core/row.h"

RADDLE_ENGINE_BEGIN

/// How two states mix: O = a.O * first + b.O * second, and the LSE of the union.
struct Mix {
  float first;
  float second;
  float lse;
};

/// Weights of ⊕. Exact where one side is empty: the other side passes unchanged.
RADDLE_FN Mix compose(float lse_a, float lse_b) {
  const float top = max(lse_a, lse_b);
  if (top == -math::infinity) return Mix{0.0f, 0.0f, -math::infinity};
  if (lse_b == -math::infinity) return Mix{1.0f, 0.0f, lse_a};
  if (lse_a == -math::infinity) return Mix{0.0f, 1.0f, lse_b};
  const float a = math::exp(lse_a - top);
  const float b = math::exp(lse_b - top);
  const float sum = a + b;
  return Mix{a / sum, b / sum, top + math::log(sum)};
}

RADDLE_ENGINE_END
