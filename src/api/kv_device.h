// The KV cache's functions on a GPU: which kernel, with how many blocks. All pointers in the views
// are the device's.
#pragma once

#include <string>

#include "api/bound_variant.h"
#include "jit/kv_kernels.h"

namespace raddle::cuda {

/// The kernels for a dtype, and for a composition where there is one.
jit::KvKernels kv_kernels(DType dtype, const BoundVariant* variant);

/// Compiles those of a spec's dtype and variant with NVRTC; needs no GPU. Returns what the
/// assembler says: registers and spills of each. Raises CompileError.
std::string compile_kv(const AttentionSpec& spec, const std::string& arch);

}  // namespace raddle::cuda
