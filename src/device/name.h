// Devices as messages name them.
#pragma once

#include <string>

#include "raddle/tensor.h"

namespace raddle {

inline bool is_gpu(DeviceId device) { return device.kind == DeviceId::Kind::cuda; }

/// "cpu" or "cuda:0"
inline std::string name_of(DeviceId device) {
  return device.kind == DeviceId::Kind::cpu ? "cpu" : "cuda:" + std::to_string(device.ordinal);
}

}  // namespace raddle
