// The kernel that draws the next tokens from logits of one dtype.
#pragma once

#include <string>

#include "jit/nvrtc.h"
#include "raddle/engine/core/dtype.h"

namespace raddle::jit {

/// The kernel's entry point: (SampleView), by value.
constexpr const char* sample_entry_point = "raddle_sample";

/// Complete source, headers included.
std::string sample_source(DType dtype);

/// Compiles, without looking into the cache. Raises CompileError.
Cubin compile_sample(DType dtype, const std::string& arch);

/// The cubin from the cache, or compiled into it.
std::string sample_cubin(DType dtype, const std::string& arch);

}  // namespace raddle::jit
