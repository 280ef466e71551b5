// The engine's headers as text, embedded when the library is built (cmake/embed_headers.cmake).
#pragma once

#include <string_view>
#include <vector>

namespace raddle::jit {

struct Header {
  std::string_view path;  ///< as it is included: "raddle/engine/core/row.h"
  std::string_view text;
};

/// All of include/raddle/engine, sorted by path.
const std::vector<Header>& engine_headers();

}  // namespace raddle::jit
