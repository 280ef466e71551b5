// What works on which backend. The table is not written by hand: each feature is tried on a problem
// of a few keys, and a refusal's own message is the reason that the table gives.
#pragma once

#include <string>
#include <vector>

namespace raddle {

struct Support {
  std::string feature;  ///< "variant: softcap"
  std::string backend;  ///< "cpu"
  bool works;
  std::string reason;  ///< empty when it works
};

std::vector<Support> support_matrix();

}  // namespace raddle
