// Parts and members of a user's own variant, found by NVRTC where there is no C++ compiler.
#pragma once

#include "jit/source.h"
#include "raddle/engine/variant/stages.h"

namespace raddle::jit {

/// Which parts of the contract a variant has, and where its members lie. Its functions do
/// not exist on the host: their pointers only say that a part is present and must not be called,
/// and coverage is unknown. Compiled, or from the cache; lives as long as the process. Raises
/// CompileError.
const VariantOps& describe_on_gpu(const VariantSource& source, const std::string& arch);

}  // namespace raddle::jit
