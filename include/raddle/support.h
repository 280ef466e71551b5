// What works on which backend. The table is not written by hand: each feature is tried on a problem
// of a few keys, and a refusal's own message is the reason that the table gives.
#pragma once

#include <string>
#include <vector>

#include "raddle/tensor.h"

namespace raddle {

struct Support {
  std::string feature;  ///< "variant: softcap"
  std::string backend;  ///< "cpu" or "cuda"
  bool works;
  std::string reason;  ///< empty when it works
};

/// Of one device. Raises DeviceError or CompileError where nothing can be tried there.
std::vector<Support> support_matrix(DeviceId device = {});

}  // namespace raddle
