// What a variant of the user's own has, asked of NVRTC where there is no C++ compiler to ask.
#pragma once

#include "jit/source.h"
#include "raddle/engine/variant/stages.h"

namespace raddle::jit {

/// Which parts of the contract a variant has, and where its members lie. Its functions are not
/// there: those that are present must not be called, and coverage is unknown. Compiled, or from the
/// cache; lives as long as the process. Raises CompileError.
const VariantOps& describe_on_gpu(const VariantSource& source, const std::string& arch);

}  // namespace raddle::jit
