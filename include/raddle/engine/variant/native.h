// What variants take from the hardware: a GPU's special function unit has approximations in one
// instruction each, whose last bits are not those of a CPU.
#pragma once

#include "raddle/engine/core/math.h"
#if defined(__CUDACC_RTC__)
#include "raddle/engine/ptx/math.h"
#endif

RADDLE_ENGINE_BEGIN

namespace native {

/// tanh(x / y) within 2^-21, an absolute error: a soft cap's part that is not linear.
RADDLE_FN float tanh_ratio(float x, float y) {
#if defined(__CUDACC_RTC__)
  const float e = ptx::exp2(x * (2.0f * math::log2e * ptx::reciprocal(y)));
  return ptx::fma(-2.0f, ptx::reciprocal(e + 1.0f), 1.0f);
#else
  return math::tanh(x / y);
#endif
}

/// tanh(x), likewise.
RADDLE_FN float tanh(float x) { return tanh_ratio(x, 1.0f); }

}  // namespace native

RADDLE_ENGINE_END
