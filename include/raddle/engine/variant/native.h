// Functions that variants take from the hardware. A GPU's special function unit computes each
// approximation in one instruction; its last bits differ from a CPU's.
#pragma once

#include "raddle/engine/core/math.h"
#if defined(__CUDACC_RTC__)
#include "raddle/engine/ptx/math.h"
#endif

RADDLE_ENGINE_BEGIN

namespace native {

/// tanh(x / y) within 2^-21, an absolute error: the nonlinear part of a soft cap.
RADDLE_FN float tanh_ratio(float x, float y) {
#if defined(__CUDACC_RTC__)
  const float e = ptx::exp2(x * (2.0f * math::log2e * ptx::reciprocal(y)));
  return ptx::fma(-2.0f, ptx::reciprocal(e + 1.0f), 1.0f);
#else
  return math::tanh(x / y);
#endif
}

/// tanh(x) within 2^-21, an absolute error.
RADDLE_FN float tanh(float x) { return tanh_ratio(x, 1.0f); }

}  // namespace native

RADDLE_ENGINE_END
