// Kernels of compositions on a GPU: compiled or found in the cache, and loaded, once a process and
// device, whoever asks first.
#pragma once

#include "device/cuda/module.h"
#include "jit/gpu_kernel.h"
#include "jit/planner_kernel.h"

namespace raddle::cuda {

const Kernel& loaded(const jit::GpuKernel& kernel, const Device& device, i32 shared_bytes);

/// With all the shared memory that a block can have: how much a launch takes depends on its maxima.
const Kernel& loaded(const jit::PlannerKernel& kernel, const Device& device);

}  // namespace raddle::cuda
