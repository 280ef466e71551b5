// Hopper's instruction for tanh, which errs more than what other processors compute. Emulated
// kernels include this before all else: variants ask for it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define RADDLE_HAS_TANH 1

namespace raddle {
inline namespace gpu {  // RADDLE_ISA of kernels
namespace ptx {

/// As far off as an H200 was seen to be (include/raddle/engine/ptx/math.h); the errors of
/// neighbours have nothing in common.
inline float tanh(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const float y = std::tanh(x), most = std::min(8.2e-6f, 1.0e-5f * std::fabs(y));
  return y + most * (static_cast<float>(bits * 2654435761u >> 8) / 8388608.0f - 1.0f);
}

}  // namespace ptx
}  // namespace gpu
}  // namespace raddle
