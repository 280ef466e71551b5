// Cubins by NVRTC, through the cache.
#pragma once

#include <string>

namespace raddle::jit {

/// The cubin of a complete source for an architecture: from the cache, or compiled into it. `name`
/// is for people. Raises CompileError.
std::string find_or_compile_cubin(const std::string& name, const std::string& source,
                                  const std::string& arch);

}  // namespace raddle::jit
