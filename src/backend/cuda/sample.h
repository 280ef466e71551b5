// Sampling on a GPU: one kernel, launched on a stream.
#pragma once

#include <string>

#include "jit/nvrtc.h"
#include "raddle/engine/kernel/sampling/view.h"
#include "raddle/tensor.h"

namespace raddle::cuda {

/// A block a row; waits for nothing. Pointers are the device's, the logits' dtype is `dtype`.
void sample(DeviceId device, void* stream, const SampleView& view, DType dtype);

/// Compiles the kernel with NVRTC; needs no GPU. Raises CompileError.
jit::Cubin compile_sample(DType dtype, const std::string& arch);

}  // namespace raddle::cuda
