// Cubins by NVRTC, through the cache.
#pragma once

#include <string>

#include "jit/background.h"

namespace raddle::jit {

/// The cubin of a complete source for an architecture: from the cache, or compiled into it. `name`
/// is for people, `watch` for a caller that waits for it on another thread. Raises CompileError.
std::string find_or_compile_cubin(const std::string& name, const std::string& source,
                                  const std::string& arch, Watch* watch = nullptr);

/// Sees to it that the cache has it. Returns whether it was compiled now.
bool warm_cubin(const std::string& name, const std::string& source, const std::string& arch);

}  // namespace raddle::jit
