// A tensor as Hopper's bulk copies see it.
#pragma once

#include "raddle/engine/core/config.h"

namespace raddle {

/// Address, sizes, strides, the box and the swizzle of a tensor, in the driver's own encoding
/// (cuTensorMapEncodeTiled). A part of a kernel's parameter.
struct alignas(64) TensorMap {
  u64 words[16];
};

}  // namespace raddle
