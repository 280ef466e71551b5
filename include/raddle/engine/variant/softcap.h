// Logit soft capping (Gemma 2): s -> cap · tanh(s / cap).
#pragma once

#include "raddle/engine/variant/contract.h"
#include "raddle/engine/variant/native.h"

RADDLE_ENGINE_BEGIN

struct SoftCap {
  float cap;

  RADDLE_FN float logits(float s, const Row&, const Key&) const {
    return cap * native::tanh_ratio(s, cap);
  }
  RADDLE_FN float near_limit(float scale) const { return native::near_soft_cap_limit(scale, cap); }
  RADDLE_FN float near_logits(float s, float scale, const Row&, const Key&) const {
    return native::near_soft_cap(s, scale, cap);
  }
};
RADDLE_VARIANT(SoftCap, "softcap", checked(RADDLE_RUN_MEMBER(SoftCap, cap), Check::positive));

RADDLE_ENGINE_END
